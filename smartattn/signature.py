"""What was asked: a call reduced to all that its speed, validity or numerics depends on, without its values.

Text form, one line, parsed back by ``parse_signature``::

    sdpa infer cuda bfloat16 N2 Hq32 H8 L1024 S1024 E128 Ev128 layout=bhsd mask=causal scale=positive

Fields at their default are left out. The words and axis letters are PyTorch's own (N batch, Hq query heads, H key and
value heads, L query length, S key length, E head dim, Ev value head dim).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from smartattn import versions
from smartattn.layout import MASK_AXES, Layout, read_layout

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MASK_KINDS = ("none", "causal", "bool", "additive", "causal+bool", "causal+additive")
"""Mask classes of calls whose mask was not recognised; ``masks`` adds the recognised ones."""


class Call(NamedTuple):
    """The arguments of one call, after autocast's casts, as PyTorch names them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the call: query, key, value and the mask if there is one."""
        found = (self.query, self.key, self.value)
        return found if self.attn_mask is None else (*found, self.attn_mask)


@dataclass(frozen=True, slots=True)
class Signature:
    """One problem.

    Attributes:
        pass_name: ``infer`` or ``train`` (gradients of at least one tensor are wanted).
        device_type: ``cpu``, ``cuda``, ...
        dtype: of query, key and value, after autocast.
        batch: leading sizes; ``(N,)`` for 4-D inputs, ``()`` for 3-D, longer for 5-D and more.
        Hq: query heads.
        H: key and value heads.
        L: query length.
        S: key length.
        E: head dim of query and key.
        Ev: head dim of value.
        layouts: of query, key and value.
        mask: mask class.
        scale: ``positive`` or ``non_positive``.
        gqa: ``none``; ``enabled`` (``enable_gqa`` was given); ``implicit`` (one key head broadcast without it).
        grads: which of query, key, value, mask want a gradient, as letters of ``qkvm``.
        mask_axes: axes of the mask with 1 where it broadcasts, for example ``b1ls``; empty without a mask.
        mask_dtype: of the mask tensor; empty without one.
        mask_layout: of the mask tensor.
        dropout: ``none``, ``sixteenths`` (``dropout_p`` is a multiple of 1/16) or ``other``.
        autocast: dtype that autocast casts to; empty when it is off.
        deterministic: ``off``, ``warn`` or ``strict``.
        precision: float32 matmul precision switch; empty at PyTorch's default.
        reduced: whether Math may reduce in half precision.
        disabled: backends that the process switched off, as letters of ``fecm`` (flash, efficient, cudnn, math).
    """

    pass_name: str
    device_type: str
    dtype: str
    batch: tuple[int, ...]
    Hq: int
    H: int
    L: int
    S: int
    E: int
    Ev: int
    layouts: tuple[Layout, Layout, Layout]
    mask: str = "none"
    scale: str = "positive"
    gqa: str = "none"
    grads: str = ""
    mask_axes: str = ""
    mask_dtype: str = ""
    mask_layout: Layout | None = None
    dropout: str = "none"
    autocast: str = ""
    deterministic: str = "off"
    precision: str = ""
    reduced: bool = False
    disabled: str = ""

    @property
    def N(self) -> int:  # noqa: N802 - the axis letter of torch's documentation
        """Product of all batch sizes."""
        return math.prod(self.batch)

    @property
    def rank(self) -> int:
        """Number of dimensions of query, key and value."""
        return len(self.batch) + 3

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.Hq // self.H

    @property
    def wants_grad(self) -> bool:
        """Whether this is a training problem."""
        return self.pass_name == "train"

    @property
    def is_causal(self) -> bool:
        """Whether the top-left triangle applies (alone or together with a mask tensor)."""
        return self.tensor_mask.startswith("causal")

    @property
    def tensor_mask(self) -> str:
        """Mask class as a backend sees it that knows no recognised classes: one of ``MASK_KINDS``.

        A recognised class is a promise about the values of the mask tensor, which says all of it by itself.
        """
        if self.mask in MASK_KINDS:
            return self.mask
        return "bool" if self.mask_dtype in ("bool", "") else "additive"

    @property
    def has_mask_tensor(self) -> bool:
        """Whether a mask tensor is part of the call."""
        return bool(self.mask_dtype)

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element of query, key and value."""
        return DTYPES[self.dtype].itemsize

    @property
    def num_scores(self) -> int:
        """Elements of the whole score matrix, N x Hq x L x S."""
        return self.N * self.Hq * self.L * self.S

    @property
    def family(self) -> str:
        """Text of this signature without N, L and S, but with whether L equals S."""
        square = " L=S" if self.L == self.S else ""
        return _text(self, with_lengths=False) + square

    @property
    def family_key(self) -> tuple[object, ...]:
        """What ``family`` says, as a key that is cheaper than its text."""
        return _FAMILY_FIELDS(self), len(self.batch), self.L == self.S

    @property
    def lengths(self) -> tuple[tuple[int, ...], int, int]:
        """What is not in ``family``: batch sizes, L and S."""
        return self.batch, self.L, self.S

    @property
    def digest(self) -> str:
        """Name of this signature's files."""
        return digest_of(str(self))

    def __str__(self) -> str:
        return _text(self, with_lengths=True)


