"""Attacks: random, seeded and bounded in time, on servers of their own.

A scenario is a function of a seed, seconds and a server. It returns figures, or raises `Violation`
with the history of what was violated. `scripts/attack` runs them mixed for minutes, and
`test_attack.py` each for seconds.
"""
