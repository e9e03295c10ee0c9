"""What every rewrite must keep: the exact signature of what it leaves, the values, and the gradients."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from smartattn.rewrites.base import Rewrite
from smartattn.signature import Call, Signature, read_signature

LAYOUTS = (
    "natural",
    "bshd",
    "packed",
    "wide",
    "expanded_heads",
    "expanded_batch",
    "late",
    "last_strided",
    "outer_heads",
)
MASK_LAYOUTS = ("natural", "wide", "expanded", "late", "transposed")


def dense_reference(call: Call) -> torch.Tensor:
    """Return attention in float64, written from the definition; rows that see no key are zeros."""
    query, key, value = (t.double() for t in (call.query, call.key, call.value))
    group = query.size(-3) // key.size(-3)
    key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    scale = 1 / math.sqrt(query.size(-1)) if call.scale is None else call.scale
    scores = query @ key.transpose(-2, -1) * scale
    if call.attn_mask is not None and call.attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.attn_mask, -math.inf)
    elif call.attn_mask is not None:
        scores = scores + call.attn_mask.double()
    if call.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch._safe_softmax(scores, -1) @ value


def tensor_of(shape: tuple[int, ...], layout: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random values in memory laid out as named."""
    generator = torch.Generator().manual_seed(seed)
    *lead, heads, length, width = shape

    def rand(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    if layout == "bshd":
        return rand(*lead, length, heads, width).transpose(-3, -2)
    if layout == "packed":
        return rand(*lead, length, 3, heads, width)[..., 1, :, :].transpose(-3, -2)
    if layout == "wide":
        return rand(*lead, heads, length, width + 8)[..., :width]
    if layout == "expanded_heads":
        return rand(*lead, 1, length, width).expand(shape)
    if layout == "expanded_batch" and lead:
        return rand(1, *shape[1:]).expand(shape)
    if layout == "late":
        return rand(math.prod(shape) + 1)[1:].view(shape)
    if layout == "last_strided":
        return rand(*lead, heads, width, length).transpose(-2, -1)
    if layout == "outer_heads":
        return rand(heads, *lead, length, width).movedim(0, -3)
    return rand(*shape)


def mask_of(shape: tuple[int, ...], layout: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a mask in which some rows may see no key."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*sizes: int) -> torch.Tensor:
        visible = torch.rand(sizes, generator=generator) < 0.6
        if dtype == torch.bool:
            return visible
        bias = torch.randn(sizes, generator=generator)
        return bias.masked_fill(~visible, -math.inf).to(dtype)

    if layout == "wide":
        return rand(*shape[:-1], shape[-1] + 3)[..., : shape[-1]]
    if layout == "expanded":
        return rand(*(1 if i in (0, len(shape) - 2) else n for i, n in enumerate(shape))).expand(shape)
    if layout == "late":
        return rand(math.prod(shape) + 1)[1:].view(shape)
    if layout == "transposed":
        return rand(*shape[:-2], shape[-1], shape[-2]).transpose(-2, -1)
    return rand(*shape)


@st.composite
def calls(
    draw: st.DrawFn, ranks: tuple[int, ...] = (3, 4, 5), dtypes: tuple[str, ...] = ("float32", "bfloat16")
) -> Call:
    """Draw a regular call: any rank, layout, grouping, mask and head dim."""
    sizes = st.sampled_from
    batch = tuple(draw(sizes((1, 2, 3))) for _ in range(draw(sizes(ranks)) - 3))
    H, group = draw(sizes((1, 2, 3))), draw(sizes((1, 1, 2, 4)))
    L, S = draw(sizes((1, 2, 5, 8))), draw(sizes((1, 3, 8)))
    E, Ev = draw(sizes(((8, 8), (5, 5), (8, 3), (16, 8), (1, 1))))
    dtype = getattr(torch, draw(sizes(dtypes)))
    seed = draw(st.integers(0, 1000))
    wants_grad = draw(st.booleans())
    shapes = (*batch, H * group, L, E), (*batch, H, S, E), (*batch, H, S, Ev)
    query, key, value = (
        tensor_of(shape, draw(sizes(LAYOUTS)), dtype, seed + i).requires_grad_(wants_grad)
        for i, shape in enumerate(shapes)
    )
    mask = None
    if draw(st.booleans()):
        full = (*batch, H * group, L, S)
        rank = draw(st.integers(2, len(full)))
        shape = tuple(size if draw(st.booleans()) else 1 for size in full[-rank:])
        mask_dtype = draw(sizes((torch.bool, torch.float32, dtype)))
        mask = mask_of(shape, draw(sizes(MASK_LAYOUTS)), mask_dtype, seed)
        if mask.dtype != torch.bool and wants_grad:
            mask.requires_grad_(draw(st.booleans()))
    scale = draw(sizes((None, 0.3)))
    return Call(query, key, value, mask, 0.0, draw(st.booleans()), scale, group > 1)


def gradients(output: torch.Tensor, call: Call) -> dict[str, torch.Tensor]:
    """Return the gradients of everything that wants one, for a fixed gradient of the output."""
    named = {name: t for name, t in zip("qkvm", call.tensors, strict=False) if t.requires_grad}
    ramp = torch.linspace(-1, 1, output.numel(), dtype=torch.float64, device=output.device).view(output.shape)
    found = torch.autograd.grad((output.double() * ramp).sum(), list(named.values()))
    return dict(zip(named, found, strict=True))


def run_captured(rewrite: Rewrite, call: Call, signature: Signature) -> tuple[torch.Tensor, list[Call]]:
    """Run a rewrite around the float64 reference and return the output and what reached the reference."""
    seen: list[Call] = []

    def reference(*arguments: object) -> torch.Tensor:
        seen.append(Call(*arguments))  # type: ignore[arg-type]
        return dense_reference(seen[-1])

    run = rewrite.bind(signature, reference)
    return run(*call), seen


def check_rewrite(rewrite: Rewrite, call: Call) -> None:
    """Check the whole contract on one call for which the rewrite applies."""
    signature = read_signature(call)
    output, seen = run_captured(rewrite, call, signature)
    assert read_signature(seen[0]) == rewrite.transform(signature)
    assert rewrite.workspace_bytes(signature) >= 0
    expected = dense_reference(call)
    assert output.shape == expected.shape
    # A mask that is cast to the dtype of the inputs loses digits there; nothing else is inexact.
    casts_mask = (
        call.attn_mask is not None and call.attn_mask.dtype == torch.float32 and call.query.dtype != torch.float32
    )
    tolerance = 2e-2 if casts_mask else 1e-9
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    if signature.wants_grad:
        wanted, found = gradients(expected, call), gradients(output, call)
        for name, tensor in wanted.items():
            loose = {"rtol": 5e-2, "atol": 5e-2} if tensor.dtype != torch.float32 or casts_mask else {}
            torch.testing.assert_close(found[name], tensor, msg=lambda text, n=name: f"{n}: {text}", **loose)
