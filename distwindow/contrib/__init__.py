"""Integrations: each module needs the library that it is named after, and nothing imports them."""