@functools.lru_cache(maxsize=8192)
def digest_of(text: str) -> str:
    """Return the short hexadecimal digest that names files."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


OPTIONAL_FIELDS = (
    "gqa",
    "grads",
    "mask_axes",
    "mask_dtype",
    "mask_layout",
    "dropout",
    "autocast",
    "deterministic",
    "precision",
    "reduced",
    "disabled",
)
FIELD_CHOICES = {
    "scale": ("positive", "non_positive"),
    "gqa": ("none", "enabled", "implicit"),
    "dropout": ("none", "sixteenths", "other"),
    "deterministic": ("off", "warn", "strict"),
    "reduced": ("on",),
}
# Sizes are plain digits, few enough for any machine; int() would also take other scripts and underscores.
SIZES = ("Hq", "H", "L", "S", "E", "Ev")
_FAMILY_FIELDS = operator.attrgetter(
    *(field.name for field in dataclasses.fields(Signature) if field.name not in ("batch", "L", "S"))
)
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Signature)}


def _text(signature: Signature, *, with_lengths: bool) -> str:
    s = signature
    batch, L, S = f"rank{s.rank}", "", ""
    if with_lengths:
        batch, L, S = f"N{'x'.join(map(str, s.batch)) or '-'}", f" L{s.L}", f" S{s.S}"
    fields = _text_of_fields(s.layouts, *_read_fields(s))
    return f"sdpa {s.pass_name} {s.device_type} {s.dtype} {batch} Hq{s.Hq} H{s.H}{L}{S} E{s.E} Ev{s.Ev} {fields}"


TEXT_FIELDS = ("mask", "scale", *OPTIONAL_FIELDS)
_read_fields = operator.attrgetter(*TEXT_FIELDS)


# Few values exist of what does not hold lengths, so that this answers nearly always from memory.
@functools.lru_cache(maxsize=4096)
def _text_of_fields(layouts: tuple[Layout, ...], *values: Any) -> str:
    texts = [str(layout) for layout in layouts]
    parts = ["layout=" + (texts[0] if len(set(texts)) == 1 else ",".join(texts))]
    for name, value in zip(TEXT_FIELDS, values, strict=True):
        if name not in OPTIONAL_FIELDS or value != _DEFAULTS[name]:
            parts.append(f"{name}={'on' if value is True else value}")
    return " ".join(parts)


def read_signature(call: Call) -> Signature | None:
    """Reduce a call to its signature; ``None`` when the call is not one that smartattn measures.

    Not measured are calls that PyTorch answers in a way of its own: sizes of zero, fewer than three dimensions, batch
    sizes that broadcast, unequal key and value heads, masks that do not broadcast, and every wrong call.
    """
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    if not _is_regular(call, *shapes) or (mask is not None and not _is_regular_mask(mask, query, shapes[1][-2])):
        return None
    wants = [t.requires_grad for t in (query, key, value)] + [mask is not None and mask.requires_grad]
    grads = "".join(letter for letter, want in zip("qkvm", wants, strict=True) if want)
    if not torch.is_grad_enabled():
        grads = ""
    heads_differ = shapes[0][-3] != shapes[1][-3]
    return Signature(
        pass_name="train" if grads else "infer",
        device_type=query.device.type,
        dtype=DTYPE_NAMES[query.dtype],
        batch=shapes[0][:-3],
        Hq=shapes[0][-3],
        H=shapes[1][-3],
        L=shapes[0][-2],
        S=shapes[1][-2],
        E=shapes[0][-1],
        Ev=shapes[2][-1],
        layouts=(_layout(query), _layout(key), _layout(value)),
        mask=_mask_kind(mask, is_causal=call.is_causal),
        scale="positive" if call.scale is None or call.scale > 0 else "non_positive",
        gqa="none" if not heads_differ else "enabled" if call.enable_gqa else "implicit",
        grads=grads,
        mask_axes="" if mask is None else _mask_axes(mask),
        mask_dtype="" if mask is None else str(mask.dtype).removeprefix("torch."),
        mask_layout=None if mask is None else _mask_layout(mask),
        dropout=_dropout_class(call.dropout_p),
        autocast=versions.autocast_dtype_name(query.device.type),
        deterministic=versions.deterministic_mode(),
        precision=versions.float32_precision(query.device.type),
        reduced=versions.reduced_math_enabled(),
        disabled=versions.disabled_backends(),
    )


def _is_regular(call: Call, query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> bool:
    tensors = call.query, call.key, call.value
    if len(query) < 3 or not len(query) == len(key) == len(value) or len(query) > len(MASK_AXES):
        return False
    if len({t.dtype for t in tensors}) != 1 or len({t.device for t in tensors}) != 1:
        return False
    if call.query.dtype not in DTYPE_NAMES or 0 in query + key + value:
        return False
    Hq, H = query[-3], key[-3]
    return (
        query[:-3] == key[:-3] == value[:-3]
        and H == value[-3]
        and (Hq == H or (call.enable_gqa and Hq % H == 0) or H == 1)
        and query[-1] == key[-1]
        and key[-2] == value[-2]
        and (call.scale is None or math.isfinite(call.scale))
        and 0.0 <= call.dropout_p < 1.0
    )


def _is_regular_mask(mask: torch.Tensor, query: torch.Tensor, S: int) -> bool:
    full = (*query.shape[:-1], S)
    if mask.device != query.device or not 2 <= mask.dim() <= len(full):
        return False
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return False
    return all(size in (1, whole) for size, whole in zip(mask.shape, full[-mask.dim() :], strict=True))


def _layout(tensor: torch.Tensor, axes: str | None = None) -> Layout:
    arguments = tuple(tensor.shape), tensor.stride(), tensor.element_size(), tensor.data_ptr()
    return read_layout(*arguments) if axes is None else read_layout(*arguments, axes)


def _mask_layout(mask: torch.Tensor) -> Layout:
    layout = _layout(mask, MASK_AXES)
    if mask.dtype != torch.bool:
        return layout
    # Every route converts a bool mask first, so its own alignment would only split families.
    return dataclasses.replace(layout, has_aligned_rows=True, has_aligned_start=True)


def _mask_kind(mask: torch.Tensor | None, *, is_causal: bool) -> str:
    if mask is None:
        return "causal" if is_causal else "none"
    return "causal+" * is_causal + ("bool" if mask.dtype == torch.bool else "additive")


def _mask_axes(mask: torch.Tensor) -> str:
    letters = MASK_AXES[-mask.dim() :]
    return "".join(letter if size > 1 else "1" for letter, size in zip(letters, mask.shape, strict=True))


def _dropout_class(dropout_p: float) -> str:
    if dropout_p == 0:
        return "none"
    # cuDNN stores the rate in sixteenths and refuses others from torch 2.12 on (facts of pytorch's check_cudnn_dropout).
    return "sixteenths" if (dropout_p * 16).is_integer() else "other"
