"""Timing routes against each other: interleaved rounds, early drop of hopeless ones, medians over the faster half decide.

What is timed is exactly the callable that the hot path will run. The clock is injected, so the loop is tested with a
fake one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from smartattn.clocks import Clock
from smartattn.measurement import Measurement, Sample

Trial = Callable[[], object]
"""One call of a bound route on prepared inputs, with its backward when training."""

BLOCK_US = 200.0
"""Length of a timed block.

Source: the resolution of event and wall clocks is about 1 us, so a block of 200 us keeps it at half a percent,
and short blocks meet other programs on the machine less often.
"""
MAX_CALLS_PER_BLOCK = 64
MIN_ROUNDS = 7
MAX_ROUNDS = 31
HOPELESS_RATIO = 3.0
"""Estimated cost over the best estimate above which a route is not timed further."""
CLEAR_RATIO = 1.25
"""Median over the best median above which a route leaves after the first rounds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a race may go on.

    Attributes:
        budget_ms: wall time for the rounds after the first; every route gets at least one block.
        keep: routes that are never dropped (stock, so that every gain is known).
        max_rounds: most rounds.
    """

    budget_ms: float
    keep: frozenset[str] = frozenset({"stock"})
    max_rounds: int = MAX_ROUNDS


def race(
    trials: Mapping[str, Trial], clock: Clock, limits: Limits, looks: Mapping[str, Sample] | None = None
) -> dict[str, Measurement]:
    """Time every trial against the others.

    Args:
        trials: route name to trial; each has run before, so first-call costs are behind.
        clock: measures blocks.
        limits: time and rounds.
        looks: what a single call of a route is known to cost; the others are looked at first.

    Returns:
        One measurement per trial. Routes that were dropped early have fewer samples.

    Note:
        Interruptible at any block; nothing is kept outside the returned value.
    """
    start_s = clock.now_s()
    looks = looks or {}
    samples = {name: [looks.get(name) or clock.sample(trial, 1)] for name, trial in trials.items()}
    if not samples:
        return {}
    running = _survivors(samples, HOPELESS_RATIO, limits.keep)
    calls = {name: _calls_per_block(samples[name][0].cost_us) for name in running}
    for name in running:
        # The first look was one call, cold and short: it only served to find the block size.
        samples[name] = [clock.sample(trials[name], calls[name])]
    for round_index in range(1, limits.max_rounds):
        if round_index >= MIN_ROUNDS:
            running = [name for name in running if name in _survivors(samples, CLEAR_RATIO, limits.keep)]
            if _is_clear(samples, running):
                break
        if (clock.now_s() - start_s) * 1e3 >= limits.budget_ms:
            break
        # Alternating directions keeps a drift of the clock speed from favouring the same route every round.
        for name in running if round_index % 2 else running[::-1]:
            samples[name].append(clock.sample(trials[name], calls[name]))
    return {name: Measurement(tuple(taken)) for name, taken in samples.items()}


def _survivors(samples: Mapping[str, list[Sample]], ratio: float, keep: frozenset[str]) -> list[str]:
    costs = {name: Measurement(tuple(taken)).cost_us for name, taken in samples.items()}
    limit = min(costs.values()) * ratio
    return [name for name, cost in costs.items() if cost <= limit or name in keep]


def _calls_per_block(cost_us: float) -> int:
    return max(1, min(MAX_CALLS_PER_BLOCK, round(BLOCK_US / max(cost_us, 0.1))))


def _is_clear(samples: Mapping[str, list[Sample]], running: list[str]) -> bool:
    """Return whether the best route stands apart from every other by more than both spreads."""
    if len(running) < 2:
        return True
    measured = sorted((Measurement(tuple(samples[name])) for name in running), key=lambda m: m.cost_us)
    best, second = measured[0], measured[1]
    return second.cost_us - best.cost_us > best.spread_us + second.spread_us


def is_unsettled(measured: Mapping[str, Measurement], limit_ratio: float = 0.25) -> bool:
    """Return whether the earlier samples would have chosen a route that the later ones find worse by ``limit_ratio``.

    A drift that all routes share does no harm, since they took turns; one that turns their order does.
    Source: a GPU that is throttled or shared shows as a drift between early and late samples (TileOPs#772).
    """
    halves = [
        (Measurement(m.samples[: len(m.samples) // 2]).cost_us, Measurement(m.samples[len(m.samples) // 2 :]).cost_us)
        for m in measured.values()
        if len(m.samples) >= 4
    ]
    if len(halves) < 2:
        return False
    _, late_us = min(halves)
    return late_us > (1 + limit_ratio) * min(late for _, late in halves)
