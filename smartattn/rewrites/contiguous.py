"""``contiguous``: copy those of query, key and value whose memory keeps fused backends away."""

from __future__ import annotations

import dataclasses
import math

import torch

from smartattn.backends.base import Runner
from smartattn.layout import Layout
from smartattn.rewrites.base import Rewrite
from smartattn.rewrites.dense import copy_layout, dense_copy, in_order, is_sequence_major, shapes_of
from smartattn.signature import Signature


class Contiguous(Rewrite):
    """Dense copies; BSHD inputs stay BSHD, so that the output keeps its order too."""

    name = "contiguous"

    def reasons(self, signature: Signature) -> tuple[str, ...]:
        """Apply where a copy cures a layout."""
        return () if any(_cures(signature)) else ("query, key and value lie in memory as every backend takes them",)

    def transform(self, signature: Signature) -> Signature:
        """Return the problem on the copies."""
        layouts = zip(signature.layouts, _copies(signature), _cures(signature), strict=True)
        query, key, value = (copy if is_cured else layout for layout, copy, is_cured in layouts)
        return dataclasses.replace(signature, layouts=(query, key, value))

    def bind(self, signature: Signature, run: Runner) -> Runner:
        """Wrap the runner."""
        cures_query, cures_key, cures_value = _cures(signature)
        majors = [is_sequence_major(layout) for layout in signature.layouts]

        def contiguous(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
            dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
        ) -> torch.Tensor:  # fmt: skip
            query = dense_copy(query, sequence_major=majors[0]) if cures_query else query
            key = dense_copy(key, sequence_major=majors[1]) if cures_key else key
            value = dense_copy(value, sequence_major=majors[2]) if cures_value else value
            output = run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            return in_order(output, sequence_major=majors[0]) if majors[0] else output

        return contiguous

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of the copies."""
        sizes = [math.prod(shape) * signature.itemsize_bytes for shape in shapes_of(signature)]
        return sum(size for size, is_cured in zip(sizes, _cures(signature), strict=True) if is_cured)


def _copies(signature: Signature) -> tuple[Layout, ...]:
    pairs = zip(shapes_of(signature), signature.layouts, strict=True)
    return tuple(copy_layout(shape, layout, signature.itemsize_bytes) for shape, layout in pairs)


def _cures(signature: Signature) -> tuple[bool, ...]:
    return tuple(
        not layout.has_unit_last_stride
        or not layout.has_aligned_start
        or bool(layout.expanded)
        # Rows that are misaligned because the head dim is odd would be so in a copy too.
        or (not layout.has_aligned_rows and copy.has_aligned_rows)
        for layout, copy in zip(signature.layouts, _copies(signature), strict=True)
    )
