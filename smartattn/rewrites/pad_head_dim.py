"""``pad_head_dim``: zeros behind the head dim up to a multiple of 8, for backends that take no other sizes.

Zeros add nothing to a product of query and key, and zero columns of value only make columns of the output that are cut
off again; the scale stays that of the true head dim.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from smartattn.backends.base import Runner
from smartattn.layout import Layout
from smartattn.rewrites.base import Rewrite
from smartattn.rewrites.dense import copy_layout, in_order, is_sequence_major, shapes_of
from smartattn.signature import Signature

HEAD_DIM_MULTIPLE = 8
"""Source: PyTorch's filters for Efficient and cuDNN ask for multiples of 8 elements in half precision."""


class PadHeadDim(Rewrite):
    """Dense padded copies of what is not a multiple of 8 wide."""

    name = "pad_head_dim"

    def reasons(self, signature: Signature) -> tuple[str, ...]:
        """Apply where a head dim is no multiple of 8."""
        if signature.E % HEAD_DIM_MULTIPLE or signature.Ev % HEAD_DIM_MULTIPLE:
            return ()
        return (f"head dims are multiples of {HEAD_DIM_MULTIPLE} already; they are {signature.E} and {signature.Ev}",)

    def transform(self, signature: Signature) -> Signature:
        """Return the problem with wider head dims."""
        wider = dataclasses.replace(signature, E=_padded(signature.E), Ev=_padded(signature.Ev))
        layouts: list[Layout] = []
        for before, shape, layout in zip(shapes_of(signature), shapes_of(wider), signature.layouts, strict=True):
            layouts.append(layout if before == shape else copy_layout(shape, layout, signature.itemsize_bytes))
        query, key, value = layouts
        return dataclasses.replace(wider, layouts=(query, key, value))

    def bind(self, signature: Signature, run: Runner) -> Runner:
        """Wrap the runner."""
        E, Ev = signature.E, signature.Ev
        more, more_value = _padded(E) - E, _padded(Ev) - Ev
        majors = [is_sequence_major(layout) for layout in signature.layouts]
        true_scale = 1.0 / math.sqrt(E)
        keeps_view = _stock_slices(signature)

        def padded(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
            dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
        ) -> torch.Tensor:  # fmt: skip
            if more:
                query = _pad(query, more, sequence_major=majors[0])
                key = _pad(key, more, sequence_major=majors[1])
            if more_value:
                value = _pad(value, more_value, sequence_major=majors[2])
            scale = true_scale if scale is None else scale
            output = run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if not more_value:
                return output
            output = output[..., :Ev]
            return output if keeps_view else in_order(output, sequence_major=majors[0])

        return padded

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of the padded inputs and of the wide output."""
        wider = dataclasses.replace(signature, E=_padded(signature.E), Ev=_padded(signature.Ev))
        pairs = zip(shapes_of(signature), shapes_of(wider), strict=True)
        elements = sum(math.prod(shape) for before, shape in pairs if before != shape)
        if wider.Ev != signature.Ev:
            elements += signature.N * signature.Hq * signature.L * wider.Ev
        return elements * signature.itemsize_bytes


def _padded(size: int) -> int:
    return math.ceil(size / HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


def _pad(tensor: torch.Tensor, more: int, *, sequence_major: bool) -> torch.Tensor:
    # Made contiguous first, since padding would keep the strides of inputs that look like channels-last images.
    if sequence_major:
        return _pad(tensor.transpose(-3, -2), more, sequence_major=False).transpose(-3, -2)
    dense = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return torch.nn.functional.pad(dense, (0, more))


def _stock_slices(signature: Signature) -> bool:
    """Whether PyTorch's own call would hand out a slice of wider rows too, which saves the copy.

    Source: PyTorch's Flash on CUDA pads inside and returns a slice; it takes no mask tensor, half precision, E = Ev.
    """
    s = signature
    return (
        s.device_type == "cuda" and s.mask in ("none", "causal") and s.dtype in ("float16", "bfloat16")
        and s.E == s.Ev and s.rank == 4 and s.gqa != "implicit"
    )  # fmt: skip
