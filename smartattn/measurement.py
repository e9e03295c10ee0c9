"""The result of timing one thing: raw samples, and statistics derived from them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

NOISY_SPREAD_RATIO = 0.25
"""Interquartile range over median above which a measurement calls itself noisy.

Source: torch.utils.benchmark warns at 10 % and again at 25 %; the stronger one is used because medians decide here.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed block, as mean per call.

    Attributes:
        device_us: time on the device (equal to ``host_us`` on CPU).
        host_us: time until the call returned to Python.
    """

    device_us: float
    host_us: float

    @property
    def cost_us(self) -> float:
        """What an eager caller pays: the slower of device and host."""
        return max(self.device_us, self.host_us)


@dataclass(frozen=True, slots=True)
class Measurement:
    """All samples of one route.

    Attributes:
        samples: in the order they were taken.
        plan_ms: what the first call at this shape cost beyond a steady one.
    """

    samples: tuple[Sample, ...]
    plan_ms: float = 0.0

    @property
    def quiet(self) -> tuple[Sample, ...]:
        """The faster half of the samples.

        Source: other programs on the machine can only add time, and on a busy one they touch more than half of all
        blocks (seen on two shared cores: medians of equal kernels 5x apart, medians of the faster halves within 5 %).
        """
        by_cost = sorted(self.samples, key=lambda s: s.cost_us)
        return tuple(by_cost[: (len(by_cost) + 1) // 2])

    @property
    def device_us(self) -> float:
        """Median device time per call over the faster half."""
        return statistics.median(s.device_us for s in self.quiet)

    @property
    def host_us(self) -> float:
        """Median host time per call over the faster half."""
        return statistics.median(s.host_us for s in self.quiet)

    @property
    def cost_us(self) -> float:
        """Median over the faster half of what an eager caller pays per call."""
        return statistics.median(s.cost_us for s in self.quiet)

    @property
    def spread_us(self) -> float:
        """Interquartile range of the cost over the faster half (the whole range below four samples)."""
        costs = sorted(s.cost_us for s in self.quiet)
        if len(costs) < 4:
            return costs[-1] - costs[0]
        low, _, high = statistics.quantiles(costs, n=4)
        return high - low

    @property
    def is_noisy(self) -> bool:
        """Whether the spread is too large for the median to decide near-ties."""
        return self.spread_us > NOISY_SPREAD_RATIO * self.cost_us
