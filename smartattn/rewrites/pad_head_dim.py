"""``pad_head_dim``: zeros behind the head dim up to a multiple of 8, for backends that take no other sizes.

``pad_head_dim_64`` pads the same head dims up to a multiple of 64, for which kernels are built.

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


WIDE_MULTIPLE = 64
"""Source: on an H200 cuDNN takes 38 us for a head dim of 100 padded to 128, flash padded inside 57."""


class PadHeadDim(Rewrite):
    """Dense padded copies of what is not a multiple of 8 wide.

    Attributes:
        multiple: that head dims are padded to.
    """

    name = "pad_head_dim"

    def __init__(self, multiple: int = HEAD_DIM_MULTIPLE) -> None:
        self.multiple = multiple
        if multiple != HEAD_DIM_MULTIPLE:
            self.name = f"{PadHeadDim.name}_{multiple}"

    def reasons(self, signature: Signature) -> tuple[str, ...]:
        """Apply where a head dim is no multiple of 8."""
        if not (signature.E % HEAD_DIM_MULTIPLE or signature.Ev % HEAD_DIM_MULTIPLE):
            dims = f"{signature.E} and {signature.Ev}"
            return (f"head dims are multiples of {HEAD_DIM_MULTIPLE} already; they are {dims}",)
        return ()

    def transform(self, signature: Signature) -> Signature:
        """Return the problem with wider head dims."""
        wider = self._wider(signature)
        layouts: list[Layout] = []
        for before, shape, layout in zip(shapes_of(signature), shapes_of(wider), signature.layouts, strict=True):
            layouts.append(layout if before == shape else copy_layout(shape, layout, signature.itemsize_bytes))
        query, key, value = layouts
        return dataclasses.replace(wider, layouts=(query, key, value))

    def bind(self, signature: Signature, run: Runner) -> Runner:
        """Wrap the runner."""
        E, Ev = signature.E, signature.Ev
        more, more_value = -E % self.multiple, -Ev % self.multiple
        majors = [is_sequence_major(layout) for layout in signature.layouts]
        true_scale = 1.0 / math.sqrt(E)
        keeps_view = _stock_slices(signature)
        is_training = signature.wants_grad

        def padded(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
            dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
        ) -> torch.Tensor:  # fmt: skip
            if more and more_value and not is_training and type(query) is torch.Tensor:
                query, key, value = _pad_together((query, key, value), (more, more, more_value), majors)
            else:
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
        wider = self._wider(signature)
        pairs = zip(shapes_of(signature), shapes_of(wider), strict=True)
        elements = sum(math.prod(shape) for before, shape in pairs if before != shape)
        if wider.Ev != signature.Ev:
            elements += signature.N * signature.Hq * signature.L * wider.Ev
        return elements * signature.itemsize_bytes

    def _wider(self, signature: Signature) -> Signature:
        E, Ev = (size + -size % self.multiple for size in (signature.E, signature.Ev))
        return dataclasses.replace(signature, E=E, Ev=Ev)


def _pad_together(
    tensors: tuple[torch.Tensor, ...], more: tuple[int, ...], sequence_major: list[bool]
) -> list[torch.Tensor]:
    """Pad several tensors into one piece of zeros: one launch fewer for each, for calls without gradients."""
    swapped = [t.transpose(-3, -2) if major else t for t, major in zip(tensors, sequence_major, strict=True)]
    shapes = [(*t.shape[:-1], t.size(-1) + wide) for t, wide in zip(swapped, more, strict=True)]
    pieces = tensors[0].new_zeros(sum(map(math.prod, shapes))).split([math.prod(shape) for shape in shapes])
    padded = []
    for tensor, piece, shape, major in zip(swapped, pieces, shapes, sequence_major, strict=True):
        wide = piece.view(shape)
        wide[..., : tensor.size(-1)].copy_(tensor)
        padded.append(wide.transpose(-3, -2) if major else wide)
    return padded


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
