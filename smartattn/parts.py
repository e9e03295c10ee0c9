"""Parts of a large problem: some batches, heads and query rows (first, last, random) whose results can be checked alone.

A part of a call is a smaller call. Its output is the same rows of the whole output, and its gradients are the whole
gradients at the same places for a gradient of the output that is zero elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from smartattn.reference import flat, flat_mask
from smartattn.signature import Call, Signature

MIN_ROWS = 8
_EDGE = 2


@dataclass(frozen=True, slots=True)
class Part:
    """What is looked at; indices in ascending order.

    Attributes:
        batches: of the flattened batch.
        key_heads: of key and value.
        members: of each group of query heads.
        rows: of the query length.
        group: query heads per key head in the whole call.
    """

    batches: tuple[int, ...]
    key_heads: tuple[int, ...]
    members: tuple[int, ...]
    rows: tuple[int, ...]
    group: int

    @property
    def query_heads(self) -> tuple[int, ...]:
        """The query heads: the same members of each chosen group."""
        return tuple(h * self.group + member for h in self.key_heads for member in self.members)


def choose_part(signature: Signature, limit: int, seed: int = 0) -> Part | None:
    """Return a part of about ``limit`` scores; ``None`` when the whole problem has no more."""
    s = signature
    # The gradient of a mask that broadcasts over batch axes, or under the triangle, is no part of a smaller call's.
    is_whole_mask = "m" in s.grads and (s.rank > 4 or (s.is_causal and "1" in s.mask_axes[-2:]))
    if s.num_scores <= limit or is_whole_mask:
        return None
    draw = random.Random(seed)  # noqa: S311 - no secret
    for count in (3, 2, 1):
        batches, key_heads, members = (_ends(size, count, draw) for size in (s.N, s.H, s.group))
        rows = limit // (len(batches) * len(key_heads) * len(members) * s.S)
        if rows >= min(MIN_ROWS, s.L) or count == 1:
            break
    return Part(batches, key_heads, members, _ends(s.L, max(rows, min(MIN_ROWS, s.L)), draw), s.group)


def _ends(size: int, count: int, draw: random.Random) -> tuple[int, ...]:
    """Return ``count`` of ``range(size)``: the last, the first, more of both ends when there is room, then random."""
    if count >= size:
        return tuple(range(size))
    edge = _EDGE if count > 2 * _EDGE else 1
    chosen = dict.fromkeys([*range(size - 1, size - 1 - edge, -1), *range(edge)][:count])
    middle = range(edge, size - edge)
    return tuple(sorted([*chosen, *draw.sample(middle, count - len(chosen))]))


def restrict(call: Call, part: Part) -> Call:
    """Return the part of a call as a call of its own, with four axes; the triangle becomes part of the mask."""
    mask = None
    if call.attn_mask is not None:
        mask = take(flat_mask(call.attn_mask, tuple(call.query.shape[:-3])), part, "dmask")
    if call.is_causal:
        mask = _with_triangle(mask, part, call)
    return call._replace(
        query=take(call.query, part, "dQ"),
        key=take(call.key, part, "dK"),
        value=take(call.value, part, "dV"),
        attn_mask=mask,
        is_causal=False,
        enable_gqa=len(part.members) > 1,
    )


def _with_triangle(mask: torch.Tensor | None, part: Part, call: Call) -> torch.Tensor:
    device = call.query.device
    rows = torch.tensor(part.rows, device=device).unsqueeze(-1)
    visible = torch.arange(call.key.size(-2), device=device) <= rows
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, float("-inf"))


def take(tensor: torch.Tensor, part: Part, name: str) -> torch.Tensor:
    """Return the part of a tensor that stands where ``name`` (``output dQ dK dV dmask``) does, with four axes."""
    tensor = flat(tensor) if tensor.dim() != 4 else tensor
    heads = part.key_heads if name in ("dK", "dV") else part.query_heads
    tensor = _take_along(tensor, 0, part.batches)
    tensor = _take_along(tensor, 1, heads)
    return tensor if name in ("dK", "dV") else _take_along(tensor, 2, part.rows)


def spread(values: torch.Tensor, part: Part, shape: torch.Size) -> torch.Tensor:
    """Return zeros of ``shape`` (*batch, Hq, L, width) with ``values`` at the part's places."""
    whole = torch.zeros(flat(torch.empty(shape, device="meta")).shape, dtype=values.dtype, device=values.device)
    indices = [torch.tensor(i, device=values.device) for i in (part.batches, part.query_heads, part.rows)]
    whole[indices[0][:, None, None], indices[1][:, None], indices[2]] = values
    return whole.reshape(shape)


def _take_along(tensor: torch.Tensor, dim: int, indices: tuple[int, ...]) -> torch.Tensor:
    if tensor.size(dim) == 1 or len(indices) == tensor.size(dim):
        return tensor
    return tensor.index_select(dim, torch.tensor(indices, device=tensor.device))
