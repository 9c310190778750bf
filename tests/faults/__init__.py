"""The matrix of faults on purpose, each with what must hold.

`matrix.py` is the table: each fault, the tests that show what holds, and the guards without which
these fail. `test_matrix.py` keeps it true; `scripts/mutations --matrix` takes out each guard. The
tests that no other folder has are here; their processes are those of `tests.attack`.
"""
