"""Reported faults of kind E that the tests of the store do not name: keys, stored names, storms, bounds."""

from __future__ import annotations

import json

import pytest
import torch

import smartattn
from smartattn.selector import selector
from smartattn.signature import read_signature
from tests.cases.common import call_of, everywhere_right
from tests.fakes import FakeBackend, FakeClock, registered

CHANGES = {
    "scale": {"scale": -1.0},
    "dropout": {"dropout_p": 0.5},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.ones(8, 8, dtype=torch.bool)},
    "additive": {"attn_mask": torch.zeros(8, 8)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_option_more_is_another_choice(change: str):
    """R104: calls that differ in one option never share a stored choice."""
    call = call_of(2, 2, 8, 16)
    other = call._replace(**CHANGES[change])
    assert read_signature(call).digest != read_signature(other).digest
    for each in (call, other, call, other):
        smartattn.scaled_dot_product_attention(*each)
    assert smartattn.stats().tunings == 2
    assert len(smartattn.cache.records()) == 2


@pytest.mark.parametrize("switch", ["flash", "efficient", "deterministic", "reduced", "precision", "autocast", "grad"])
def test_each_switch_of_the_process_is_another_choice(switch: str):
    """R104: a global switch that changes who may run, or how, is part of the key."""
    call = call_of(2, 2, 8, 16, grads="q")
    before = str(read_signature(call))
    cuda = torch.backends.cuda
    switches = {
        "flash": (cuda.enable_flash_sdp, False, True),
        "efficient": (cuda.enable_mem_efficient_sdp, False, True),
        "deterministic": (torch.use_deterministic_algorithms, True, False),
        "reduced": (cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
        "precision": (torch.set_float32_matmul_precision, "medium", "highest"),
        "grad": (torch.set_grad_enabled, False, True),
        "autocast": (lambda on: torch.set_autocast_enabled("cpu", on), True, False),
    }
    setter, changed, restored = switches[switch]
    setter(changed)
    try:
        assert str(read_signature(call)) != before
    finally:
        setter(restored)
    assert str(read_signature(call)) == before


@pytest.mark.parametrize(("E", "S"), [(126, 63), (128, 64), (127, 65)])
def test_a_bucket_is_no_permission(E: int, S: int):
    """R106: lengths of one bucket share a record, and each is asked again whether the route may serve it."""
    clock = FakeClock(default_us=50.0)
    selector.clock = lambda device: clock

    class Even(FakeBackend):
        def extra_reasons(self, signature, environment):
            return ("needs an even number of keys",) if signature.S % 2 else ()

    backend = Even("even", clock=clock, cost_us=10.0)
    with registered(backend):
        smartattn.scaled_dot_product_attention(*call_of(2, 2, 8, E, S=64))
        assert smartattn.explain(*call_of(2, 2, 8, E, S=64)).route == "even"
        call = call_of(2, 2, 8, E, S=S)
        calls = backend.calls
        smartattn.scaled_dot_product_attention(*call)
        assert backend.calls == calls + (S % 2 == 0)
        assert smartattn.stats().tunings == 1
        everywhere_right(call)


def test_each_shape_has_its_own_key():
    """R107: nothing of a key is computed once for all calls of a module."""
    module = smartattn.SmartAttention()
    for L in (3, 5, 3, 700, 5):
        call = call_of(2, 2, L, 16)
        torch.testing.assert_close(module(*call[:3]), torch.nn.functional.scaled_dot_product_attention(*call[:3]))
    assert len({record.record.digest for record in smartattn.cache.records()}) == 2


@pytest.mark.parametrize("name", ["gone", "", "default", "cudnn", "pad_head_dim+flash", "../math"])
def test_stored_names_are_hints(name: str, cache_dir):
    """R110: a stored winner that does not exist, is off, or may not serve here is passed over without a word of error."""
    call = call_of(2, 2, 8, 16)
    smartattn.scaled_dot_product_attention(*call)
    path = smartattn.cache.records()[0].path
    data = json.loads(path.read_text())
    best = {**data["outcomes"]["stock"], "device_us": 0.001, "host_us": 0.001}
    data["outcomes"] = {name: best, "math": data["outcomes"]["math"]}
    path.write_text(json.dumps(data))
    selector.memory.clear()
    smartattn.configure()
    torch.testing.assert_close(
        smartattn.scaled_dot_product_attention(*call), torch.nn.functional.scaled_dot_product_attention(*call[:3])
    )
    assert smartattn.explain(*call).route != name


def test_a_stored_winner_that_the_process_switched_off_is_not_run():
    """R110: a record made with flash on is no permission with flash off."""
    call = call_of(2, 2, 8, 16)
    smartattn.scaled_dot_product_attention(*call)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert "flash" not in everywhere_right(call)
        assert smartattn.explain(*call).outcomes["flash"].is_ == "rejected"
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_a_thousand_lengths_tune_a_bounded_number_of_times():
    """R112: lengths drawn from 8,000 to 72,000 tune per bucket of half an octave, not per length."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8_000, 72_000, (1000,), generator=generator).tolist()
    signature = read_signature(call_of(1, 1, 2, 8))
    import dataclasses

    from smartattn.buckets import bucket_of

    digests = {bucket_of(dataclasses.replace(signature, L=n, S=n)).digest for n in lengths}
    assert len(digests) <= 8


def test_random_sizes_stay_within_the_budget_of_the_process():
    """R113, R116: whatever sizes come, tuning ends with ``process_budget_s`` and every call is answered right."""
    clock = FakeClock(default_us=5e4)
    selector.clock = lambda device: clock
    smartattn.configure(process_budget_s=2.0)
    for N in range(1, 30):
        call = call_of(N, 1, 2 + N, 8, S=1 + 40 * N)
        torch.testing.assert_close(
            smartattn.scaled_dot_product_attention(*call), torch.nn.functional.scaled_dot_product_attention(*call[:3])
        )
    one_s = smartattn.stats().tuning_s / smartattn.stats().tunings
    assert smartattn.stats().tuning_s <= 2.0 + one_s
    assert smartattn.stats().tunings < 29


def test_a_signature_may_be_tuned_only_when_it_comes_back():
    """R113: with ``tune_after`` a size that comes once costs no tuning."""
    smartattn.configure(tune_after=3)
    for number in range(4):
        smartattn.scaled_dot_product_attention(*call_of(2, 2, 8, 16))
        assert smartattn.stats().tunings == (1 if number >= 2 else 0)


def test_the_order_of_routes_does_not_rank_them():
    """R119: the same costs in any order of measuring give the same choice."""
    from itertools import permutations

    from smartattn.timing import Limits, race

    costs = {"a": 60.0, "b": 50.0, "c": 55.0}
    for order in permutations(costs):
        clock = FakeClock({name: costs[name] for name in costs}, noise_ratio=0.02)
        trials = {}
        for name in order:
            exec(f"def {name}(): pass", trials)  # noqa: S102 - the fake clock knows trials by name
        trials.pop("__builtins__")
        measured = race({name: trials[name] for name in order}, clock, Limits(1e9))
        assert min(measured, key=lambda name: measured[name].cost_us) == "b"
