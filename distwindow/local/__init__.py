"""What is decided in this process: `direct`, `leased` and `eventual`."""
