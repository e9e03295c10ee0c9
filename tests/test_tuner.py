"""Tuning with fake backends and a fake clock: every route ends as one outcome, whatever happens to it."""

from __future__ import annotations

import pytest
import torch

from smartattn.backends.registry import backends_for
from smartattn.environment import environment_of
from smartattn.record import Failed, Invalid, Rejected, Timed
from smartattn.routes import Route
from smartattn.settings import Settings
from smartattn.signature import Call, read_signature
from smartattn.trials import trial_of
from smartattn.tuner import Tuning, TuningAbortedError, one_line
from tests.fakes import FakeBackend, FakeClock, tensors


def tune(clock, *backends, call=None, settings=None, quarantined=None, with_stock=True):
    call = call or Call(*tensors(1, 2, 8, 8))
    stock = [Route((), backends_for("cpu")["stock"])] if with_stock else []
    routes = [*stock, *(Route((), backend) for backend in backends)]
    environment = environment_of(torch.device("cpu"))
    return Tuning(
        call, read_signature(call), environment, routes, settings or Settings(), clock, quarantined or {}
    ).run()


def test_every_route_has_one_outcome_in_the_given_order(fake_clock):
    """Timed, invalid, failed and rejected routes all stay in the record, in tie order."""
    record = tune(
        fake_clock,
        FakeBackend("good", clock=fake_clock, cost_us=20),
        FakeBackend("wrong", clock=fake_clock, error=0.5),
        FakeBackend("broken", clock=fake_clock, raises=ValueError("no such kernel")),
        FakeBackend("absent", reason="is not installed"),
    )
    kinds = {name: type(outcome) for name, outcome in record.outcomes.items()}
    assert kinds == {"stock": Timed, "good": Timed, "wrong": Invalid, "broken": Failed, "absent": Rejected}
    assert record.outcomes["broken"].reason == "ValueError: no such kernel"
    assert record.outcomes["absent"].reasons == ("is not installed",)
    assert "output" in record.outcomes["wrong"].reason


def test_costs_are_those_of_the_clock(fake_clock):
    """What the clock says a route costs is what its outcome holds."""
    record = tune(fake_clock, FakeBackend("good", clock=fake_clock, cost_us=20))
    assert record.outcomes["good"].device_us == pytest.approx(20)


def test_a_plan_is_the_first_call_over_a_steady_one(fake_clock):
    """Only backends that plan per shape have a plan cost; others may be slow at first for other reasons."""
    record = tune(fake_clock, FakeBackend("planned", clock=fake_clock, cost_us=20, plan_ms=50))
    assert record.outcomes["planned"].plan_ms == pytest.approx(50)


def test_nan_results_are_invalid(fake_clock):
    """A route that gives NaN where the reference is finite is out."""
    record = tune(fake_clock, FakeBackend("nan", clock=fake_clock, error=float("nan")))
    assert isinstance(record.outcomes["nan"], Invalid)


def test_a_plan_that_was_made_before_is_found_at_a_neighbouring_length(fake_clock):
    """When the program planned this shape already, a length that nobody met shows what a plan costs."""
    planned = FakeBackend("planned", clock=fake_clock, cost_us=20, plan_ms=50)
    call = Call(*tensors(1, 2, 64, 8))
    planned._planned.add((call.query.shape, call.key.shape))
    assert tune(fake_clock, planned, call=call).outcomes["planned"].plan_ms == pytest.approx(50)


def test_hopeless_routes_are_not_validated(fake_clock):
    """A route far slower than the fastest is called twice at most, and its reason holds both times."""
    slow = FakeBackend("slow", clock=fake_clock, cost_us=3000)
    record = tune(fake_clock, FakeBackend("fast", clock=fake_clock, cost_us=20), slow)
    assert slow.calls <= 2
    assert "3 ms against 20 us" in record.outcomes["slow"].reasons[0]


def test_one_slow_call_that_others_caused_rejects_nothing(fake_clock):
    """A single call of 8 ms among calls of 0.1 ms is looked at again before its route is called slow."""
    spiked = FakeBackend("spiked", clock=fake_clock, cost_us=90)

    class Spiking(FakeClock):
        def once_us(self, run):
            is_first = not spiked.calls
            found = super().once_us(run)
            return found + 8e3 if is_first and spiked.calls else found

    clock = Spiking()
    spiked.clock = clock
    assert isinstance(tune(clock, spiked).outcomes["spiked"], Timed)


def test_a_route_that_only_plans_slowly_is_not_hopeless(fake_clock):
    """A long first call that is a plan does not count against the route."""
    planned = FakeBackend("planned", clock=fake_clock, cost_us=10, plan_ms=60)
    record = tune(fake_clock, FakeBackend("fast", clock=fake_clock, cost_us=20), planned)
    assert isinstance(record.outcomes["planned"], Timed)


