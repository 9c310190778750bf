"""Random scripts for a `ScriptedFleet`, drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from tests.simulation.scripted import Step


def scripts(
    keys: tuple[str, ...],
    *,
    extra: Iterable[st.SearchStrategy[Step]] = (),
    without: tuple[str, ...] = (),
    max_cost: int = 3,
    max_steps: int = 60,
) -> st.SearchStrategy[list[Step]]:
    """Return scripts that are mostly calls, time and flushes, with the `extra` steps among them and
    no step whose name is in `without`.
    """
    process, key = st.integers(0, 5), st.sampled_from(keys)
    run, cost = st.integers(-3, 3), st.integers(1, max_cost)
    step = st.one_of(
        st.tuples(st.just("call"), process, key, st.just(1), st.integers(1, 30)),
        st.tuples(st.just("call"), process, key, cost, st.integers(1, 4)),
        st.tuples(st.just("call_until_refused"), process, key),
        st.tuples(st.just("begin_call"), process, key, cost),
        st.tuples(st.just("flush"), process),
        st.tuples(st.sampled_from(["execute", "deliver", "deliver", "lose_reply"]), run),
        st.tuples(
            st.just("wait_and_flush"), st.sampled_from([0.0, 4.0, 30.0, 253.0, 253.0, 900.0])
        ),
        st.tuples(st.just("wait_and_flush"), st.just(253.0)),
        st.tuples(st.just("wait"), st.sampled_from([0.2, 1.0, 2.5, 10.0, 60.0, 251.0, 1100.0])),
        st.tuples(st.just("next_bucket"), st.sampled_from([-5.0, -1.5, -0.5, 0.0, 0.5, 3.0])),
        *extra,
    )
    drawn = st.lists(step, min_size=1, max_size=max_steps)
    return drawn.map(lambda script: [step for step in script if step[0] not in without])
