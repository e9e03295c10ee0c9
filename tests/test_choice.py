"""Choosing is a pure function of outcomes."""

import dataclasses
import math

import pytest

from smartattn.choice import break_even_calls, choose, fastest, has_plan
from smartattn.record import Failed, Invalid, Rejected, Timed


def timed(device_us, host_us=1.0, plan_ms=0.0, spread_us=0.0, n=25):
    return Timed(device_us, host_us, spread_us, n, 0.1, "v", plan_ms=plan_ms)


def pick(outcomes, *, dynamic=None, num_calls=0, is_planned=False, allowed=None):
    return choose(
        outcomes,
        (lambda name: True) if allowed is None else allowed.__contains__,
        dynamic=dynamic,
        num_calls=num_calls,
        is_planned=is_planned,
    )


PLANNED = {"stock": timed(100, plan_ms=50.0), "cudnn": timed(50, plan_ms=50.0), "flash": timed(75)}


def test_host_time_counts_beyond_what_stock_needs():
    """A route that takes more host time than stock, with half of slack, costs that host time."""
    assert pick({"stock": timed(50, host_us=20), "flash": timed(10, host_us=80)}).route == "stock"
    assert pick({"stock": timed(50, host_us=20), "flash": timed(10, host_us=30)}).route == "flash"


def test_stock_keeps_its_place_within_three_percent():
    """A gain under 3 % does not displace stock; one above does."""
    assert fastest({"stock": timed(102.9), "flash": timed(100)}) == "stock"
    assert fastest({"stock": timed(103.1), "flash": timed(100)}) == "flash"


def test_stock_keeps_its_place_within_the_noise():
    """A gain smaller than the standard error of both medians does not displace stock."""
    assert fastest({"stock": timed(120, spread_us=60, n=4), "flash": timed(100)}) == "stock"
    assert fastest({"stock": timed(120, spread_us=60, n=100), "flash": timed(100)}) == "flash"


def test_the_backend_that_stock_runs_must_win_clearly():
    """One kernel by two ways in differs by noise alone, so stock stays unless the direct call gains a tenth."""
    stock = dataclasses.replace(timed(108), resolved="flash")
    assert fastest({"stock": stock, "flash": timed(100)}) == "stock"
    assert fastest({"stock": stock, "eager": timed(100)}) == "eager"
    assert fastest({"stock": dataclasses.replace(stock, device_us=111.0), "flash": timed(100)}) == "flash"


def test_near_ties_go_to_the_order_of_the_record():
    """Between two routes that beat stock by much and each other by little, the earlier one is chosen."""
    assert fastest({"stock": timed(300), "cudnn": timed(101), "flash": timed(100)}) == "cudnn"


@pytest.mark.parametrize(
    "outcome", [Rejected(("no",)), Failed("E", "v"), Invalid("wrong", "v")], ids=["rejected", "failed", "invalid"]
)
def test_only_timed_routes_are_chosen(outcome):
    """A route that was rejected, failed or was wrong is never the choice."""
    assert pick({"flash": outcome}) is None
    assert pick({"flash": outcome, "math": timed(500)}).route == "math"


def test_a_route_that_is_not_allowed_is_passed_over():
    """Eligibility for the exact call decides over the record."""
    assert pick({"stock": timed(9), "flash": timed(1)}, allowed={"stock"}).route == "stock"


def test_inference_rents_until_the_plan_is_paid_then_buys():
    """Below the break-even the plan-free route runs; from it on, the faster one."""
    renting = pick(PLANNED)
    assert (renting.route, renting.faster, renting.break_even_calls) == ("flash", "cudnn", 2000)
    assert pick(PLANNED, num_calls=1999).route == "flash"
    assert pick(PLANNED, num_calls=2000).route == "cudnn"


def test_a_declaration_skips_the_waiting():
    """dynamic=False buys at once, dynamic=True never, not even a plan that was made."""
    assert pick(PLANNED, dynamic=False).route == "cudnn"
    assert pick(PLANNED, dynamic=True, num_calls=10**9, is_planned=True).route == "flash"


def test_a_plan_that_was_made_is_free():
    """After a tuning at this exact shape its plans exist, so nothing is rented."""
    assert pick(PLANNED, is_planned=True).route == "cudnn"


def test_without_a_free_route_the_planned_one_runs():
    """When every allowed route has a plan, the fastest of them runs at once."""
    assert pick(PLANNED, allowed={"stock", "cudnn"}).route == "cudnn"
    assert pick(PLANNED, dynamic=True, allowed={"stock", "cudnn"}).route == "cudnn"


def test_never_worse_than_twice_the_best_in_hindsight():
    """Whatever the number of calls, renting then buying costs at most twice the better of both."""
    free, fast = PLANNED["flash"], PLANNED["cudnn"]
    for calls in (1, 10, 1999, 2000, 2001, 10**6):
        cost_us, plan_us = 0.0, fast.plan_ms * 1e3
        bought = break_even_calls(free.cost_us, fast.cost_us, fast.plan_ms)
        cost_us = min(calls, bought) * free.cost_us
        if calls > bought:
            cost_us += plan_us + (calls - bought) * fast.cost_us
        best_us = min(calls * free.cost_us, plan_us + calls * fast.cost_us)
        assert cost_us <= 2 * best_us


def test_no_saving_never_pays():
    """A plan whose route saves nothing is never bought."""
    assert break_even_calls(10.0, 10.0, 5.0) > 10**12


def test_small_plans_do_not_count():
    """A first call that costs a fraction of a millisecond more is no plan."""
    assert not has_plan(timed(1, plan_ms=0.34))
    assert has_plan(timed(1, plan_ms=50))
    assert math.isfinite(timed(1).cost_us)
