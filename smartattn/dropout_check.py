"""Whether a route drops at the wanted rate, and drops the same probabilities forward and backward.

Which probabilities fall is each route's own affair, so only statistics are compared, with generous bounds.
"""

from __future__ import annotations

import math

import torch

from smartattn import inputs
from smartattn.backends.base import Runner
from smartattn.parts import Part, restrict, take
from smartattn.probes import differentiate, leaves
from smartattn.reference import flat, solve
from smartattn.signature import Call
from smartattn.trials import generators_of

DEVIATIONS = 6.0
"""Standard deviations that a mean may be off; 6 would happen by chance once in 500 million."""
SLACK = 0.02
"""What rounding may add, as a share of the mean."""
ROW_ROUNDINGS = 4.0


def fault(run: Runner, call: Call, grads: str, *, part: Part | None, dtype: torch.dtype, keeps_mask: bool) -> str:
    """Return what is wrong with the route's dropout, empty when nothing is.

    Runs once with the call's own rate, on a query of zeros and values around 1, and differentiates once when the
    value wants a gradient. Meant for the inside of ``untraced``: it seeds the device's generator.
    """
    probe = leaves(_probe(call, keeps_mask=keeps_mask), grads)
    for generator in generators_of(call.query.device):
        generator.manual_seed(0)
    output = run(*probe)
    shape = (*call.query.shape[:-1], call.value.size(-1))
    if tuple(output.shape) != shape or output.dtype != call.query.dtype:
        return f"output has shape {tuple(output.shape)} and dtype {output.dtype}, not {shape} and {call.query.dtype}"
    if not bool(torch.isfinite(output).all()):
        return "output has NaN or Inf"
    return _mean_fault(probe, output.detach(), part, dtype) or (
        _row_fault(probe, output, dtype) if "v" in grads else ""
    )


def _probe(call: Call, *, keeps_mask: bool) -> Call:
    filled = inputs.fill(call, "random", keeps_mask=keeps_mask)
    # In place on the whole memory, which works for expanded layouts too.
    inputs.memory_of(filled.query.detach()).zero_()
    inputs.memory_of(filled.value.detach()).mul_(0.5).add_(1.0)
    return filled


def _mean_fault(probe: Call, output: torch.Tensor, part: Part | None, dtype: torch.dtype) -> str:
    p = probe.dropout_p
    small = leaves(probe, "") if part is None else restrict(leaves(probe, ""), part)
    found = output if part is None else take(output, part, "output")
    right = solve(small, dtype).tensors["output"]
    L, S = small.query.size(-2), small.key.size(-2)
    rows = right.numel() // right.size(-1)
    # Uniform probabilities over S keys vary by p / (1 - p) / S; under a mask or triangle a row may see one key only.
    visible = 1 if small.attn_mask is not None or small.is_causal else S
    bound = DEVIATIONS * 1.5 * math.sqrt(p / (1 - p) / visible / rows) + SLACK
    mean, wanted = float(found.to(dtype).mean()), float(right.mean())
    if abs(mean - wanted) > bound * max(abs(wanted), 1e-3):
        return f"output is {mean:.4g} on average, right is {wanted:.4g}; allowed is {bound:.2g} of it"
    spread = math.sqrt(p / (1 - p) / S)
    rounding = torch.finfo(output.dtype).eps
    if p * rows * S > DEVIATIONS**2 and spread > 8 * rounding and rows * L > 1:
        change = float((found.to(dtype) - right).abs().max())
        if change < spread / 8:
            return f"output changes by {change:.2g} at most; dropout_p {p} does not seem to be applied"
    return ""


def _row_fault(probe: Call, output: torch.Tensor, dtype: torch.dtype) -> str:
    """Read the probabilities of one row out of the gradient of value, and compute that row's output from them."""
    grad_out = torch.zeros_like(output)
    flat(grad_out)[-1, -1, -1] = 1.0
    gradient = differentiate(output, probe, grad_out, "v", keep=False)["dV"]
    probabilities = flat(gradient)[-1, -1, :, :1].to(dtype)
    value = flat(probe.value.detach())[-1, -1].to(dtype)
    right = (probabilities * value).sum(0)
    found = flat(output.detach())[-1, -1, -1].to(dtype)
    size = float((probabilities.abs() * value.abs()).sum(0).max())
    error = float((found - right).abs().max())
    if error > ROW_ROUNDINGS * torch.finfo(output.dtype).eps * max(size, 1.0) * (
        1 if output.element_size() == 2 else 8
    ):
        return f"backward drops other probabilities than forward: the last row is off by {error:.2g}"
    return ""
