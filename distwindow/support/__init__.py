"""What the classes need of Python: locks, forks, functions as users write them."""
