"""What is known about the values of mask tensors, remembered by identity.

A fact belongs to one tensor at one moment: address, shape, strides, dtype, device and version counter, as long as the
tensor itself lives, or the one that it is a view of: models often cut the same view anew for every layer. Writes that bypass the version counter (through ``.data``, NumPy or another library's pointer) are
not seen; whoever writes masks so must switch ``recognize_masks`` off.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

TABLE_SIZE = 256
"""Most mask tensors that facts are kept for; the least recently noted go first."""


@dataclass(frozen=True, eq=False)
class Facts:
    """What the values of one mask tensor are.

    Attributes:
        name: mask class as it stands in signatures; ``bool`` or ``additive`` when the values follow no known class.
        left: keys before a query's own position that it sees, -1 for all; positions end together (query L - 1 stands
            at key S - 1).
        right: keys after it, -1 for all.
        ends: (documents + 1,) int32 on the mask's device, where documents begin and end; ``None`` elsewhere.
        longest: length of the longest document.
        starts: (N or 1,) int32 on the mask's device, first visible key of each batch element; ``None`` elsewhere.
        lengths: (N or 1,) int32, number of visible keys.
        cost_ms: what finding this out took, once.
    """

    name: str
    left: int = -1
    right: int = -1
    ends: torch.Tensor | None = None
    longest: int = 0
    starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    cost_ms: float = 0.0
    repeated: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Device tensors derived from these facts by whoever runs them, by a key of their own."""

    @property
    def is_known(self) -> bool:
        """Whether the values follow a class."""
        return self.name not in ("bool", "additive")


Identity = tuple[Any, ...]
_table: OrderedDict[Identity, tuple[TensorWeakRef, int, Facts]] = OrderedDict()
"""Identity to the owner of the memory, the owner's address, and the facts."""
_lock = threading.Lock()


def can_be_remembered(mask: torch.Tensor) -> bool:
    """Return whether changes of this tensor would be seen: inference tensors have no version counter."""
    return type(mask) in (torch.Tensor, torch.nn.Parameter) and not mask.is_inference()


def identity_of(mask: torch.Tensor) -> Identity:
    """Return what tells this tensor at this moment from every other; about 2 us."""
    return (
        mask.data_ptr(), mask.storage_offset(), tuple(mask.shape), mask.stride(), mask.dtype, mask.device,
        mask._version,
    )  # fmt: skip


def owner_of(mask: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose life is that of the memory: the one that ``mask`` is a view of, else ``mask``."""
    base = mask._base
    return mask if base is None else base


def remember(mask: torch.Tensor, facts: Facts) -> None:
    """Keep the facts of a tensor for as long as its memory lives and nobody writes to it."""
    identity, owner = identity_of(mask), owner_of(mask)
    with _lock:
        _table[identity] = TensorWeakRef(owner), owner.data_ptr(), facts
        _table.move_to_end(identity)
        while len(_table) > TABLE_SIZE:
            _table.popitem(last=False)


def facts_of(mask: torch.Tensor) -> Facts | None:
    """Return what is remembered about a tensor; ``None`` when nothing is, or when it has been written to since.

    Cost: about 3 us, no device work.
    """
    if not can_be_remembered(mask):
        return None
    found = _table.get(identity_of(mask))
    if found is None:
        return None
    kept = found[0]()
    # A dead owner means that its memory may have been handed out again; a living one may have been pointed elsewhere.
    if kept is None or kept.data_ptr() != found[1] or kept._version != mask._version:
        return None
    return found[2]


def forget() -> None:
    """Forget all facts."""
    with _lock:
        _table.clear()
