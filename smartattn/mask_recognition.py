"""Find out what a dense mask means from the visible keys of each row; exact, one sync a mask.

Every class sees, in each row, one run of neighbouring keys. So each row is reduced on the device to its first and last
visible key and their number, which tell whether it is such a run and then say all of it; they are read once, and the
classes are compared with those short vectors on the host. Rows are read eight keys at a time.

Programs make the same mask anew for every step. Once two masks of one form were alike, the next is compared with what
is expected instead, which is one number to read.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from smartattn.mask_facts import Facts, can_be_remembered, facts_of, remember
from smartattn.mask_runs import Runs, class_of
from smartattn.signature import Call

_MAX_RANK = 4
_WORD = 8
"""Keys read at a time: bool elements in an int64."""
_LANE_LIMIT = 128
"""Words added up at a time: a byte of the sum holds 255 at most."""
_EXPECTS_ON = ("cuda",)
"""Where comparing is quicker than reducing: a single CPU core takes 7 against 4 ms at 2048 x 2048."""
MAX_EXPECTED = 32
"""Forms of masks that something is expected of; each holds two numbers per row on the device."""


@dataclass(frozen=True, eq=False)
class Expected:
    """What the next mask of a form is likely to be.

    Attributes:
        runs: of the last mask, on the host.
        start, end: (B, rows, 1) int64 on the mask's device, first visible key and the one behind the last.
        facts: that follow.
        is_trusted: whether the last two masks of the form were so.
    """

    runs: Runs
    start: torch.Tensor
    end: torch.Tensor
    facts: Facts
    is_trusted: bool = False


_expected: OrderedDict[tuple[Any, ...], Expected] = OrderedDict()
_lock = threading.Lock()


def can_be_recognized(call: Call) -> bool:
    """Return whether the mask of a call is one that is looked at: shape and kind only, no device work."""
    mask = call.attn_mask
    if mask is None or mask.requires_grad or not can_be_remembered(mask):
        return False
    rank = call.query.dim()
    if not 2 <= mask.dim() <= _MAX_RANK or (mask.dim() > 2 and rank != _MAX_RANK):
        return False
    L, S = call.query.size(-2), call.key.size(-2)
    return mask.size(-1) == S and mask.size(-2) in (1, L) and mask.numel() > 0


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
    if mask is None or not can_be_recognized(call):
        return None
    known = facts_of(mask)
    if known is None:
        start_s = time.perf_counter()
        with torch.no_grad():
            known = _find_out(mask, call.query.size(-2), call.key.size(-2))
        known = dataclasses.replace(known, cost_ms=(time.perf_counter() - start_s) * 1e3)
        remember(mask, known)
    return known


def _find_out(mask: torch.Tensor, L: int, S: int) -> Facts:
    other = Facts("bool" if mask.dtype == torch.bool else "additive")
    visible, is_plain = _visible(mask)
    B, rows, _ = visible.shape
    form = tuple(mask.shape), mask.stride(), mask.dtype, mask.device, L, S
    expected = _expected.get(form) if mask.device.type in _EXPECTS_ON else None
    if expected is not None and expected.is_trusted:
        if _is_as_expected(visible, is_plain, expected):
            return expected.facts
        _note(form, dataclasses.replace(expected, is_trusted=False))
    words = _words(visible.reshape(B * rows, S))
    columns = torch.stack([*_ends(words), _counts(words)])
    # Where no element can be anything else, there is no verdict to bring along.
    read = columns.flatten() if is_plain is None else torch.cat([columns.flatten(), is_plain.long().view(1)])
    numbers = read.cpu()
    if is_plain is not None and not numbers[-1]:
        return other
    runs = _runs(numbers[: columns.numel()].view(5, B, rows), S)
    found = None if runs is None else class_of(runs, L)
    if runs is None or found is None:
        return other
    if expected is not None and expected.runs.are(runs.start, runs.start + runs.count):
        _note(form, dataclasses.replace(expected, is_trusted=True))
        return expected.facts
    facts = _on(found, mask.device)
    start, end = (vector.unsqueeze(-1).to(mask.device) for vector in (runs.start, runs.start + runs.count))
    _note(form, Expected(runs, start, end, facts))
    return facts


def _note(form: tuple[Any, ...], expected: Expected) -> None:
    with _lock:
        _expected[form] = expected
        _expected.move_to_end(form)
        while len(_expected) > MAX_EXPECTED:
            _expected.popitem(last=False)


def _is_as_expected(visible: torch.Tensor, is_plain: torch.Tensor | None, expected: Expected) -> bool:
    keys = torch.arange(visible.size(-1), device=visible.device)
    is_same = ((keys >= expected.start) & (keys < expected.end)).eq_(visible).all()
    return bool(is_same if is_plain is None else is_same & is_plain)


def _on(facts: Facts, device: torch.device) -> Facts:
    """Return facts with their vectors on the mask's device."""
    vectors = {"ends": facts.ends, "starts": facts.starts, "lengths": facts.lengths}
    moved = {name: v.to(device=device, dtype=torch.int32) for name, v in vectors.items() if v is not None}
    return dataclasses.replace(facts, **moved)  # type: ignore[arg-type]  # each vector goes back to its own field


