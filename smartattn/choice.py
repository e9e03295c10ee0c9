"""Deriving a choice from a record: pure functions of outcomes, so that a new objective needs no new measuring.

The steady cost of a route is its device time; host time counts only beyond what stock needs to be enqueued (with some
slack), because a program that runs stock well hides that much already, and graph replay hides all of it. Stock keeps its place unless it is beaten by more
than the noise; other near-ties go to the fixed order of the record. For lengths that may not come back the choice is
rent-or-buy: run the best route without a plan until the calls seen, times the saving, have paid for the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from smartattn.record import Outcome, Timed

STOCK = "stock"
MIN_GAIN_RATIO = 0.03
"""Gain below which two routes count as equal.

Source: repeated medians of one kernel differ by up to 3 % on a shared machine; flashinfer#4433 and helion#2626 report
near-ties that flip between processes and ranks below such a margin.
"""
TWIN_GAIN_RATIO = 0.10
"""Gain below which the very backend that stock runs counts as equal to stock when it is called directly.

Source: one kernel by two ways in: repeated measurements of the pair on two shared cores differ by up to 8 %.
"""
HOST_SLACK_RATIO = 1.5
"""Host time over stock's up to which host time costs nothing.

Source: on an H200 with torch 2.11 stock takes 20.5 us of host time, direct operators 16.7 to 26, flash-attn-4 110 to
200: the slack lets the former compete on device time and makes the latter pay.
"""
NEGLIGIBLE_PLAN_MS = 1.0
"""Plan cost up to which a route counts as free of plans.

Source: measured on an H200 with torch 2.11: a first call at a new length costs Flash 0.07 ms forward and 0.34 ms with
backward, cuDNN 50 ms and 145 ms.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to run for one exact signature.

    Attributes:
        route: name of the route to run now.
        faster: name of the route that is faster once its plan is paid; empty when ``route`` is it.
        break_even_calls: calls at this exact length that pay for the plan of ``faster``.
        cost_us: steady cost of ``route``.
    """

    route: str
    cost_us: float
    faster: str = ""
    break_even_calls: int = 0


def timed_outcomes(outcomes: Mapping[str, Outcome], is_allowed: Callable[[str], bool]) -> dict[str, Timed]:
    """Return the valid and measured routes that are allowed, in the record's order."""
    return {name: o for name, o in outcomes.items() if isinstance(o, Timed) and is_allowed(name)}


def steady_costs(timed: Mapping[str, Timed]) -> dict[str, float]:
    """Return the steady cost per call of each route in microseconds: device time, or host time where that is in excess."""
    if not timed:
        return {}
    stock = timed.get(STOCK)
    usual_us = stock.host_us if stock is not None else min(o.host_us for o in timed.values())
    free_us = HOST_SLACK_RATIO * usual_us
    return {name: o.device_us if o.host_us <= free_us else max(o.device_us, o.host_us) for name, o in timed.items()}


def fastest(timed: Mapping[str, Timed], costs: Mapping[str, float] | None = None) -> str | None:
    """Return the route to prefer on steady cost; ``None`` when there is none.

    Args:
        timed: routes to choose among.
        costs: their steady costs, when they were already derived from more routes than these.
    """
    if not timed:
        return None
    costs = costs or steady_costs(timed)
    best = min(timed, key=lambda name: costs[name])
    limit = costs[best] * (1 + MIN_GAIN_RATIO)
    is_twin = STOCK in timed and timed[STOCK].resolved == best
    stock_limit = costs[best] * (1 + TWIN_GAIN_RATIO) if is_twin else limit
    if STOCK in timed and costs[STOCK] <= max(stock_limit, costs[best] + _noise_us(timed[STOCK], timed[best])):
        return STOCK
    return next(name for name in timed if costs[name] <= limit)


def _noise_us(one: Timed, other: Timed) -> float:
    # The standard error of a median of n samples is about 0.93 interquartile ranges over the root of n.
    return math.hypot(one.spread_us / math.sqrt(max(1, one.n)), other.spread_us / math.sqrt(max(1, other.n)))


def has_plan(outcome: Timed) -> bool:
    """Return whether each new exact shape costs this route a plan worth counting."""
    return outcome.plan_ms > NEGLIGIBLE_PLAN_MS


def choose(
    outcomes: Mapping[str, Outcome],
    is_allowed: Callable[[str], bool],
    *,
    dynamic: bool | None,
    num_calls: float,
    is_planned: bool,
) -> Choice | None:
    """Return what to run.

    Args:
        outcomes: of a record.
        is_allowed: whether a route may serve this exact call (eligible, not in quarantine, wished for).
        dynamic: declared intent: ``True`` never pays for a plan, ``False`` pays at once, ``None`` rents, then buys.
        num_calls: calls seen, or expected, at this exact length.
        is_planned: whether the plans for this exact shape were already made in this process.

    Returns:
        ``None`` when no allowed route was measured.
    """
    timed = timed_outcomes(outcomes, is_allowed)
    costs = steady_costs(timed)
    fast = fastest(timed, costs)
    if fast is None:
        return None
    chosen = Choice(fast, costs[fast])
    if not has_plan(timed[fast]) or (dynamic is not True and (is_planned or dynamic is False)):
        return chosen
    free = fastest({name: o for name, o in timed.items() if not has_plan(o)}, costs)
    if free is None:
        return chosen
    if dynamic is True:
        return Choice(free, costs[free])
    calls = break_even_calls(costs[free], costs[fast], timed[fast].plan_ms)
    if num_calls >= calls:
        return chosen
    return Choice(free, costs[free], faster=fast, break_even_calls=calls)


def choose_compiled(
    outcomes: Mapping[str, Outcome], is_allowed: Callable[[str], bool], *, may_plan: bool
) -> Choice | None:
    """Return what a compiled graph should run: by device time alone, since a graph's own calls hide the host's.

    Args:
        outcomes: of a record.
        is_allowed: whether a route may be part of the graph.
        may_plan: whether each plan is paid once; where lengths vary in one graph, each of them would pay.

    Returns:
        ``None`` when no allowed route was measured.
    """
    timed = timed_outcomes(outcomes, is_allowed)
    if not may_plan:
        timed = {name: o for name, o in timed.items() if not has_plan(o)} or timed
    costs = {name: o.device_us for name, o in timed.items()}
    fast = fastest(timed, costs)
    return None if fast is None else Choice(fast, costs[fast])


def break_even_calls(free_us: float, fast_us: float, plan_ms: float) -> int:
    """Return after how many calls the saving of the faster route has paid for its plan."""
    saving_us = free_us - fast_us
    if saving_us <= 0:
        return 1 << 62
    return max(1, math.ceil(plan_ms * 1e3 / saving_us))
