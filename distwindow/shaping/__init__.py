"""Limits that are paced or warm up."""
