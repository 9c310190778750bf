"""Minute views: what entries did in the last minute."""
