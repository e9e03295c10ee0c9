"""Arithmetic on layouts, shared by the rewrites: which copy a rewrite makes and how that copy lies in memory.

A rewrite must name the exact signature it leaves. Symbolic layouts fix the strides of dense tensors only, so a rewrite
takes a view where the layout proves that one exists, and else makes a dense copy, never "whatever reshape does".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from smartattn.layout import AXES, MASK_AXES, Layout, read_layout
from smartattn.signature import DTYPES, Signature


def is_sequence_major(layout: Layout) -> bool:
    """Return whether memory holds all heads of one position side by side (BSHD)."""
    return layout.order.index("s") < layout.order.index("h")


def is_dense(layout: Layout) -> bool:
    """Return whether the order of the axes alone fixes all strides."""
    return not layout.is_gapped and not layout.expanded and layout.has_unit_last_stride


def natural_order(rank: int, *, sequence_major: bool = False) -> str:
    """Return the axis letters of a dense tensor of this rank, outermost first."""
    letters = AXES[-rank:]
    return letters[:-3] + "shd" if sequence_major else letters


def strides_of(shape: Sequence[int], order: str, axes: str = AXES) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose memory follows ``order``."""
    letters = axes[-len(shape) :]
    strides = [0] * len(shape)
    step = 1
    for letter in reversed(order):
        index = letters.index(letter)
        strides[index] = step
        step *= shape[index]
    return tuple(strides)


def dense_layout(
    shape: Sequence[int], itemsize_bytes: int, order: str = "", *, has_aligned_start: bool = True
) -> Layout:
    """Return the layout of a dense query, key or value; a fresh allocation starts on 16 bytes."""
    strides = strides_of(shape, order or natural_order(len(shape)))
    return read_layout(tuple(shape), strides, itemsize_bytes, 0 if has_aligned_start else 1)


def dense_mask_layout(shape: Sequence[int], dtype_name: str, row_multiple: int = 1) -> Layout:
    """Return the layout of a freshly made mask whose rows are padded to a multiple of so many elements."""
    width = math.ceil(shape[-1] / row_multiple) * row_multiple
    letters = MASK_AXES[-len(shape) :]
    strides = strides_of((*shape[:-1], width), letters, MASK_AXES)
    itemsize_bytes = 1 if dtype_name == "bool" else DTYPES[dtype_name].itemsize
    layout = read_layout(tuple(shape), strides, itemsize_bytes, 0, MASK_AXES)
    if dtype_name == "bool":
        # Signatures do not tell the alignment of bool masks apart.
        return dataclasses.replace(layout, has_aligned_rows=True, has_aligned_start=True)
    return layout


def shapes_of(signature: Signature) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of query, key and value."""
    s = signature
    return (*s.batch, s.Hq, s.L, s.E), (*s.batch, s.H, s.S, s.E), (*s.batch, s.H, s.S, s.Ev)


def mask_shape_of(signature: Signature) -> tuple[int, ...]:
    """Return the shape of the mask tensor: the full size where ``mask_axes`` names the axis, 1 elsewhere."""
    s = signature
    full = (*s.batch, s.Hq, s.L, s.S)
    axes = s.mask_axes
    return tuple(1 if letter == "1" else size for letter, size in zip(axes, full[len(full) - len(axes) :], strict=True))


def axes_of(shape: Sequence[int]) -> str:
    """Return the ``mask_axes`` of a mask of this shape."""
    letters = MASK_AXES[-len(shape) :]
    return "".join(letter if size > 1 else "1" for letter, size in zip(letters, shape, strict=True))


def copy_layout(shape: Sequence[int], layout: Layout, itemsize_bytes: int) -> Layout:
    """Return the layout of ``dense_copy``."""
    order = natural_order(len(shape), sequence_major=is_sequence_major(layout))
    return dense_layout(shape, itemsize_bytes, order)


def dense_copy(tensor: torch.Tensor, *, sequence_major: bool) -> torch.Tensor:
    """Copy to dense memory that keeps heads and sequence in the order given."""
    if sequence_major:
        return tensor.transpose(-3, -2).clone(memory_format=torch.contiguous_format).transpose(-3, -2)
    return tensor.clone(memory_format=torch.contiguous_format)


def in_order(output: torch.Tensor, *, sequence_major: bool) -> torch.Tensor:
    """Return the output in the memory order of the query, as PyTorch's fused backends give it; copies if need be."""
    if sequence_major:
        return output.transpose(-3, -2).contiguous().transpose(-3, -2)
    return output.contiguous()


def without_expanded(mask: torch.Tensor, narrowed: Sequence[int]) -> torch.Tensor:
    """Return the mask with size 1 on these axes, along which it only repeats itself."""
    for axis in narrowed:
        mask = mask.narrow(axis, 0, 1)
    return mask


def expanded_axes(signature: Signature) -> tuple[int, ...]:
    """Return the axes, counted from the end, along which the mask repeats itself; never that of the keys."""
    layout = signature.mask_layout
    # A gradient is wanted per element of the mask, also where elements share memory.
    if layout is None or "m" in signature.grads:
        return ()
    letters = MASK_AXES[-len(signature.mask_axes) :]
    return tuple(letters.index(x) - len(letters) for x in layout.expanded if x != "s")


def narrowed_mask_shape(signature: Signature) -> tuple[int, ...]:
    """Return the shape of the mask after ``without_expanded``."""
    shape = list(mask_shape_of(signature))
    for axis in expanded_axes(signature):
        shape[axis] = 1
    return tuple(shape)
