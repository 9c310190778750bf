"""The stores: this process, and Redis."""
