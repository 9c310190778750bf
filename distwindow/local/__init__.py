"""Strategies that decide in this process: `direct`, `leased` and `eventual`."""
