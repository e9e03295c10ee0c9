"""The reference is attention, whole or in parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smartattn import reference
from smartattn.parts import choose_part, restrict, spread, take
from smartattn.probes import LETTERS, leaves
from smartattn.reference import attention, flat_mask, reference_dtype, solve
from smartattn.signature import Call
from smartattn.signature_text import parse_signature
from tests.backends.contract import Problem, problems

QUICK = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def _math(call: Call) -> torch.Tensor:
    """Compute by PyTorch's own operators in float64, with everything folded into one mask."""
    query, key, value = call[:3]
    group = query.size(-3) // key.size(-3)
    key, value = (t.repeat_interleave(group, -3) for t in (key, value))
    shape = (*query.shape[:-1], key.size(-2))
    mask = torch.zeros(shape, dtype=torch.float64)
    if call.attn_mask is not None:
        given = call.attn_mask
        mask = mask.masked_fill(~given, -torch.inf) if given.dtype == torch.bool else mask + given
    if call.is_causal:
        mask = mask.masked_fill(~torch.ones(shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return torch._scaled_dot_product_attention_math(query, key, value, mask, 0.0, False, None, scale=call.scale)[0]


def _in_float64(call: Call, grads: str) -> Call:
    mask = call.attn_mask if call.attn_mask is None or call.attn_mask.dtype == torch.bool else call.attn_mask.double()
    query, key, value = (t.detach().double() for t in call[:3])
    return leaves(call._replace(query=query, key=key, value=value, attn_mask=mask), grads)


@QUICK
@given(problem=problems(), block=st.sampled_from([1, 50, 1 << 22]))
def test_output_and_gradients_equal_autograd(problem: Problem, block: int) -> None:
    """In blocks of any size, outputs and gradients are those of Math with autograd in float64."""
    has_float_mask = "additive" in problem.signature.mask
    grads = "qkvm" if has_float_mask else "qkv"
    call = _in_float64(problem.call, grads)
    output = _math(call)
    grad_out = torch.randn_like(output)
    wanted = [t for letter, t in zip("qkvm", call.tensors, strict=False) if letter in grads]
    expected = torch.autograd.grad(output, wanted, grad_out)
    old, reference.BLOCK_SCORES = reference.BLOCK_SCORES, block
    try:
        found = solve(call, torch.float64, grad_out, grads)
    finally:
        reference.BLOCK_SCORES = old
    torch.testing.assert_close(found.tensors["output"], output.detach(), atol=1e-9, rtol=1e-9)
    for letter, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(found.tensors[LETTERS[letter]], right, atol=1e-8, rtol=1e-8)


@QUICK
@given(problem=problems(), limit=st.sampled_from([10, 100, 1000]))
def test_a_part_is_the_same_part_of_the_whole(problem: Problem, limit: int) -> None:
    """Output and gradients of a part equal the part of the whole, for a gradient that is zero elsewhere."""
    has_float_mask = "additive" in problem.signature.mask
    grads = "qkvm" if has_float_mask else "qkv"
    call = _in_float64(problem.call, "")
    part = choose_part(dataclasses.replace(problem.signature, grads=grads), limit)
    if part is None:
        return
    small = restrict(call, part)
    values = torch.randn(*small.query.shape[:-1], small.value.size(-1), dtype=torch.float64)
    found = solve(small, torch.float64, values, grads)
    shape = torch.Size((*call.query.shape[:-1], call.value.size(-1)))
    whole = solve(call, torch.float64, spread(values, part, shape), grads)
    for name, right in whole.tensors.items():
        expected = flat_mask(right, problem.signature.batch) if name == "dmask" else right
        torch.testing.assert_close(found.tensors[name], take(expected, part, name), atol=1e-9, rtol=1e-9)


def test_rows_that_see_no_key_are_zero() -> None:
    """A hidden row gives 0 and zero gradients, and is named as empty."""
    call = Call(*(torch.randn(1, 1, 3, 4) for _ in range(3)), torch.tensor([[True] * 3, [False] * 3, [True] * 3]))
    found = solve(call, torch.float64, torch.ones(1, 1, 3, 4), "qkv")
    assert found.is_empty.flatten().tolist() == [False, True, False]
    assert (found.tensors["output"][0, 0, 1] == 0).all()
    assert (found.tensors["dQ"][0, 0, 1] == 0).all()


def test_triangle_is_top_left_and_applies_with_a_mask() -> None:
    """Query i sees keys 0 to i, and of those only what the mask shows."""
    value = torch.eye(4).reshape(1, 1, 4, 4)
    call = Call(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 4, 4), value, torch.tensor([[True, False, True, True]]))
    output = attention(call._replace(is_causal=True), torch.float64)
    assert output[0, 0].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    assert attention(call._replace(is_causal=True, attn_mask=None), torch.float64)[0, 0, 1].tolist() == [0.5, 0.5, 0, 0]


def test_nan_is_not_hidden() -> None:
    """NaN in a query stays NaN in its row and in no other."""
    call = Call(*(torch.randn(1, 1, 3, 4) for _ in range(3)))
    call.query[0, 0, 1, 0] = torch.nan
    output = attention(call, torch.float64)
    assert output.isnan().all(-1).flatten().tolist() == [False, True, False]


def test_vague_rows_are_those_hidden_by_large_finite_values() -> None:
    """finfo.min is not -inf: such a row is not empty, but only its finiteness can be asked for."""
    mask = torch.zeros(3, 3)
    mask[1] = torch.finfo(torch.float32).min
    found = solve(Call(*(torch.randn(1, 1, 3, 4) for _ in range(3)), mask), torch.float64)
    assert found.is_vague.flatten().tolist() == [False, True, False]
    assert not found.is_empty.any()
    assert not solve(Call(*(1000 * torch.randn(1, 1, 3, 4) for _ in range(3))), torch.float64).is_vague.any()


def test_parts_hold_the_ends() -> None:
    """A part of a large problem holds the first and the last batch, head and row, and about as many scores as asked."""
    text = (
        "sdpa infer cuda bfloat16 N16 Hq32 H8 L65537 S65537 E64 Ev64 layout=bhsd mask=none scale=positive gqa=enabled"
    )
    part = choose_part(parse_signature(text), 1 << 26)
    assert part is not None
    assert {0, 15} <= set(part.batches)
    assert {0, 31} <= set(part.query_heads)
    assert {0, 1, 65535, 65536} <= set(part.rows)
    assert len(part.batches) * len(part.query_heads) * len(part.rows) * 65537 <= 1 << 26
    assert choose_part(parse_signature(text), 1 << 50) is None


@pytest.mark.parametrize(
    ("device_type", "dtype", "is_full", "expected"),
    [
        ("cpu", torch.bfloat16, True, torch.float64),
        ("cuda", torch.bfloat16, True, torch.float32),
        ("cuda", torch.bfloat16, False, torch.float64),
        ("cuda", torch.float32, True, torch.float64),
        ("cuda", torch.float64, True, torch.float64),
    ],
)
def test_reference_dtype(device_type: str, dtype: torch.dtype, is_full: bool, expected: torch.dtype) -> None:
    """The reference is wider than what it judges, also where float32 products are not computed in float32."""
    assert reference_dtype(device_type, dtype, is_full_precision=is_full) == expected
