"""One contract for every backend: eligible and right, or rejected with reasons that a person can act on."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from smartattn import guards
from smartattn.backends.base import Backend
from smartattn.environment import environment_of
from smartattn.inputs import synthesize
from smartattn.signature import Call, Signature, read_signature
from smartattn.signature_text import parse_signature
from smartattn.validation import Validator, Verdict

LAYOUTS = (
    "dense",
    "sequence_first",
    "packed",
    "gapped",
    "expanded_heads",
    "expanded_batch",
    "late_start",
    "stepped",
    "transposed",
)


def laid_out(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Return random values of ``shape`` (*batch, heads, length, width) in one of ``LAYOUTS``."""
    *batch, H, S, E = shape
    new = {"dtype": dtype, "device": device}
    if layout == "sequence_first":
        return torch.randn(*batch, S, H, E, **new).transpose(-3, -2)
    if layout == "packed":
        return torch.randn(*batch, S, 3, H, E, **new)[..., 1, :, :].transpose(-3, -2)
    if layout == "gapped":
        return torch.randn(*batch, H, S, E + 3, **new)[..., :E]
    if layout == "expanded_heads":
        return torch.randn(*batch, 1, S, E, **new).expand(shape)
    if layout == "expanded_batch":
        return torch.randn(*([1] * len(batch)), H, S, E, **new).expand(shape)
    if layout == "late_start":
        return torch.randn(torch.Size(shape).numel() + 1, **new)[1:].view(shape)
    if layout == "stepped":
        return torch.randn(*batch, H, S, 2 * E, **new)[..., ::2]
    if layout == "transposed":
        return torch.randn(*batch, H, E, S, **new).transpose(-2, -1)
    return torch.randn(shape, **new)


@dataclass(frozen=True)
class Problem:
    """A call that shows itself by its signature; hypothesis prints it when a test fails."""

    call: Call
    signature: Signature

    def __repr__(self) -> str:
        return f"{self.signature} (scale={self.call.scale})"


@st.composite
def problems(draw: st.DrawFn, device: str = "cpu", max_length: int = 40) -> Problem:
    """Draw a call that smartattn measures, dropout aside."""
    call = draw(_calls(device, max_length))
    signature = read_signature(call)
    assert signature is not None
    return Problem(call, signature)


@st.composite
def _calls(draw: st.DrawFn, device: str, max_length: int) -> Call:
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    batch = draw(st.sampled_from([(1,), (2,), (3,), (), (2, 3), (1, 2)]))
    H = draw(st.integers(1, 3))
    group = draw(st.sampled_from([1, 1, 2, 3]))
    L, S = (draw(st.integers(1, max_length)) for _ in range(2))
    E = draw(st.integers(1, 24))
    Ev = draw(st.sampled_from([E, E, 8, 5]))
    layouts = [draw(st.sampled_from(LAYOUTS)) for _ in range(3)]
    if draw(st.booleans()):
        layouts = layouts[:1] * 3
    torch.manual_seed(draw(st.integers(0, 1000)))
    shapes = (*batch, H * group, L, E), (*batch, H, S, E), (*batch, H, S, Ev)
    made = [laid_out(shape, layout, dtype, device) for shape, layout in zip(shapes, layouts, strict=True)]
    wants = draw(st.sampled_from(["", "", "qkv", "qkv", "q", "kv", "m", "qkvm"]))
    mask = draw(_masks((*batch, H * group, L, S), dtype, device))
    tensors = made if mask is None else [*made, mask]
    for letter, tensor in zip("qkvm", tensors, strict=False):
        tensor.requires_grad_(letter in wants and tensor.dtype != torch.bool)
    return Call(
        *made, mask,
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.3, 1.0, -0.5, 0.0])),
        enable_gqa=group > 1 or draw(st.booleans()),
    )  # fmt: skip


