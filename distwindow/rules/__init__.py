"""What a limit does without being enforced."""
