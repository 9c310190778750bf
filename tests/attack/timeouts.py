"""Scenario `timeouts`: many asynchronous calls with tiny timeouts, with `leased`.

Beyond the calls that returned, the server has charged at most the calls of unknown outcome and one
lease for each key.
"""

from __future__ import annotations

import itertools
import time

from distwindow import Limit
from tests.attack.children import Child
from tests.attack.harness import FOREVER, Run, Violation, derive_seed
from tests.attack.server_counts import check_conserved, read_all_counts
from tests.servers import Delay, Proxy, Standalone

CALLS = 10_000


def timeouts(run: Run) -> None:
    """Play batches of calls until the time is up; `only` is the number of calls in a batch."""
    calls = int(run.only or CALLS)
    with Standalone() as server, Proxy(server.port) as proxy:
        until = time.monotonic() + run.seconds
        for batch in itertools.count():
            if batch and time.monotonic() >= until:
                return
            proxy.fault = Delay(requests=0.0003, replies=[0.0, 0.0007, 0.0015][batch % 3])
            _one(run, server, proxy.url, batch, calls)


def _one(run: Run, server: Standalone, url: str, batch: int, calls: int) -> None:
    prefix = f"timeouts-{batch}"
    plan = {
        "url": url, "prefix": prefix, "limit": FOREVER, "keys": 4, "tasks": 20, "calls": calls,
        "seed": derive_seed(run.seed, batch),
    }  # fmt: skip
    with Child("timeouts_child", plan) as child:
        code = child.wait(calls / 50 + 60)
        facts = next((facts for facts in child.reports() if facts.get("done")), None)
        if code != 0 or facts is None:
            raise Violation(f"timeouts: exit {code}", [child.stderr()[-4000:]])
    run.gather(facts["figures"])
    with server.client(decode_responses=False) as client:
        counts = read_all_counts(client, prefix, facts["certain"], Limit(FOREVER))
    leases = sum(facts["lease"].values())
    over, _ = check_conserved(
        f"timeouts, batch {batch}",
        {key: count.passed for key, count in counts.items()},
        facts["certain"],
        facts["unsure"],
        stranded=leases,
        history=[f"plan {plan}", {"one lease for each key": leases, **facts["figures"]}],
    )
    run.count("permits stranded", over)
