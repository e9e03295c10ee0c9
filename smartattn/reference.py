"""The reference: attention written once, plainly, in a wide dtype, in blocks of bounded memory.

It also gives the gradients for a given gradient of the output, and for every row of every result a *magnitude*: the
sum of the sizes of the terms that were added up, larger for rows whose scores are large. Rounding errors are
proportional to it, whatever cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from smartattn.signature import Call

BLOCK_SCORES = 1 << 22
"""Scores computed at once.

Source: 32 MiB in float64, which is about the last-level cache of a processor and little on a GPU.
"""

VAGUE_SCORE = 1000.0
"""Score beyond that of query and key from which a row is vague: a mask's large finite value hides its every key.

Right implementations differ there: adding -65504 or finfo.min rounds the scores away, more or less of them by dtype.
"""
VAGUE_STRAIN = 1e7


@dataclass(slots=True)
class Solution:
    """Attention of one call.

    Attributes:
        tensors: ``output``, and of ``dQ dK dV dmask`` those that were asked for, in the shapes of the call.
        magnitudes: by the same names, broadcastable to the tensors.
        is_empty: bool (*batch, Hq, L, 1), True for rows that see no key.
        is_vague: bool (*batch, Hq, L, 1), True for rows of which only finiteness can be asked.
    """

    tensors: dict[str, torch.Tensor]
    magnitudes: dict[str, torch.Tensor]
    is_empty: torch.Tensor
    is_vague: torch.Tensor


def reference_dtype(device_type: str, dtype: torch.dtype, *, is_full_precision: bool = True) -> torch.dtype:
    """Return the dtype to compute the reference in: float64, or float32 for half inputs on an accelerator.

    Args:
        device_type: where the call runs.
        dtype: of query, key and value.
        is_full_precision: whether float32 matrix products are computed in float32 here (no TF32).
    """
    if device_type == "cpu" or dtype == torch.float64:
        return torch.float64
    if dtype == torch.float32 or not is_full_precision:
        return torch.float32 if device_type == "mps" else torch.float64
    return torch.float32


def attention(call: Call, dtype: torch.dtype) -> torch.Tensor:
    """Return the output (*batch, Hq, L, Ev) in ``dtype``; dropout is left out.

    A mask and ``is_causal`` both apply, the triangle starts top-left, and a row that sees no key is all zeros.
    """
    return solve(call, dtype).tensors["output"]


def solve(
    call: Call, dtype: torch.dtype, grad_out: torch.Tensor | None = None, grads: str = "", strain: float = 0.0
) -> Solution:
    """Return output, gradients and magnitudes.

    Args:
        call: with any number of batch axes and 2 to as many mask axes; dropout is left out.
        dtype: to compute and answer in.
        grad_out: gradient of the output, of its shape; ``None`` for no gradients.
        grads: which gradients, as letters of ``qkvm``.
        strain: growth of a row's magnitude per unit of its largest score.

    Cost: two matrix products over the scores in ``dtype``, seven with all gradients; memory for ``BLOCK_SCORES``
    scores (or one head's, if more) and the results.
    """
    problem = _Problem(call, dtype, grad_out, grads if grad_out is not None else "", strain)
    for batches, heads in problem.blocks():
        problem.solve_block(batches, heads)
    return problem.solution()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of 3 or more axes with all batch axes as one: (N, heads, rows, width)."""
    return tensor.unsqueeze(0) if tensor.dim() == 3 else tensor.reshape(-1, *tensor.shape[-3:])


def flat_mask(mask: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    """Return a mask with 4 axes: (N or 1, Hq or 1, L or 1, S or 1)."""
    rank = len(batch) + 3
    mask = mask.reshape(*(1,) * (rank - mask.dim()), *mask.shape)
    if set(mask.shape[:-3]) <= {1}:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])


