"""Sentinel's local structures, exact to Sentinel 1.8.9: in one process, without a store.

Times are arguments, in ms. Nothing in this package is locked: code that shares an object between
threads has to lock it.
"""