@st.composite
def _masks(draw: st.DrawFn, full: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor | None:
    kind = draw(st.sampled_from(["none", "bool", "own", "float32"]))
    if kind == "none":
        return None
    rank = draw(st.integers(2, len(full)))
    shape = tuple(draw(st.sampled_from([size, size, 1])) for size in full[-rank:])
    visible = torch.rand(shape, device=device) < draw(st.sampled_from([0.7, 0.7, 0.2, 1.0]))
    if kind == "bool":
        mask = visible
    else:
        hidden = draw(st.sampled_from([float("-inf"), -1e4]))
        mask = torch.randn(shape, dtype=dtype if kind == "own" else torch.float32, device=device)
        mask = mask.masked_fill(~visible, hidden)
    return mask.expand(full) if draw(st.booleans()) and rank == len(full) else mask


def signatures(device: str = "cpu") -> list[Signature]:
    """Return one signature for each of the things that a backend may get wrong, alone and in company."""
    found = []
    dtypes = ("float32", "bfloat16", "float16", "float64")
    shapes = (
        "N2 Hq2 H2 L17 S17 E16 Ev16",
        "N2 Hq4 H2 L5 S33 E16 Ev16 gqa",
        "N1 Hq3 H1 L33 S9 E8 Ev8 gqa",
        "N2 Hq2 H2 L1 S65 E16 Ev24",
        "N- Hq2 H2 L7 S9 E7 Ev7",
        "N2x3 Hq4 H2 L6 S10 E8 Ev8 gqa",
    )
    masks = (
        "mask=none",
        "mask=causal",
        "mask=bool mask_axes=ls mask_dtype=bool mask_layout=ls",
        "mask=bool mask_axes=11s mask_dtype=bool mask_layout=hls",
        "mask=additive mask_axes=hls mask_dtype={dtype} mask_layout=hls",
        "mask=additive mask_axes=1s mask_dtype=float32 mask_layout=ls",
        "mask=causal+bool mask_axes=l1 mask_dtype=bool mask_layout=ls",
        "mask=causal+additive mask_axes=ls mask_dtype={dtype} mask_layout=ls",
    )
    for (number, shape), mask, train in itertools.product(enumerate(shapes), masks, (False, True)):
        dtype = dtypes[number % 2 if device != "cpu" else (number + len(found)) % 4]
        grads = " grads=" + ("qkvm" if "additive" in mask else "qkv") if train else ""
        size = shape.removesuffix(" gqa")
        name = "bhsd" if "N-" not in size else "hsd"
        name = "7bhsd" if "N2x3" in size else name
        text = (
            f"sdpa {'train' if train else 'infer'} {device} {dtype} {size} layout={name} {mask.format(dtype=dtype)} "
            f"scale=positive{' gqa=enabled' if ' gqa' in shape else ''}{grads}"
        )
        found.append(_representable(parse_signature(text)))
    return found


def _representable(signature: Signature) -> Signature:
    """Return the signature with the alignment that dense tensors of its sizes have."""
    dense = synthesize_dense(signature)
    read = read_signature(dense)
    assert read is not None
    return read


def synthesize_dense(signature: Signature) -> Call:
    """Return a call of the signature's sizes on dense tensors."""
    s = signature
    dtype, device = getattr(torch, s.dtype), s.device_type
    made = [
        torch.randn(*s.batch, *size, dtype=dtype, device=device)
        for size in ((s.Hq, s.L, s.E), (s.H, s.S, s.E), (s.H, s.S, s.Ev))
    ]
    mask = None
    if s.has_mask_tensor:
        full = (*s.batch, s.Hq, s.L, s.S)[-len(s.mask_axes) :]
        shape = [1 if letter == "1" else size for letter, size in zip(s.mask_axes, full, strict=True)]
        mask = torch.randn(
            shape, device=device, dtype=torch.float32 if s.mask_dtype == "bool" else getattr(torch, s.mask_dtype)
        )
        mask = mask > -0.5 if s.mask_dtype == "bool" else mask
    for letter, tensor in zip("qkvm", made if mask is None else [*made, mask], strict=False):
        tensor.requires_grad_(letter in s.grads)
    return Call(*made, mask, is_causal=s.is_causal, enable_gqa=s.gqa == "enabled")


def verdict_on(backend: Backend, call: Call, accuracy: str = "standard") -> Verdict | None:
    """Return the verdict on a backend, ``None`` when it is rejected with proper reasons.

    Raises:
        AssertionError: reasons that say nothing.
    """
    signature = read_signature(call)
    assert signature is not None
    environment = environment_of(call.query.device)
    reasons = backend.reasons(signature, environment)
    reasons += guards.reasons(backend.name, signature, environment) if not reasons else ()
    if reasons:
        for reason in reasons:
            assert isinstance(reason, str), reason
            assert len(re.findall(r"\w+", reason)) >= 3, (
                f"{backend.name} gives the reason {reason!r}, which says nothing"
            )
        assert len(set(reasons)) == len(reasons), reasons
        return None
    return Validator(call, signature, accuracy=accuracy).check(backend.bind(signature))


def call_of(signature: Signature) -> Call:
    """Return a call with made-up values for a signature."""
    return synthesize(signature, torch.device(signature.device_type))
