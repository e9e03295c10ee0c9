"""``flatten_batch``: join all batch axes into one, since the fused backends take four dimensions only."""

from __future__ import annotations

import dataclasses
import math

import torch

from smartattn.backends.base import Runner
from smartattn.layout import AXES, Layout
from smartattn.rewrites.base import Rewrite
from smartattn.rewrites.dense import (
    axes_of,
    copy_layout,
    dense_layout,
    dense_mask_layout,
    is_dense,
    is_sequence_major,
    mask_shape_of,
    natural_order,
    shapes_of,
)
from smartattn.signature import Signature

_RANK = 4


class FlattenBatch(Rewrite):
    """Five dimensions and more to four; views of dense inputs, dense copies of others."""

    name = "flatten_batch"

    def reasons(self, signature: Signature) -> tuple[str, ...]:
        """Apply to more than four dimensions alone."""
        return () if signature.rank > _RANK else (f"takes 5 dimensions and more; there are {signature.rank}",)

    def transform(self, signature: Signature) -> Signature:
        """Return the problem with one batch axis."""
        batch = (math.prod(signature.batch),)
        layouts = []
        for shape, layout in zip(shapes_of(signature), signature.layouts, strict=True):
            flat = (*batch, *shape[-3:])
            if _is_view(layout):
                order = natural_order(_RANK, sequence_major=is_sequence_major(layout))
                layouts.append(
                    dense_layout(flat, signature.itemsize_bytes, order, has_aligned_start=layout.has_aligned_start)
                )
            else:
                layouts.append(copy_layout(flat, layout, signature.itemsize_bytes))
        query, key, value = layouts
        changes: dict[str, object] = {"batch": batch, "layouts": (query, key, value)}
        if signature.mask_layout is not None and len(signature.mask_axes) > 2:
            changes |= {"mask": signature.tensor_mask, **_mask_changes(signature, batch[0])}
        return dataclasses.replace(signature, **changes)  # type: ignore[arg-type]

    def bind(self, signature: Signature, run: Runner) -> Runner:
        """Wrap the runner."""
        batch = signature.batch
        copies = [not _is_view(layout) for layout in signature.layouts]
        majors = [is_sequence_major(layout) for layout in signature.layouts]
        rank = len(signature.mask_axes)
        spreads_mask = _varies_over_batch(signature.mask_axes)

        def flat(tensor: torch.Tensor, index: int) -> torch.Tensor:
            if not copies[index]:
                return tensor.flatten(0, -4)
            if majors[index]:
                dense = tensor.transpose(-3, -2).clone(memory_format=torch.contiguous_format)
                return dense.flatten(0, -4).transpose(-3, -2)
            return tensor.clone(memory_format=torch.contiguous_format).flatten(0, -4)

        def flattened(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
            dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
        ) -> torch.Tensor:  # fmt: skip
            if attn_mask is not None and rank > 2:
                tail = attn_mask.shape[-3:]
                attn_mask = attn_mask.expand(*batch, *tail).contiguous() if spreads_mask else attn_mask
                attn_mask = attn_mask.view(-1, *tail) if spreads_mask else attn_mask.reshape(1, *tail)
            inputs = flat(query, 0), flat(key, 1), flat(value, 2)
            output = run(*inputs, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            return output.view(*batch, *output.shape[1:])

        return flattened

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of copied inputs and of a mask that must be spread over the batch."""
        found = 0
        for shape, layout in zip(shapes_of(signature), signature.layouts, strict=True):
            found += 0 if _is_view(layout) else math.prod(shape) * signature.itemsize_bytes
        if _varies_over_batch(signature.mask_axes):
            itemsize = 1 if signature.mask_dtype == "bool" else signature.itemsize_bytes
            found += math.prod(signature.batch) * math.prod(mask_shape_of(signature)[-3:]) * itemsize
        return found


def _is_view(layout: Layout) -> bool:
    leading = AXES[-len(layout.order) : -3]
    return is_dense(layout) and layout.order.startswith(leading)


def _varies_over_batch(mask_axes: str) -> bool:
    return any(letter != "1" for letter in mask_axes[:-3])


def _mask_changes(signature: Signature, batch: int) -> dict[str, object]:
    shape, layout = mask_shape_of(signature), signature.mask_layout
    if layout is None:
        return {}
    if not _varies_over_batch(signature.mask_axes):
        order = "b" + "".join(letter for letter in layout.order if letter in "hls")
        return {"mask_axes": axes_of((1, *shape[-3:])), "mask_layout": dataclasses.replace(layout, order=order)}
    flat = (batch, *shape[-3:])
    found = dense_mask_layout(flat, signature.mask_dtype)
    is_kept = math.prod(shape[:-3]) == batch and dense_mask_layout(shape, signature.mask_dtype) == dataclasses.replace(
        layout, has_aligned_start=True
    )
    if is_kept:
        found = dataclasses.replace(found, has_aligned_start=layout.has_aligned_start)
    return {"mask_axes": axes_of(flat), "mask_layout": found}
