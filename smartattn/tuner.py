"""Tuning one signature: eligible -> first call -> validate -> measure -> record. Never touches the disk.

Order matters: reasons cost nothing, so they come first; a first call shows hopeless routes before the costlier
validation; only valid routes are raced. Every route ends as one outcome, whatever happens to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from smartattn import events, versions
from smartattn.backends.base import Runner
from smartattn.backends.registry import backends_for
from smartattn.backends.stock import resolved_backend
from smartattn.buckets import Bucket
from smartattn.choice import STOCK
from smartattn.clocks import Clock
from smartattn.environment import Environment, provenance_now
from smartattn.formatting import format_bytes, format_us
from smartattn.measurement import Measurement, Sample
from smartattn.record import Failed, Invalid, Outcome, Record, Rejected, Timed
from smartattn.routes import Route
from smartattn.settings import Settings
from smartattn.signature import Call, Signature
from smartattn.timing import Limits, Trial, is_unsettled, race
from smartattn.trials import leaf_copies, untraced
from smartattn.validation import Validator

HOPELESS_RATIOS = ((50e3, 1.5), (5e3, 3.0), (0.0, 8.0))
"""From which fastest first call, in microseconds, a route that many times slower is not even validated.

Source: validating costs several calls. Short first calls hold caches and lazily loaded kernels (up to about 3x seen),
long ones do not: calls of 50 ms and more repeated within a third on a busy machine.
"""
LONG_CALL_US = 5e3
"""First call from which it counts as a sample: what is cold about it no longer shows."""
MAX_REASON_CHARACTERS = 300
Result = TypeVar("Result")


class TuningAbortedError(Exception):
    """An accelerator error that outlives its call was met; nothing more may be tried in this process."""


@dataclass
class Tuning:
    """One tuning in progress.

    Attributes:
        call: the caller's own tensors; only read.
        signature: of the call.
        environment: where it runs.
        routes: every route to judge, in tie order.
        settings: budgets, accuracy, share of memory.
        clock: measures time.
        quarantined: route name to the reason why it may not be tried again.
        bucket: that the record may answer for.
        outcomes: of the routes judged so far.
        plans_ms: route name to what its first call cost beyond its second.
        lacks_memory: whether a route was rejected for memory that this device has, but not now.
    """

    call: Call
    signature: Signature
    environment: Environment
    routes: Sequence[Route]
    settings: Settings
    clock: Clock
    quarantined: Mapping[str, str] = field(default_factory=dict)
    bucket: Bucket | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    plans_ms: dict[str, float] = field(default_factory=dict)
    lacks_memory: bool = False

    @property
    def device(self) -> torch.device:
        """Device of the call."""
        return self.call.query.device

    def run(self) -> Record:
        """Tune and return the record.

        Returns:
            A record with one outcome per route.

        Raises:
            TuningAbortedError: after an accelerator error that outlives its call.

        Note:
            Runs the routes on the caller's tensors without changing them; leaves gradients, generators, flags and
            hooks as found. Interruptible; nothing is kept then.
        """
        start_s = self.clock.now_s()
        with untraced(self.device, grad=self.signature.wants_grad):
            runners = self._bind_eligible()
            own = leaf_copies(self.call)
            trials = {name: trial_of(run, own, self.signature) for name, run in runners.items()}
            firsts = self._first_calls(trials)
            errors = self._validate(runners, firsts, own)
            spent_ms = (self.clock.now_s() - start_s) * 1e3
            measured = self._race({name: trials[name] for name in errors}, firsts, spent_ms)
        noisy = is_unsettled(measured)
        for name, measurement in measured.items():
            self.outcomes[name] = self._timed(name, measurement, firsts[name].cost_us, errors[name])
        ordered = {route.name: self.outcomes[route.name] for route in self.routes}
        provenance = provenance_now(self.signature.device_type, noisy=noisy)
        return Record(self.signature, ordered, provenance, self.bucket)

    def _bind_eligible(self) -> dict[str, Runner]:
        runners = {}
        free_bytes = versions.free_memory_bytes(self.device)
        for route in self.routes:
            reasons = route.reasons(self.signature, self.environment)
            if not route.backend.is_exact and self.settings.accuracy != "approximate":
                reasons += ("is approximate; accuracy is " + repr(self.settings.accuracy),)
            if route.name in self.quarantined:
                reasons += (f"is in quarantine: {self.quarantined[route.name]}",)
            if not reasons:
                reasons = self._memory_reasons(route, free_bytes)
            if reasons:
                self.outcomes[route.name] = Rejected(reasons)
                continue
            runners[route.name] = route.bind(self.signature, self.environment)
        return runners

    def _memory_reasons(self, route: Route, free_bytes: int) -> tuple[str, ...]:
        wanted = 0 if route.name == STOCK else route.workspace_bytes(self.signature)
        allowed = int(free_bytes * self.settings.memory_share)
        if wanted <= allowed:
            return ()
        self.lacks_memory |= wanted <= versions.total_memory_bytes(self.device) * self.settings.memory_share
        share = f"{self.settings.memory_share:.0%} of {format_bytes(free_bytes)} free"
        return (f"wants {format_bytes(wanted)} of workspace; {format_bytes(allowed)} are allowed ({share})",)

    def _first_calls(self, trials: Mapping[str, Trial]) -> dict[str, Sample]:
        """Return what one call of every route costs; hopeless routes get their outcome (stock always stays)."""
        firsts: dict[str, Sample] = {}
        for name, trial in trials.items():
            sample = self._guarded(name, functools.partial(self.clock.sample, trial, 1))
            if sample is not None:
                firsts[name] = sample
        limit_us = self._hopeless_us(firsts)
        for name, first in list(firsts.items()):
            if first.cost_us <= limit_us or name == STOCK:
                continue
            # Plans and lazily loaded kernels are paid now, so a second call tells whether it is the route that is slow.
            is_cold = first.cost_us < LONG_CALL_US or self._route(name).backend.plans_per_shape
            steady = self._guarded(name, functools.partial(self.clock.sample, trials[name], 1)) if is_cold else first
            if steady is None:
                del firsts[name]
                continue
            if steady.cost_us <= limit_us:
                self.plans_ms[name] = (first.cost_us - steady.cost_us) / 1e3
                firsts[name] = steady
            else:
                times = f"{format_us(steady.cost_us)} against {format_us(min(f.cost_us for f in firsts.values()))}"
                self.outcomes[name] = Rejected((f"a single call is too slow to be worth validating: {times}",))
                del firsts[name]
        return firsts

    def _hopeless_us(self, firsts: Mapping[str, Sample]) -> float:
        fastest_us = min((first.cost_us for first in firsts.values()), default=0.0)
        return fastest_us * next(ratio for from_us, ratio in HOPELESS_RATIOS if fastest_us >= from_us)

    def _validate(self, runners: Mapping[str, Runner], firsts: Mapping[str, Sample], own: Call) -> dict[str, float]:
        """Return the error ratio of every valid route; the others get their outcome."""
        validator = Validator(own, self.signature, accuracy=self.settings.accuracy)
        errors: dict[str, float] = {}
        try:
            validator.prepare()
        except Exception as error:
            if not versions.is_out_of_memory(error):
                raise
            # Without a reference nothing can be called right: no route may be chosen now.
            versions.release_memory(self.device)
            self.lacks_memory = True
            for name in firsts:
                self.outcomes[name] = Rejected((f"no memory was left to validate it: {one_line(error)}",))
            return errors
        for name in firsts:
            verdict = self._guarded(name, functools.partial(validator.check, runners[name]))
            if verdict is None:
                continue
            if verdict.is_valid:
                errors[name] = verdict.error_ratio
            else:
                self.outcomes[name] = Invalid(verdict.reason, self._route(name).backend.version())
        return errors

    def _race(
        self, trials: Mapping[str, Trial], firsts: Mapping[str, Sample], spent_ms: float
    ) -> dict[str, Measurement]:
        measured: dict[str, Measurement] = {}
        remaining = dict(trials)
        limit_us = self._hopeless_us(firsts)
        stock_us = firsts[STOCK].cost_us if STOCK in remaining else 0.0
        if stock_us > max(limit_us, LONG_CALL_US) and len(remaining) > 1:
            # Far behind, and slow: what its first call told is all that the record needs.
            measured[STOCK] = Measurement((firsts[STOCK],))
            del remaining[STOCK]
        budget_ms = self.settings.signature_budget_ms
        while remaining:
            looks = {name: firsts[name] for name in remaining if firsts[name].cost_us >= LONG_CALL_US}
            # Two rounds are the least that can put routes in order, whatever was spent before.
            two_rounds_ms = 2 * sum(look.cost_us for look in looks.values()) / 1e3
            limits = Limits(max(0.3 * budget_ms, budget_ms - spent_ms, two_rounds_ms))
            try:
                return measured | race(remaining, self.clock, limits, looks)
            except Exception as error:
                # A route that ran before and fails now (memory, mostly) leaves; the others are timed again.
                del remaining[self._blame(remaining, error)]
        return measured

    def _blame(self, trials: Mapping[str, Trial], error: Exception) -> str:
        for name, trial in trials.items():
            if self._guarded(name, functools.partial(self.clock.sample, trial, 1)) is None:
                return name
        name = next(reversed(trials))
        self._note_failure(name, error)
        return name

    def _guarded(self, name: str, action: Callable[[], Result]) -> Result | None:
        """Return what ``action`` returns; on an error note the outcome of ``name`` and return ``None``."""
        try:
            return action()
        except Exception as error:
            self._note_failure(name, error)
            return None

    def _note_failure(self, name: str, error: Exception) -> None:
        if versions.is_sticky_error(error):
            raise TuningAbortedError(f"route {name!r} left the accelerator unusable: {one_line(error)}") from error
        if versions.is_out_of_memory(error):
            versions.release_memory(self.device)
            self.lacks_memory = True
            self.outcomes[name] = Rejected((f"ran out of memory: {one_line(error)}",))
            return
        events.logger.debug("route %s failed on %s: %s", name, self.signature, error)
        self.outcomes[name] = Failed(one_line(error), self._route(name).backend.version())

    def _route(self, name: str) -> Route:
        return next(route for route in self.routes if route.name == name)

    def _timed(self, name: str, measurement: Measurement, first_us: float, error: float) -> Timed:
        route = self._route(name)
        resolved = resolved_backend(self.call) if name == STOCK else ""
        plan_ms = max(self.plans_ms.get(name, 0.0), first_us / 1e3 - measurement.cost_us / 1e3, 0.0)
        return Timed(
            device_us=measurement.device_us,
            host_us=measurement.host_us,
            spread_us=measurement.spread_us,
            n=len(measurement.samples),
            error=error,
            version=route.backend.version(),
            plan_ms=plan_ms if self._plans(route, resolved) else 0.0,
            peak_bytes=0 if name == STOCK else route.workspace_bytes(self.signature),
            resolved=resolved,
        )

    def _plans(self, route: Route, resolved: str) -> bool:
        if not resolved:
            return route.backend.plans_per_shape
        backend = backends_for(self.signature.device_type).get(resolved)
        return backend is not None and backend.plans_per_shape


def trial_of(run: Runner, call: Call, signature: Signature) -> Trial:
    """Return one call of ``run`` on ``call``, with the backward of everything that wants a gradient."""
    if not signature.wants_grad:
        return lambda: run(*call)
    wanted = [tensor for tensor in call.tensors if tensor.requires_grad]
    grad_outputs: list[torch.Tensor] = []

    def train() -> None:
        output = run(*call)
        if not grad_outputs:
            # In the memory order of the output, as the next layer's backward gives it.
            grad_outputs.append(torch.ones_like(output))
        torch.autograd.grad(output, wanted, grad_outputs[0])

    return train


def one_line(error: BaseException) -> str:
    """Return type and text of an error on one line, cut to a length that fits a record."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:MAX_REASON_CHARACTERS]
