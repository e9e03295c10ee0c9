"""``eager`` and ``eager_inplace``: two matrix products in the dtype of the inputs around a softmax.

They win where fused kernels have no good shape (wide head dims, one query against many keys), at the price of a
score matrix. ``eager_inplace`` saves the copies by working on the scores in place, which only a call without gradients
allows. Grouped heads are computed by folding the group into the query length, without repeating keys.
"""

from __future__ import annotations

import math

import torch

from smartattn import versions
from smartattn.backends.base import Backend, Capabilities, Runner
from smartattn.environment import Environment
from smartattn.signature import Signature


def _scores_bytes(signature: Signature, copies: int) -> int:
    return signature.num_scores * max(4, signature.itemsize_bytes) * copies


def _overflow_reasons(signature: Signature) -> tuple[str, ...]:
    """Refuse scores in float16: beyond 65504 they turn infinite and the row NaN, where fused kernels and Math stay right.

    Source: a case of large but finite inputs, optimum#1100; no probe can know the values of later calls.
    """
    if signature.dtype == "float16":
        return ("keeps scores in float16, which overflows beyond 65504; use bfloat16, or math",)
    return ()


class Eager(Backend):
    """Attention written in plain PyTorch, out of place."""

    name = "eager"
    capabilities = Capabilities(supports_double_backward=True)

    def extra_reasons(self, signature: Signature, environment: Environment) -> tuple[str, ...]:
        """Refuse float16."""
        del environment
        return _overflow_reasons(signature)

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of the score matrix: scores, masked scores and probabilities, kept when gradients are."""
        return _scores_bytes(signature, copies=5 if signature.wants_grad else 3)

    def bind(self, signature: Signature) -> Runner:
        """Return the out-of-place runner."""
        del signature
        return run_eager


class EagerInplace(Backend):
    """Attention written in plain PyTorch, masking and normalising the scores in place."""

    name = "eager_inplace"
    capabilities = Capabilities(supports_training=False)

    def extra_reasons(self, signature: Signature, environment: Environment) -> tuple[str, ...]:
        """Refuse float16, and gradients by their own reason."""
        del environment
        found = _overflow_reasons(signature)
        if signature.wants_grad:
            found += ("writes over the scores that a backward would need; use eager when gradients are wanted",)
        return found

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of the score matrix and of its softmax."""
        return _scores_bytes(signature, copies=2)

    def bind(self, signature: Signature) -> Runner:
        """Return the in-place runner."""
        del signature
        return run_eager_inplace


def run_eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Run attention out of place."""
    del enable_gqa
    scores, value, group = _scores(query, key, value, scale)
    if attn_mask is not None:
        scores = _unfold(scores, group)
        # A float32 mask raises half scores: cast down, its finite values would become -inf.
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else scores + attn_mask
        scores = _fold(scores, group)
    if is_causal:
        hidden = _hidden(query, key)
        scores = _fold(_unfold(scores, group).masked_fill(hidden, float("-inf")), group)
    probabilities = _softmax(scores, is_safe=attn_mask is not None).to(value.dtype)
    if dropout_p > 0:
        probabilities = torch.dropout(probabilities, dropout_p, train=True)
    return _unfold(probabilities @ value, group)


def run_eager_inplace(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Run attention with the scores masked in place; needs gradients off."""
    del enable_gqa
    scores, group = _scaled_products(query, key, scale)
    if attn_mask is not None or is_causal:
        unfolded = _unfold(scores, group)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            unfolded.masked_fill_(~attn_mask, float("-inf"))
        elif attn_mask is not None and attn_mask.dtype == scores.dtype:
            unfolded.add_(attn_mask)
        elif attn_mask is not None:
            # A float32 mask raises half scores: cast down, its finite values would become -inf.
            unfolded = unfolded + attn_mask
            scores = _fold(unfolded, group)
        if is_causal:
            unfolded.masked_fill_(_hidden(query, key), float("-inf"))
    probabilities = _softmax(scores, is_safe=attn_mask is not None).to(value.dtype)
    if dropout_p > 0:
        probabilities = torch.dropout_(probabilities, dropout_p, train=True)
    return _unfold(probabilities @ value, group)


def _scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return scaled scores with the query group folded into the query length, the value, and the group."""
    group = query.size(-3) // key.size(-3)
    if scale is None:
        scale = 1.0 / math.sqrt(query.size(-1))
    # Scaling the query costs L x E instead of L x S, and keeps half-precision scores away from their limit.
    return _fold(query * scale, group) @ key.transpose(-2, -1), value, group


def _scaled_products(query: torch.Tensor, key: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, int]:
    """Return the scores, folded, and the group; scaled inside the product where the batch axes merge into one.

    The scale is applied before rounding then, and one launch is saved, which shows in decoding.
    """
    group = query.size(-3) // key.size(-3)
    folded = _fold(query, group)
    if query.dim() != _RANK or not (_merges(folded) and _merges(key)):
        scores, _, _ = _scores(query, key, key, scale)
        return scores, group
    factor = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    products = torch.baddbmm(
        query.new_empty((1, 1, 1)), folded.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), beta=0.0, alpha=factor
    )
    return products.unflatten(0, folded.shape[:2]), group


_RANK = 4


def _merges(tensor: torch.Tensor) -> bool:
    """Return whether the first two axes are one without a copy."""
    N, H, *_ = tensor.shape
    return N == 1 or H == 1 or tensor.stride(0) == H * tensor.stride(1)


def _fold(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """Turn (..., H * group, L, X) into (..., H, group * L, X); a view where memory allows."""
    if group == 1:
        return tensor
    *batch, Hq, L, width = tensor.shape
    return tensor.reshape(*batch, Hq // group, group * L, width)


def _unfold(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """Undo ``_fold`` as a view."""
    if group == 1:
        return tensor
    *batch, H, folded, width = tensor.shape
    return tensor.view(*batch, H * group, folded // group, width)


def _hidden(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.ones((query.size(-2), key.size(-2)), dtype=torch.bool, device=query.device).triu(1)


def _softmax(scores: torch.Tensor, *, is_safe: bool) -> torch.Tensor:
    """Return probabilities; a row that sees no key is all zeros where a mask can cause one.

    In the dtype of the scores: PyTorch's softmax of half inputs computes in float32 inside, so asking for a float32
    result would only add a copy (187 against 112 us for one head of 4096 x 4096 on an H200).
    """
    return versions.safe_softmax(scores, -1) if is_safe else torch.softmax(scores, -1)
