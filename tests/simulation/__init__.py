"""Simulated fleets: several strategies over one store in memory, whose clock the test moves.

process      one process of a fleet, and operations whose commands and replies are delivered by hand
scripted     a fleet that follows a script of single steps, in any interleaving
scripts      random scripts, drawn by hypothesis
timed        a fleet whose calls arrive at given times, and whose commands take time
admissions   what a fleet admitted, and how much of it any window holds
"""
