"""Whether a route computes attention: its results on probes against a wide reference, by the yardstick of eager."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from smartattn import dropout_check, inputs
from smartattn.backends.base import Runner
from smartattn.parts import choose_part, take
from smartattn.probes import GRAD_KINDS, Probe, Trial, differentiate, laid_out, prepare, relative_error
from smartattn.reference import flat_mask, reference_dtype
from smartattn.signature import MASK_KINDS, Call, Signature
from smartattn.trials import untraced

MAX_SCORES = {"cpu": 1 << 18}
MAX_SCORES_ACCELERATOR = 1 << 26
"""Scores above which only a part of a problem is compared: tens of milliseconds of reference on either device."""
LARGE_SCORES = 1 << 22
"""Scores above which a call is slow enough for two probes to be all."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of checking one route.

    Attributes:
        is_valid: whether the route may serve the signature.
        error_ratio: largest error as a share of what is allowed; infinite for what no error can express.
        reason: empty when valid; else the probe, the tensor, the place, the error and what is allowed.
    """

    is_valid: bool
    error_ratio: float
    reason: str = ""


class _FaultError(Exception):
    """A result that is wrong; carries the share of the allowed error."""

    def __init__(self, text: str, ratio: float = math.inf) -> None:
        super().__init__(text)
        self.ratio = ratio


class Validator:
    """Checks routes against the same probes; reference and yardstick of each probe are computed once.

    Args:
        call: whose layouts, flags and values are probed; used through detached views.
        signature: of the call.
        accuracy: ``standard``, ``approximate`` (judges alike) or ``strict`` (every probe at any size, and a bound on
            the mean error by Math's).
        is_own_mask: whether the call holds the caller's own values; made-up ones are not probed as the caller's.
        has_all_probes: whether every probe is made at any size, as for ``strict``, under the bounds of ``accuracy``.

    Cost: the first ``check`` computes the probes (each about ten calls, at most ``MAX_SCORES`` scores in float64).
    Every ``check`` then makes one forward call per probe, and for training one backward: at most three probes and two
    more with a mask tensor; two in all above ``LARGE_SCORES`` scores. Dropout adds one call.
    """

    def __init__(
        self,
        call: Call,
        signature: Signature,
        *,
        accuracy: str = "standard",
        is_own_mask: bool = True,
        has_all_probes: bool = False,
    ) -> None:
        self.call = call
        self.signature = signature
        self.is_strict = accuracy == "strict"
        self.has_all_probes = has_all_probes or self.is_strict
        self.is_own = is_own_mask
        self.dtype = reference_dtype(signature.device_type, call.query.dtype, is_full_precision=not signature.precision)
        self.part = choose_part(signature, MAX_SCORES.get(signature.device_type, MAX_SCORES_ACCELERATOR))
        self._probes: list[Probe] | None = None

    def prepare(self) -> None:
        """Compute the probes now; an error here, such as lack of memory, says nothing about any route."""
        with untraced(self.call.query.device, grad=self.signature.wants_grad):
            self._prepared()

    def check(self, run: Runner) -> Verdict:
        """Return whether ``run`` computes this signature; what ``run`` raises is passed on."""
        with untraced(self.call.query.device, grad=self.signature.wants_grad):
            worst = 0.0
            for probe in self._prepared():
                try:
                    worst = max(worst, self._check_probe(run, probe))
                except _FaultError as fault:
                    return Verdict(False, fault.ratio, f"probe {probe.name}: {fault}")
            if self.signature.dropout != "none":
                text = dropout_check.fault(
                    run, self.call, self.signature.grads,
                    part=self.part, dtype=self.dtype, keeps_mask=self._keeps_mask,
                )  # fmt: skip
                if text:
                    return Verdict(False, math.inf, f"probe dropout: {text}")
        return Verdict(True, worst)

    @property
    def _is_brief(self) -> bool:
        return self.signature.num_scores > LARGE_SCORES and not self.has_all_probes

    @property
    def _has_clean_mask(self) -> bool:
        return self.call.attn_mask is None or inputs.is_clean(self.call.attn_mask)

    @property
    def _keeps_mask(self) -> bool:
        # A mask of a recognised class must stay of it; that of a large problem is not drawn a second time.
        return self.signature.mask not in MASK_KINDS or (self._is_brief and self._has_clean_mask)

    def _prepared(self) -> list[Probe]:
        if self._probes is None:
            names = list(self._names())
            self._probes = [
                prepare(
                    self.call, name, index, part=self.part, grads=self.signature.grads,
                    # One layout per probe keeps it to one backward; a lone probe takes the two that matter most.
                    grad_kinds=GRAD_KINDS[:2] if len(names) == 1 else (GRAD_KINDS[index % len(GRAD_KINDS)],),
                    dtype=self.dtype, keeps_mask=self._keeps_mask, is_strict=self.is_strict,
                )
                for index, name in enumerate(names)
            ]  # fmt: skip
        return self._probes

    def _names(self) -> Iterator[str]:
        # NaN and Inf travel differently through correct implementations, so values that hold them prove nothing.
        tensors = self.call.query, self.call.key, self.call.value
        if self.is_own and self._has_clean_mask and all(bool(torch.isfinite(t).all()) for t in tensors):
            yield "caller"
        yield "random"
        if self._is_brief:
            return
        if self.call.scale != 0:
            yield "very_negative"
        if self.signature.has_mask_tensor and not self._keeps_mask:
            yield "masked_rows"
            yield "one_visible_key"

    def _check_probe(self, run: Runner, probe: Probe) -> float:
        output = run(*probe.call)
        self._check_form("output", output, probe.call)
        worst = 0.0
        for trial in probe.trials:
            found = {"output": output.detach()}
            grad_out = laid_out(trial, output, probe.part)
            if grad_out is not None:
                if not output.requires_grad:
                    raise _FaultError("output does not depend on inputs that want a gradient")
                keep = trial is not probe.trials[-1]
                found |= differentiate(output, probe.call, grad_out, self.signature.grads, keep=keep)
            for name in trial.expected.tensors:
                self._check_form(name, found[name], probe.call)
                actual = found[name] if probe.part is None else take(self._flat(found[name], name), probe.part, name)
                worst = max(worst, self._compare(trial, name, actual))
        return worst

    def _flat(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return flat_mask(tensor, self.signature.batch) if name == "dmask" else tensor

    def _check_form(self, name: str, actual: torch.Tensor, call: Call) -> None:
        like = {"dQ": call.query, "dK": call.key, "dV": call.value, "dmask": call.attn_mask}.get(name)
        shape = (*call.query.shape[:-1], call.value.size(-1)) if like is None else tuple(like.shape)
        like = call.query if like is None else like
        for what, given, right in (
            ("shape", tuple(actual.shape), shape),
            ("dtype", actual.dtype, like.dtype),
            ("device", actual.device, like.device),
        ):
            if given != right:
                raise _FaultError(f"{name} has {what} {given}, right is {right}")

    def _compare(self, trial: Trial, name: str, actual: torch.Tensor) -> float:
        expected = trial.expected.tensors[name]
        about = f" (grad_out {trial.grad_kind})" if name != "output" else ""
        error = relative_error(actual, expected, trial.expected.magnitudes[name])
        worst = float(error.max())
        if not math.isfinite(worst):
            wrong = (actual.isnan() != expected.isnan()) | actual.isinf()
            raise _FaultError(
                f"{name} has {int(wrong.sum())} of {wrong.numel()} elements NaN or Inf where the right ones are "
                f"finite, first at {self._place(wrong, name)}{about}"
            )
        if name in ("output", "dQ"):
            wrong = (actual != 0) & trial.expected.is_empty
            if bool(wrong.any()):
                place = self._place(wrong, name)
                raise _FaultError(f"{name} at {place} is not 0 in a row that sees no key{about}")
        ratio = worst / trial.allowed[name]
        if ratio > 1:
            at = _first(error == error.max())
            raise _FaultError(
                f"{name} at {self._place(error == error.max(), name)} is {float(actual[at]):.6g}, right is "
                f"{float(expected[at]):.6g}; error {worst:.2g} of the row's magnitude, allowed "
                f"{trial.allowed[name]:.2g}{about}",
                ratio,
            )
        if self.is_strict:
            mean = float(error.mean())
            if mean > trial.allowed_mean[name]:
                raise _FaultError(
                    f"{name} has mean error {mean:.2g} of its rows' magnitudes, strict allows "
                    f"{trial.allowed_mean[name]:.2g}{about}",
                    mean / trial.allowed_mean[name],
                )
        return ratio

    def _place(self, wrong: torch.Tensor, name: str) -> list[int]:
        """Return the index, in the flattened whole, of the first element that is wrong."""
        at = list(_first(wrong))
        part = self.part
        if part is not None and name != "dmask":
            maps = [part.batches, part.key_heads if name in ("dK", "dV") else part.query_heads]
            maps += [] if name in ("dK", "dV") else [part.rows]
            at[: len(maps)] = [whole[i] for whole, i in zip(maps, at, strict=False)]
        return at


def _first(wrong: torch.Tensor) -> tuple[int, ...]:
    index = int(wrong.reshape(-1).to(torch.uint8).argmax())
    place: list[int] = []
    for size in reversed(wrong.shape):
        index, at = divmod(index, size)
        place.insert(0, at)
    return tuple(place)
