"""Reported faults of ``nn.MultiheadAttention``: smartattn's module gives the right answer in each of these cases."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

import smartattn
from smartattn import SmartMultiheadAttention
from tests.multihead_reference import reference

F, T = False, True


def pair(*args, **kwargs) -> tuple[torch.nn.MultiheadAttention, SmartMultiheadAttention]:
    """Return PyTorch's module and smartattn's with the same weights."""
    stock = torch.nn.MultiheadAttention(*args, **kwargs)
    smart = SmartMultiheadAttention(*args, **kwargs)
    smart.load_state_dict(stock.state_dict(), strict=True)
    return stock, smart


@pytest.mark.parametrize("need_weights", [True, False])
def test_r124_one_masked_query_leaves_gradients_finite(need_weights: bool):
    """A query that padding and band together blind gives no NaN gradient, whichever way weights are computed."""
    module = SmartMultiheadAttention(1, 1, batch_first=True)
    torch.nn.init.ones_(module.in_proj_weight)
    x = torch.randn(2, 4, 1)
    padding = torch.tensor([[F, F, F, F], [F, F, T, T]])
    band = torch.full((4, 4), float("-inf"))
    for i in range(4):
        band[i, max(0, i - 1) : i + 1] = 0.0
    output, weights = module(x, x, x, key_padding_mask=padding, attn_mask=band, need_weights=need_weights)
    output[:, :2].sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.isfinite().all(), name
    assert torch.equal(output[1, 3], module.out_proj.bias), "a blind query attends to nothing"
    if need_weights:
        assert weights[1, 3].tolist() == [0.0] * 4


def test_r125_one_head_fully_masked():
    """Masking a whole head gives the same finite output with and without weights, and weights of 0 for that head."""
    module = SmartMultiheadAttention(3, 3, batch_first=True)
    x = torch.randn(1, 5, 3)
    mask = torch.zeros(3, 5, 5, dtype=torch.bool)
    mask[2] = True
    found, weights = module(x, x, x, attn_mask=mask, average_attn_weights=False)
    expected, _ = module(x, x, x, attn_mask=mask, need_weights=False)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected)
    assert weights[0, 2].abs().max() == 0


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize("given", ["no mask", "causal mask", "other mask"])
def test_r127_is_causal_means_causal(need_weights: bool, has_padding: bool, given: str):
    """``is_causal=True`` applies the triangle in every combination; a mask given beside it applies as well."""
    module = SmartMultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 6, 16)
    triangle = torch.ones(6, 6, dtype=torch.bool).triu(1)
    other = torch.zeros(6, 6, dtype=torch.bool)
    other[:, 0] = True
    mask = {"no mask": None, "causal mask": triangle, "other mask": other}[given]
    padding = torch.tensor([[F] * 6, [F] * 4 + [T] * 2]) if has_padding else None
    found, _ = module(
        x, x, x, attn_mask=mask, key_padding_mask=padding, is_causal=True, need_weights=need_weights
    )  # fmt: skip
    hidden = triangle if mask is None else triangle | mask
    torch.testing.assert_close(found, reference(module, x, x, x, hidden, padding)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("shape", [(8, 8), (4, 8, 8), (2, 2, 8, 8)])
def test_r128_masks_of_each_rank(is_training: bool, shape: tuple[int, ...]):
    """Masks (L, S), (N * heads, L, S) and (N, heads, L, S) give the reference in training and evaluation."""
    module = SmartMultiheadAttention(16, 2, batch_first=True).train(is_training)
    x = torch.randn(2, 8, 16)
    mask = torch.rand(shape) < 0.3
    padding = torch.tensor([[F] * 8, [F] * 6 + [T] * 2])
    with torch.set_grad_enabled(is_training):
        found, _ = module(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)
    expected, _ = reference(module, x, x, x, mask.reshape(-1, 2, 8, 8) if len(shape) > 2 else mask, padding)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_r128_wrong_rank_is_refused():
    """A mask (N, L, S) is refused with the shapes that are allowed."""
    module = SmartMultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(3, 8, 16)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(3, 8, 8\).*\(6, 8, 8\)"):
        module(x, x, x, attn_mask=torch.zeros(3, 8, 8, dtype=torch.bool))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize(("embed_dim", "num_heads"), [(15, 3), (16, 4)])
def test_r130_odd_heads_and_no_bias(has_bias: bool, has_padding: bool, embed_dim: int, num_heads: int):
    """Odd head counts and modules without bias equal PyTorch's in training and evaluation."""
    stock, smart = pair(embed_dim, num_heads, bias=has_bias, batch_first=True)
    x = torch.randn(2, 7, embed_dim)
    padding = torch.tensor([[F] * 7, [F] * 5 + [T] * 2]) if has_padding else None
    for mode in (True, False):
        expected = stock.train(mode)(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        found = smart.train(mode)(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_r131_padding_as_bool_and_as_float():
    """Bool padding equals -inf padding; both dtypes may be mixed with either dtype of ``attn_mask``."""
    module = SmartMultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 6, 16)
    padding = torch.tensor([[F] * 6, [F] * 4 + [T] * 2])
    as_float = torch.zeros(2, 6).masked_fill(padding, float("-inf"))
    bias = torch.randn(6, 6)
    for mask in (None, bias):
        for need_weights in (True, False):
            options = {"attn_mask": mask, "need_weights": need_weights}
            expected = module(x, x, x, key_padding_mask=padding, **options)[0]
            torch.testing.assert_close(module(x, x, x, key_padding_mask=as_float, **options)[0], expected)


def test_r131_float_padding_of_ones_is_told(caplog: pytest.LogCaptureFixture):
    """A float padding mask of zeros and ones, which favours the padding, is warned about once."""
    module = SmartMultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 6, 16)
    padding = torch.tensor([[0.0] * 6, [0.0] * 4 + [1.0] * 2])
    with caplog.at_level(logging.WARNING, logger="smartattn"):
        for _ in range(2):
            module(x, x, x, key_padding_mask=padding, need_weights=False)
    assert [record for record in caplog.messages if "favours the padding" in record] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_r133_out_proj_is_called(is_training: bool, need_weights: bool):
    """A hook on ``out_proj`` runs once per forward, and a wrapper in its place takes effect."""
    module = SmartMultiheadAttention(16, 2, batch_first=True).train(is_training)
    x = torch.randn(2, 6, 16)
    calls = []
    module.out_proj.register_forward_hook(lambda *given: calls.append(given))
    with torch.no_grad():
        expected, _ = module(x, x, x, need_weights=need_weights)
        assert len(calls) == 1
        module.out_proj = torch.nn.Sequential(module.out_proj, torch.nn.Threshold(1e9, 7.0))
        assert (module(x, x, x, need_weights=need_weights)[0] == 7.0).all()
    assert (expected != 7.0).any()


