"""``promote``: give 3-D inputs a batch axis, since the fused backends take four dimensions only."""

from __future__ import annotations

import dataclasses

import torch

from smartattn.backends.base import Runner
from smartattn.layout import Layout
from smartattn.rewrites.base import Rewrite
from smartattn.signature import Signature

_RANK = 3


class Promote(Rewrite):
    """3-D to 4-D; views only."""

    name = "promote"

    def reasons(self, signature: Signature) -> tuple[str, ...]:
        """Apply to three dimensions alone."""
        return () if signature.rank == _RANK else (f"takes 3 dimensions; there are {signature.rank}",)

    def transform(self, signature: Signature) -> Signature:
        """Return the problem with a batch of 1; masks of 2 dimensions broadcast as they are."""
        query, key, value = (_with_batch(layout) for layout in signature.layouts)
        changes: dict[str, object] = {"batch": (1,), "layouts": (query, key, value)}
        if len(signature.mask_axes) == _RANK and signature.mask_layout is not None:
            changes |= {"mask": signature.tensor_mask}
            changes |= {"mask_axes": "1" + signature.mask_axes, "mask_layout": _with_batch(signature.mask_layout)}
        return dataclasses.replace(signature, **changes)  # type: ignore[arg-type]

    def bind(self, signature: Signature, run: Runner) -> Runner:
        """Wrap the runner."""
        promotes_mask = len(signature.mask_axes) == _RANK

        def promoted(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
            dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
        ) -> torch.Tensor:  # fmt: skip
            if promotes_mask and attn_mask is not None:
                attn_mask = attn_mask.unsqueeze(0)
            inputs = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            return run(*inputs, attn_mask, dropout_p, is_causal, scale, enable_gqa).squeeze(0)

        return promoted


def _with_batch(layout: Layout) -> Layout:
    return dataclasses.replace(layout, order="b" + layout.order)
