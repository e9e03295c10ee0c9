"""Checking stored choices again: what fails is reported, quarantined, written down, and lifted by ``forget``."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

import smartattn
from smartattn.record import Invalid, Timed
from smartattn.selector import selector
from tests.fakes import FakeBackend, FakeClock, registered, tensors


@pytest.fixture(autouse=True)
def no_real_time(fake_clock: FakeClock):
    """Let ``fake`` win every tuning without measuring anything."""
    selector.clock = lambda device: fake_clock


@pytest.fixture
def backend(fake_clock: FakeClock):
    """Register a backend that is right and the fastest."""
    backend = FakeBackend(clock=fake_clock, cost_us=30.0)
    with registered(backend):
        yield backend


def run(*shape: int, **rest: object) -> torch.Tensor:
    """Call the public function on new tensors."""
    return smartattn.scaled_dot_product_attention(*tensors(*(shape or (2, 2, 6, 8))), **rest)


TIMED = Timed(1.0, 1.0, 0.0, 9, 0.1, "1")


def rewrite_outcomes(**outcomes: object) -> None:
    """Change what the one stored record says."""
    (entry,) = smartattn.cache.records()
    changed = dataclasses.replace(entry.record, outcomes={**entry.record.outcomes, **outcomes})
    selector.keep(entry.environment, changed, smartattn.settings())


def statuses(**rest: object) -> dict[str, str]:
    """Return route to status."""
    return {each.route: each.status for each in smartattn.verify(**rest)}


def test_right_choices_are_valid(backend: FakeBackend):
    """A stored choice that is right stays, and is reported with its origin and date."""
    run()
    (found,) = smartattn.verify()
    assert (found.route, found.status, found.reason, found.bucket) == ("fake", "valid", "", True)
    assert found.error_ratio <= 1
    assert found.date.startswith("20")
    assert not found.is_quarantined
    assert smartattn.explain(*tensors(2, 2, 6, 8)).route == "fake"


def test_wrong_values_are_found_and_quarantined(backend: FakeBackend):
    """A route that has become wrong since it was stored is quarantined with its reason, here and on disk."""
    run()
    backend.error = 0.1
    (found,) = smartattn.verify()
    assert (found.route, found.status) == ("fake", "invalid")
    assert found.error_ratio > 1
    assert "output" in found.reason
    assert found.is_quarantined
    (entry,) = selector.memory.store.quarantine_entries()
    assert entry.route_name == "fake"
    assert "found invalid by verify" in entry.reason
    assert entry.date.startswith("20")
    assert entry.environment_digest == smartattn.cache.records()[0].environment_digest


def test_nothing_wrong_is_bound_any_more(backend: FakeBackend):
    """After ``verify`` the very next call runs another route, although its key was bound before."""
    run()
    backend.error = 0.1
    smartattn.verify()
    calls = backend.calls
    query, key, value = tensors(2, 2, 6, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(smartattn.scaled_dot_product_attention(query, key, value), expected)
    assert backend.calls == calls
    assert smartattn.stats().tunings == 1


def test_a_whole_bucket_is_warned(backend: FakeBackend):
    """Other lengths of the bucket do not meet the wrong route either."""
    run()
    backend.error = 0.1
    smartattn.verify()
    assert smartattn.explain(*tensors(2, 2, 7, 8)).route != "fake"
    assert isinstance(smartattn.cache.records()[0].record.outcomes["fake"], Invalid)


def test_nan_is_wrong(backend: FakeBackend):
    """A result of NaN is infinitely wrong, and still plain data."""
    run()
    backend.error = math.nan
    (found,) = smartattn.verify()
    assert (found.status, found.error_ratio) == ("invalid", math.inf)
    assert json.loads(json.dumps(found.to_dict()))["error_ratio"] is None


def test_what_raises_has_failed(backend: FakeBackend):
    """A route that raises where Math answers is quarantined with the error's text."""
    run()
    backend.raises = RuntimeError("no engine")
    (found,) = smartattn.verify()
    assert (found.status, found.reason) == ("failed", "RuntimeError: no engine")
    assert smartattn.stats().quarantines == 1


