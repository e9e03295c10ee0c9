"""Reported faults of kind A about values and layouts: NaN, very negative scores, overflow, strides, alignment."""

from __future__ import annotations

import pytest
import torch

import smartattn
from smartattn.signature import Call
from tests import oracle
from tests.backends.contract import LAYOUTS, laid_out
from tests.cases.common import answers, call_of, everywhere_right, lower

HALVES = (torch.bfloat16, torch.float16)


def negative(L: int, S: int, dtype: torch.dtype, *, logit: float = -120.0, **rest: object) -> Call:
    """Return a training call whose scores are all near ``logit``."""
    call = call_of(1, 2, L, 64, S=S, dtype=dtype, grads="", **rest)
    query, key = (tensor.float() * 0.1 for tensor in call[:2])
    query[..., 0], key[..., 0] = 1.0, logit * 8.0
    made = [tensor.to(dtype).requires_grad_() for tensor in (query, key, call.value)]
    return call._replace(query=made[0], key=made[1], value=made[2])


@pytest.mark.parametrize("S", [64, 192])
@pytest.mark.parametrize("mask", ["none", "lower", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_very_negative_scores_keep_gradients(S: int, mask: str, dtype: torch.dtype):
    """R01: gradients are finite and right when every row's log-sum-exp is far below -88, with and without a mask."""
    masks = {"none": None, "lower": lower(S, S)[None, None], "all": torch.ones(1, 1, S, S, dtype=torch.bool)}
    everywhere_right(negative(S, S, dtype, attn_mask=masks[mask]))


@pytest.mark.parametrize("S", [128, 97, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_very_negative_scores_at_one_query(S: int, dtype: torch.dtype):
    """R23: the same with a single query."""
    everywhere_right(negative(1, S, dtype, logit=-122.0))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("grads", ["", "qkv", "qkvm"])
def test_a_float32_mask_beside_halves(dtype: torch.dtype, grads: str):
    """R02, R53: a float32 additive mask of -inf above the diagonal means what it says beside half inputs."""
    mask = torch.nn.Transformer.generate_square_subsequent_mask(32)
    assert mask.dtype == torch.float32
    names = everywhere_right(call_of(2, 4, 32, 64, dtype=dtype, grads=grads, attn_mask=mask))
    assert "math" in names


def test_a_float32_mask_beside_float64():
    """R02: PyTorch's CPU operator reads a float32 mask as float64; here the answer is right on every way."""
    everywhere_right(call_of(2, 4, 33, 16, dtype=torch.float64, attn_mask=torch.randn(33, 33)))


@pytest.mark.parametrize("mask_dtype", [torch.float64, torch.int64, torch.bfloat16, torch.complex64])
def test_other_mask_dtypes_are_refused_by_name(mask_dtype: torch.dtype):
    """R53: what PyTorch refuses is refused with the dtype that was given and those that fit."""
    mask = torch.zeros(8, 8, dtype=mask_dtype)
    with pytest.raises(RuntimeError, match=f"attn_mask has dtype {mask_dtype}; it must be torch.bool or torch.float32"):
        smartattn.scaled_dot_product_attention(*call_of(2, 2, 8, 16, attn_mask=mask))


@pytest.mark.parametrize("S", [33, 65, 97, 129, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_broadcast_over_heads(S: int, dtype: torch.dtype):
    """R05: keys and values of one head as stride-0 views, with rows that see no key, at S of 1 modulo 32."""
    call = call_of(1, 4, 17, 64, S=S, dtype=dtype, attn_mask=torch.rand(1, 1, 17, S) < 0.5)
    call.attn_mask[..., :3, :] = False
    one = call._replace(key=call.key[:, :1].expand(1, 4, S, 64), value=call.value[:, :1].expand(1, 4, S, 64))
    assert one.key.stride(1) == 0
    everywhere_right(one)
    everywhere_right(one._replace(key=one.key.contiguous(), value=one.value.contiguous()))


@pytest.mark.parametrize("which", ["query", "key", "value", "all", "one"])
def test_nan_inputs_are_not_judged_and_not_hidden_by_math(which: str):
    """R11: NaN in NaN out holds for Math; which backend hides it is the backend's; no tuning draws conclusions from it."""
    call = call_of(2, 4, 16, 8)
    tensors = {name: getattr(call, name) for name in ("query", "key", "value")}
    for name, tensor in tensors.items():
        if which in (name, "all"):
            tensor.fill_(float("nan"))
    if which == "one":
        call.query[0, 0, 3, 2] = float("nan")
    output = smartattn.scaled_dot_product_attention(*call, backend="math")
    stock = torch.nn.functional.scaled_dot_product_attention(*call[:3])
    if which == "one":
        assert output[0, 0, 3].isnan().all()
        assert int(output.isnan().sum()) == 8
    else:
        assert output.isnan().all()
    chosen = smartattn.scaled_dot_product_attention(*call)
    explanation = smartattn.explain(*call)
    assert {outcome.is_ for outcome in explanation.outcomes.values()} <= {"timed", "rejected"}
    if explanation.route == "stock":
        assert torch.equal(chosen.isnan(), stock.isnan())
    # What was tuned on NaN serves good values as well.
    everywhere_right(
        call._replace(query=torch.randn(2, 4, 16, 8), key=torch.randn(2, 4, 16, 8), value=torch.randn(2, 4, 16, 8))
    )


@pytest.mark.parametrize("S", [512, 513, 600])
def test_large_values_do_not_overflow(S: int):
    """R25: float16 scores beyond 65504 give finite results on every way."""
    call = call_of(1, 2, 8, 16, S=S, dtype=torch.float16)
    large = call._replace(query=call.query * 200, key=call.key * 200)
    for name, output in answers(large):
        assert torch.isfinite(output).all(), name
        assert float(output.abs().max()) <= float(call.value.abs().max()) * 1.01, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("L", [49, 8])
def test_gradients_do_not_depend_on_the_layout_of_grad_out(dtype: torch.dtype, L: int):
    """R16, R46: head-first, sequence-first, permuted and expanded gradients of the output give the same gradients."""
    call = call_of(2, 2, L, 32, dtype=dtype, grads="qkv")
    values = torch.randn(2, 2, L, 32).to(dtype)
    layouts = (
        values,
        values.transpose(1, 2).contiguous().transpose(1, 2),
        values.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.ones((), dtype=dtype).expand(2, 2, L, 32),
    )
    everywhere_right(call, grad_outs=layouts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 7, 8), (3, 5, 33, 64), (1, 1, 1, 16), (2, 5, 4)])
def test_any_layout_of_the_inputs(layout: str, shape: tuple[int, ...]):
    """R17, R20, R104: views, gaps, packed projections, steps and late starts give what dense copies give."""
    made = [laid_out((*shape[:-3], *shape[-3:]), layout, torch.float32) for _ in range(3)]
    assert everywhere_right(Call(*made))
    everywhere_right(Call(*made, is_causal=True))


def test_a_packed_projection_split_over_heads():
    """R20: query and one key head split out of one packed tensor are read where they lie."""
    packed = torch.randn(64, 1, 18, 64, dtype=torch.float16)
    query, key, value = (part.permute(1, 2, 0, 3) for part in packed.split([16, 1, 1], dim=2))
    everywhere_right(Call(query, key, value, is_causal=True, enable_gqa=True))


@pytest.mark.parametrize("E", [72, 80, 96, 100, 104, 112, 30, 7, 1])
def test_odd_head_dims_have_right_gradients(E: int):
    """R22, R49: head dims that are no multiple of 32, or of 8, are right forward and backward."""
    everywhere_right(call_of(1, 2, 33, E, dtype=torch.bfloat16, grads="qkv"))


def test_views_that_start_between():
    """R34: views that start 4, 8 and 12 bytes into a buffer are right."""
    memory = torch.randn(3 * 6 * 4 * 16 * 8 + 8)
    size = 6 * 4 * 16 * 8
    made = [memory[i * size + i + 1 : (i + 1) * size + i + 1].view(6, 4, 16, 8) for i in range(3)]
    assert [tensor.data_ptr() % 16 for tensor in made] != [0, 0, 0]
    everywhere_right(Call(*made))


@pytest.mark.parametrize("scale", [0.0, -0.5, -1.0, 1e-6, 3.0, 0.125])
@pytest.mark.parametrize("rest", [{}, {"is_causal": True}, {"attn_mask": torch.rand(6, 9) < 0.6}])
@pytest.mark.parametrize("grads", ["", "qkv"])
def test_scales_of_any_sign(scale: float, rest: dict[str, object], grads: str):
    """Contract: scale 0 weighs all visible keys alike, a negative one turns the order; triangle and mask still hold."""
    call = call_of(2, 2, 6, 8, S=9, grads=grads, scale=scale, **rest)
    everywhere_right(call)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_without_a_value_are_pytorchs_to_answer(scale: float):
    """A scale that is no number has no signature; PyTorch's answer is handed on."""
    call = call_of(2, 2, 6, 8, scale=scale)
    found = smartattn.scaled_dot_product_attention(*call)
    expected = torch.nn.functional.scaled_dot_product_attention(*call[:3], scale=scale)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert smartattn.stats().passthroughs == 1


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("form", ["plain", "causal", "mask"])
def test_dropout_keeps_the_mean_and_one_mask(p: float, form: str):
    """Contract: dropout drops the wanted share, scales the rest, and drops the same forward and backward."""
    S = 200
    rest = {"plain": {}, "causal": {"is_causal": True}, "mask": {"attn_mask": torch.ones(S, S, dtype=torch.bool)}}[form]
    call = call_of(1, 2, S, 8, dropout_p=p, **rest)
    query = torch.zeros_like(call.query)
    value = torch.eye(S).expand(1, 2, S, S).clone().requires_grad_()
    for backend in ("stock", "math", "eager", None):
        output = smartattn.scaled_dot_product_attention(query, query, value, *call[3:], backend=backend)
        weights = output.detach()[..., -1, :]
        assert abs(float((weights == 0).float().mean()) - p) < 6 * (p * (1 - p) / (2 * S)) ** 0.5
        torch.testing.assert_close(weights[weights != 0], torch.full_like(weights[weights != 0], 1 / S / (1 - p)))
        grad_out = torch.zeros_like(output)
        grad_out[..., -1, 0] = 1.0
        (gradient,) = torch.autograd.grad(output, value, grad_out)
        torch.testing.assert_close(gradient[..., 0], weights)


def test_the_answer_stays_the_same_when_it_is_chosen_again():
    """R109: the first run (tuned), the second (bound) and one from disk agree."""
    call = call_of(2, 2, 33, 16, grads="qkv", attn_mask=torch.randn(33, 33))
    right = oracle.answer(call, torch.ones(2, 2, 33, 16))
    for _ in range(2):
        for _ in range(3):
            output = smartattn.scaled_dot_product_attention(*call)
            oracle.check(call, output, right, oracle.differentiate(call, output, torch.ones_like(output)))
        smartattn.configure()
        smartattn.selector.selector.memory.clear()
    assert smartattn.stats().tunings == 1
    assert smartattn.stats().disk_hits == 1
