"""Statistics derived from raw samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartattn.measurement import NOISY_SPREAD_RATIO, Measurement, Sample


def measurement_of(*costs_us: float) -> Measurement:
    return Measurement(tuple(Sample(device_us=cost, host_us=0.0) for cost in costs_us))


def test_cost_is_the_slower_of_device_and_host():
    """An eager caller waits for the host when launching is slower than running, and for the device otherwise."""
    assert Sample(device_us=5, host_us=9).cost_us == 9
    assert Sample(device_us=9, host_us=5).cost_us == 9


def test_medians_are_taken_per_column_over_the_faster_half():
    """Device, host and cost each have their own median, and what other programs add does not move them."""
    found = Measurement((Sample(10, 4), Sample(12, 20), Sample(900, 5), Sample(901, 5), Sample(11, 3)))
    assert (found.device_us, found.host_us, found.cost_us) == (11, 4, 11)
    assert found.quiet == (Sample(10, 4), Sample(11, 3), Sample(12, 20))


def test_spread_of_few_samples_is_their_range():
    """Below four samples in the faster half there are no quartiles, so its whole range counts."""
    assert measurement_of(10, 13, 11).spread_us == 1
    assert measurement_of(10).spread_us == 0


def test_spread_of_many_samples_is_the_interquartile_range():
    """Where the faster half has four samples or more, its outliers do not count, nor does the slower half."""
    assert measurement_of(1, 10, 10, 10, 10, 10, 10, 10, 99, 99, 99, 99, 99, 99).spread_us == 0


@pytest.mark.parametrize(("costs", "is_noisy"), [((10, 10, 20, 90), False), ((10, 20, 30, 30), True)])
def test_noise_is_spread_over_median(costs: tuple[float, ...], is_noisy: bool):
    """A measurement whose faster half is spread over more than a quarter of its median says so itself."""
    assert NOISY_SPREAD_RATIO == 0.25
    assert measurement_of(*costs).is_noisy is is_noisy


@given(st.lists(st.floats(0.1, 1e7), min_size=1, max_size=30))
def test_statistics_stay_inside_the_samples(costs: list[float]):
    """A median lies between the extremes, and samples in another order give the same statistics."""
    found, turned = measurement_of(*costs), measurement_of(*reversed(costs))
    assert min(costs) <= found.cost_us <= max(costs)
    assert found.spread_us >= 0
    assert (found.cost_us, found.spread_us) == (turned.cost_us, turned.spread_us)
