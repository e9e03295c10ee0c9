"""Inputs and a float32 reference that the GPU tests share."""

from __future__ import annotations

import math

import torch

from smartattn.backends.base import Runner
from smartattn.backends.registry import backends_for
from smartattn.environment import environment_of
from smartattn.guards import reasons
from smartattn.signature import Call, read_signature

TOLERANCES = {torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest absolute error allowed on unit-normal inputs.

Source: three times the largest error seen on an H200 with torch 2.11.0 (bfloat16 0.03, TF32-free float32 1e-3), for
outputs and gradients of up to 700 keys and groups of up to 4.
"""


def tensors(
    N: int,
    Hq: int,
    H: int,
    L: int,
    S: int,
    E: int,
    Ev: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "bhsd",
    wants_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value on the GPU in a layout: bhsd, bshd, packed, gap (odd rows) or offN (odd start)."""

    def one(heads: int, length: int, width: int) -> torch.Tensor:
        def randn(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device="cuda", dtype=dtype)

        if layout == "bshd":
            made = randn(N, length, heads, width).transpose(1, 2)
        elif layout == "packed":
            made = randn(N, length, 3 * heads, width)[:, :, heads : 2 * heads].transpose(1, 2)
        elif layout == "gap":
            made = randn(N, heads, length, width + 1)[..., :width]
        elif layout.startswith("off"):
            start = int(layout[3:])
            made = randn(N * heads * length * width + start)[start:].view(N, heads, length, width)
        else:
            made = randn(N, heads, length, width)
        return made.detach().requires_grad_(wants_grad)

    return one(Hq, L, E), one(H, S, E), one(H, S, Ev or E)


def reference(call: Call, grad_out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Return the output in float32 and, with ``grad_out``, the gradients of query, key and value."""
    query, key, value = (t.detach().float().contiguous().requires_grad_() for t in call.tensors[:3])
    group = query.size(1) // key.size(1)
    scale = 1 / math.sqrt(query.size(-1)) if call.scale is None else call.scale
    scores = (query * scale) @ key.repeat_interleave(group, 1).transpose(-1, -2)
    mask = call.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask.detach().float()
    if call.is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    visible_rows = (scores > float("-inf")).any(-1, keepdim=True)
    probabilities = torch.where(visible_rows, scores, 0.0).softmax(-1) * visible_rows
    output = probabilities @ value.repeat_interleave(group, 1)
    if grad_out is None:
        return (output.detach(),)
    return (output.detach(), *torch.autograd.grad(output, (query, key, value), grad_out.float()))


def run(runner: Runner, call: Call, grad_out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Run a bound callable and return what ``reference`` returns."""
    output = runner(*call)
    if grad_out is None:
        return (output.detach(),)
    return (output.detach(), *torch.autograd.grad(output, call.tensors[:3], grad_out))


def errors(found: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> list[float]:
    """Return the largest absolute error of each tensor; infinite where one is not finite."""
    pairs = zip(found, right, strict=True)
    return [(a.float() - b).abs().max().item() if a.isfinite().all() else math.inf for a, b in pairs]


def eligible(call: Call) -> dict[str, Runner]:
    """Return the bound callable of every CUDA backend that says it can serve the call, guards included."""
    signature = read_signature(call)
    assert signature is not None
    environment = environment_of(call.query.device)
    return {
        name: backend.bind(signature)
        for name, backend in backends_for("cuda").items()
        if not backend.reasons(signature, environment) and not reasons(name, signature, environment)
    }
