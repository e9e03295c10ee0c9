"""``SmartMultiheadAttention``: equal to PyTorch's module wherever that is right, in every combination of arguments."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import smartattn
from smartattn import SmartMultiheadAttention, multihead_masks
from tests.multihead_reference import reference

N, L, S, E, H = 2, 5, 7, 24, 4


def num_calls() -> int:
    counters = smartattn.stats()
    return counters.hits + counters.misses + counters.memory_hits + counters.disk_hits


def pair(**options) -> tuple[nn.MultiheadAttention, SmartMultiheadAttention]:
    stock = nn.MultiheadAttention(E, H, **options)
    smart = SmartMultiheadAttention(E, H, **options)
    smart.load_state_dict(stock.state_dict())
    return stock, smart


def inputs(module: nn.MultiheadAttention, *, is_batched: bool = True) -> list[torch.Tensor]:
    lengths, sizes = (L, S, S), (E, module.kdim, module.vdim)
    found = [torch.randn(N, length, size, requires_grad=True) for length, size in zip(lengths, sizes, strict=True)]
    if not is_batched:
        return [x[0] for x in found]
    return found if module.batch_first else [x.transpose(0, 1) for x in found]


MASKS = {
    "none": {},
    "bool": {"attn_mask": torch.ones(L, S, dtype=torch.bool).triu(2)},
    "float": {"attn_mask": torch.linspace(-2, 2, L * S).view(L, S)},
    "per head": {"attn_mask": torch.linspace(-2, 2, N * H * L * S).view(N * H, L, S)},
    "padding": {"key_padding_mask": torch.tensor([[False] * S, [False] * 4 + [True] * 3])},
}
MASKS["both"] = {**MASKS["bool"], **MASKS["padding"]}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"kdim": 12, "vdim": 20}, {"add_bias_kv": True, "add_zero_attn": True}, {"bias": False}], ids=str
)
def test_equals_stock(options: dict, batch_first: bool, need_weights: bool, mask: str):
    """Outputs, weights and gradients of inputs and parameters equal PyTorch's, N, L and S all different."""
    stock, smart = pair(batch_first=batch_first, **options)
    given = inputs(stock)
    results = []
    for module in (stock, smart):
        output, weights = module(*given, need_weights=need_weights, **MASKS[mask])
        gradients = torch.autograd.grad(output.square().sum(), [*given, *module.parameters()])
        results.append([output, *([] if weights is None else [weights]), *gradients])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert (num_calls() > 0) == (not need_weights)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("with_mask", [True, False])
def test_unbatched_equals_stock(need_weights: bool, with_mask: bool):
    """Inputs without a batch give outputs and weights without one, whatever ``batch_first`` says."""
    padding = torch.tensor([False] * 5 + [True] * 2) if with_mask else None
    for batch_first in (True, False):
        stock, smart = pair(batch_first=batch_first)
        given = inputs(stock, is_batched=False)
        expected = stock(*given, key_padding_mask=padding, need_weights=need_weights)
        found = smart(*given, key_padding_mask=padding, need_weights=need_weights)
        torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
        if need_weights:
            torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shared", ["all", "key and value", "none"])
def test_packed_projections_equal_stock(shared: str):
    """Sharing inputs, which saves products, changes nothing in outputs and gradients."""
    stock, smart = pair(batch_first=True)
    x, y, z = (torch.randn(N, S, E) for _ in range(3))
    given = {"all": (x, x, x), "key and value": (x, y, y), "none": (x, y, z)}[shared]
    gradients = []
    for module in (stock, smart):
        module(*given, need_weights=False)[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_low_precision_and_autocast():
    """A bfloat16 module and autocast take float32 masks and stay within bfloat16's rounding of the reference."""
    _, smart = pair(batch_first=True, add_bias_kv=True)
    x = torch.randn(N, S, E)
    mask = torch.randn(S, S)
    expected, _ = reference(smart, x, x, x, mask)
    for need_weights in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, _ = smart(x, x, x, attn_mask=mask, need_weights=need_weights)
        torch.testing.assert_close(found.float(), expected, atol=5e-2, rtol=5e-2)
        low = copy.deepcopy(smart).bfloat16()
        found, _ = low(*[x.bfloat16()] * 3, attn_mask=mask, need_weights=need_weights)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_within_encoder_layers_in_evaluation(norm_first: bool, has_padding: bool):
    """In an encoder in evaluation without gradients the module is called, and outputs equal stock's, padding included."""
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True, norm_first=norm_first)
    stock = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    smart = copy.deepcopy(stock)
    for each in smart.layers:
        attention = SmartMultiheadAttention(E, H, batch_first=True)
        attention.load_state_dict(each.self_attn.state_dict())
        each.self_attn = attention.eval()
    x = torch.randn(N, S, E)
    padding = MASKS["padding"]["key_padding_mask"] if has_padding else None
    with torch.no_grad():
        expected, found = (each(x, src_key_padding_mask=padding) for each in (stock, smart))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert num_calls() >= 2


def test_within_transformer():
    """``nn.Transformer`` with replaced self- and cross-attention trains as stock, causal hint and masks included."""
    stock = nn.Transformer(E, H, 2, 2, 32, dropout=0.0, batch_first=True)
    smart = copy.deepcopy(stock)
    for module in list(smart.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.MultiheadAttention:
                attention = SmartMultiheadAttention(E, H, batch_first=True)
                attention.load_state_dict(child.state_dict())
                setattr(module, name, attention)
    source, target = torch.randn(N, S, E), torch.randn(N, L, E)
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    results = []
    for each in (stock, smart):
        output = each(source, target, tgt_mask=mask, tgt_is_causal=True)
        output.square().sum().backward()
        results.append([output, *(parameter.grad for parameter in each.parameters())])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=5e-5)
    assert num_calls() == 6


