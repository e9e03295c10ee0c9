"""Every rewrite of the table against the one contract."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from smartattn.rewrites.gqa import ExpandKv, FoldGqa
from smartattn.rewrites.mask_tensors import AlignMask
from smartattn.rewrites.pad_head_dim import PadHeadDim
from smartattn.rewrites.registry import REWRITES
from smartattn.rewrites.split_batch import SplitBatch
from smartattn.signature import Call, read_signature
from tests.rewrites.contract import calls, check_rewrite, run_captured, tensor_of

ALL = (*REWRITES[:-1], SplitBatch(limit=2))


@pytest.mark.parametrize("rewrite", ALL, ids=lambda rewrite: rewrite.name)
# Most calls do not suit a given rewrite: that is what rewrites are like, not a fault of the strategy.
@settings(max_examples=80, suppress_health_check=[HealthCheck.filter_too_much])
@given(call=calls())
def test_keeps_values_gradients_and_says_what_it_leaves(rewrite, call):
    """Wherever a rewrite applies, it leaves exactly the signature it names and changes no result."""
    signature = read_signature(call)
    assume(not rewrite.reasons(signature))
    check_rewrite(rewrite, call)


def test_names_are_unique():
    """A route's name can mean one rewrite only."""
    names = [rewrite.name for rewrite in REWRITES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("rewrite", ALL, ids=lambda rewrite: rewrite.name)
def test_declines_where_nothing_changes(rewrite):
    """A plain dense 4-D call with equal heads needs no rewrite, and each says why."""
    tensor = torch.randn(2, 2, 4, 8)
    signature = read_signature(Call(tensor, tensor, tensor))
    assert all(rewrite.reasons(signature))
    assert rewrite.reasons(signature)


@pytest.mark.parametrize("rewrite", [FoldGqa(), ExpandKv()], ids=lambda rewrite: rewrite.name)
def test_grouped_heads_without_the_flag(rewrite):
    """One key head broadcasts without enable_gqa; both rewrites take it and ask for no flag."""
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 1, 5, 8)
    call = Call(query, key, key)
    assert read_signature(call).gqa == "implicit"
    check_rewrite(rewrite, call)
    _, seen = run_captured(rewrite, call, read_signature(call))
    assert not seen[0].enable_gqa


def test_fold_keeps_the_memory_order_of_query():
    """A BSHD query gets a BSHD output back, so that callers may view it as before."""
    query, key = torch.randn(2, 7, 4, 8).transpose(1, 2), torch.randn(2, 2, 5, 8)
    call = Call(query, key, key, enable_gqa=True)
    output, _ = run_captured(FoldGqa(), call, read_signature(call))
    assert output.transpose(1, 2).is_contiguous()


def test_fold_copies_no_query_when_decoding():
    """One query per head folds as a view, also out of a packed projection."""
    query, key = torch.randn(2, 1, 3, 4, 8)[:, :, 0].transpose(1, 2), torch.randn(2, 2, 5, 8)
    call = Call(query, key, key, enable_gqa=True)
    _, seen = run_captured(FoldGqa(), call, read_signature(call))
    assert seen[0].query.data_ptr() == query.data_ptr()


def test_fold_declines_what_counts_queries():
    """Causal triangles and masks that vary over heads or queries cannot be folded."""
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)
    causal = read_signature(Call(query, key, key, is_causal=True, enable_gqa=True))
    varying = read_signature(Call(query, key, key, torch.ones(3, 3, dtype=torch.bool), enable_gqa=True))
    assert "causal" in FoldGqa().reasons(causal)[0]
    assert "broadcasts over heads and queries" in FoldGqa().reasons(varying)[0]


def test_padding_keeps_the_scale_of_the_true_head_dim():
    """The scale is that of E, not of the padded head dim."""
    tensor = torch.randn(1, 2, 4, 5)
    call = Call(tensor, tensor, tensor)
    _, seen = run_captured(PadHeadDim(), call, read_signature(call))
    assert seen[0].query.size(-1) == 8
    assert seen[0].scale == pytest.approx(5**-0.5)


def test_wide_padding_fills_up_to_its_multiple():
    """The wide form pads what the narrow one pads, further; without gradients all three share one piece of zeros."""
    tensor = torch.randn(1, 2, 4, 100)
    call = Call(tensor, tensor, tensor)
    _, seen = run_captured(PadHeadDim(64), call, read_signature(call))
    assert PadHeadDim(64).name == "pad_head_dim_64"
    assert tuple(seen[0].query.shape) == (1, 2, 4, 128)
    assert seen[0].query.untyped_storage().data_ptr() == seen[0].value.untyped_storage().data_ptr()
    assert not seen[0].key[..., 100:].any()
    torch.testing.assert_close(seen[0].key[..., :100], tensor)


def test_aligned_rows_do_not_spread_broadcast_axes():
    """A mask that repeats itself over heads is copied once, not once per head."""
    tensor = torch.randn(2, 4, 3, 8)
    mask = torch.randn(2, 1, 3, 3).expand(2, 4, 3, 3)
    call = Call(tensor, tensor, tensor, mask)
    _, seen = run_captured(AlignMask(), call, read_signature(call))
    assert tuple(seen[0].attn_mask.shape) == (2, 1, 3, 3)
    assert seen[0].attn_mask.stride(-2) * 4 % 16 == 0


def test_split_declines_rows_between_on_a_gpu():
    """Pieces of misaligned rows would start between 16 bytes, which ends a CUDA context."""
    tensor = torch.randn(3, 2, 4, 5)
    signature = dataclasses.replace(read_signature(Call(tensor, tensor, tensor)), device_type="cuda")
    assert "16 bytes" in SplitBatch(limit=2).reasons(signature)[0]


def test_fold_gqa_keeps_single_axes_in_their_place():
    """With heads outermost and a batch axis of one element, the folded layout is the one that the tensor has."""
    query = tensor_of((2, 1, 4, 1, 8), "outer_heads", torch.float32, 0)
    key = tensor_of((2, 1, 2, 3, 8), "natural", torch.float32, 1)
    check_rewrite(FoldGqa(), Call(query, key, key, enable_gqa=True))