@dataclass(slots=True)
class _Problem:
    call: Call
    dtype: torch.dtype
    grad_out: torch.Tensor | None
    grads: str
    strain: float
    query: torch.Tensor = field(init=False)
    key: torch.Tensor = field(init=False)
    value: torch.Tensor = field(init=False)
    mask: torch.Tensor | None = field(init=False)
    given: torch.Tensor | None = field(init=False)
    found: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    sizes: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    is_empty: torch.Tensor = field(init=False)
    is_vague: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        call = self.call
        self.query, self.key, self.value = flat(call.query), flat(call.key), flat(call.value)
        self.mask = None if call.attn_mask is None else flat_mask(call.attn_mask, tuple(call.query.shape[:-3]))
        self.given = None if self.grad_out is None else flat(self.grad_out)
        N, Hq, L, E = self.query.shape
        _, H, S, Ev = self.value.shape
        self._add("output", (N, Hq, L, Ev))
        wanted = {"q": ("dQ", (N, Hq, L, E)), "k": ("dK", (N, H, S, E)), "v": ("dV", (N, H, S, Ev))}
        for letter in self.grads:
            if letter in wanted:
                self._add(*wanted[letter])
            elif self.mask is not None:
                self._add("dmask", tuple(self.mask.shape), tuple(self.mask.shape))
        self.is_empty = torch.zeros((N, Hq, L, 1), dtype=torch.bool, device=self.query.device)
        self.is_vague = torch.zeros_like(self.is_empty)

    def _add(self, name: str, shape: tuple[int, ...], sizes: tuple[int, ...] | None = None) -> None:
        device = self.query.device
        self.found[name] = torch.zeros(shape, dtype=self.dtype, device=device)
        self.sizes[name] = torch.zeros(sizes or (*shape[:-1], 1), dtype=self.dtype, device=device)

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Yield batches and key heads to compute together."""
        N, Hq, L, _ = self.query.shape
        H, S = self.key.shape[1:3]
        per_head = Hq // H * L * S
        heads = max(1, min(H, BLOCK_SCORES // per_head))
        batches = max(1, BLOCK_SCORES // (per_head * H)) if heads == H else 1
        for n in range(0, N, batches):
            for h in range(0, H, heads):
                yield slice(n, min(n + batches, N)), slice(h, min(h + heads, H))

    def solve_block(self, n: slice, h: slice) -> None:
        group = self.query.size(1) // self.key.size(1)
        hq = slice(h.start * group, h.stop * group)
        query = self.query[n, hq].to(self.dtype)
        key = self.key[n, h].to(self.dtype).repeat_interleave(group, dim=1)
        value = self.value[n, h].to(self.dtype).repeat_interleave(group, dim=1)
        scale = 1.0 / math.sqrt(query.size(-1)) if self.call.scale is None else self.call.scale

        scores = (query @ key.transpose(-2, -1)).mul_(scale)
        if self.mask is not None:
            mask = _part(self.mask, n, hq)
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(self.dtype)
        if self.call.is_causal:
            L, S = scores.shape[-2:]
            later = torch.ones((L, S), dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        top = scores.amax(-1, keepdim=True)
        is_empty = top == -math.inf
        reach = query.norm(dim=-1, keepdim=True) * (key.norm(dim=-1).amax(-1)[..., None, None] * abs(scale))
        is_vague = ((top.abs() - reach) > VAGUE_SCORE) & ~is_empty
        strain = 1 + self.strain * (reach + top.masked_fill(is_empty, 0.0).abs())
        strain = strain.masked_fill(is_vague, VAGUE_STRAIN)

        weights = scores.sub_(top.masked_fill(is_empty, 0.0)).exp_()
        probabilities = weights.div_(weights.sum(-1, keepdim=True).masked_fill(is_empty, 1.0))

        self.is_empty[n, hq] = is_empty
        self.is_vague[n, hq] = is_vague
        output, size = _products(probabilities, value, value.abs().amax(-1, keepdim=True))
        self.found["output"][n, hq] = output
        self.sizes["output"][n, hq] = strain * size
        if self.given is not None and self.grads:
            self._differentiate(n, h, scale, (query, key, value), (probabilities, output, strain))

    def _differentiate(
        self, n: slice, h: slice, scale: float,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:  # fmt: skip
        query, key, value = inputs
        P, output, strain = rows
        group = self.query.size(1) // self.key.size(1)
        hq = slice(h.start * group, h.stop * group)
        assert self.given is not None
        dO = self.given[n, hq].to(self.dtype)
        # A term of dS is at most P_ij |dO_i| (|V_j| + sum_j P_ij |V_j|); all magnitudes below follow from that.
        strength = strain * dO.norm(dim=-1, keepdim=True)
        lengths = value.norm(dim=-1, keepdim=True)
        widths = key.abs().amax(-1, keepdim=True)
        mean, wide, both = _products(P, lengths, widths, lengths * widths)
        weight = strength * query.abs().amax(-1, keepdim=True)
        dV, dV_size, above, below = _products(
            P.transpose(-2, -1), dO, strain * dO.abs().amax(-1, keepdim=True), weight, weight * mean
        )
        if "v" in self.grads:
            self.found["dV"][n, h] = _over_group(dV, group)
            self.sizes["dV"][n, h] = _over_group(dV_size, group)
        if self.grads == "v":
            return
        # The sum over keys of P dP is the product of dO with the output.
        dS = (dO @ value.transpose(-2, -1)).sub_((dO * output).sum(-1, keepdim=True)).mul_(P)
        if "q" in self.grads:
            self.found["dQ"][n, hq] = (dS @ key).mul_(scale)
            self.sizes["dQ"][n, hq] = strength * (both + mean * wide) * abs(scale)
        if "k" in self.grads:
            self.found["dK"][n, h] = _over_group((dS.transpose(-2, -1) @ query).mul_(scale), group)
            self.sizes["dK"][n, h] = _over_group((lengths * above + below) * abs(scale), group)
        if "m" in self.grads:
            size = P * strength * (lengths.transpose(-2, -1) + mean)
            for totals, terms in ((self.found, dS), (self.sizes, size)):
                target = _part(totals["dmask"], n, hq)
                target += terms.sum_to_size(target.shape)

    def solution(self) -> Solution:
        batch = tuple(self.call.query.shape[:-3])
        found, sizes = (self._in_call_shapes(tensors, batch) for tensors in (self.found, self.sizes))
        rows = [tensor.reshape(*batch, *tensor.shape[1:]) for tensor in (self.is_empty, self.is_vague)]
        return Solution(found, sizes, *rows)

    def _in_call_shapes(self, tensors: dict[str, torch.Tensor], batch: tuple[int, ...]) -> dict[str, torch.Tensor]:
        shaped = {name: t.reshape(*batch, *t.shape[1:]) for name, t in tensors.items() if name != "dmask"}
        if "dmask" in tensors and self.call.attn_mask is not None:
            total, given = tensors["dmask"], self.call.attn_mask
            if total.numel() != given.numel():
                # Several batch axes, some of which the mask spans: those that it does not are summed.
                lead = (1,) * (len(batch) + 3 - given.dim())
                total = total.reshape(*batch, *total.shape[1:]).sum_to_size((*lead, *given.shape))
            shaped["dmask"] = total.reshape(given.shape)
        return shaped


def _part(mask: torch.Tensor, n: slice, hq: slice) -> torch.Tensor:
    mask = mask if mask.size(0) == 1 else mask[n]
    return mask if mask.size(1) == 1 else mask[:, hq]


def _products(P: torch.Tensor, *columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the products of one matrix with several in one pass."""
    return torch.split(P @ torch.cat(columns, -1), [column.size(-1) for column in columns], -1)


def _over_group(tensor: torch.Tensor, group: int) -> torch.Tensor:
    return tensor if group == 1 else tensor.unflatten(1, (-1, group)).sum(2)
