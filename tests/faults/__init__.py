"""Faults on purpose, on real processes: the matrix of faults, each with what must hold.

`matrix.py` is the table: each fault, the tests that show what holds, and the guards without which
these fail. `test_matrix.py` keeps it true; `scripts/mutations --matrix` takes out each guard.

The parts, for any test:

- `tests.servers`: servers, the proxy that causes faults, the clock that can be stepped;
- `caller.py`: a process that calls, and logs each call; `callers.py` starts several, and ends them;
- `history.py`: what their logs hold together, and its checks C1 to C8;
- `nemesis.py`: faults at random, with these checks (`scripts/nemesis`).
"""
