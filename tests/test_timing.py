"""The race is tested with a fake clock: no test here takes a real time."""

import pytest

from smartattn.measurement import Measurement, Sample
from smartattn.timing import MAX_CALLS_PER_BLOCK, MAX_ROUNDS, MIN_ROUNDS, Limits, is_unsettled, race


class ScriptedClock:
    """A clock whose costs are given per trial, with seeded noise."""

    def __init__(self, costs_us, noise=()):
        self.costs_us = costs_us
        self.noise = list(noise)
        self.time_s = 0.0
        self.blocks = []

    def now_s(self):
        return self.time_s

    def sample(self, run, num_calls):
        name = run()
        factor = self.noise[len(self.blocks) % len(self.noise)] if self.noise else 1.0
        cost_us = self.costs_us[name] * factor
        self.blocks.append((name, num_calls))
        self.time_s += cost_us * num_calls / 1e6
        return Sample(cost_us, cost_us / 2)


def trials(*names):
    return {name: (lambda name=name: name) for name in names}


def test_medians_are_the_given_costs():
    """A quiet clock gives back exactly what it was told."""
    clock = ScriptedClock({"stock": 100.0, "flash": 60.0})
    result = race(trials("stock", "flash"), clock, Limits(1e9))
    assert (result["stock"].device_us, result["flash"].device_us) == (100.0, 60.0)
    assert result["flash"].host_us == 30.0


def test_hopeless_routes_are_looked_at_once():
    """A route more than three times slower gets one look, stock is kept whatever it costs."""
    clock = ScriptedClock({"stock": 900.0, "flash": 100.0, "math": 500.0})
    result = race(trials("stock", "flash", "math"), clock, Limits(1e9))
    assert len(result["math"].samples) == 1
    assert len(result["stock"].samples) >= MIN_ROUNDS


def test_clearly_slower_routes_leave_after_the_first_rounds():
    """A route beyond a quarter over the best leaves once a few rounds were taken; finalists go on."""
    clock = ScriptedClock({"stock": 100.0, "flash": 101.0, "eager": 140.0}, noise=(1.0, 1.1, 0.9, 1.05, 0.95))
    result = race(trials("stock", "flash", "eager"), clock, Limits(1e9))
    assert len(result["eager"].samples) == MIN_ROUNDS
    assert len(result["flash"].samples) == MAX_ROUNDS


def test_a_clear_order_ends_the_race():
    """When the best stands apart by more than both spreads, no further rounds are taken."""
    clock = ScriptedClock({"stock": 100.0, "flash": 85.0})
    assert len(race(trials("stock", "flash"), clock, Limits(1e9))["flash"].samples) == MIN_ROUNDS


def test_the_budget_ends_the_race_but_everyone_is_timed():
    """With no budget each surviving route still has one block."""
    clock = ScriptedClock({"stock": 100.0, "flash": 101.0})
    result = race(trials("stock", "flash"), clock, Limits(0.0))
    assert {name: len(m.samples) for name, m in result.items()} == {"stock": 1, "flash": 1}


def test_blocks_are_long_enough_for_short_calls():
    """A call of one microsecond is timed in the largest block, one of a second alone."""
    clock = ScriptedClock({"short": 1.0, "stock": 1e6})
    race(trials("short", "stock"), clock, Limits(0.0))
    assert ("short", MAX_CALLS_PER_BLOCK) in clock.blocks
    assert {calls for name, calls in clock.blocks if name == "stock"} == {1}


def test_rounds_interleave():
    """Routes take turns, and the direction alternates, so that a drift favours none."""
    clock = ScriptedClock({"stock": 100.0, "flash": 101.0}, noise=(1.0, 1.2))
    race(trials("stock", "flash"), clock, Limits(1e9, max_rounds=5))
    rounds = [name for name, _ in clock.blocks[4:]]
    assert rounds[:4] == ["stock", "flash", "flash", "stock"]


def test_an_error_leaves_the_race():
    """What a trial raises reaches the caller, who knows whom to blame."""

    def broken():
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        race({"stock": broken}, ScriptedClock({}), Limits(1.0))


def test_no_trials_no_measurements():
    """An empty race is no error."""
    assert race({}, ScriptedClock({}), Limits(1.0)) == {}


def measurement(*costs_us):
    return Measurement(tuple(Sample(cost, 1.0) for cost in costs_us))


def test_a_shared_drift_is_settled():
    """When all routes slow down alike, the order stands and nothing is noisy."""
    slower = {"stock": measurement(100, 100, 150, 150), "flash": measurement(80, 80, 120, 120)}
    assert not is_unsettled(slower)


def test_a_turned_order_is_unsettled():
    """When the early winner is found a quarter slower than another route later, the record is noisy."""
    turned = {"stock": measurement(100, 100, 100, 100), "flash": measurement(80, 80, 130, 130)}
    assert is_unsettled(turned)


def test_too_few_samples_settle_nothing():
    """Routes that left early say nothing about a drift."""
    assert not is_unsettled({"stock": measurement(100, 500), "flash": measurement(80)})
