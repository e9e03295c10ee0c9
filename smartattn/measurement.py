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
    def device_us(self) -> float:
        """Median device time per call."""
        return statistics.median(s.device_us for s in self.samples)

    @property
    def host_us(self) -> float:
        """Median host time per call."""
        return statistics.median(s.host_us for s in self.samples)

    @property
    def cost_us(self) -> float:
        """Median of what an eager caller pays per call."""
        return statistics.median(s.cost_us for s in self.samples)

    @property
    def spread_us(self) -> float:
        """Interquartile range of the cost."""
        costs = sorted(s.cost_us for s in self.samples)
        if len(costs) < 4:
            return costs[-1] - costs[0]
        low, _, high = statistics.quantiles(costs, n=4)
        return high - low

    @property
    def is_noisy(self) -> bool:
        """Whether the spread is too large for the median to decide near-ties."""
        return self.spread_us > NOISY_SPREAD_RATIO * self.cost_us
