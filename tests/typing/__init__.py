"""What type checkers infer for the code of a user."""
