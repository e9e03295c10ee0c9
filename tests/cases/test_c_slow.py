"""Reported faults of kind C: choices that are slow or hungry although a better way exists."""

from __future__ import annotations

import pytest
import torch

import smartattn
from smartattn.backends.stock import resolved_backend
from smartattn.record import Timed
from smartattn.selector import selector
from smartattn.signature import Call, read_signature
from tests.cases.common import call_of, eligible_routes, everywhere_right
from tests.fakes import FakeBackend, FakeClock, registered


def ways(call: Call) -> set[str]:
    """Return the eligible routes of a call, all of them right."""
    return set(everywhere_right(call)) - {"public"}


@pytest.mark.parametrize("route", ["math", "eager", "flash", "eager_inplace"])
def test_any_route_that_is_faster_wins(route: str, fake_clock: FakeClock):
    """R56, R68: no order is fixed: whatever route measures fastest is chosen, plain products and Math included."""

    class Clock(FakeClock):
        def sample(self, run, num_calls):
            from smartattn.routes import parse_route  # the runner of a route tells itself by its own kind

            wanted = parse_route(route, "cpu").bind(signature)
            inner = run.__closure__ or ()
            is_wanted = any(cell.cell_contents is wanted for cell in inner)
            self.costs = {"<lambda>": 10.0 if is_wanted else 50.0}
            return super().sample(run, num_calls)

    call = call_of(2, 2, 8, 16)
    signature = read_signature(call)
    selector.clock = lambda device: Clock()
    smartattn.scaled_dot_product_attention(*call)
    assert smartattn.explain(*call).route == route


def test_stock_stays_when_nothing_is_faster():
    """R56: equal times change nothing for the program: stock keeps its place."""
    call = call_of(2, 2, 8, 16)
    smartattn.scaled_dot_product_attention(*call)
    assert smartattn.explain(*call).route == "stock"


@pytest.mark.parametrize(("H", "enable_gqa"), [(2, True), (1, True), (1, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grads", ["", "qkv"])
def test_grouped_heads_reach_fused_backends(H: int, enable_gqa: bool, dtype: torch.dtype, grads: str):
    """R61, R62: grouped heads, and one head without the flag, have a fused way, also where PyTorch takes Math."""
    call = call_of(2, 8, 16, 32, H=H, dtype=dtype, grads=grads, enable_gqa=enable_gqa)
    found = ways(call)
    assert any(name.split("+")[-1] == "flash" for name in found), found


@pytest.mark.parametrize(
    ("batch", "rewrite"), [((2, 3), "flatten_batch"), ((), "promote"), ((2, 1, 2), "flatten_batch")]
)
@pytest.mark.parametrize("masked", [False, True])
def test_other_ranks_reach_fused_backends(batch: tuple[int, ...], rewrite: str, masked: bool):
    """R63, R64: inputs of 3, 5 and more dimensions, whose stock is Math, have a fused way with the right values."""
    call = call_of(*batch, 4, 16, 8, attn_mask=torch.rand(16, 16) < 0.7 if masked else None)
    assert resolved_backend(call) == "math"
    assert f"{rewrite}+flash" in ways(call)


def test_half_math_is_measured_like_any_other():
    """R65: Math in half precision is one route among others, and its switch is part of what is remembered."""
    call = call_of(2, 2, 8, 16, dtype=torch.bfloat16)
    plain = read_signature(call)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        assert read_signature(call).reduced
        assert str(read_signature(call)) != str(plain)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    assert "math" in ways(call)


@pytest.mark.parametrize("shape", [(1, 1, 64, 96), (64, 96), (1, 1, 1, 96), (2, 1, 64, 96)])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_are_not_spread_over_axes_they_broadcast(shape: tuple[int, ...], kind: str):
    """R67: no rewrite makes a copy of a mask per head or batch: what reaches an operator has the axes of 1 it came with."""
    from smartattn.routes import parse_route

    mask = torch.rand(shape) < 0.7 if kind == "bool" else torch.randn(shape)
    call = call_of(2, 4, 64, 16, S=96, attn_mask=mask)
    signature = read_signature(call)
    for name in eligible_routes(call):
        left = parse_route(name, "cpu").remaining(signature)
        kept = [axis for axis in left.mask_axes[-4:] if axis != "1"]
        assert len(kept) <= sum(size > 1 for size in shape), (name, left.mask_axes)
    everywhere_right(call)


def test_a_length_that_grows_pays_no_plan_and_few_tunings():
    """R58, R59: decoding over 300 key lengths tunes once per bucket, not per step, and pays no plan per step."""
    clock = FakeClock(default_us=50.0)
    selector.clock = lambda device: clock
    backend = FakeBackend(clock=clock, cost_us=20.0, plan_ms=50.0)
    with registered(backend):
        module = smartattn.SmartAttention(dynamic=True)
        for S in range(1, 300):
            call = call_of(1, 2, 1, 8, S=S)
            torch.testing.assert_close(module(*call[:3]), torch.nn.functional.scaled_dot_product_attention(*call[:3]))
        planned = len(backend._planned)
    assert smartattn.stats().tunings <= 5
    assert planned <= 4 * smartattn.stats().tunings


def test_plan_cost_is_part_of_the_record():
    """R58: what a first call costs beyond a steady one is measured and kept."""
    clock = FakeClock(default_us=50.0)
    selector.clock = lambda device: clock
    with registered(FakeBackend(clock=clock, cost_us=20.0, plan_ms=80.0)):
        smartattn.scaled_dot_product_attention(*call_of(2, 2, 8, 16))
        outcome = smartattn.cache.records()[0].record.outcomes["fake"]
    assert isinstance(outcome, Timed)
    assert outcome.plan_ms == pytest.approx(80.0, rel=0.05)
