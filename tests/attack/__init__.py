"""Attacks: random scenarios, seeded and bounded in time, on servers of their own.

A scenario is a function of a `Run`: a seed, seconds, and figures that it counts. It raises
`Violation` with a history of the events before. `scripts/attack` runs the scenarios in turn for
minutes, and `test_attack.py` runs each for seconds.

The parts, for any test, beside the servers and the proxy of `tests.servers`:

- `harness.py`: runs, seeds, violations, and how a list of events is shrunk;
- `children.py`: a child process, its plan, its reports, and its end;
- `client.py`: one process of a fleet, its threads or tasks, and its log; `caller.py`: a plain one;
- `fleet.py`: several of them over a link with faults, frozen, killed and forked;
- `history.py`: what their logs hold together, the counts of the server, and the checks C1 to C8.
"""