def test_causal_mask_with_hint_becomes_the_flag():
    """A mask that is the triangle, given with ``is_causal``, is replaced by the flag; any other mask is kept."""
    query = torch.randn(N, H, S, 6)
    triangle = torch.ones(S, S, dtype=torch.bool).triu(1)
    as_float = torch.zeros(S, S).masked_fill(triangle, float("-inf"))
    shape = (N, H, S, S)
    for mask in (triangle, as_float):
        found = multihead_masks.combined_mask(mask, None, True, shape, 0, query, is_batched=True, is_dense=False)
        assert found == (None, True)
    for mask in (triangle.triu(2), as_float + 1.0, as_float.tril()):
        kept, is_causal = multihead_masks.combined_mask(
            mask, None, True, shape, 0, query, is_batched=True, is_dense=False
        )
        assert kept is not None
        assert is_causal


def test_masks_are_made_once_and_seen_when_written_to():
    """A stack of layers gets one combined mask; writing to a source makes another; a dead source frees it."""
    query = torch.randn(N, H, S, 6)

    def combined(padding: torch.Tensor) -> torch.Tensor:
        shape = (N, H, S, S)
        return multihead_masks.combined_mask(None, padding, False, shape, 0, query, is_batched=True, is_dense=False)[0]

    padding = torch.zeros(N, S, dtype=torch.bool)
    first = combined(padding)
    assert combined(padding) is first
    padding[1, 3:] = True
    second = combined(padding)
    assert second is not first
    assert second[1, 0, 0].tolist() == [True] * 3 + [False] * 4
    before = len(multihead_masks._table)
    del padding
    gc.collect()
    assert len(multihead_masks._table) < before


def test_float_mask_gets_its_gradient():
    """A learnt additive mask gets the gradient that PyTorch's module gives it."""
    stock, smart = pair(batch_first=True)
    given = inputs(stock)
    mask = torch.randn(L, S, requires_grad=True)
    gradients = [
        torch.autograd.grad(module(*given, attn_mask=mask, need_weights=False)[0].sum(), mask)[0]
        for module in (stock, smart)
    ]
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-5)
    assert gradients[1].abs().max() > 0


def test_copies_and_pickles():
    """``deepcopy`` and ``pickle`` keep weights and wishes, and the copies run."""
    module = SmartMultiheadAttention(E, H, batch_first=True, backend="math", dynamic=True)
    x = torch.randn(N, S, E)
    expected, _ = module(x, x, x, need_weights=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other._site.wish is module._site.wish
        assert torch.equal(other(x, x, x, need_weights=False)[0], expected)


def test_whole_graph_compiles():
    """The module compiles without a graph break, with masks, to the eager answer."""
    torch.compiler.reset()
    module = SmartMultiheadAttention(E, H, batch_first=True)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    x = torch.randn(N, S, E)
    for mask in ({}, MASKS["padding"]):
        expected, _ = module(x, x, x, need_weights=False, **mask)
        torch.testing.assert_close(compiled(x, x, x, need_weights=False, **mask)[0], expected, atol=1e-5, rtol=1e-5)


def test_dropout_acts_in_training_only():
    """Dropout changes the output in training, and evaluation is without it."""
    module = SmartMultiheadAttention(E, H, dropout=0.5, batch_first=True)
    x = torch.randn(N, S, E)
    assert not torch.equal(module(x, x, x, need_weights=False)[0], module(x, x, x, need_weights=False)[0])
    expected, _ = reference(module, x, x, x)
    torch.testing.assert_close(module.eval()(x, x, x, need_weights=False)[0], expected, atol=1e-5, rtol=1e-5)


WRONG = [
    ({"query": (N, L)}, "all three must have 3 dimensions"),
    ({"query": (N, L, E + 1)}, "query has 25 features"),
    ({"key": (N, S, E - 1)}, "key has 23 features"),
    ({"key": (N, S + 1, E)}, "same length"),
    ({"query": (N + 1, L, E)}, "same batch size"),
    ({"key_padding_mask": (N, L)}, r"key_padding_mask has shape \(2, 5\)"),
    ({"attn_mask": (S, L)}, r"attn_mask has shape \(7, 5\)"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG, ids=[text for _, text in WRONG])
def test_wrong_shapes_are_told(changes: dict, text: str):
    """A shape that does not fit is refused with the argument, the shape given and what is allowed."""
    module = SmartMultiheadAttention(E, H, batch_first=True)
    shapes = {"query": (N, L, E), "key": (N, S, E), "value": (N, S, E)}
    given = {name: torch.zeros(shape) for name, shape in {**shapes, **changes}.items()}
    with pytest.raises(ValueError, match=text):
        module(**given)


def test_integer_masks_are_refused():
    """A mask of integers is refused, as its ones could mean either."""
    module = SmartMultiheadAttention(E, H, batch_first=True)
    x = torch.randn(N, S, E)
    with pytest.raises(ValueError, match=r"key_padding_mask has dtype torch.int64"):
        module(x, x, x, key_padding_mask=torch.zeros(N, S, dtype=torch.long))
    with pytest.raises(smartattn.UnknownNameError):
        SmartMultiheadAttention(E, H, backend="no such")
