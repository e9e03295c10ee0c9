"""Random calls through the public function against attention by its definition: any route may win, none may differ.

``--differential N`` draws N calls instead of 200; ``--differential-seconds S`` goes on for S seconds, on a GPU with
``-m gpu``. Every call is made at first sight, when bound, when memorised, and then with other values in the mask.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import smartattn
from smartattn.first_sight import forget_everything
from smartattn.measurement import Sample
from smartattn.selector import selector
from smartattn.signature import Call
from tests import oracle
from tests.backends.contract import Problem, problems
from tests.fakes import FakeClock

BATCH = 200
"""Examples drawn with one seed."""
NUM_WAYS = 4
"""Calls after which every way was taken: first sight, key, key that makes a memo, memo."""
GRAD_LAYOUTS = ("like_output", "expanded", "sequence_first")


class LotteryClock(FakeClock):
    """A clock by which every route has a random but steady cost, so that any may win."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._lot = random.Random(seed)
        self._drawn: list[tuple[object, float]] = []

    def sample(self, run: Callable[[], object], num_calls: int) -> Sample:
        """Run ``run`` once, and report the cost that was drawn for it."""
        super().sample(run, num_calls)
        for known, cost_us in self._drawn:
            if known is run:
                return Sample(cost_us, cost_us)
        self._drawn.append((run, self._lot.uniform(10.0, 70.0)))
        return Sample(*[self._drawn[-1][1]] * 2)


def grad_of(output: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a gradient of the output in a memory layout."""
    if layout == "expanded":
        return torch.ones((), dtype=output.dtype, device=output.device).expand(output.shape)
    if layout == "sequence_first":
        return torch.randn_like(output.transpose(-3, -2).contiguous()).transpose(-3, -2)
    return torch.randn_like(output)


def differ(call: Call, seed: int, grad_layout: str) -> None:
    """Make the call by a route that a seeded clock chooses, on every way through, and compare with the definition."""
    if seed % 4:
        # Else a record of another call may answer for the whole bucket.
        smartattn.cache.clear()
    forget_everything()
    selector.clock = lambda device: LotteryClock(seed)
    compare(call, grad_layout, rounds=NUM_WAYS)
    mask = call.attn_mask
    if mask is not None and 0 not in mask.stride():
        with torch.no_grad():
            other = torch.empty_strided(mask.shape, mask.stride(), dtype=mask.dtype, device=mask.device)
            other.copy_(mask.flip(-1))
            call = call._replace(attn_mask=other.requires_grad_(mask.requires_grad))
        compare(call, grad_layout, rounds=1)


def compare(call: Call, grad_layout: str, rounds: int) -> None:
    """Make a call several times and compare each answer, and the gradients of the first and the last."""
    wants_grad = any(tensor.requires_grad for tensor in call.tensors)
    shape = (*call.query.shape[:-1], call.value.size(-1))
    like = torch.empty(shape, dtype=call.query.dtype, device=call.query.device)
    grad_out = grad_of(like, grad_layout) if wants_grad else None
    right = oracle.answer(call, grad_out)
    for number in range(rounds):
        output = smartattn.scaled_dot_product_attention(*call)
        is_end = number in (0, rounds - 1)
        gradients = oracle.differentiate(call, output, grad_out) if grad_out is not None and is_end else None
        oracle.check(call, output, right, gradients)


def sweep(config: pytest.Config, device: str, max_length: int) -> int:
    """Draw calls in batches until number and seconds are reached; return how many were drawn."""
    wanted, seconds = config.getoption("--differential"), config.getoption("--differential-seconds")
    stop = time.monotonic() + seconds
    num_drawn = 0
    smartattn.configure(signature_budget_ms=1.0, process_budget_s=1e9)

    def one(problem: Problem, seed: int, grad_layout: str) -> None:
        nonlocal num_drawn
        num_drawn += 1
        differ(problem.call, seed, grad_layout)

    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    first = config.getoption("--differential-seed")
    while num_drawn < wanted or time.monotonic() < stop:
        size = BATCH if time.monotonic() < stop else min(BATCH, wanted - num_drawn)
        drawn = given(problems(device, max_length), st.integers(0, 1 << 16), st.sampled_from(GRAD_LAYOUTS))(one)
        drawn = hypothesis.seed(first + num_drawn)(drawn)
        hypothesis.settings(max_examples=size, derandomize=False, database=None, suppress_health_check=checks)(drawn)()
    return num_drawn


def test_random_calls_are_right(request: pytest.FixtureRequest):
    """No route that may win any random call on CPU differs from attention by its definition."""
    assert sweep(request.config, "cpu", max_length=40) >= request.config.getoption("--differential")


@pytest.mark.gpu
def test_random_calls_are_right_on_a_gpu(request: pytest.FixtureRequest):
    """No route that may win any random call on a GPU differs from attention by its definition."""
    assert sweep(request.config, "cuda", max_length=200) >= request.config.getoption("--differential")


@pytest.mark.parametrize("seed", range(3))
def test_the_clock_lets_different_routes_win(seed: int):
    """The sweep reaches more than stock: over a few seeds, several routes win."""
    winners = set()
    for number in random.Random(seed).sample(range(1 << 16), 12):
        smartattn.cache.clear()
        forget_everything()
        selector.clock = lambda device, number=number: LotteryClock(number)
        call = [torch.randn(2, 2, 6, 8) for _ in range(3)]
        smartattn.scaled_dot_product_attention(*call)
        winners.add(smartattn.explain(*call).route)
    assert len(winners) >= 3


def test_the_oracle_sees_a_small_fault():
    """A thousandth more in one element is found, so the bounds are not empty."""
    call = Call(*(torch.randn(2, 2, 6, 8, requires_grad=True) for _ in range(3)))
    output, _, _ = oracle.attend(call)
    right = oracle.answer(call, torch.ones_like(output))
    gradients = oracle.differentiate(call, output, torch.ones_like(output))
    oracle.check(call, output, right, gradients)
    wrong = output.detach().clone()
    wrong[1, 1, 5, 7] += 1e-3
    with pytest.raises(AssertionError, match="output is off by"):
        oracle.check(call, wrong, right)
    with pytest.raises(AssertionError, match="gradient of key is off by"):
        oracle.check(call, output, right, {"key": gradients["key"] + 1e-2})
