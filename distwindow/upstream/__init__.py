"""What is learned from the responses of an API that limits its callers, and shared by a fleet."""
