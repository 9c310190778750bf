"""Sentinel's and go-zero's windows in one process: public, and without a store."""
