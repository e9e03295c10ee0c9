"""``additive_mask`` and ``align_mask``: a mask tensor in the form that a fused backend reads."""

from __future__ import annotations

import dataclasses
import math

import torch

from smartattn.backends.base import Runner
from smartattn.backends.masks_cuda import additive_in
from smartattn.layout import ALIGNMENT_BYTES
from smartattn.rewrites.base import Rewrite
from smartattn.rewrites.dense import (
    axes_of,
    dense_mask_layout,
    expanded_axes,
    narrowed_mask_shape,
    without_expanded,
)
from smartattn.signature import DTYPES, Signature


class AdditiveMask(Rewrite):
    """Bool to 0 and -inf, and float32 masks cast, in the dtype of the inputs; repeated axes become broadcast ones."""

    name = "additive_mask"

    def reasons(self, signature: Signature) -> tuple[str, ...]:
        """Apply to mask tensors of another dtype."""
        if not signature.has_mask_tensor:
            return ("needs a mask tensor",)
        if signature.mask_dtype == signature.dtype:
            return (f"the mask is {signature.dtype} already",)
        return ()

    def transform(self, signature: Signature) -> Signature:
        """Return the problem with an additive mask."""
        shape = narrowed_mask_shape(signature)
        return dataclasses.replace(
            signature,
            mask="causal+additive" if signature.is_causal else "additive",
            mask_axes=axes_of(shape),
            mask_dtype=signature.dtype,
            mask_layout=dense_mask_layout(shape, signature.dtype),
        )

    def bind(self, signature: Signature, run: Runner) -> Runner:
        """Wrap the runner."""
        repeated = expanded_axes(signature)
        dtype = DTYPES[signature.dtype]

        def with_additive_mask(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
            dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
        ) -> torch.Tensor:  # fmt: skip
            if attn_mask is not None:
                attn_mask = without_expanded(attn_mask, repeated).contiguous()
                attn_mask = additive_in(attn_mask, dtype)
            return run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

        return with_additive_mask

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of the converted mask."""
        return math.prod(narrowed_mask_shape(signature)) * signature.itemsize_bytes


class AlignMask(Rewrite):
    """Rows of an additive mask moved to multiples of 16 bytes; repeated axes become broadcast ones."""

    name = "align_mask"

    def reasons(self, signature: Signature) -> tuple[str, ...]:
        """Apply to additive mask tensors whose rows, start or last stride are off."""
        layout = signature.mask_layout
        if layout is None or signature.mask_dtype == "bool":
            return ("needs an additive mask tensor",)
        if signature.mask_axes.endswith("1"):
            return ("the mask broadcasts over the keys, so it has no rows to align",)
        if layout.has_aligned_rows and layout.has_aligned_start and layout.has_unit_last_stride:
            return ("the rows of the mask start on multiples of 16 bytes already",)
        return ()

    def transform(self, signature: Signature) -> Signature:
        """Return the problem with an aligned mask."""
        shape = narrowed_mask_shape(signature)
        layout = dense_mask_layout(shape, signature.mask_dtype, _row_multiple(signature))
        return dataclasses.replace(signature, mask=signature.tensor_mask, mask_axes=axes_of(shape), mask_layout=layout)

    def bind(self, signature: Signature, run: Runner) -> Runner:
        """Wrap the runner."""
        repeated = expanded_axes(signature)
        multiple = _row_multiple(signature)

        def with_aligned_mask(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
            dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
        ) -> torch.Tensor:  # fmt: skip
            if attn_mask is not None:
                attn_mask = _aligned(without_expanded(attn_mask, repeated), multiple)
            return run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

        return with_aligned_mask

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of the aligned mask."""
        *rows, S = narrowed_mask_shape(signature)
        multiple = _row_multiple(signature)
        return math.prod(rows) * math.ceil(S / multiple) * ALIGNMENT_BYTES


def _row_multiple(signature: Signature) -> int:
    return ALIGNMENT_BYTES // DTYPES[signature.mask_dtype].itemsize


def _aligned(mask: torch.Tensor, multiple: int) -> torch.Tensor:
    S = mask.size(-1)
    more = -S % multiple
    if not more:
        return mask.clone(memory_format=torch.contiguous_format)
    return torch.nn.functional.pad(mask.contiguous(), (0, more))[..., :S]
