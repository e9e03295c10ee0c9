"""Clocks: how long a block of calls takes. Injected wherever time is measured, so that tests use one of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from smartattn.measurement import Sample


class Clock(Protocol):
    """Measures blocks of calls on one device."""

    def now_s(self) -> float:
        """Return a monotonic time in seconds, for budgets."""

    def sample(self, run: Callable[[], object], num_calls: int) -> Sample:
        """Run ``run`` ``num_calls`` times back to back and return the mean per call."""


class WallClock:
    """The wall clock, for devices whose calls return when they are done."""

    def now_s(self) -> float:
        """Return a monotonic time in seconds."""
        return time.perf_counter()

    def sample(self, run: Callable[[], object], num_calls: int) -> Sample:
        """Time ``num_calls`` calls; device and host time are the same here."""
        start_s = time.perf_counter()
        for _ in range(num_calls):
            run()
        us = (time.perf_counter() - start_s) * 1e6 / num_calls
        return Sample(device_us=us, host_us=us)


def clock_for(device: torch.device) -> Clock:
    """Return the clock that measures work on ``device``."""
    del device
    return WallClock()
