"""The right answer, written here a second time: attention in float64 by its definition, and what rounding may move.

It shares no code with the library's own reference, so that a mistake there cannot hide one elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from smartattn.signature import Call

ROUNDINGS = 4.0
"""Roundings of the dtype that any step may lose, at the magnitude of that step's terms."""
NAMES = ("query", "key", "value", "attn_mask")


@dataclass(frozen=True)
class Answer:
    """The right output and gradients, and how far each may be off.

    Attributes:
        output: (*batch, Hq, L, Ev) in float64.
        output_error: broadcastable to ``output``.
        gradients: name of the input to its gradient, for those that want one.
        gradient_errors: name of the input to its largest error.
        is_empty: (*batch, Hq, L, 1), rows that see no key.
    """

    output: torch.Tensor
    output_error: torch.Tensor
    gradients: dict[str, torch.Tensor]
    gradient_errors: dict[str, float]
    is_empty: torch.Tensor


def answer(call: Call, grad_out: torch.Tensor | None = None) -> Answer:
    """Return the right answer to a call, and its gradients for ``grad_out``."""
    leaves = [tensor.detach().double() if tensor.is_floating_point() else tensor for tensor in call.tensors]
    for leaf, tensor in zip(leaves, call.tensors, strict=True):
        leaf.requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        output, probabilities, is_empty = attend(call._replace(**dict(zip(NAMES, leaves, strict=False))))
    wanted = {name: leaf for name, leaf in zip(NAMES, leaves, strict=False) if leaf.requires_grad}
    gradients = {}
    if grad_out is not None and wanted:
        found = torch.autograd.grad(output, list(wanted.values()), grad_out.detach().double())
        gradients = dict(zip(wanted, found, strict=True))
    unit = ROUNDINGS * torch.finfo(call.query.dtype).eps * (1 + _score_sizes(call))
    error = unit * _largest(call.value)
    errors = {} if grad_out is None else _gradient_errors(call, probabilities, grad_out, float(unit.max()))
    return Answer(output.detach(), error, gradients, {name: errors[name] for name in gradients}, is_empty)


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, probabilities and which rows are empty, by the definition, in the dtype of the call."""
    group = call.query.size(-3) // call.key.size(-3)
    key, value = (tensor.repeat_interleave(group, dim=-3) for tensor in (call.key, call.value))
    scale = 1.0 / math.sqrt(call.query.size(-1)) if call.scale is None else call.scale
    scores = call.query @ key.transpose(-2, -1) * scale
    if call.attn_mask is not None:
        mask = call.attn_mask
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    if call.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    is_empty = (scores == -math.inf).all(-1, keepdim=True)
    probabilities = torch.softmax(scores.masked_fill(is_empty, 0.0), -1).masked_fill(is_empty, 0.0)
    return probabilities @ value, probabilities, is_empty


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max())


def _score_sizes(call: Call) -> torch.Tensor:
    """Return for each query row the size of the largest term that its scores are made of."""
    query, key = call.query.detach().double().abs(), call.key.detach().double().abs()
    scale = 1.0 / math.sqrt(query.size(-1)) if call.scale is None else abs(call.scale)
    key = key.repeat_interleave(query.size(-3) // key.size(-3), dim=-3)
    sizes = (query @ key.transpose(-2, -1)).amax(-1, keepdim=True) * scale
    mask = call.attn_mask
    if mask is None or mask.dtype == torch.bool:
        return sizes
    values = mask.detach().double().expand(*query.shape[:-1], key.size(-2))
    if call.is_causal:
        values = values.masked_fill(torch.ones_like(values, dtype=torch.bool).triu(1), -math.inf)
    # What lies far below the largest value of its row hides a key, and rounding it decides nothing.
    is_small = values < values.amax(-1, keepdim=True) - 200
    return sizes + values.masked_fill(is_small | (values == -math.inf), 0.0).abs().amax(-1, keepdim=True)


def _gradient_errors(call: Call, P: torch.Tensor, grad_out: torch.Tensor, unit: float) -> dict[str, float]:
    """Return crude bounds: every term of a gradient at its largest, times the roundings."""
    given = grad_out.detach().double().abs()
    P = P.detach()
    scale = 1.0 / math.sqrt(call.query.size(-1)) if call.scale is None else abs(call.scale)
    strength = 2 * float(given.sum(-1).max()) * _largest(call.value)
    group = call.query.size(-3) // call.key.size(-3)
    column = group * float(P.sum(-2).max())
    # Keys and values gather a term from every query row; float32 sums lose a little at each.
    gathered = unit * (1 + math.sqrt(P.size(-2) * group) / 4)
    errors = {
        "query": unit * strength * scale * _largest(call.key),
        "key": gathered * strength * scale * _largest(call.query) * column,
        "value": gathered * column * float(given.max()),
    }
    if call.attn_mask is not None:
        unit = max(unit, ROUNDINGS * torch.finfo(call.attn_mask.dtype).eps) if call.attn_mask.requires_grad else unit
        errors["attn_mask"] = (
            unit
            * math.sqrt(P.numel() / call.attn_mask.numel())
            * strength
            * float(P.sum_to_size(call.attn_mask.shape).max())
        )
    return errors


def check(call: Call, output: torch.Tensor, right: Answer, gradients: dict[str, torch.Tensor] | None = None) -> None:
    """Assert that an output, and gradients by name, are right in values and form."""
    assert output.shape == right.output.shape
    assert output.dtype == call.query.dtype
    assert output.device == call.query.device
    close(output, right.output, right.output_error, "output")
    assert not bool((output.detach() != 0)[right.is_empty.expand_as(output)].any()), "a row that sees no key is not 0"
    for name, gradient in (gradients or {}).items():
        given = getattr(call, name)
        assert (gradient.shape, gradient.dtype) == (given.shape, given.dtype), name
        close(gradient, right.gradients[name], torch.tensor(right.gradient_errors[name]), f"gradient of {name}")
    if gradients and "query" in gradients:
        assert not bool((gradients["query"] != 0)[right.is_empty.expand_as(gradients["query"])].any())


def close(found: torch.Tensor, right: torch.Tensor, error: torch.Tensor, what: str) -> None:
    """Assert that ``found`` is finite and within ``error`` of ``right``."""
    found = found.detach()
    assert bool(torch.isfinite(found).all()), f"{what} has {int((~torch.isfinite(found)).sum())} NaN or Inf"
    tiny = torch.finfo(found.dtype).tiny * 16
    excess = (found.double() - right).abs() - error.to(right.device) - tiny
    assert float(excess.max()) <= 0, f"{what} is off by {float((found.double() - right).abs().max()):.3g}"


def differentiate(call: Call, output: torch.Tensor, grad_out: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of what wants one, by name."""
    wanted = {n: t for n, t in zip(NAMES, call.tensors, strict=False) if t.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(output, list(wanted.values()), grad_out), strict=True))
