"""What both services agree on: the limit of a customer, over all of them."""

import os

REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

PER_CUSTOMER = "20/minute strict"
NAME = "customer"
"""Limits with one name are one limit, in whatever service and framework they stand."""
