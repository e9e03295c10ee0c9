"""Deriving a choice from a record: pure functions of outcomes, so that a new objective needs no new measuring.

The eager cost of a route is ``max(device, host) + plan / calls``. Stock keeps its place unless it is beaten by more
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
        cost_us: steady eager cost of ``route``.
    """

    route: str
    cost_us: float
    faster: str = ""
    break_even_calls: int = 0


def timed_outcomes(outcomes: Mapping[str, Outcome], is_allowed: Callable[[str], bool]) -> dict[str, Timed]:
    """Return the valid and measured routes that are allowed, in the record's order."""
    return {name: o for name, o in outcomes.items() if isinstance(o, Timed) and is_allowed(name)}


def fastest(timed: Mapping[str, Timed], *, cost: Callable[[Timed], float] = lambda o: o.cost_us) -> str | None:
    """Return the route to prefer on steady cost; ``None`` when there is none."""
    if not timed:
        return None
    best = min(timed, key=lambda name: cost(timed[name]))
    limit = cost(timed[best]) * (1 + MIN_GAIN_RATIO)
    stock = timed.get(STOCK)
    if stock is not None and cost(stock) <= max(limit, cost(timed[best]) + _noise_us(stock, timed[best])):
        return STOCK
    return next(name for name in timed if cost(timed[name]) <= limit)


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
    fast = fastest(timed)
    if fast is None:
        return None
    chosen = Choice(fast, timed[fast].cost_us)
    if not has_plan(timed[fast]) or (dynamic is not True and (is_planned or dynamic is False)):
        return chosen
    free = fastest({name: o for name, o in timed.items() if not has_plan(o)})
    if free is None:
        return chosen
    if dynamic is True:
        return Choice(free, timed[free].cost_us)
    calls = break_even_calls(timed[free], timed[fast])
    if num_calls >= calls:
        return chosen
    return Choice(free, timed[free].cost_us, faster=fast, break_even_calls=calls)


def break_even_calls(free: Timed, fast: Timed) -> int:
    """Return after how many calls the saving of ``fast`` has paid for its plan."""
    saving_us = free.cost_us - fast.cost_us
    if saving_us <= 0:
        return 1 << 62
    return max(1, math.ceil(fast.plan_ms * 1e3 / saving_us))