def test_memory_is_a_limit(fake_clock):
    """A route whose workspace exceeds the allowed share is rejected with the bytes it wanted; it is not run."""
    greedy = FakeBackend("greedy", clock=fake_clock, workspace_bytes=1 << 60)
    record = tune(fake_clock, greedy)
    assert "1048576.0 TiB" in record.outcomes["greedy"].reasons[0]
    assert greedy.calls == 0


def test_running_out_of_memory_is_a_rejection(fake_clock):
    """Out of memory says nothing about the route, so it is neither failed nor invalid."""
    record = tune(fake_clock, FakeBackend("big", clock=fake_clock, raises=torch.OutOfMemoryError("wanted 80 GiB")))
    assert isinstance(record.outcomes["big"], Rejected)
    assert "80 GiB" in record.outcomes["big"].reasons[0]


def test_no_memory_to_validate_blames_no_route(fake_clock, monkeypatch):
    """When even the reference does not fit, every route is rejected for that reason, and none failed."""

    def prepare(self):
        raise torch.OutOfMemoryError("wanted 80 GiB")

    monkeypatch.setattr("smartattn.validation.Validator.prepare", prepare)
    record = tune(fake_clock, FakeBackend("good", clock=fake_clock))
    assert all("to validate" in outcome.reasons[0] for outcome in record.outcomes.values())


def test_an_error_that_outlives_its_call_ends_all_tuning(fake_clock):
    """After a sticky accelerator error nothing more is tried."""
    after = FakeBackend("after", clock=fake_clock)
    sticky = FakeBackend("sticky", clock=fake_clock, raises=RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(TuningAbortedError, match="sticky"):
        tune(fake_clock, sticky, after)
    assert after.calls == 0


def test_an_interrupt_leaves_the_tuning(fake_clock):
    """Ctrl-C in a trial reaches the user at once."""
    with pytest.raises(KeyboardInterrupt):
        tune(fake_clock, FakeBackend("slow", clock=fake_clock, raises=KeyboardInterrupt()))


def test_quarantined_routes_are_not_run(fake_clock):
    """A route in quarantine is rejected with the reason that put it there."""
    bad = FakeBackend("bad", clock=fake_clock)
    record = tune(fake_clock, bad, quarantined={"bad": "failed at run time: E"})
    assert record.outcomes["bad"].reasons == ("is in quarantine: failed at run time: E",)
    assert bad.calls == 0


def test_approximate_routes_need_approximate_accuracy(fake_clock):
    """A backend that is not exact serves only who asked for it."""
    loose = FakeBackend("loose", clock=fake_clock)
    loose.is_exact = False
    assert isinstance(tune(fake_clock, loose).outcomes["loose"], Rejected)
    admitted = tune(fake_clock, loose, settings=Settings(accuracy="approximate"))
    assert isinstance(admitted.outcomes["loose"], Timed)


def test_nan_inputs_are_no_tuning_failure(fake_clock):
    """Inputs that hold NaN prove nothing, so routes are judged on other values."""
    query, key, value = tensors(1, 2, 8, 8)
    query.fill_(float("nan"))
    record = tune(fake_clock, FakeBackend("good", clock=fake_clock), call=Call(query, key, value))
    assert isinstance(record.outcomes["good"], Timed)
    assert isinstance(record.outcomes["stock"], Timed)


def test_a_turned_order_makes_a_noisy_record():
    """When a route wins early and loses late, the record says so."""

    class Turning(FakeClock):
        def sample(self, run, num_calls):
            turning.cost_us = 60 if len(self.log) < 11 else 200
            return super().sample(run, num_calls)

    clock = Turning()
    turning = FakeBackend("turning", clock=clock)
    assert tune(clock, turning).provenance.noisy
    assert not tune(FakeClock(), turning).provenance.noisy


def test_training_trials_run_the_backward_and_touch_no_grad():
    """A training trial computes every wanted gradient without accumulating into the caller's tensors."""
    query, key, value = (t.requires_grad_() for t in tensors(1, 2, 8, 8))
    call = Call(query, key, value)
    seen = []
    query.register_hook(seen.append)

    def run(*arguments):
        return torch.nn.functional.scaled_dot_product_attention(*arguments[:3])

    trial_of(run, call, read_signature(call))()
    assert len(seen) == 1
    assert query.grad is None


def test_reasons_fit_a_record():
    """A long error text is put on one line and cut."""
    text = one_line(RuntimeError("a\nb " + "x" * 1000))
    assert text.startswith("RuntimeError: a b x")
    assert len(text) == 300
