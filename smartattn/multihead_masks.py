"""The two masks and the causal flag of multi-head attention as the one mask that SDPA takes.

What comes out is remembered for as long as its sources live and nobody writes to them, so that a stack of layers
makes and recognises it once.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch.nn import functional

from smartattn import events, versions
from smartattn.mask_facts import can_be_remembered, identity_of

Shape = tuple[int, int, int, int]
"""N, heads, L, S; S without the positions that the module appends to the keys."""
TABLE_SIZE = 8
_table: OrderedDict[Hashable, tuple[tuple[weakref.ref[torch.Tensor], ...], tuple[torch.Tensor | None, bool]]] = (
    OrderedDict()
)


def _forget(key: Any, table: OrderedDict[Any, Any], _: weakref.ref[torch.Tensor]) -> None:
    # The table comes as an argument: at the interpreter's end this module's own names are gone first.
    table.pop(key, None)


def combined_mask(
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    is_causal: bool,
    shape: Shape,
    num_extra: int,
    query: torch.Tensor,
    *,
    is_batched: bool,
    is_dense: bool,
) -> tuple[torch.Tensor | None, bool]:
    """Return ``attn_mask`` and ``is_causal`` as SDPA takes them.

    Args:
        attn_mask, key_padding_mask: as the module takes them (True is hidden).
        is_causal: whether the triangle applies too.
        shape: of the scores, without appended positions.
        num_extra: positions appended to the keys, which every query sees.
        query: gives dtype and device.
        is_batched: whether ``key_padding_mask`` has a batch dimension.
        is_dense: put the triangle into the mask rather than into the flag.

    Returns:
        A mask that broadcasts to (N, heads, L, S + num_extra), True is visible or added to the scores; and a flag.

    Raises:
        ValueError: a mask whose shape or dtype does not fit.

    Note:
        At its first sight a mask is compared with the triangle when ``is_causal``, and a float padding mask is looked
        at for 0 and 1; both wait for the device. Not while compiling or capturing.
    """
    if attn_mask is None and key_padding_mask is None and not is_causal:
        return None, False
    if attn_mask is None and key_padding_mask is None and not num_extra and not is_dense:
        return None, True
    if torch.compiler.is_compiling() or not versions.is_jit_tracing():
        _check(attn_mask, key_padding_mask, shape, is_batched=is_batched)
    sources = tuple(mask for mask in (attn_mask, key_padding_mask) if mask is not None)
    is_remembered = bool(sources) and not _is_traced(query) and all(
        can_be_remembered(mask) and not mask.requires_grad for mask in sources
    )  # fmt: skip
    key: Hashable = None
    if is_remembered:
        is_first = attn_mask is not None
        key = (tuple(map(identity_of, sources)), is_first, is_causal, shape, num_extra, query.dtype, is_dense)
        found = _table.get(key)
        if found is not None and all(ref() is mask for ref, mask in zip(found[0], sources, strict=True)):
            return found[1]
    result = _combine(
        attn_mask, key_padding_mask, is_causal, shape, num_extra, query, is_dense=is_dense, reads=is_remembered
    )
    if is_remembered:
        _table[key] = tuple(weakref.ref(mask, functools.partial(_forget, key, _table)) for mask in sources), result
        while len(_table) > TABLE_SIZE:
            _table.popitem(last=False)
    return result


def _is_traced(query: torch.Tensor) -> bool:
    return torch.compiler.is_compiling() or versions.is_jit_tracing() or versions.is_capturing(query.device.type)


def _check(
    attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, shape: Shape, *, is_batched: bool
) -> None:
    N, num_heads, L, S = shape
    if key_padding_mask is not None:
        expected = (N, S) if is_batched else (S,)
        if tuple(key_padding_mask.shape) != expected:
            raise ValueError(
                f"key_padding_mask has shape {tuple(key_padding_mask.shape)}; it must be (N, S) = {expected}"
            )
    if attn_mask is not None:
        allowed = ((L, S), (N * num_heads, L, S), (N, num_heads, L, S))
        if tuple(attn_mask.shape) not in allowed:
            raise ValueError(
                f"attn_mask has shape {tuple(attn_mask.shape)}; it must be (L, S) = {allowed[0]}, (N * num_heads, L, S) "
                f"= {allowed[1]} or (N, num_heads, L, S) = {allowed[2]}"
            )
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"{name} has dtype {mask.dtype}; it must be torch.bool or a floating dtype")


def _combine(
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    is_causal: bool,
    shape: Shape,
    num_extra: int,
    query: torch.Tensor,
    *,
    is_dense: bool,
    reads: bool,
) -> tuple[torch.Tensor | None, bool]:
    N, num_heads, L, S = shape
    parts = []
    if attn_mask is not None:
        if (
            is_causal
            and reads
            and not is_dense
            and key_padding_mask is None
            and not num_extra
            and _is_triangle(attn_mask)
        ):
            return None, True
        parts.append(attn_mask.unflatten(0, (N, num_heads)) if attn_mask.dim() == 3 else attn_mask)
    if key_padding_mask is not None:
        if reads and key_padding_mask.is_floating_point():
            _warn_of_zeros_and_ones(key_padding_mask)
        parts.append(key_padding_mask.reshape(-1, 1, 1, S))
    if is_causal and (num_extra or is_dense):
        parts.append(torch.ones((L, S), dtype=torch.bool, device=query.device).triu(1))
        is_causal = False
    if all(part.dtype == torch.bool for part in parts):
        hidden = parts[0]
        for part in parts[1:]:
            hidden = hidden | part
        visible = hidden.logical_not()
        return functional.pad(visible, (0, num_extra), value=True) if num_extra else visible, is_causal
    added = None
    for part in parts:
        each = _additive(part, query.dtype)
        added = each if added is None else added + each
    return functional.pad(added, (0, num_extra)) if num_extra else added, is_causal  # type: ignore[arg-type]  # there is at least one part


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _is_triangle(mask: torch.Tensor) -> bool:
    """Return whether a mask hides exactly the keys after each query."""
    if mask.dim() != 2:
        return False
    hidden = mask if mask.dtype == torch.bool else mask == float("-inf")
    triangle = torch.ones_like(hidden).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(hidden, triangle)
    return bool(((hidden == triangle) & (hidden | (mask == 0))).all())


def _warn_of_zeros_and_ones(mask: torch.Tensor) -> None:
    if bool((((mask == 0) | (mask == 1)).all() & (mask == 1).any()).item()):
        events.warn_once(
            "float padding of ones",
            "key_padding_mask is a float tensor of zeros and ones; floats are added to the scores, so a 1 favours the "
            "padding instead of hiding it. Pass key_padding_mask.bool(), or -inf where keys are hidden.",
        )
