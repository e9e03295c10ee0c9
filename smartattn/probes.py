"""Probes: inputs on which every route of a signature is judged, with the right results and the error allowed on them.

Errors are relative to the magnitude of their row (see ``reference``). The yardstick is plain attention in the dtype of
the inputs on the same probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from smartattn import inputs
from smartattn.backends.eager import run_eager
from smartattn.backends.math import run_math
from smartattn.parts import Part, restrict, spread
from smartattn.reference import VAGUE_SCORE, Solution, solve
from smartattn.signature import Call

LETTERS = {"q": "dQ", "k": "dK", "v": "dV", "m": "dmask"}
GRAD_KINDS = ("like_output", "expanded", "sequence_first")
"""Memory layouts of the gradient of the output.

Source: pytorch#133671, a backward that took every incoming gradient to have the output's layout; ``sum().backward()``
gives an expanded one.
"""
YARDSTICK_RATIO = 2.0
"""How many times the error of eager a route may have. Source: the rule of FlashAttention's own tests."""
STRICT_MEAN_RATIO = 1.5
MEAN_FLOOR_RATIO = 1 / 16
"""Mean over largest rounding: an eighth of an ``eps`` is the mean error of one rounding, halved for cancellation."""
MAX_YARDSTICK = 0.5
"""Error of eager, as a share of the magnitude, above which it is no yardstick and Math takes its place."""
FLOOR_ROUNDINGS = 2.0
"""Roundings in the dtype that every route may lose: one when probabilities are cast, one at the end."""
FLOOR_SCORE_ROUNDINGS = 4.0
"""Roundings of a score in the dtype that it is computed in; each moves a probability in proportion to the score."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One gradient of the output on one probe, with what is expected for it.

    Attributes:
        grad_kind: one of ``GRAD_KINDS``; empty without gradients.
        grad_out: its values, in the shape of the expected output.
        expected: the right results.
        allowed: largest relative error by name of the tensor.
        allowed_mean: mean relative error by name, for ``strict``.
    """

    grad_kind: str
    grad_out: torch.Tensor | None
    expected: Solution
    allowed: dict[str, float]
    allowed_mean: dict[str, float]


@dataclass(frozen=True, slots=True)
class Probe:
    """One set of inputs.

    Attributes:
        name: kind of values.
        call: the whole call, on leaves that want the signature's gradients.
        part: what of the results is compared; ``None`` for all.
        trials: at least one.
    """

    name: str
    call: Call
    part: Part | None
    trials: tuple[Trial, ...]


def prepare(
    call: Call, name: str, seed: int, *, part: Part | None, grads: str, grad_kinds: tuple[str, ...],
    dtype: torch.dtype, keeps_mask: bool, is_strict: bool,
) -> Probe:  # fmt: skip
    """Return a probe of a kind of values; computes reference and yardstick, in ``dtype`` and the call's own."""
    filled = leaves(inputs.fill(call, name, seed, keeps_mask=keeps_mask)._replace(dropout_p=0.0), grads)
    small = filled if part is None else leaves(restrict(leaves(filled, ""), part), grads)
    makers = [
        _TrialMaker(small, kind, seed, part, grads, dtype, is_strict) for kind in (grad_kinds if grads else ("",))
    ]
    return Probe(name, filled, part, tuple(maker.make() for maker in makers))


def leaves(call: Call, grads: str) -> Call:
    """Return the call on detached views that want the given gradients."""
    made = [tensor.detach() for tensor in call.tensors]
    for letter, tensor in zip("qkvm", made, strict=False):
        tensor.requires_grad_(letter in grads)
    mask = made[3] if len(made) > 3 else None
    return call._replace(query=made[0], key=made[1], value=made[2], attn_mask=mask)


def laid_out(trial: Trial, output: torch.Tensor, part: Part | None) -> torch.Tensor | None:
    """Return the gradient of the whole output, zero outside of the part, in the memory layout of the trial."""
    values = trial.grad_out
    if values is None:
        return None
    if trial.grad_kind == "expanded":
        if part is None:
            return values
        column = spread(values[..., :1], part, torch.Size((*output.shape[:-1], 1)))
        return column.expand(output.shape)
    whole = values if part is None else spread(values, part, output.shape)
    if trial.grad_kind == "sequence_first":
        return whole.transpose(-3, -2).contiguous().transpose(-3, -2)
    return torch.empty_like(output).copy_(whole)


