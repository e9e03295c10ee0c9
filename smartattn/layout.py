"""Symbolic memory layout of one tensor: what a kernel's speed and validity depend on, without raw strides.

Text form: axes from outermost to innermost in memory (``b`` batch, ``h`` heads, ``s`` sequence, ``d`` head dim;
extra batch axes are digits), then marks: ``~`` gapped (a view of something wider), ``/h`` axis ``h`` is expanded
(stride 0), ``%`` a last
axis whose elements do not lie side by side, ``!`` rows that do not start on 16 bytes,
``@`` data that does not start on 16 bytes.
A BSHD view of a packed projection is ``bshd~``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

AXES = "8765432bhsd"
MASK_AXES = "8765432bhls"
ALIGNMENT_BYTES = 16
"""Vector width of the loads that fused kernels use.

Source: torch's Efficient kernels read 16 bytes at a time (pytorch#183484).
"""
_TEXT = re.compile(
    r"^(?P<order>[0-9a-z]+)(?P<gapped>~?)(?P<step>%?)(?:/(?P<expanded>[0-9a-z]+))?(?P<rows>!?)(?P<start>@?)$"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of one tensor.

    Attributes:
        order: axis letters from outermost to innermost; axes of size 1 and expanded ones stand in natural order.
        is_gapped: whether memory between the elements is skipped.
        expanded: letters of axes that are longer than 1 and have stride 0.
        has_aligned_rows: whether every stride but the innermost is a multiple of 16 bytes.
        has_aligned_start: whether the first element lies on a multiple of 16 bytes.
        has_unit_last_stride: whether the elements of the last axis lie side by side (true for a size of 1).
    """

    order: str
    is_gapped: bool = False
    expanded: str = ""
    has_aligned_rows: bool = True
    has_aligned_start: bool = True
    has_unit_last_stride: bool = True

    def __str__(self) -> str:
        return (
            self.order
            + "~" * self.is_gapped
            + "%" * (not self.has_unit_last_stride)
            + (f"/{self.expanded}" if self.expanded else "")
            + "!" * (not self.has_aligned_rows)
            + "@" * (not self.has_aligned_start)
        )


def parse_layout(text: str) -> Layout:
    """Return the layout whose ``str`` is ``text``; raise ``ValueError`` otherwise."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no layout")
    return Layout(
        order=match["order"],
        is_gapped=bool(match["gapped"]),
        expanded=match["expanded"] or "",
        has_aligned_rows=not match["rows"],
        has_aligned_start=not match["start"],
        has_unit_last_stride=not match["step"],
    )


def read_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize_bytes: int, start_bytes: int, axes: str = AXES
) -> Layout:
    """Return the layout of a tensor from its facts; shape and strides in elements, ``start_bytes`` an address."""
    letters = axes[-len(shape) :]
    moving = [i for i, size in enumerate(shape) if size > 1 and strides[i] != 0]
    expanded = "".join(letters[i] for i, size in enumerate(shape) if size > 1 and strides[i] == 0)
    by_stride = sorted(moving, key=lambda i: (-strides[i], i))
    slots = iter(by_stride)
    # Axes that do not move keep their natural place, so that sizes of 1 do not invent layouts of their own.
    order = [next(slots) if i in moving else i for i in range(len(shape))]
    expected = 1
    is_gapped = False
    for i in reversed(by_stride):
        is_gapped = is_gapped or strides[i] != expected
        expected = strides[i] * shape[i]
    outer = [strides[i] * itemsize_bytes for i in moving if i != len(shape) - 1]
    return Layout(
        order="".join(letters[i] for i in order),
        is_gapped=is_gapped,
        expanded=expanded,
        has_aligned_rows=all(stride % ALIGNMENT_BYTES == 0 for stride in outer),
        has_aligned_start=start_bytes % ALIGNMENT_BYTES == 0,
        has_unit_last_stride=shape[-1] <= 1 or strides[-1] == 1,
    )
