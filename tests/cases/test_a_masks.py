"""Reported faults of kind A about masks: hidden rows, large negative values, triangles, broadcasting."""

from __future__ import annotations

import itertools

import pytest
import torch

import smartattn
from smartattn.signature import Call
from tests import oracle
from tests.cases.common import answers, call_of, everywhere_right, hiding, lower

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "mask_dtype"),
    [(torch.float32, "bool"), (torch.float32, "own"), (torch.bfloat16, "bool"), (torch.bfloat16, "float32")],
)
def test_blocks_of_packed_sequences_match_the_sequences(dtype: torch.dtype, mask_dtype: str):
    """R07: one masked call over packed sequences equals a call per sequence; rows of no sequence are 0."""
    visible = torch.zeros(600, 600, dtype=torch.bool)
    blocks = [(0, 128), (128, 256), (256, 384), (543, 600)]
    for start, stop in blocks:
        visible[start:stop, start:stop] = True
    mask = visible if mask_dtype == "bool" else hiding(visible, dtype=dtype if mask_dtype == "own" else torch.float32)
    call = call_of(1, 1, 600, 80, dtype=dtype, attn_mask=mask)
    right = oracle.answer(call)
    for name, output in answers(call):
        oracle.check(call, output, right)
        assert not output[:, :, 384:543].any(), name
        for start, stop in blocks:
            part = call._replace(**{n: getattr(call, n)[:, :, start:stop] for n in ("query", "key", "value")})
            oracle.check(part, output[:, :, start:stop], oracle.answer(part._replace(attn_mask=None)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", ["bool", "own", "float32", "with_triangle", "by_key", "every_row"])
@pytest.mark.parametrize("H", [2, 1])
def test_a_row_that_sees_no_key_is_zero(dtype: torch.dtype, form: str, H: int):
    """R08: a row without a visible key is 0 and all gradients are finite, its own 0, in every form of mask."""
    visible = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    visible[0, :, 3] = False
    rest = {}
    if form == "with_triangle":
        # Rows 0 to 4 are hidden by triangle and mask together, not by either alone.
        visible[1, :, :, :5] = False
        rest = {"is_causal": True}
    if form == "by_key":
        visible = torch.ones(2, 1, 1, 8, dtype=torch.bool)
        visible[0] = False
    if form == "every_row":
        visible[:] = False
    mask = visible
    if form in ("own", "float32"):
        mask = hiding(visible, dtype=dtype if form == "own" else torch.float32)
    call = call_of(2, 2, 8, 16, H=H, enable_gqa=H == 1, dtype=dtype, grads="qkv", attn_mask=mask, **rest)
    assert oracle.answer(call).is_empty.any()
    assert len(everywhere_right(call)) > 3


@pytest.mark.parametrize("S", [8, 33, 512, 600])
def test_hidden_by_the_smallest_number_is_not_hidden_by_infinity(S: int):
    """R10: a row hidden everywhere by finfo.min is an average of all values, not 0; with other rows as by -inf."""
    smallest = torch.finfo(torch.float32).min
    mask = torch.zeros(2, 1, 8, S)
    mask[0, 0, 3] = smallest
    mask[1, 0, :, S // 2 :] = smallest
    call = call_of(2, 2, 8, 16, S=S, attn_mask=mask)
    for name, output in answers(call):
        assert torch.isfinite(output).all(), name
        torch.testing.assert_close(output[0, :, 3], call.value[0].mean(-2), atol=1e-5, rtol=1e-4, msg=name)
        hidden = oracle.answer(call._replace(attn_mask=mask.masked_fill(mask == smallest, float("-inf"))))
        torch.testing.assert_close(output[1].double(), hidden.output[1], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("columns", [1, 128, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_of_the_smallest_number_give_finite_gradients(columns: int, dtype: torch.dtype):
    """R10: whole key tiles hidden by finfo.min leave output and gradients finite and right."""
    mask = torch.zeros(2, 1, 64, 512 + 24, dtype=dtype)
    mask[..., :columns] = torch.finfo(dtype).min
    everywhere_right(call_of(2, 2, 64, 16, S=512 + 24, dtype=dtype, grads="qkv", attn_mask=mask))


@pytest.mark.parametrize(("length", "window"), [(600, 10), (640, 10), (700, 513)])
def test_sliding_windows_are_finite(length: int, window: int):
    """R13: late rows of a causal window are right beyond one kernel tile, as bool and as additive mask."""
    visible = lower(length, length) & ~lower(length, length).tril(-window)
    for mask in (visible, hiding(visible)):
        everywhere_right(call_of(1, 1, length, 2, attn_mask=mask))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("kept", [1, 6, 32])
def test_left_padding_stays_finite_over_two_layers(dtype: torch.dtype, kept: int):
    """R14: rows of left padding are 0, so nothing spreads from them in the next layer."""
    L = 33
    visible = lower(L, L).expand(2, 1, L, L).clone()
    visible[1, ..., : L - kept] = False
    attention = smartattn.SmartAttention()
    call = call_of(2, 4, L, 32, dtype=dtype, attn_mask=visible)
    everywhere_right(call)
    hidden = call.query
    for _ in range(2):
        hidden = attention(hidden, hidden, hidden, visible)
        assert torch.isfinite(hidden).all()
        assert not hidden[1, :, : L - kept].any()


@pytest.mark.parametrize(("L", "S"), [(8, 8), (4, 9), (9, 4), (1, 8)])
@pytest.mark.parametrize("form", ["bool", "own", "float32", "rows", "columns"])
@pytest.mark.parametrize("grads", ["", "qkv"])
def test_mask_and_triangle_both_apply(L: int, S: int, form: str, grads: str):
    """R27: mask and is_causal together mean both, on every route, Math included."""
    visible = torch.rand(1, 1, L, S) < 0.7
    visible[..., S // 2] = False
    if form == "rows":
        visible = visible[..., :1]
    if form == "columns":
        visible = visible[..., :1, :]
    mask = hiding(visible) if form in ("own", "float32") else visible
    dtype = torch.bfloat16 if form == "float32" else torch.float32
    call = call_of(2, 2, L, 16, S=S, dtype=dtype, grads=grads, attn_mask=mask, is_causal=True)
    assert {"public", "math", "eager"} <= set(everywhere_right(call))


@pytest.mark.parametrize(("L", "S"), [(4, 8), (8, 4), (1, 8), (1, 1), (33, 7), (130, 600)])
@pytest.mark.parametrize("grads", ["", "qkv"])
@pytest.mark.parametrize("H", [4, 2])
def test_the_triangle_is_top_left(L: int, S: int, grads: str, H: int):
    """R28: with is_causal query row i sees keys 0 to i, whatever the lengths are."""
    call = call_of(2, 4, L, 16, S=S, H=H, enable_gqa=H != 4, grads=grads, is_causal=True)
    everywhere_right(call)
    first = smartattn.scaled_dot_product_attention(*call)[..., 0, :]
    torch.testing.assert_close(first, call.value[..., 0, :].repeat_interleave(4 // H, 1))


@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 8, 8), (2, 1, 8), (2, 8, 1)])
def test_a_mask_of_three_axes_is_per_head(shape: tuple[int, ...]):
    """R29: a mask of three axes is broadcast as (1, heads, L, S), as PyTorch documents, also where N equals Hq."""
    mask = torch.randn(shape)
    call = call_of(2, 2, 8, 16, attn_mask=mask)
    names = everywhere_right(call)
    assert "math" in names
    per_head = smartattn.scaled_dot_product_attention(*call._replace(attn_mask=mask.expand(2, 8, 8)[None]))
    torch.testing.assert_close(smartattn.scaled_dot_product_attention(*call), per_head)


def test_a_mask_of_three_axes_that_fits_no_heads_is_refused():
    """R29: a (N, L, S) mask that cannot be meant per head raises PyTorch's error, with what would fit."""
    with pytest.raises(RuntimeError, match=r"must broadcast to \(3, 2, 8, 8\)"):
        smartattn.scaled_dot_product_attention(*call_of(3, 2, 8, 16, attn_mask=torch.randn(3, 8, 8)))


BROADCASTS = list(itertools.product((1, 2), (1, 4), (1, 5), (1, 7)))


@pytest.mark.parametrize("shape", BROADCASTS, ids=str)
def test_masks_broadcast_as_math_broadcasts_them(shape: tuple[int, ...]):
    """Contract: an axis of size 1 broadcasts, each alone and all together, for values and for the mask's gradient."""
    call = call_of(2, 4, 5, 8, S=7, H=2, enable_gqa=True, grads="qkvm", attn_mask=torch.randn(shape))
    everywhere_right(call)
    everywhere_right(call._replace(attn_mask=torch.rand(shape) < 0.6))


@pytest.mark.parametrize("grads", ["m", "qm", "qkvm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_alone_wants_a_gradient_gets_it(grads: str, dtype: torch.dtype):
    """R26, N6: the gradient of an additive mask is right, also when nothing else wants one."""
    call = call_of(1, 2, 64, 16, dtype=dtype, grads=grads, attn_mask=torch.randn(1, 2, 64, 64, dtype=dtype))
    names = everywhere_right(call)
    assert "flash" not in names
    assert call.attn_mask.grad is None


def test_another_mask_of_the_same_form_is_read_again():
    """Contract: what a mask means is never remembered for other values in the same form, or in the same memory."""
    visible = lower(16, 16)
    call = call_of(2, 2, 16, 8, attn_mask=visible)
    for change in (None, "window", "padding", "all", "random", "one", None):
        visible.copy_(lower(16, 16))
        if change == "window":
            visible.copy_(lower(16, 16) & ~lower(16, 16).tril(-3))
        if change == "padding":
            visible.fill_(True)[:, 9:] = False
        if change == "all":
            visible.fill_(True)
        if change == "random":
            visible.copy_(torch.rand(16, 16) < 0.5)
        if change == "one":
            visible[15, 15] = False
        everywhere_right(call)
        everywhere_right(Call(*call[:3], visible.clone()))