OPTIONS = [
    {},
    {"kdim": 8, "vdim": 8},
    {"kdim": 8},
    {"add_bias_kv": True},
    {"bias": False},
    {"add_zero_attn": True},
    {"bias": False, "kdim": 8, "vdim": 4, "add_bias_kv": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_r134_state_dict_and_start_values(options: dict[str, object]):
    """Keys, shapes and order of ``state_dict`` and the start values are PyTorch's; loading is strict both ways."""
    torch.manual_seed(3)
    stock = torch.nn.MultiheadAttention(64, 4, **options)
    torch.manual_seed(3)
    smart = SmartMultiheadAttention(64, 4, **options)
    assert list(smart.state_dict()) == list(stock.state_dict())
    for name, tensor in stock.state_dict().items():
        assert torch.equal(smart.state_dict()[name], tensor), name
    stock.load_state_dict(smart.state_dict(), strict=True)
    smart.load_state_dict(stock.state_dict(), strict=True)
    S, N = 5, 2
    key = torch.randn(S, N, options.get("kdim", 64))
    value = torch.randn(S, N, options.get("vdim", 64))
    output, _ = smart(torch.randn(4, N, 64), key, value, need_weights=False)
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in smart.parameters()), "no unused parameter"


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_r136_output_is_contiguous(is_training: bool, need_weights: bool):
    """A batch-first output is contiguous in training and evaluation, also after ``torch.compile``."""
    module = SmartMultiheadAttention(16, 2, batch_first=True).train(is_training)
    x = torch.randn(2, 6, 16)
    torch.compiler.reset()
    for run in (module, torch.compile(module, backend="eager")):
        with torch.set_grad_enabled(is_training):
            output, _ = run(x, x, x, need_weights=need_weights)
        assert output.is_contiguous()
        assert output.view(-1).numel() == x.numel()


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_r137_nested_inputs_in_training(layout: torch.layout):
    """Nested self-attention equals each sequence by itself, in training; other uses say what to do instead."""
    module = SmartMultiheadAttention(16, 2, batch_first=True)
    parts = [torch.randn(3, 16), torch.randn(5, 16)]
    nested = torch.nested.as_nested_tensor(parts, layout=layout)
    output, _ = module(nested, nested, nested, need_weights=False)
    for part, found in zip(parts, output.unbind(), strict=True):
        torch.testing.assert_close(found, module(part, part, part, need_weights=False)[0], atol=1e-5, rtol=1e-5)
    sum(part.sum() for part in output.unbind()).backward()
    assert module.in_proj_weight.grad.isfinite().all()
    assert (nested + output).is_nested, "a residual sum is possible"
    with pytest.raises(ValueError, match="need_weights=False"):
        module(nested, nested, nested)
    other = torch.nested.as_nested_tensor(parts, layout=layout)
    with pytest.raises(ValueError, match="self-attention only"):
        module(nested, other, other, need_weights=False)


def test_r139_scripting_and_tracing():
    """A scripted and a traced module give the right answer at a length that they had not seen."""
    module = SmartMultiheadAttention(16, 2, batch_first=True).eval()
    x, longer = torch.randn(2, 6, 16), torch.randn(2, 9, 16)
    expected, _ = module(longer, longer, longer, need_weights=False)
    # With gradients on: without them PyTorch's own scripted module fails for need_weights=False (torch 2.13).
    scripted = torch.jit.script(copy.deepcopy(module))
    torch.testing.assert_close(scripted(longer, longer, longer, need_weights=False)[0], expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():

        class Caller(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = module

            def forward(self, x):
                return self.attention(x, x, x, need_weights=False)[0]

        traced = torch.jit.trace(Caller(), (x,), check_trace=False)
        torch.testing.assert_close(traced(longer), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("is_batched", [True, False])
def test_r140_returned_weights(average: bool, is_batched: bool):
    """Weights have PyTorch's shapes and values, and are those after dropout in training."""
    stock, smart = pair(16, 2, dropout=0.5, batch_first=True)
    x = torch.randn(2, 8, 16) if is_batched else torch.randn(8, 16)
    for mode in (True, False):
        torch.manual_seed(5)
        expected = stock.train(mode)(x, x, x, average_attn_weights=average)
        torch.manual_seed(5)
        found = smart.train(mode)(x, x, x, average_attn_weights=average)
        torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    assert smart(x, x, x, need_weights=False)[1] is None


def test_r140_weights_need_no_choice():
    """A call that asks for weights computes them itself: nothing is tuned and nothing looked up."""
    module = SmartMultiheadAttention(16, 2)
    x = torch.randn(6, 2, 16)
    module(x, x, x)
    assert smartattn.stats() == smartattn.Stats()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options", [{"add_zero_attn": True}, {"add_bias_kv": True}, {"add_bias_kv": True, "add_zero_attn": True}]
)
def test_n2_appended_positions_stay_visible(options: dict[str, bool], need_weights: bool):
    """With ``is_causal`` the columns of bias and zero attention are seen by every query, as with an explicit mask."""
    module = SmartMultiheadAttention(16, 2, batch_first=True, **options)
    x = torch.randn(2, 6, 16)
    triangle = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected, _ = module(x, x, x, attn_mask=triangle, need_weights=need_weights)
    for mask in (None, triangle):
        found, _ = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(expected, reference(module, x, x, x, triangle, None)[0], atol=1e-5, rtol=1e-5)
