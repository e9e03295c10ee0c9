"""``split_batch``: run in pieces along the batch or the heads, for kernels whose launch grid ends at 65535.

Source: pytorch#146704, #142228 and #177985: Efficient (batch and heads) and Flash (batch) fail from 65536 on.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from smartattn.backends.base import Runner
from smartattn.layout import AXES, MASK_AXES, Layout
from smartattn.rewrites.base import Rewrite
from smartattn.rewrites.dense import in_order, is_sequence_major, mask_shape_of, shapes_of
from smartattn.signature import Signature

GRID_LIMIT = 65_535
_RANK = 4


class SplitBatch(Rewrite):
    """Pieces of nearly equal size; what is left is the first and largest of them.

    Attributes:
        limit: most batch elements or query heads of one piece.
    """

    name = "split_batch"

    def __init__(self, limit: int = GRID_LIMIT) -> None:
        self.limit = limit

    def reasons(self, signature: Signature) -> tuple[str, ...]:
        """Apply to 4-D problems with more batch elements or heads than the limit."""
        s = signature
        if s.rank != _RANK:
            return (f"takes 4 dimensions; there are {s.rank}",)
        if s.N <= self.limit and s.Hq <= self.limit:
            return (f"neither batch ({s.N}) nor query heads ({s.Hq}) are above {self.limit}",)
        found = []
        if self._piece(s) < 2:
            found.append(f"needs pieces of two key heads at least; one of them serves {s.group} query heads")
        masks = [s.mask_layout] if s.mask_layout is not None else []
        if s.device_type != "cpu" and not all(layout.has_aligned_rows for layout in (*s.layouts, *masks)):
            found.append("needs rows on multiples of 16 bytes, or the pieces would start between")
        return tuple(found)

    def _axis(self, signature: Signature) -> str:
        return "b" if signature.N > self.limit else "h"

    def _piece(self, signature: Signature) -> int:
        """Batch elements, or key heads, of one piece."""
        if self._axis(signature) == "b":
            return _even_piece(signature.N, self.limit)
        return _even_piece(signature.H, self.limit // signature.group)

    def transform(self, signature: Signature) -> Signature:
        """Return the first piece."""
        axis, piece = self._axis(signature), self._piece(signature)
        pairs = zip(signature.layouts, shapes_of(signature), strict=True)
        query, key, value = (_cut(layout, axis, shape, AXES) for layout, shape in pairs)
        mask_layout = signature.mask_layout
        if mask_layout is not None and _mask_varies(signature.mask_axes, axis):
            mask_layout = _cut(mask_layout, axis, mask_shape_of(signature), MASK_AXES)
        sizes = {"batch": (piece,)} if axis == "b" else {"Hq": piece * signature.group, "H": piece}
        changes: dict[str, object] = {**sizes, "layouts": (query, key, value), "mask_layout": mask_layout}
        changes["mask"] = signature.tensor_mask if signature.has_mask_tensor else signature.mask
        return dataclasses.replace(signature, **changes)  # type: ignore[arg-type]

    def bind(self, signature: Signature, run: Runner) -> Runner:
        """Wrap the runner."""
        is_batch = self._axis(signature) == "b"
        dim = 0 if is_batch else 1
        piece = self._piece(signature)
        piece_query = piece if is_batch else piece * signature.group
        splits_mask = _mask_varies(signature.mask_axes, self._axis(signature))
        major = is_sequence_major(signature.layouts[0])
        mask_dim = -4 if is_batch else -3

        def split(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
            dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
        ) -> torch.Tensor:  # fmt: skip
            queries, keys, values = query.split(piece_query, dim), key.split(piece, dim), value.split(piece, dim)
            masks: tuple[torch.Tensor | None, ...] = (attn_mask,) * len(queries)
            if attn_mask is not None and splits_mask:
                masks = attn_mask.split(piece_query, mask_dim)
            pieces = zip(queries, keys, values, masks, strict=True)
            outputs = [run(*one, dropout_p, is_causal, scale, enable_gqa) for one in pieces]
            return in_order(torch.cat(outputs, dim), sequence_major=major)

        return split

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of the outputs before they are joined."""
        s = signature
        return s.N * s.Hq * s.L * s.Ev * s.itemsize_bytes


def _even_piece(size: int, limit: int) -> int:
    if limit < 1:
        return 0
    return math.ceil(size / math.ceil(size / limit))


def _cut(layout: Layout, axis: str, shape: tuple[int, ...], axes: str) -> Layout:
    """Return the layout of a piece along ``axis`` of a tensor of this shape."""
    sizes = dict(zip(axes[-len(shape) :], shape, strict=True))
    outer = layout.order[: layout.order.index(axis)]
    # Skipping part of an axis leaves a gap in every moving axis outside of it.
    leaves_gap = any(sizes[letter] > 1 and letter not in layout.expanded for letter in outer)
    if axis in layout.expanded or not leaves_gap:
        return layout
    return dataclasses.replace(layout, is_gapped=True)


def _mask_varies(mask_axes: str, axis: str) -> bool:
    return axis in mask_axes