def test_out_of_memory_proves_nothing(backend: FakeBackend):
    """A route that runs out of memory is skipped and stays."""
    run()
    backend.raises = torch.OutOfMemoryError("CUDA out of memory")
    (found,) = smartattn.verify()
    assert found.status == "skipped"
    backend.raises = None
    assert smartattn.explain(*tensors(2, 2, 6, 8)).route == "fake"


def test_a_sticky_error_is_raised(backend: FakeBackend):
    """An accelerator error that outlives its call ends the checking."""
    run()
    backend.raises = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        smartattn.verify()


def test_forget_lifts_the_quarantine(backend: FakeBackend):
    """After ``forget`` the signature is tuned again and may take the route again."""
    run()
    backend.error = 0.1
    (found,) = smartattn.verify()
    backend.error = 0.0
    assert smartattn.cache.forget(found.signature) >= 2
    run()
    assert smartattn.explain(*tensors(2, 2, 6, 8)).route == "fake"
    assert list(selector.memory.store.quarantine_entries()) == []


def test_every_route_checks_the_others_too(backend: FakeBackend):
    """``every_route`` also checks measured routes that would not be chosen now."""
    run()
    record = smartattn.cache.records()[0].record
    timed = {name for name, outcome in record.outcomes.items() if isinstance(outcome, Timed)}
    assert set(statuses()) == {"fake"}
    assert set(statuses(every_route=True)) == timed > {"fake", "stock", "math"}


def test_both_ends_of_rent_or_buy_are_checked(backend: FakeBackend):
    """Where a plan must pay first, the route of now and the route of later are both checked."""
    run()
    rewrite_outcomes(fake=Timed(1.0, 1.0, 0.0, 9, 0.1, "1", plan_ms=50.0))
    assert len(statuses()) == 2


def test_training_gradients_are_checked(backend: FakeBackend):
    """A route with the right output and a wrong gradient is found."""
    query, key, value = tensors(2, 2, 6, 8)
    query.requires_grad_()
    smartattn.scaled_dot_product_attention(query, key, value)
    assert statuses() == {"fake": "valid"}
    right = backend._run
    backend._run = lambda query, *rest: right(_Doubled.apply(query), *rest)
    (found,) = smartattn.verify()
    assert found.status == "invalid"
    assert "dQ" in found.reason


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


def test_frozen_mode_writes_nothing(backend: FakeBackend):
    """In a mode that does not write, the quarantine holds for this process alone."""
    run()
    smartattn.configure(mode="frozen")
    backend.error = 0.1
    assert smartattn.verify()[0].status == "invalid"
    assert smartattn.explain(*tensors(2, 2, 6, 8)).route != "fake"
    assert list(selector.memory.store.quarantine_entries()) == []
    assert isinstance(smartattn.cache.records()[0].record.outcomes["fake"], Timed)


def test_nothing_stored_nothing_checked():
    """Without records there is nothing to report."""
    assert smartattn.verify() == ()
    assert smartattn.cache.verify() == ()


def test_a_record_without_a_usable_route_is_skipped(backend: FakeBackend):
    """A record whose routes may not serve here any more is named, not hidden."""
    run()
    backend.reason = "is gone"
    rewrite_outcomes(
        **{name: Invalid("wrong", "1") for name in smartattn.cache.records()[0].record.outcomes} | {"fake": TIMED}
    )
    (found,) = smartattn.verify()
    assert (found.route, found.status) == ("", "skipped")


def test_verify_leaves_random_state_and_records_alone(backend: FakeBackend):
    """Checking draws no random numbers of the program and keeps files of valid records byte for byte."""
    run()
    path = smartattn.cache.records()[0].path
    before = torch.get_rng_state(), path.read_bytes()
    smartattn.verify(every_route=True)
    assert torch.equal(before[0], torch.get_rng_state())
    assert path.read_bytes() == before[1]


def test_a_verification_reads_as_one_line(backend: FakeBackend):
    """``str`` names status, route and signature on one line."""
    run()
    text = str(smartattn.verify()[0])
    assert text.startswith("valid")
    assert "fake" in text
    assert "sdpa infer cpu float32" in text
    assert "\n" not in text
