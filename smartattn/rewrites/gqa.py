"""``fold_gqa`` and ``expand_kv``: two ways to turn grouped heads into equal ones.

``fold_gqa`` moves the query heads of one group into the query length: every one of them reads the same keys, so they
are more queries of one head. Nothing of the keys is copied or read twice. ``expand_kv`` repeats keys and values.
"""

from __future__ import annotations

import dataclasses

import torch

from smartattn.backends.base import Runner
from smartattn.layout import Layout
from smartattn.rewrites.base import Rewrite
from smartattn.rewrites.dense import (
    dense_layout,
    in_order,
    is_dense,
    is_sequence_major,
    natural_order,
    shapes_of,
)
from smartattn.signature import Signature


class FoldGqa(Rewrite):
    """(Hq, L) queries of H keys become (H, group * L)."""

    name = "fold_gqa"

    def reasons(self, signature: Signature) -> tuple[str, ...]:
        """Apply to grouped heads whose mask treats all heads and queries alike."""
        found = []
        if signature.group == 1:
            found.append(f"needs fewer key heads than query heads; both are {signature.H}")
        if signature.is_causal:
            found.append("needs a mask that treats all queries alike; this one is causal")
        if any(letter != "1" for letter in signature.mask_axes[:-1][-2:]):
            found.append(f"needs a mask that broadcasts over heads and queries; its axes are {signature.mask_axes}")
        return tuple(found)

    def transform(self, signature: Signature) -> Signature:
        """Return the problem with equal heads and longer queries."""
        s = signature
        # The classes that speak of queries would count them wrongly now; the tensor stays right.
        keeps_class = not s.has_mask_tensor or s.mask == "key_padding"
        mask = s.mask if keeps_class else s.tensor_mask
        folded = dataclasses.replace(s, Hq=s.H, L=s.group * s.L, gqa="none", mask=mask)
        return dataclasses.replace(folded, layouts=(_folded_layout(s, shapes_of(folded)[0]), *s.layouts[1:]))

    def bind(self, signature: Signature, run: Runner) -> Runner:
        """Wrap the runner."""
        H, group = signature.H, signature.group
        copies = not _is_view(signature)
        major = is_sequence_major(signature.layouts[0])

        def folded(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
            dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
        ) -> torch.Tensor:  # fmt: skip
            del enable_gqa
            batch, (Hq, L, E) = query.shape[:-3], query.shape[-3:]
            if copies:
                query = query.clone(memory_format=torch.contiguous_format)
            query = query.reshape(*batch, H, group * L, E)
            output = run(query, key, value, attn_mask, dropout_p, is_causal, scale, False)
            output = output.reshape(*batch, Hq, L, output.size(-1))
            return in_order(output, sequence_major=True) if major else output

        return folded

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of a copied query and of the output put back in order."""
        s = signature
        query_bytes = 0 if _is_view(s) else s.N * s.Hq * s.L * s.E * s.itemsize_bytes
        is_reordered = is_sequence_major(s.layouts[0])
        return query_bytes + (s.N * s.Hq * s.L * s.Ev * s.itemsize_bytes if is_reordered else 0)


def _is_view(signature: Signature) -> bool:
    layout = signature.layouts[0]
    if signature.L == 1:
        return not layout.expanded and layout.has_unit_last_stride
    return is_dense(layout) and layout.order == natural_order(signature.rank)


def _folded_layout(signature: Signature, shape: tuple[int, ...]) -> Layout:
    layout = signature.layouts[0]
    if not _is_view(signature):
        return dense_layout(shape, signature.itemsize_bytes)
    if is_dense(layout) and layout.order == natural_order(signature.rank):
        return dense_layout(shape, signature.itemsize_bytes, has_aligned_start=layout.has_aligned_start)
    # One query: the axis of heads splits in two that lie one inside the other, in place of the old one; axes of one
    # element stay where they stand by nature, as in ``read_layout``.
    natural = natural_order(signature.rank)
    single = {letter for letter, size in zip(natural, shape, strict=True) if size == 1}
    moving = iter([letter for letter in layout.order.replace("s", "").replace("h", "hs") if letter not in single])
    order = "".join(letter if letter in single else next(moving) for letter in natural)
    return dataclasses.replace(layout, order=order)


class ExpandKv(Rewrite):
    """Keys and values repeated for every query head, as dense copies."""

    name = "expand_kv"

    def reasons(self, signature: Signature) -> tuple[str, ...]:
        """Apply to grouped heads."""
        if signature.group == 1:
            return (f"needs fewer key heads than query heads; both are {signature.H}",)
        return ()

    def transform(self, signature: Signature) -> Signature:
        """Return the problem with equal heads."""
        wide = dataclasses.replace(signature, H=signature.Hq, gqa="none")
        _, key, value = (dense_layout(shape, signature.itemsize_bytes) for shape in shapes_of(wide))
        return dataclasses.replace(wide, layouts=(signature.layouts[0], key, value))

    def bind(self, signature: Signature, run: Runner) -> Runner:
        """Wrap the runner."""
        group = signature.group

        def expanded(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
            dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
        ) -> torch.Tensor:  # fmt: skip
            del enable_gqa
            key, value = _repeat(key, group), _repeat(value, group)
            return run(query, key, value, attn_mask, dropout_p, is_causal, scale, False)

        return expanded

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of the repeated keys and values."""
        s = signature
        return s.N * s.Hq * s.S * (s.E + s.Ev) * s.itemsize_bytes


def _repeat(tensor: torch.Tensor, group: int) -> torch.Tensor:
    # A real copy: axes of stride 0 gave wrong results in one fused backend (pytorch#191937).
    wide = tensor.unsqueeze(-3).expand(*tensor.shape[:-2], group, *tensor.shape[-2:])
    return wide.clone(memory_format=torch.contiguous_format).flatten(-4, -3)
