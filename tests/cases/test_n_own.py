"""Kind N: seen while the reported faults were tried."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import smartattn
from smartattn.signature import Call
from tests.cases.common import call_of, everywhere_right

stock = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("shape", [(8,), (1,), ()])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_fewer_than_two_axes_end_as_in_pytorch_and_say_why(shape: tuple[int, ...], dtype: torch.dtype):
    """N1: a mask of one or no axis raises PyTorch's kind of error, with the axes that a mask needs."""
    call = call_of(2, 2, 8, 16, attn_mask=torch.ones(shape, dtype=dtype))
    with pytest.raises((IndexError, RuntimeError)) as theirs:
        stock(*call[:4])
    with pytest.raises(type(theirs.value), match=r"needs at least the dimensions \(L, S\) = \(8, 8\)"):
        smartattn.scaled_dot_product_attention(*call)
    assert smartattn.stats().tunings == 0


def test_the_safe_default_never_leans_on_a_priority_list():
    """N3: ``backend="math"`` runs Math itself, not a list of priorities that PyTorch's CPU dispatch ignores."""
    call = call_of(2, 2, 8, 16)
    query = call.query.clone().fill_(float("nan"))
    assert smartattn.scaled_dot_product_attention(query, call.key, call.value, backend="math").isnan().all()


@pytest.mark.parametrize(("H", "Hv"), [(2, 4), (4, 2), (1, 4)])
def test_unequal_key_and_value_heads_are_pytorchs_to_answer(H: int, Hv: int):
    """N4: key and value heads that differ are never measured: PyTorch's answer or error stands."""
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, H, 6, 8), torch.randn(1, Hv, 6, 8)
    try:
        expected = stock(query, key, value, enable_gqa=True)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            smartattn.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    else:
        found = smartattn.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        torch.testing.assert_close(found, expected)
    assert smartattn.stats().tunings == 0


@pytest.mark.parametrize("backend", [None, "math"])
def test_a_head_dim_of_zero_gives_the_mean_of_values(backend: str | None):
    """N7: without features every key counts alike, and nothing is tuned."""
    value = torch.randn(2, 2, 8, 16)
    call = Call(torch.empty(2, 2, 5, 0), torch.empty(2, 2, 8, 0), value)
    found = smartattn.scaled_dot_product_attention(*call, backend=backend)
    torch.testing.assert_close(found, value.mean(-2, keepdim=True).expand(2, 2, 5, 16))
    assert smartattn.stats().tunings == 0


def test_inputs_from_inference_mode_and_out_of_it_do_not_mix():
    """N5: choices bound in inference mode serve ordinary calls with ordinary tensors, and the reverse."""
    call = call_of(2, 2, 8, 16)
    with torch.inference_mode():
        first = [smartattn.scaled_dot_product_attention(*call) for _ in range(3)]
    assert all(output.is_inference() for output in first)
    for _ in range(3):
        assert not smartattn.scaled_dot_product_attention(*call).is_inference()
    everywhere_right(call)


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min], ids=["-1e9", "finfo.min"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["plain", "causal"])
@pytest.mark.parametrize("batch", [(1,), (2, 1)], ids=["4-D", "5-D"])
def test_rows_of_nothing_but_large_negative_values_keep_gradients(batch, is_causal, fill):
    """A row that an additive mask fills with one huge negative value attends evenly, and so do its gradients.

    PyTorch's fused operator on CPU loses the logarithm of the number of keys there, forward right, backward not.
    """
    query, key, value = (torch.randn(*batch, 2, 8, 8) for _ in "qkv")
    mask = torch.zeros(8, 8)
    mask[2] = fill
    weights = torch.arange(8.0)

    def gradients(attend, dtype):
        tensors = [t.to(dtype).requires_grad_() for t in (query, key, value)]
        return torch.autograd.grad((attend(*tensors) * weights).sum(), tensors)

    def right(query, key, value):
        whole = mask.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), float("-inf")) if is_causal else mask
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, whole)

    def ours(query, key, value):
        return smartattn.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)

    for found, expected in zip(gradients(ours, torch.float32), gradients(right, torch.float32), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
