"""Conformance: what the upstream limiters answered, replayed on distwindow."""
