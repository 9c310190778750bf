"""Traces of the upstream limiters (Sentinel, sentinel-golang, go-zero), replayed on distwindow."""
