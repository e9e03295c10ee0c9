"""Which class a mask is of whose rows each see one run of neighbouring keys: arithmetic on short vectors, on the host."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from smartattn.mask_facts import Facts


@dataclass(frozen=True, eq=False)
class Runs:
    """What the rows of a mask see.

    Attributes:
        start: (B, rows) first visible key, 0 in rows that see none.
        count: (B, rows) number of visible keys.
        S: number of keys.
    """

    start: torch.Tensor
    count: torch.Tensor
    S: int

    def are(self, start: torch.Tensor, end: torch.Tensor) -> bool:
        """Return whether the rows see exactly the keys from ``start`` to before ``end``, both broadcast to all rows."""
        count = (end - start).clamp_(min=0)
        # Where nothing is seen there is no first key to compare.
        return bool(((self.count == count) & ((self.start == start) | (count == 0))).all())


def class_of(runs: Runs, L: int) -> Facts | None:
    """Return the class of a mask for L queries, vectors on the host; ``None`` when it has none."""
    rows = runs.start.size(1)
    if bool((runs.count == runs.S).all()):
        return Facts("none")
    facts = _band(runs) if rows == L > 1 else None
    facts = facts or _padding(runs, L)
    return _documents(runs) if facts is None and rows == L == runs.S > 1 else facts


def _band(runs: Runs) -> Facts | None:
    start, count, S = runs.start[0], runs.count[0], runs.S
    L = start.numel()
    seeing = int((count > 0).byte().argmax())
    high = int(start[seeing] + count[seeing]) - 1 - seeing
    low = int(start[-1]) - (L - 1)
    queries = torch.arange(L)
    if not runs.are((queries + low).clamp_(min=0), (queries + high + 1).clamp_(max=S)):
        return None
    is_unbounded_left = low <= -(L - 1)
    if is_unbounded_left and high == 0:
        return Facts("causal", left=-1, right=0)
    if is_unbounded_left and high == S - L:
        return Facts("causal_lower_right", left=-1, right=0)
    left = -1 if is_unbounded_left else S - L - low
    right = -1 if high >= S - 1 else high - (S - L)
    # The kernels read a negative number as "no limit", so windows that leave the diagonal out have no name.
    if (left < 0 and not is_unbounded_left) or (right < 0 and high < S - 1):
        return None
    return Facts(f"window({left},{right})", left=left, right=right)


def _padding(runs: Runs, L: int) -> Facts | None:
    start, end = runs.start[:, -1:], runs.start[:, -1:] + runs.count[:, -1:]
    padded = Facts("key_padding", starts=start[:, 0], lengths=(end - start)[:, 0])
    if runs.are(start, end):
        return padded
    if runs.start.size(1) != L or L != runs.S:
        return None
    if not runs.are(start, torch.minimum(end, torch.arange(1, L + 1))):
        return None
    is_left = bool(((end == runs.S) | (end == start)).all())
    return dataclasses.replace(padded, name=f"causal+key_padding({'left' if is_left else 'right'})")


def _documents(runs: Runs) -> Facts | None:
    queries = torch.arange(runs.S)
    firsts = (runs.start[0] == queries).nonzero()[:, 0]
    # The first query begins a document whatever the mask says of it.
    ends = torch.cat([firsts.new_zeros(1), firsts[firsts > 0], firsts.new_tensor([runs.S])])
    sizes = ends.diff()
    start = ends[:-1].repeat_interleave(sizes)
    longest = int(sizes.max())
    if runs.are(start, ends[1:].repeat_interleave(sizes)):
        return Facts("documents", ends=ends, longest=longest)
    if runs.are(start, queries + 1):
        return Facts("causal+documents", ends=ends, longest=longest)
    return None
