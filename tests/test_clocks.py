"""Clocks: what a sample counts, with a made-up device and made-up time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from smartattn import clocks, versions
from smartattn.clocks import CudaClock, WallClock, clock_for, is_device_busy, is_disturbed


class FakeDevice:
    """A device with one stream: work starts when it is enqueued and the device is free. Times in microseconds."""

    def __init__(self) -> None:
        self.host_us = 0.0
        self.free_us = 0.0
        self.num_calls = 0
        self.delays_us: list[float] = []

    def enqueue(self, device_us: float) -> None:
        """Add work."""
        self.free_us = max(self.free_us, self.host_us) + device_us

    def delay(self, cycles: int) -> None:
        """Keep the stream busy at 1,000 cycles a microsecond."""
        self.delays_us.append(cycles / 1_000)
        self.enqueue(cycles / 1_000)

    def call(self, device_us: float, host_us: float) -> Callable[[], None]:
        """Return a call with these costs."""

        def run() -> None:
            self.host_us += host_us
            self.enqueue(device_us)
            self.num_calls += 1

        return run


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Put a fake device in the place of CUDA."""
    fake = FakeDevice()

    class Event:
        def __init__(self, *, enable_timing: bool = False) -> None:
            self.at_us = 0.0
            del enable_timing

        def record(self) -> None:
            self.at_us = max(fake.free_us, fake.host_us)

        def query(self) -> bool:
            return fake.host_us >= self.at_us

        def synchronize(self) -> None:
            fake.host_us = max(fake.host_us, self.at_us)

        def elapsed_time(self, other: Event) -> float:
            return (other.at_us - self.at_us) / 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(versions, "delay_stream", fake.delay)
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: fake.host_us / 1e6)
    return fake


@pytest.mark.parametrize(("device_us", "host_us"), [(5.0, 30.0), (30.0, 5.0), (3000.0, 20.0), (1.0, 100.0)])
def test_device_time_holds_no_gaps_of_the_host(device: FakeDevice, device_us: float, host_us: float) -> None:
    """Both times come out as they are, also where the host is much slower than the device."""
    sample = CudaClock(torch.device("cuda", 0)).sample(device.call(device_us, host_us), 50)
    assert sample.device_us == pytest.approx(device_us)
    assert sample.host_us == pytest.approx(host_us)


def test_a_slow_device_is_sampled_once(device: FakeDevice) -> None:
    """Every call asked for is run once when the first delay was long enough."""
    CudaClock(torch.device("cuda", 0)).sample(device.call(100.0, 10.0), 45)
    assert device.num_calls == 45


def test_calls_are_queued_in_small_blocks(device: FakeDevice) -> None:
    """The queue of the driver never fills up."""
    CudaClock(torch.device("cuda", 0)).sample(device.call(5.0, 1.0), 45)
    assert len(device.delays_us) == 3


def test_a_delay_that_was_too_short_grows(device: FakeDevice) -> None:
    """Where the host outlasts the delay the block is sampled again behind a longer one, a few times at most."""
    CudaClock(torch.device("cuda", 0)).sample(device.call(1.0, 100.0), 20)
    assert device.delays_us[0] < device.delays_us[1]
    assert len(device.delays_us) <= clocks.NUM_DELAY_TRIES


def test_delays_are_bounded(device: FakeDevice) -> None:
    """A call that blocks the host for seconds does not make the device wait for seconds."""
    CudaClock(torch.device("cuda", 0)).sample(device.call(1.0, 5e5), 2)
    assert max(device.delays_us) <= clocks.MAX_DELAY_US


def test_wall_clock_divides_by_the_calls() -> None:
    """The wall clock runs what it is asked to run, and both times agree."""
    calls: list[int] = []
    sample = WallClock().sample(lambda: calls.append(1), 7)
    assert len(calls) == 7
    assert sample.device_us == sample.host_us > 0


def test_each_device_gets_its_clock() -> None:
    """CUDA gets events, everything else the wall."""
    assert isinstance(clock_for(torch.device("cuda", 0)), CudaClock)
    assert isinstance(clock_for(torch.device("cpu")), WallClock)


def test_probes_tell_a_busy_device() -> None:
    """One late answer is chance, a late median is not; a CPU is never called busy."""
    assert not is_disturbed([60.0] * 8 + [5_000.0])
    assert is_disturbed([60.0] * 3 + [1_500.0] * 6)
    assert not is_device_busy(torch.device("cpu"))
