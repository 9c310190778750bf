"""Waiting for permits: queues in this process, and the fleet's virtual line."""
