"""Several limits of one request, asked together: in one round trip, all of them or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import KeysOnSeveralNodes, StoreError
from ...observer import Tally
from ...ring.decision import Decision
from ...ring.key import normalize_key
from ...support.async_use import result_of
from .counts import count_failed, count_one
from .request_limit import (
    AskedLimit,
    LimitedRequest,
    Question,
    RequestLimit,
    charged_before,
    conclude,
    is_same_question,
)


async def decide_all(
    limits: Sequence[RequestLimit],
    request: Any,
    earlier: LimitedRequest,
    cost: int | None = None,
    given: Sequence[Mapping[str, Any]] = (),
    *,
    again: bool = False,
) -> Decision | None:
    """Do `RequestLimit.decide` for several limits: together where that can be, and otherwise one
    after the other. Return the decision on all; None if none limits the request. `given` is what
    replaces the key, cost and limits of each. With `again`, one of these limits that was asked
    before charges the request once more, for another part of it.

    They cannot be asked together on different nodes of a cluster, of different `RateLimits`, with
    different `on_store_error`, with `priority`, or where one has a cost afterwards and another one
    is paced or warms up.
    """
    asked: list[Question] = []
    for limit, own in zip(limits, given or ({},) * len(limits), strict=True):
        if limit.shadow:
            await limit.decide_in_shadow(request, earlier, again, **{"cost": cost, **own})
            continue
        question = await limit.question(request, **{"cost": cost, **own})
        if question is not None:
            asked.append(question)
    await earlier.others_ended(asked, again)
    decision: Decision | None = None
    questions: list[Question] = []
    for question in asked:
        met = charged_before(earlier, question, again)
        if met is not None:
            decision = met
        elif not any(is_same_question(question, each) for each in questions):
            questions.append(question)
    if not questions:
        return decision
    with earlier.asking(questions):
        return await _ask_all(questions, earlier)


async def _ask_all(questions: list[Question], earlier: LimitedRequest) -> Decision | None:
    questions.sort(key=Question.is_above_limit, reverse=True)  # which is refused without asking
    if len(questions) > 1 and _can_be_asked_together(questions):
        try:
            return await _ask(questions, earlier)
        except KeysOnSeveralNodes:
            pass
    decision = None
    for question in questions:
        decision = await question.limit.ask(question, earlier)
    return decision


def _can_be_asked_together(questions: Sequence[Question]) -> bool:
    limits = [each.limit for each in questions]
    if questions[0].is_above_limit():
        return False
    if len({(each.rate_limits, each.on_store_error) for each in limits}) > 1:
        return False
    if any(each.priority for each in limits):
        return False
    settles = any(each.settles for each in limits)
    return not (settles and any(limit.is_shaped for each in questions for limit in each.limits))


async def _ask(questions: Sequence[Question], earlier: LimitedRequest) -> Decision:
    limiter, reservation = questions[0].limiter, None
    try:
        if any(each.limit.settles for each in questions):
            items = [(each.key, each.limits, _estimate(each)) for each in questions]
            reservation = await result_of(limiter.reserve_all(items))
            decision: Decision = reservation.decision
        else:
            items = [each[1:4] for each in questions]
            decision = await result_of(limiter.try_acquire_all(items))
    except StoreError:
        for question in questions:
            count_failed(question)
        raise
    deciding = [
        each
        for each in questions
        if normalize_key(each.key) == decision.key and decision.limit in each.limits
    ]
    binding = (deciding or questions)[0]
    policies = binding.policies.with_all([each.policies for each in questions])
    without = [each._replace(arguments=()) for each in questions]
    limit = LimitsTogether(without, binding._replace(arguments=()))
    has_charge = reservation is not None and decision.charged is not None
    earlier.needs_response |= has_charge
    arguments = tuple(each.arguments for each in questions) if has_charge else ()
    asked = AskedLimit(decision, policies, limit, limiter, reservation, arguments)
    await conclude(earlier, asked, binding.limit.rate_limits)
    return decision


def _estimate(question: Question) -> int:
    """Return the cost that is reserved: no guess refuses every request."""
    if question.limit.cost_after is None:
        return question.cost
    return min(question.cost, *(limit.amount for limit in question.limits))


class LimitsTogether:
    """What was asked together for one request, in the place of one `RequestLimit`."""

    shadow = False  # those in shadow are asked by themselves

    def __init__(self, questions: Sequence[Question], binding: Question) -> None:
        self._questions = questions
        self._binding = binding

    def questions_of(self, asked: AskedLimit) -> Sequence[Question]:
        return self._questions

    def refusal(self, earlier: LimitedRequest, asked: AskedLimit) -> Exception:
        return self._binding.limit.refusal(earlier, asked)

    def count(self, tally: Tally, asked: AskedLimit) -> None:
        """See `RequestLimit.count`: the one that refuses, or all."""
        for each in self._questions if asked.decision.allowed else [self._binding]:
            self._count_one(tally, asked.decision, each, 1)

    def _count_one(self, tally: Tally, decision: Decision, of: Question, calls: int) -> None:
        is_binding = of.limit is self._binding.limit and of.key == self._binding.key
        limit, cost = decision.limit if is_binding else of.limits[0], _estimate(of)
        count_one(tally, of.limit, decision, of.policies.given[0], limit, cost, calls)

    async def settle(self, asked: AskedLimit, response: Any, *, was_refused: bool) -> None:
        tally = self._binding.limit.rate_limits.opened.tally
        actuals = [0] * len(self._questions)
        if asked.reservation is not None:
            actuals = [
                await each.limit.actual(_estimate(each), arguments, response, was_refused)
                for each, arguments in zip(self._questions, asked.arguments, strict=True)
            ]
        for each, actual in zip(self._questions, actuals, strict=True):
            if was_refused and not actual and tally is not None:
                self._count_one(tally, asked.decision, each, -1)
        if asked.reservation is not None:
            await result_of(asked.reservation.commit(*actuals, now=True))
        elif was_refused:
            await result_of(asked.limiter.refund(asked.decision))
