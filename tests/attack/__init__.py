"""Attacks: random scenarios, seeded and bounded in time, on servers of their own.

A scenario is a function of a `Run`: a seed, seconds, and figures that it counts. It raises
`Violation` with a history of the events before. `scripts/attack` runs the scenarios in turn for
minutes, and `test_attack.py` runs each for seconds.
"""
