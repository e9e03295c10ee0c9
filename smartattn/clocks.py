"""Clocks: how long a block of calls takes. Injected wherever time is measured, so that tests use one of their own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

from smartattn import versions
from smartattn.measurement import Sample


class Clock(Protocol):
    """Measures blocks of calls on one device."""

    def now_s(self) -> float:
        """Return a monotonic time in seconds, for budgets."""

    def once_us(self, run: Callable[[], object]) -> float:
        """Run ``run`` once and return the microseconds until its work is done, whatever a first call has to load."""

    def sample(self, run: Callable[[], object], num_calls: int) -> Sample:
        """Run ``run`` ``num_calls`` times back to back and return the mean per call."""


class WallClock:
    """The wall clock, for devices whose calls return when they are done."""

    def now_s(self) -> float:
        """Return a monotonic time in seconds."""
        return time.perf_counter()

    def once_us(self, run: Callable[[], object]) -> float:
        """Time one call."""
        return self.sample(run, 1).host_us

    def sample(self, run: Callable[[], object], num_calls: int) -> Sample:
        """Time ``num_calls`` calls; device and host time are the same here."""
        start_s = time.perf_counter()
        for _ in range(num_calls):
            run()
        us = (time.perf_counter() - start_s) * 1e6 / num_calls
        return Sample(device_us=us, host_us=us)


MAX_QUEUED_CALLS = 20
"""Calls enqueued behind one delay.

Source: a launch blocks the host once about 1,000 launches wait; a training call of Math has about 50.
"""
MAX_DELAY_US = 20_000.0
FIRST_DELAY_US = 500.0
DELAY_MARGIN_RATIO = 1.5
"""Length of the delay over the host time it must cover."""
NUM_DELAY_TRIES = 3


class CudaClock:
    """Device time by events behind a delay that keeps the queue full; host time by enqueueing meanwhile.

    The delay makes the device start only when all calls are enqueued, so that device time holds no gaps of the host,
    and lets the host run ahead without waiting, so that both times come from the same calls. Only the clock's own
    events are waited for. Work runs on the current stream of the given device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cycles_per_us = 1_000.0
        self._host_us = 0.0

    def now_s(self) -> float:
        """Return a monotonic time in seconds."""
        return time.perf_counter()

    def once_us(self, run: Callable[[], object]) -> float:
        """Return the wall time of one call from an idle stream to the end of its work.

        A plan is host time that no delay covers, and ``sample`` would run the call again to cover it.
        """
        with torch.cuda.device(self._device):
            end = torch.cuda.Event()
            end.record()
            end.synchronize()
            start_s = time.perf_counter()
            run()
            end.record()
            end.synchronize()
            return (time.perf_counter() - start_s) * 1e6

    def sample(self, run: Callable[[], object], num_calls: int) -> Sample:
        """Run ``run`` ``num_calls`` times and return the mean device and host time per call."""
        device_us = host_us = 0.0
        left = num_calls
        with torch.cuda.device(self._device):
            while left > 0:
                num_queued = min(left, MAX_QUEUED_CALLS)
                sample = self._sample_queued(run, num_queued)
                device_us += sample.device_us
                host_us += sample.host_us
                left -= num_queued
        return Sample(device_us=device_us / num_calls, host_us=host_us / num_calls)

    def _sample_queued(self, run: Callable[[], object], num_calls: int) -> Sample:
        """Return the sum over ``num_calls`` calls."""
        expected_us = self._host_us * num_calls * DELAY_MARGIN_RATIO if self._host_us else FIRST_DELAY_US
        for attempt in range(NUM_DELAY_TRIES):
            sample, was_full = self._sample_once(run, num_calls, expected_us * 2**attempt)
            self._host_us = sample.host_us / num_calls
            # A queue that ran dry matters only where the device was faster than the host.
            if was_full or sample.device_us > 2 * sample.host_us:
                break
            expected_us = max(expected_us, sample.host_us * DELAY_MARGIN_RATIO)
        return sample

    def _sample_once(self, run: Callable[[], object], num_calls: int, delay_us: float) -> tuple[Sample, bool]:
        before, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        cycles = int(min(delay_us, MAX_DELAY_US) * self._cycles_per_us)
        before.record()
        versions.delay_stream(cycles)
        start.record()
        start_s = time.perf_counter()
        for _ in range(num_calls):
            run()
        host_us = (time.perf_counter() - start_s) * 1e6
        was_full = not start.query()
        end.record()
        end.synchronize()
        # The clock rate of the device moves, so each delay corrects the length of the next one.
        delayed_us = before.elapsed_time(start) * 1e3
        if delayed_us > 0:
            self._cycles_per_us = min(max(cycles / delayed_us, 100.0), 5_000.0)
        return Sample(device_us=start.elapsed_time(end) * 1e3, host_us=host_us), was_full


NUM_PROBES = 9
BUSY_US = 600.0
"""Median time for an idle stream to answer above which something else holds the device.

Source: on an idle H200 a probe answers within 150 us; beside matrix products on another stream it took 1,300 us, and
another process keeps the device for time slices of about 2 ms.
"""


def is_device_busy(device: torch.device) -> bool:
    """Return whether other work is visibly running on a device: another process, or another stream of this one.

    Note:
        Waits for the current stream, then runs about 1 ms of work; allocates 2 MiB for its time. Work too light to
        slow a probe down goes unnoticed. Always false where there is no CUDA device.
    """
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        buffer = torch.empty(1 << 19, dtype=torch.float32, device=device)
        return is_disturbed([_probe_us(buffer) for _ in range(NUM_PROBES)])


def is_disturbed(probes_us: list[float]) -> bool:
    """Return whether small pieces of work mostly took too long to come back."""
    return statistics.median(probes_us) > BUSY_US


def _probe_us(buffer: torch.Tensor) -> float:
    """Return the wall time of a few small kernels that fill the device, from an empty stream to their end.

    The wall, since events of this process do not see the time slices that another process takes before them.
    """
    end = torch.cuda.Event()
    end.record()
    end.synchronize()
    start_s = time.perf_counter()
    for _ in range(8):
        buffer.fill_(1.0)
    end.record()
    end.synchronize()
    return (time.perf_counter() - start_s) * 1e6


def clock_for(device: torch.device) -> Clock:
    """Return the clock that measures work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else WallClock()
