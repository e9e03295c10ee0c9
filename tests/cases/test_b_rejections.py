"""Reported faults of kind B: what was refused or crashed works, or is refused with what is wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import smartattn
from smartattn.record import Rejected
from smartattn.selector import selector
from smartattn.signature import Call
from tests import oracle
from tests.cases.common import call_of, everywhere_right

stock = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("shape", [(65536, 1, 2, 4), (1, 65536, 2, 4)])
def test_more_batches_or_heads_than_a_launch_grid(shape: tuple[int, ...]):
    """R38, R39: 65536 batches or heads are right."""
    call = call_of(*shape)
    smartattn.configure(mode="frozen")
    found = smartattn.scaled_dot_product_attention(*call)
    torch.testing.assert_close(found, stock(*call[:3]))


@pytest.mark.parametrize(
    ("N", "H", "L", "S"), [(0, 2, 4, 4), (2, 0, 4, 4), (2, 2, 0, 4), (2, 2, 4, 0), (2, 2, 0, 0), (0, 0, 0, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grads", ["", "qkv"])
def test_empty_sizes_are_answered_and_never_tuned(N: int, H: int, L: int, S: int, dtype: torch.dtype, grads: str):
    """R40: empty batches, heads and lengths give PyTorch's answer (no keys: zeros), with gradients, and cost no tuning."""
    call = call_of(N, H, L, 8, S=0, dtype=dtype, grads=grads)
    key, value = (torch.randn(N, H, S, 8).to(dtype).requires_grad_(bool(grads)) for _ in range(2))
    call = call._replace(key=key, value=value)
    output = smartattn.scaled_dot_product_attention(*call)
    expected = stock(*call[:3])
    assert (output.shape, output.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(output, expected)
    if S == 0:
        assert not output.any()
    if grads:
        output.sum().backward()
        assert call.query.grad.shape == call.query.shape
    assert smartattn.stats().tunings == 0
    assert smartattn.cache.records() == ()


def test_all_sizes_of_zero_do_not_end_the_process():
    """R41: tensors without any element give an empty result."""
    made = (torch.empty(*size, dtype=torch.bfloat16) for size in ((0, 0, 2, 0), (0, 0, 13, 0), (0, 0, 13, 0)))
    assert smartattn.scaled_dot_product_attention(*made).shape == (0, 0, 2, 0)


@pytest.mark.parametrize("length", [0, 4, 12, 14])
def test_lengths_that_do_not_fit_are_named_before_anything_runs(length: int):
    """R41: key and value of unequal length raise; PyTorch's CPU operator would read past the end of value."""
    made = (torch.randn(*size) for size in ((2, 2, 4, 8), (2, 2, 13, 8), (2, 2, length, 8)))
    with pytest.raises(RuntimeError, match=rf"key lengths differ.*key \(2, 2, 13, 8\).*value \(2, 2, {length}, 8\)"):
        smartattn.scaled_dot_product_attention(*made)


@pytest.mark.parametrize("shape", [(8, 16, 43, 43), (2, 2, 37, 498), (2, 1, 1, 700)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mask_rows_of_any_length(shape: tuple[int, ...], dtype: torch.dtype):
    """R47: masks whose rows start at odd places are right, dense and as a slice of a wider one."""
    N, H, L, S = shape
    mask = torch.randn(N, 1, L, S).to(dtype)
    call = call_of(N, H, L, 16, S=S, dtype=dtype, attn_mask=mask)
    everywhere_right(call)
    wide = torch.randn(N, 1, L, S + 5).to(dtype)
    everywhere_right(call._replace(attn_mask=wide[..., 1 : S + 1]))


@pytest.mark.parametrize(("E", "Ev"), [(48, 32), (192, 128), (16, 48), (8, 1)])
@pytest.mark.parametrize("grads", ["", "qkv"])
def test_value_dims_that_differ(E: int, Ev: int, grads: str):
    """R50: value head dims of their own are right on every way that takes them, and some way does."""
    names = everywhere_right(call_of(1, 4, 16, E, Ev=Ev, dtype=torch.bfloat16, grads=grads))
    assert "flash" not in names
    assert {"stock", "math"} <= set(names)


def test_a_backend_that_cannot_serve_says_why():
    """R50: a named backend that refuses raises one error with its reason and the way out."""
    with pytest.raises(smartattn.RouteUnavailableError, match=r"(?s)flash: needs E equal to Ev.*Leave backend unset"):
        smartattn.scaled_dot_product_attention(*call_of(1, 4, 16, 48, Ev=32), backend="flash")


def test_a_named_backend_that_was_too_slow_to_time_still_serves():
    """R50: what is eligible and not wrong serves when it is asked for by name, although its record has no time for it."""
    call = call_of(2, 4, 6, 8, H=2, enable_gqa=True)
    smartattn.scaled_dot_product_attention(*call)
    (entry,) = smartattn.cache.records()
    rejected = Rejected(("a single call is too slow to be worth validating",))
    outcomes = {n: rejected if "flash" in n else o for n, o in entry.record.outcomes.items()}
    selector.keep(entry.environment, dataclasses.replace(entry.record, outcomes=outcomes), smartattn.settings())
    found = smartattn.scaled_dot_product_attention(*call, backend="flash")
    oracle.check(call, found, oracle.answer(call))


@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("grads", ["", "qkv"])
def test_autocast_casts_the_mask_too(cache_enabled: bool, mask_dtype: torch.dtype, grads: str):
    """R52: under autocast float32 inputs and masks run in its dtype; gradients come back in float32."""
    visible = torch.rand(64, 64) < 0.7
    mask = visible if mask_dtype == torch.bool else torch.zeros(64, 64, dtype=mask_dtype).masked_fill(~visible, -1e4)
    call = call_of(2, 4, 64, 16, grads=grads, attn_mask=mask)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
        for _ in range(3):
            output = smartattn.scaled_dot_product_attention(*call)
            assert output.dtype == torch.bfloat16
            torch.testing.assert_close(output, stock(*call[:4]), atol=3e-2, rtol=3e-2)
    if grads:
        output.float().sum().backward()
        assert call.query.grad.dtype == torch.float32
    assert smartattn.stats().tunings == 1


@pytest.mark.parametrize("dtypes", [(0, 0, 1), (0, 1, 0), (1, 0, 0)])
def test_autocast_brings_unequal_dtypes_together(dtypes: tuple[int, ...]):
    """R89: float32 beside bfloat16 inputs, as norms leave them under autocast, run in bfloat16 as PyTorch does."""
    made = [t.to((torch.float32, torch.bfloat16)[i]) for t, i in zip(call_of(2, 2, 8, 16)[:3], dtypes, strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            output = smartattn.scaled_dot_product_attention(*made, torch.zeros(8, 8))
        torch.testing.assert_close(output, stock(*made, torch.zeros(8, 8)), atol=2e-2, rtol=2e-2)
    assert output.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="dtypes differ"):
        smartattn.scaled_dot_product_attention(*made)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_autocast_leaves_and_casts_as_pytorch_does(dtype: torch.dtype):
    """R52: float64 stays what it is under autocast and float16 becomes its dtype, as in PyTorch."""
    call = call_of(2, 2, 8, 16, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        expected = stock(*call[:3])
        for _ in range(3):
            found = smartattn.scaled_dot_product_attention(*call)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


WRONG = {
    "head dims": ((2, 2, 4, 8), (2, 2, 4, 9), (2, 2, 4, 8)),
    "query has 4 heads and key 3": ((2, 4, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8)),
    "at least 2 dimensions": ((8,), (8,), (8,)),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_pytorch_refuses_is_refused_with_what_is_wrong(text: str):
    """Contract: wrong sizes raise PyTorch's kind of error, with the argument, what was given and what is allowed."""
    made = [torch.randn(*size) for size in WRONG[text]]
    with pytest.raises((RuntimeError, IndexError, ValueError)) as theirs:
        stock(*made)
    with pytest.raises(type(theirs.value), match=text) as ours:
        smartattn.scaled_dot_product_attention(*made)
    assert type(ours.value) is type(theirs.value)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_wrong_dropout_is_refused_as_pytorch_refuses_it(p: float):
    """Contract: a dropout_p outside of 0 to 1 ends as in PyTorch, never in a tuning."""
    call = call_of(2, 2, 4, 8, dropout_p=p)
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        stock(*call[:3], dropout_p=p)
    with pytest.raises(type(theirs.value), match="dropout_p is"):
        smartattn.scaled_dot_product_attention(*call)
    assert smartattn.stats().tunings == 0


@pytest.mark.parametrize(
    "shapes", [((1, 2, 4, 8), (3, 2, 5, 8)), ((3, 2, 4, 8), (1, 2, 5, 8)), ((2, 4, 8), (2, 5, 8)), ((4, 8), (5, 8))]
)
def test_batches_that_broadcast_are_pytorchs_to_answer(shapes: tuple[tuple[int, ...], ...]):
    """Contract: what PyTorch accepts works: broadcast batches, and inputs of two and three dimensions."""
    query, key, value = (torch.randn(*shapes[i]) for i in (0, 1, 1))
    expected = stock(query, key, value)
    for _ in range(3):
        torch.testing.assert_close(smartattn.scaled_dot_product_attention(query, key, value), expected)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
def test_other_dtypes_end_as_in_pytorch(dtype: torch.dtype):
    """Contract: complex and integer inputs give PyTorch's answer or its kind of error."""
    made = [torch.ones(1, 1, 2, 4, dtype=dtype)] * 3
    try:
        expected = stock(*made)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            smartattn.scaled_dot_product_attention(*made)
    else:
        torch.testing.assert_close(smartattn.scaled_dot_product_attention(*made), expected)


@pytest.mark.parametrize("grads", ["", "qkv"])
def test_five_and_six_axes(grads: str):
    """R63, R64: inputs of 3, 5 and 6 dimensions, masks over their batch axes included, are right."""
    for batch in ((), (2, 3), (2, 1, 2)):
        call = call_of(*batch, 4, 9, 8, H=2, enable_gqa=True, grads=grads)
        for mask in (None, torch.rand(9, 9) < 0.7, torch.rand(*batch, 1, 9, 9) < 0.7, torch.randn(*batch, 4, 1, 9)):
            everywhere_right(call._replace(attn_mask=mask))


def test_a_single_element():
    """Contract: the smallest call there is gives its value back."""
    call = Call(*(torch.randn(1, 1, 1, 1) for _ in range(3)))
    everywhere_right(call)
    assert torch.equal(smartattn.scaled_dot_product_attention(*call), call.value)
    oracle.check(call, call.value, oracle.answer(call))
