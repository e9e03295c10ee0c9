"""Find out what a dense mask means by comparing its values with what each class would hold; exact, one sync a mask.

All verdicts and parameters are computed on the device and read as one small tensor. A mask is called by a class only if
every one of its elements is as the class says.
"""

from __future__ import annotations

import dataclasses
import time

import torch

from smartattn.mask_facts import Facts, can_be_remembered, facts_of, remember
from smartattn.signature import Call

_MAX_RANK = 4


def recognize(call: Call) -> Facts | None:
    """Return the facts about the mask of a call, found out now unless they are remembered.

    Args:
        call: with a mask tensor; (N, Hq, L, E) inputs, or (Hq, L, E) with a mask of two dimensions.

    Returns:
        ``None`` for what is not looked at: no mask, masks that want a gradient, inference tensors, more dimensions.

    Note:
        Never call this under graph capture or compilation: at a mask's first sight it reads the whole mask on the
        device and waits for the answer once (its ``cost_ms``).
    """
    mask = call.attn_mask
    if mask is None or mask.requires_grad or not can_be_remembered(mask):
        return None
    rank = call.query.dim()
    if not 2 <= mask.dim() <= _MAX_RANK or (mask.dim() > 2 and rank != _MAX_RANK):
        return None
    L, S = call.query.size(-2), call.key.size(-2)
    if mask.size(-1) != S or mask.size(-2) not in (1, L) or mask.numel() == 0:
        return None
    known = facts_of(mask)
    if known is None:
        start_s = time.perf_counter()
        known = _find_out(mask, L, S)
        known = dataclasses.replace(known, cost_ms=(time.perf_counter() - start_s) * 1e3)
        remember(mask, known)
    return known


def _visible(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which keys are visible, (B, rows, S), and whether nothing but visible and hidden occurs."""
    for axis, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if size > 1 and stride == 0 and axis < mask.dim() - 1:
            mask = mask.narrow(axis, 0, 1)
    whole = mask.reshape((1,) * (_MAX_RANK - mask.dim()) + tuple(mask.shape))
    yes = torch.ones((), dtype=torch.bool, device=mask.device)
    visible = whole if whole.dtype == torch.bool else whole == 0
    if whole.dtype != torch.bool:
        yes = (visible | (whole == float("-inf"))).all()
    if whole.size(1) > 1:
        yes = yes & (visible == visible[:, :1]).all()
    return visible[:, 0], yes


def _find_out(mask: torch.Tensor, L: int, S: int) -> Facts:
    other = Facts("bool" if mask.dtype == torch.bool else "additive")
    with torch.no_grad():
        visible, is_plain = _visible(mask)
        rows = visible.size(1)
        keys = torch.arange(S, device=mask.device)
        last = visible[:, -1]
        starts, lengths = _first(last), last.sum(-1)
        in_range = (keys >= starts[:, None]) & (keys < (starts + lengths)[:, None])
        checks = {"all": visible.all(), "padding": (visible == in_range[:, None]).all()}
        low, high = starts[0] - (rows - 1), S - 1 - _first(visible[0, 0].flip(-1))
        if rows == L > 1:
            checks |= _square_checks(visible, keys, in_range, low, high)
        is_left = ((starts + lengths == S) | (lengths == 0)).all()
        longest = checks.pop("longest", torch.zeros((), device=mask.device))
        num_documents = checks.pop("num_documents", torch.zeros((), device=mask.device))
        firsts = checks.pop("firsts", None)
        numbers = (low, high, is_left, longest, num_documents)
        answers = torch.stack([v.long() for v in (is_plain, *numbers, *checks.values())]).tolist()
    if not answers[0]:
        return other
    found = dict(zip(checks, answers[1 + len(numbers) :], strict=True))
    facts = _band(found, answers[1], answers[2], L, S) or _padding(found, starts, lengths, is_left=bool(answers[3]))
    if facts is None and firsts is not None:
        facts = _documents(found, firsts, num_documents=answers[5], longest=answers[4])
    return facts or other


def _first(visible: torch.Tensor) -> torch.Tensor:
    """Return where the first visible key is, 0 where there is none."""
    return visible.contiguous().view(torch.uint8).argmax(-1)


def _square_checks(
    visible: torch.Tensor, keys: torch.Tensor, in_range: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the verdicts that need one row per query, and the documents' measures."""
    L, S = visible.shape[-2:]
    queries = torch.arange(L, device=visible.device)
    # Vectors are compared across each other, so that no matrix of numbers is made, eight times a mask's size.
    band = (keys >= (queries + low)[:, None]) & (keys <= (queries + high)[:, None])
    found = {"band": (visible == band).all()}
    if L != S:
        return found
    triangle = keys <= queries[:, None]
    found["causal_padding"] = (visible == (in_range[:, None] & triangle)).all()
    firsts = _first(visible[0]) == queries
    documents = firsts.cumsum(0)
    same = documents[:, None] == documents
    found["documents"] = (visible == same).all()
    found["causal_documents"] = (visible == (same & triangle)).all()
    sizes = torch.zeros(S + 1, dtype=torch.long, device=visible.device)
    sizes.scatter_add_(0, documents, torch.ones_like(documents))
    return found | {"longest": sizes.max(), "num_documents": documents[-1], "firsts": firsts}


def _band(found: dict[str, int], low: int, high: int, L: int, S: int) -> Facts | None:
    if found["all"]:
        return Facts("none")
    if not found.get("band"):
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


def _padding(found: dict[str, int], starts: torch.Tensor, lengths: torch.Tensor, *, is_left: bool) -> Facts | None:
    if found["padding"]:
        return Facts("key_padding", starts=starts.int(), lengths=lengths.int())
    if found.get("causal_padding") and is_left:
        return Facts("causal+key_padding(left)", starts=starts.int(), lengths=lengths.int())
    if found.get("causal_padding"):
        return Facts("causal+key_padding(right)", starts=starts.int(), lengths=lengths.int())
    return None


def _documents(found: dict[str, int], firsts: torch.Tensor, *, num_documents: int, longest: int) -> Facts | None:
    if not (found.get("documents") or found.get("causal_documents")):
        return None
    S = firsts.numel()
    ends = torch.full((num_documents + 1,), S, dtype=torch.int32, device=firsts.device)
    # Sorted, since reading the positions themselves would wait for the device again.
    at = torch.where(firsts, torch.arange(S, device=firsts.device), S)
    ends[:-1] = at.sort().values[:num_documents].int()
    name = "documents" if found.get("documents") else "causal+documents"
    return Facts(name, ends=ends, longest=longest)
