"""Ranges of lengths turned into signatures to tune: one per bucket, at the bucket's upper edge.

What is square stays square (L equals S), and a single query (decoding) stays one. A dense mask whose rows are S long
has aligned rows at some lengths only, and those are families of their own, so both are spread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from smartattn.buckets import bucket_of, length_range, octave_range
from smartattn.errors import SettingError, UnknownNameError
from smartattn.layout import ALIGNMENT_BYTES
from smartattn.signature import DTYPES, Signature

AXES = ("key", "query", "batch")
"""Sizes that may be given as a range: S, L and N."""

Ranges = Mapping[str, tuple[int, int]]


def check_ranges(lengths: Ranges | None) -> Ranges:
    """Return the ranges when each names an axis and is ``(lowest, highest)``.

    Raises:
        UnknownNameError: for another axis.
        SettingError: for anything but two whole numbers in order, from 1 on.
    """
    for name, ends in (lengths or {}).items():
        if name not in AXES:
            raise UnknownNameError.of("axis of lengths", name, AXES)
        is_pair = isinstance(ends, tuple | list) and len(ends) == 2 and all(type(end) is int for end in ends)
        if not is_pair or not 1 <= ends[0] <= ends[1]:
            raise SettingError(f"lengths[{name!r}] is {ends!r}; it must be (lowest, highest), whole numbers from 1 on.")
    return lengths or {}


def edges(low: int, high: int, smallest: int = 1) -> tuple[int, ...]:
    """Return the upper edge of every bucket of lengths that ``low`` to ``high`` touches; the last is at most ``high``."""
    found = []
    length = low
    while length <= high:
        end = length_range(length, smallest)[1]
        found.append(min(end, high))
        length = end + 1
    return tuple(found)


def spread(signature: Signature, lengths: Ranges) -> tuple[Signature, ...]:
    """Return the signatures to tune for a signature whose sizes may lie anywhere in the given ranges.

    A signature that no range applies to comes back alone.
    """
    found: dict[str, Signature] = {}
    for batch in _batches(signature, lengths):
        for L, S in _pairs(signature, lengths):
            changed = dataclasses.replace(signature, batch=batch, L=L, S=S)
            for variant in _with_mask_rows(changed) if "key" in lengths else (changed,):
                found.setdefault(bucket_of(variant).digest, variant)
    return tuple(found.values())


def _batches(signature: Signature, lengths: Ranges) -> tuple[tuple[int, ...], ...]:
    if "batch" not in lengths or len(signature.batch) != 1:
        return (signature.batch,)
    low, high = lengths["batch"]
    found, size = [], low
    while size <= high:
        end = octave_range(size)[1]
        found.append((min(end, high),))
        size = end + 1
    return tuple(found)


def _pairs(signature: Signature, lengths: Ranges) -> tuple[tuple[int, int], ...]:
    L, S = signature.L, signature.S
    keys = edges(*lengths["key"]) if "key" in lengths else (S,)
    if L == 1:
        # A key of length 1 would make it square, which is the first step only.
        return tuple((1, key) for key in keys if key > 1 or S == 1)
    if L == S:
        return tuple((key, key) for key in keys if key > 1) if "key" in lengths else ((L, S),)
    queries = edges(max(2, lengths["query"][0]), lengths["query"][1], smallest=2) if "query" in lengths else (L,)
    return tuple((query, key) for query in queries for key in keys if query != key)


def _with_mask_rows(signature: Signature) -> tuple[Signature, ...]:
    """Return the signature once per alignment that rows of its mask may have, at a length that has it."""
    layout = signature.mask_layout
    if layout is None or signature.mask_dtype == "bool" or not signature.mask_axes.endswith("s"):
        return (signature,)
    if layout.is_gapped or not any(axis not in "1s" for axis in signature.mask_axes):
        # Gaps allow any alignment at any length; a single row has no stride.
        return (signature,)
    multiple = ALIGNMENT_BYTES // DTYPES[signature.mask_dtype].itemsize
    low = length_range(signature.S)[0]
    found = []
    for is_aligned in (True, False):
        S = next((s for s in range(signature.S, low - 1, -1) if (s % multiple == 0) == is_aligned), None)
        if S is None or (S == 1 and signature.S != 1):
            continue
        L = S if signature.L == signature.S else signature.L
        mask_layout = dataclasses.replace(layout, has_aligned_rows=is_aligned)
        found.append(dataclasses.replace(signature, L=L, S=S, mask_layout=mask_layout))
    return tuple(found)
