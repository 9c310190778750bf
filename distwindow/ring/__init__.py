"""The engine: limits, keys, the ring of buckets, and the commands on it. Pure, without I/O."""
