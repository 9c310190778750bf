"""The limiters, what answers their calls, their entries and decorators."""
