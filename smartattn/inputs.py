"""Inputs made up for a signature, and other values for a call's own layouts.

Everything is drawn from generators of its own; the program's random state is never touched. Memory layouts are kept
to the stride (expanded and overlapping ones too), because the faults of fused kernels hide in layouts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import torch

from smartattn import masks
from smartattn.layout import ALIGNMENT_BYTES, AXES, MASK_AXES, Layout, read_layout
from smartattn.mask_facts import facts_of, remember
from smartattn.signature import DTYPES, MASK_KINDS, Call, Signature

KINDS = ("caller", "random", "very_negative", "masked_rows", "one_visible_key")
"""Kinds of values that ``fill`` knows."""

VISIBLE_SHARE = 0.7
NEGATIVE_LOGIT = -120.0
"""Logits of the kind ``very_negative``.

Source: cuDNN's backward gave NaN once log-sum-exp fell below about -88.7 (pytorch#196678), and at -122 with one query
(cudnn-frontend#1072).
"""
_NOISE = 0.1
_DROPOUT = {"none": 0.0, "sixteenths": 0.25, "other": 0.1}
_CHUNK = 1048573
"""Elements drawn at most; longer fills repeat them. A prime, so that no axis lines up with the period."""
_MAX_GAP_RATIO = 4
"""How much more memory than elements a stand-in may take to keep exact strides."""


def synthesize(signature: Signature, device: torch.device, seed: int = 0) -> Call:
    """Return a call with random values whose signature is ``signature`` (up to the switches of the process).

    Raises:
        ValueError: a layout that no tensor of this shape can have, or no such mask class.
    """
    s = signature
    generator = _generator(device, seed)
    dtype = DTYPES[s.dtype]
    shapes = (*s.batch, s.Hq, s.L, s.E), (*s.batch, s.H, s.S, s.E), (*s.batch, s.H, s.S, s.Ev)
    query, key, value = (
        _random(_empty(shape, layout, dtype, device), generator)
        for shape, layout in zip(shapes, s.layouts, strict=True)
    )
    # The mask of a recognised class holds the triangle too.
    is_causal = s.is_causal and s.mask in MASK_KINDS
    call = Call(query, key, value, None, _DROPOUT[s.dropout], is_causal, None, s.gqa == "enabled")
    if s.scale == "non_positive":
        call = call._replace(scale=-0.5)
    if s.mask not in MASK_KINDS:
        call = call._replace(attn_mask=_mask_of_class(s, device))
    elif s.has_mask_tensor:
        call = call._replace(attn_mask=_synthesized_mask(s, call, device, generator))
    for letter, tensor in zip("qkvm", call.tensors, strict=False):
        tensor.requires_grad_(letter in s.grads)
    return call


def fill(call: Call, kind: str, seed: int = 0, *, keeps_mask: bool = False) -> Call:
    """Return a call with the layouts of ``call`` and values of the given kind.

    Args:
        call: where layouts, scale, flags and wanted gradients come from.
        kind: ``caller`` (the call itself); ``random`` (unit normal, masks about 70 % visible with a visible key in
            every row); ``very_negative`` (logits around -120 in every row, the caller's mask); ``masked_rows`` (some
            rows see no key); ``one_visible_key`` (every row sees one).
        seed: of the private generator.
        keeps_mask: whether the mask's own values stay, for masks that must stay of their class.

    Raises:
        ValueError: an unknown kind, or one that needs a mask that is not there or must be kept.

    Cost: one copy of the inputs.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    if kind == "caller":
        return call
    mask = call.attn_mask
    if kind in ("masked_rows", "one_visible_key") and (mask is None or keeps_mask):
        raise ValueError(f"kind {kind!r} writes the mask, and there is none that may be written")
    device = call.query.device
    generator = _generator(device, seed)
    shifts = (0.0, 0.0)
    if kind == "very_negative":
        shifts = _negative_shifts(call)
    noise = 1.0 if kind != "very_negative" else _NOISE
    query = _random(_empty_like(call.query), generator, noise, shifts[0])
    key = _random(_empty_like(call.key), generator, noise, shifts[1])
    value = _random(_empty_like(call.value), generator)
    if mask is not None and not keeps_mask and (kind != "very_negative" or not is_clean(mask)):
        mask = _place(mask, _mask_values(call, mask, kind, generator))
    tensors = [query, key, value] + ([] if mask is None else [mask if mask is not call.attn_mask else mask.detach()])
    for made, given in zip(tensors, call.tensors, strict=True):
        made.requires_grad_(given.requires_grad)
    return call._replace(query=query, key=key, value=value, attn_mask=tensors[3] if mask is not None else None)


def is_clean(tensor: torch.Tensor) -> bool:
    """Return whether a mask holds neither NaN nor +inf; -inf is a mask's own way to hide a key."""
    return tensor.dtype == torch.bool or not bool((torch.isnan(tensor) | (tensor == math.inf)).any())


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _negative_shifts(call: Call) -> tuple[float, float]:
    """Return means of query and key features whose scaled product is ``NEGATIVE_LOGIT``."""
    E = call.query.size(-1)
    scale = 1.0 / math.sqrt(E) if call.scale is None else call.scale
    if scale == 0:
        return 0.0, 0.0
    mean = min(math.sqrt(-NEGATIVE_LOGIT / (E * abs(scale))), 100.0)
    return mean, -math.copysign(mean, scale)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all memory between the first and the last element as one axis, over which overlaps do not matter."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,))


def _random(tensor: torch.Tensor, generator: torch.Generator, spread: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    memory = memory_of(tensor)
    extent = memory.numel()
    drawn = memory if extent <= _CHUNK else memory[:_CHUNK]
    drawn.normal_(mean, spread, generator=generator)
    for start in range(_CHUNK, extent, _CHUNK):
        stop = min(start + _CHUNK, extent)
        memory[start:stop] = drawn[: stop - start]
    return tensor


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory with the strides and the alignment of ``tensor``; far apart rows are moved closer."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if extent > _MAX_GAP_RATIO * max(tensor.numel(), 256):
        axes = AXES if tensor.dtype != torch.bool else MASK_AXES
        layout = read_layout(shape, strides, tensor.element_size(), tensor.data_ptr(), axes)
        try:
            return _empty(shape, layout, tensor.dtype, tensor.device, axes)
        except ValueError:
            pass  # no smaller stand-in of this layout: the exact strides serve
    start = tensor.data_ptr() % ALIGNMENT_BYTES // tensor.element_size()
    memory = torch.zeros(start + extent, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(shape, strides, start)


def _empty(
    shape: tuple[int, ...], layout: Layout, dtype: torch.dtype, device: torch.device, axes: str = AXES
) -> torch.Tensor:
    """Return memory of a symbolic layout."""
    strides = _strides(shape, layout, dtype.itemsize, axes)
    start = 0 if layout.has_aligned_start else 1
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.zeros(start + extent, dtype=dtype, device=device).as_strided(shape, strides, start)


@functools.lru_cache(maxsize=256)
def _strides(shape: tuple[int, ...], layout: Layout, itemsize: int, axes: str) -> tuple[int, ...]:
    """Return the tightest strides that read back as ``layout``."""
    letters = axes[-len(shape) :]
    moving = [letters.index(letter) for letter in reversed(layout.order) if letter not in layout.expanded]
    moving = [i for i in moving if shape[i] > 1]
    wide = ALIGNMENT_BYTES // itemsize
    wanted = dataclasses.replace(layout, has_aligned_start=True)
    for choices in itertools.product(range(4), repeat=len(moving)):
        strides = _contiguous_strides(shape)
        for i, size in enumerate(shape):
            if size > 1 and i not in moving:
                strides[i] = 0
        expected = 1
        for i, choice in zip(moving, reversed(choices), strict=True):
            aligned = -(-expected // wide) * wide
            strides[i] = (expected, aligned, expected + 1, aligned + wide)[choice]
            expected = strides[i] * shape[i]
        if _reads_as(tuple(strides), shape, wanted, itemsize, axes):
            return tuple(strides)
    raise ValueError(f"no tensor of shape {shape} with {itemsize} bytes per element has layout {layout}")


def _reads_as(strides: tuple[int, ...], shape: tuple[int, ...], wanted: Layout, itemsize: int, axes: str) -> bool:
    found = read_layout(shape, strides, itemsize, 0, axes)
    if itemsize == 1:
        # Alignment is no part of a bool mask's layout.
        found = dataclasses.replace(found, has_aligned_rows=True)
        wanted = dataclasses.replace(wanted, has_aligned_rows=True)
    return found == wanted


def _contiguous_strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides


def _mask_of_class(s: Signature, device: torch.device) -> torch.Tensor:
    """Return a mask of a recognised class, known to be of it."""
    mask = masks.example(s.mask, s.N, s.L, s.S, device)
    facts = facts_of(mask)
    if s.mask_dtype in ("", "bool") or facts is None:
        return mask
    hidden = torch.zeros(mask.shape, dtype=DTYPES[s.mask_dtype], device=device).masked_fill_(~mask, -math.inf)
    remember(hidden, facts)
    return hidden


def _synthesized_mask(s: Signature, call: Call, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    full = (*s.batch, s.Hq, s.L, s.S)[-len(s.mask_axes) :]
    shape = tuple(1 if letter == "1" else size for letter, size in zip(s.mask_axes, full, strict=True))
    dtype = torch.bool if s.mask_dtype == "bool" else DTYPES[s.mask_dtype]
    if s.mask_layout is None:
        raise ValueError("the signature has a mask tensor but no mask_layout")
    mask = _empty(shape, s.mask_layout, dtype, device, MASK_AXES)
    return _place(mask, _mask_values(call, mask, "random", generator), onto=mask)


def _collapsed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the view that holds each element once: axes of stride 0 have size 1."""
    shape = tuple(1 if stride == 0 else n for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided(shape, tensor.stride())


def _place(mask: torch.Tensor, values: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
    """Write values (of the collapsed shape) into memory of the mask's layout; overlapping masks become dense."""
    made = _empty_like(mask) if onto is None else onto
    if values.shape == mask.shape and _overlaps(mask):
        return values
    _collapsed(made).copy_(values)
    return made


def _overlaps(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted((st, n) for n, st in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and st):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _mask_values(call: Call, mask: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Return dense mask values of the collapsed shape of ``mask``."""
    shape = tuple(_collapsed(mask).shape)
    device = mask.device
    draw = functools.partial(torch.rand, generator=generator, device=device, dtype=torch.float32)
    rows = shape[:-1]
    # Under a causal triangle the key that stays visible must lie inside it, for every row that shares the mask's row.
    last = torch.full(rows, shape[-1], device=device, dtype=torch.float32)
    if call.is_causal:
        reach = torch.arange(1, rows[-1] + 1, device=device, dtype=torch.float32) if rows[-1] > 1 else 1.0
        last = torch.minimum(last, torch.as_tensor(reach, device=device, dtype=torch.float32).expand(rows))
    kept = (draw(rows) * last).long().clamp_(max=shape[-1] - 1).unsqueeze(-1)
    visible = torch.zeros(shape, dtype=torch.bool, device=device)
    if kind != "one_visible_key":
        visible = draw(shape) < VISIBLE_SHARE
    visible.scatter_(-1, kept, torch.ones((), dtype=torch.bool, device=device).expand(kept.shape))
    if kind == "masked_rows":
        masked = draw(rows) < 1 - VISIBLE_SHARE
        masked.view(-1)[-1] = True
        visible &= ~masked.unsqueeze(-1)
    if mask.dtype == torch.bool:
        return visible
    values = torch.randn(shape, generator=generator, device=device, dtype=mask.dtype)
    return values.masked_fill(~visible, -math.inf)
