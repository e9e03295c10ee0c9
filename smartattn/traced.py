"""Calls that are being traced: their sizes without guards, and what their signature is for one value of each symbol.

Reading a symbolic size the usual way would specialise the graph to it, so sizes are read as hints (the values at hand
when the graph was traced) or computed for made-up values of their symbols.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from smartattn import versions
from smartattn.signature import Call, Signature, read_signature

PROBES = (2, 3, 5, 63, 64, 65, 128, 129, 1000, 4097, 65_535, 65_537, 70_001, 1 << 20)
"""Values that stand for all values of a symbolic size.

Source: PyTorch gives sizes of 0 and 1 graphs of their own; the others lie around the multiples and the launch limits
(65535 blocks) that eligibility rules speak of.
"""
_STEP = 5
"""How far apart two symbols stand in ``PROBES``, so that they differ in every variant but the one made to be equal."""


@dataclass(frozen=True)
class TracedTensor:
    """What ``read_signature`` reads of a tensor, in plain numbers.

    Attributes:
        shape: sizes.
        strides: in elements.
        offset: of the first element in its storage, in elements; storages start aligned.
        dtype: after autocast.
        device: where the real tensor is.
        requires_grad: as the tensor says.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def stride(self) -> tuple[int, ...]:
        """Return the strides."""
        return self.strides

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        """Return an address that is aligned as the real one is."""
        return self.offset * self.dtype.itemsize


def read_tensor(tensor: torch.Tensor, values: Mapping[Any, int] | None) -> TracedTensor | None:
    """Return a traced tensor's facts, for given values of its symbols or by hint; ``None`` where one is unknown."""
    numbers = [versions.value_of(size, values) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]
    if any(number is None for number in numbers):
        return None
    known, rank = cast("list[int]", numbers), tensor.dim()
    found = TracedTensor(
        tuple(known[:rank]), tuple(known[rank : 2 * rank]), known[-1], tensor.dtype, tensor.device, tensor.requires_grad
    )
    name = versions.autocast_dtype_name(tensor.device.type)
    is_cast = bool(name) and tensor.is_floating_point() and tensor.dtype != torch.float64
    return _cast(found, getattr(torch, name)) if is_cast and str(tensor.dtype) != f"torch.{name}" else found


def _cast(tensor: TracedTensor, dtype: torch.dtype) -> TracedTensor:
    # A cast makes a new tensor: dense, its axes in the order that they had.
    order = sorted(range(tensor.dim()), key=lambda axis: (tensor.strides[axis], -axis))
    strides, step = [0] * tensor.dim(), 1
    for axis in order:
        strides[axis] = step
        step *= tensor.shape[axis]
    return dataclasses.replace(tensor, strides=tuple(strides), offset=0, dtype=dtype)


def read_traced_signature(call: Call, values: Mapping[Any, int] | None = None) -> Signature | None:
    """Return the signature of a traced call for given values of its symbols, or by hint; ``None`` as its eager twin.

    Also ``None`` where a size has no hint, or a number among the arguments is symbolic.
    """
    tensors = [None if tensor is None else read_tensor(tensor, values) for tensor in call[:4]]
    numbers = (call.dropout_p, 1.0 if call.scale is None else call.scale)
    is_plain = all(isinstance(number, int | float) for number in numbers)
    if not is_plain or any(t is None for t in tensors[:3]) or (call.attn_mask is not None and tensors[3] is None):
        return None
    query, key, value, attn_mask = cast("list[torch.Tensor]", tensors)
    return read_signature(call._replace(query=query, key=key, value=value, attn_mask=attn_mask))


def symbols_of(call: Call) -> tuple[Any, ...]:
    """Return the symbols that the sizes, strides and offsets of a traced call are made of, in a fixed order."""
    found: set[Any] = set()
    for tensor in call.tensors:
        for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset()):
            found |= versions.symbols_in(size)
    return tuple(sorted(found, key=str))


def has_symbols(tensor: torch.Tensor) -> bool:
    """Return whether any size of a tensor is symbolic."""
    return any(versions.symbols_in(size) for size in (*tensor.shape, *tensor.stride()))


def variants(call: Call) -> Iterator[Signature | None]:
    """Yield the signatures that stand for all values of a call's symbols; ``None`` for one that is not measured.

    Sizes that attention itself wants equal stay equal (``guard_sizes`` puts that into the graph); all others differ in
    some variant.
    """
    symbols = symbols_of(call)
    fixed, leaders = _agreements(call)
    free = [symbol for symbol in symbols if symbol not in fixed and leaders.get(symbol, symbol) == symbol]
    for start, probe in enumerate(PROBES):
        spread = {symbol: PROBES[(start + _STEP * i) % len(PROBES)] for i, symbol in enumerate(free)}
        for values in (spread, dict.fromkeys(free, probe)) if len(free) > 1 else (spread,):
            whole = {symbol: fixed.get(symbol) or values[leaders.get(symbol, symbol)] for symbol in symbols}
            yield read_traced_signature(call, whole)


def _agreements(call: Call) -> tuple[dict[Any, int], dict[Any, Any]]:
    """Return the symbols that must equal a number, and for the others the symbol that leads their group."""
    fixed: dict[Any, int] = {}
    leaders: dict[Any, Any] = {}
    for sizes in _equal_sizes(*call[:4]):
        numbers = [size for size in sizes if isinstance(size, int)]
        group = sorted({symbol for size in sizes for symbol in versions.symbols_in(size)}, key=str)
        if not all(isinstance(size, int) or versions.is_symbol(size) for size in sizes):
            continue
        roots = {leaders.get(symbol, symbol) for symbol in group}
        for symbol in symbols_of(call):
            if leaders.get(symbol, symbol) in roots:
                leaders[symbol] = group[0]
                if numbers:
                    fixed[symbol] = numbers[0]
    return fixed, leaders


def _equal_sizes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
) -> Iterator[tuple[int | torch.SymInt, ...]]:
    """Yield the sizes that attention wants equal: batches, heads of key and value, key lengths, head dims of scores.

    Sizes of 1 are never symbolic, so a symbolic size of a mask must be that of the scores.
    """
    q, k, v = query.shape, key.shape, value.shape
    yield from zip(q[:-3], k[:-3], v[:-3], strict=False)
    yield k[-3], v[-3]
    yield k[-2], v[-2]
    yield q[-1], k[-1]
    if attn_mask is not None:
        scores = (*q[:-1], k[-2])
        yield from (
            pair for pair in zip(attn_mask.shape[::-1], scores[::-1], strict=False) if not isinstance(pair[0], int)
        )


def guard_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None) -> None:
    """Guard the equalities that a route was chosen under; raise ``RuntimeError`` where one does not hold.

    The operators below PyTorch's function check little: keys shorter than their values are read as they come.
    """
    if min(query.dim(), key.dim(), value.dim()) < 3:
        return
    for first, *others in _equal_sizes(query, key, value, attn_mask):
        for other in others:
            torch._check(first == other, lambda: "sizes of query, key, value and attn_mask do not fit together")