def relative_error(actual: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Return the error of each element over the magnitude of its row.

    Rows far smaller than the largest result count as larger than they are, by the precision of the dtype, and so do rows
    near the smallest normal number of the dtype: there rounding is absolute.
    """
    info = torch.finfo(actual.dtype)
    base = magnitude + (info.eps * expected.abs().max() + info.tiny)
    return (actual.detach().to(expected.dtype) - expected).abs_().div_(base)


def differentiate(output: torch.Tensor, call: Call, grad_out: torch.Tensor, grads: str, *, keep: bool) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return the gradients by name; ``keep`` lets the same output be differentiated again."""
    wanted = {LETTERS[letter]: tensor for letter, tensor in zip("qkvm", call.tensors, strict=False) if letter in grads}
    found = torch.autograd.grad(output, list(wanted.values()), grad_out, retain_graph=keep)
    return dict(zip(wanted, found, strict=True))


@dataclass(frozen=True, slots=True)
class _TrialMaker:
    call: Call
    kind: str
    seed: int
    part: Part | None
    grads: str
    dtype: torch.dtype
    is_strict: bool

    def make(self) -> Trial:
        eps = torch.finfo(self.call.query.dtype).eps
        strain = FLOOR_SCORE_ROUNDINGS * min(eps, torch.finfo(torch.float32).eps) / (FLOOR_ROUNDINGS * eps)
        grad_out = self._grad_out() if self.grads else None
        with torch.no_grad():
            if grad_out is not None and self._may_be_vague():
                # Gradients of vague rows would blur those of every key.
                grad_out = grad_out.masked_fill(solve(self.call, self.dtype).is_vague, 0.0)
            expected = solve(self.call, self.dtype, grad_out, self.grads, strain)
        limit = torch.finfo(self.call.query.dtype).max / 2
        for name in [name for name, tensor in expected.tensors.items() if not bool((tensor.abs() < limit).all())]:
            # Beyond the range of the dtype there is no right answer to compare with.
            del expected.tensors[name]
        eager = self._yardstick(run_eager, grad_out, expected)
        is_unfit = any(worst > MAX_YARDSTICK for worst, _ in eager.values())
        math_ = self._yardstick(run_math, grad_out, expected) if is_unfit or self.is_strict else eager
        floor = FLOOR_ROUNDINGS * eps
        allowed, allowed_mean = {}, {}
        for name in expected.tensors:
            worst = eager[name][0] if eager[name][0] <= MAX_YARDSTICK else math_[name][0]
            allowed[name] = floor + (YARDSTICK_RATIO * worst if math.isfinite(worst) else 0.0)
            mean = math_[name][1]
            allowed_mean[name] = MEAN_FLOOR_RATIO * floor + (STRICT_MEAN_RATIO * mean if math.isfinite(mean) else 0.0)
        return Trial(self.kind, grad_out, expected, allowed, allowed_mean)

    def _grad_out(self) -> torch.Tensor:
        query = self.call.query
        shape = (*query.shape[:-1], self.call.value.size(-1))
        if self.kind == "expanded" and self.part is None:
            return torch.ones((), dtype=query.dtype, device=query.device).expand(shape)
        width = 1 if self.kind == "expanded" else shape[-1]
        generator = torch.Generator(query.device).manual_seed(self.seed)
        values = torch.randn((*shape[:-1], width), generator=generator, dtype=query.dtype, device=query.device)
        return values.expand(shape)

    def _yardstick(
        self, run: Callable[..., torch.Tensor], grad_out: torch.Tensor | None, expected: Solution
    ) -> dict[str, tuple[float, float]]:
        output = run(*self.call)
        found = {"output": output}
        if grad_out is not None:
            found |= differentiate(output, self.call, grad_out, self.grads, keep=False)
        errors = {}
        for name, right in expected.tensors.items():
            error = relative_error(found[name], right, expected.magnitudes[name])
            worst = float(error.max())
            errors[name] = (worst, float(error.mean())) if math.isfinite(worst) else (math.inf, math.inf)
        return errors

    def _may_be_vague(self) -> bool:
        mask = self.call.attn_mask
        if mask is None or mask.dtype == torch.bool or (self.kind == "expanded" and self.part is None):
            return False
        return bool(((mask.abs() > VAGUE_SCORE) & torch.isfinite(mask)).any())