def _visible(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return which keys are visible, (B, rows, S), and whether nothing but visible and hidden occurs alike in all heads."""
    for axis, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if size > 1 and stride == 0 and axis < mask.dim() - 1:
            mask = mask.narrow(axis, 0, 1)
    whole = mask.reshape((1,) * (_MAX_RANK - mask.dim()) + tuple(mask.shape))
    visible, is_plain = whole, None
    if whole.dtype != torch.bool:
        visible = whole == 0
        is_plain = (visible ^ (whole == float("-inf"))).all()
    if whole.size(1) > 1:
        is_same = (visible == visible[:, :1]).all()
        is_plain = is_same if is_plain is None else is_plain & is_same
    return visible[:, 0], is_plain


def _words(visible: torch.Tensor) -> torch.Tensor:
    """Return rows of bool as rows of int64, hidden keys added up to a whole word."""
    more = -visible.size(-1) % _WORD
    if more:
        visible = torch.nn.functional.pad(visible, (0, more))
    if not visible.is_contiguous() or visible.storage_offset() % _WORD:
        visible = visible.clone(memory_format=torch.contiguous_format)
    return visible.view(torch.int64)


def _ends(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return of each row the place of the first and of the last word with a visible key, and those words."""
    some = (words != 0).view(torch.uint8)
    first = some.argmax(-1)
    last = words.size(-1) - 1 - some.flip(-1).argmax(-1)
    return first, last, words.gather(1, first.unsqueeze(1)).squeeze(1), words.gather(1, last.unsqueeze(1)).squeeze(1)


def _counts(words: torch.Tensor) -> torch.Tensor:
    """Return the number of visible keys of each row: the bytes of words are added side by side."""
    lane = max(size for size in (1, 2, 4, 8, 16, 32, 64, _LANE_LIMIT) if words.size(-1) % size == 0)
    sums = words.view(words.size(0), -1, lane).sum(-1)
    return sums.view(torch.uint8).view(words.size(0), -1).sum(-1)


def _runs(columns: torch.Tensor, S: int) -> Runs | None:
    """Return each row's first visible key and their number; ``None`` unless every row is one run."""
    first_word, last_word, first, last, count = columns
    # Little-endian machines keep the first key in the lowest byte of a word; every byte is 0 or 1.
    start = first_word * _WORD + _log2(first & -first) // _WORD
    end = last_word * _WORD + _log2(last) // _WORD + 1
    is_empty = count == 0
    if not bool(((end - start == count) | is_empty).all()):
        return None
    return Runs(start.masked_fill(is_empty, 0), count, S)


def _log2(words: torch.Tensor) -> torch.Tensor:
    """Return the place of the highest bit; what float64 rounds away lies eight bits below it."""
    return words.clamp(min=1).double().log2_().long()
