"""Tuning one signature: eligible -> first call -> validate -> measure -> record. Never touches the disk.

Order matters: reasons cost nothing, so they come first; a first call shows hopeless routes before the costlier
validation; only valid routes are raced. Every route ends as one outcome, whatever happens to it.
"""

from __future__ import annotations

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
from smartattn.measurement import Measurement
from smartattn.record import Failed, Invalid, Outcome, Record, Rejected, Timed
from smartattn.routes import Route
from smartattn.settings import Settings
from smartattn.signature import Call, Signature
from smartattn.timing import Limits, Trial, drifted, race
from smartattn.trials import leaf_copies, untraced
from smartattn.validation import Validator

HOPELESS_FIRST_CALL_RATIO = 8.0
"""First call over the fastest first call above which a route is not even validated.

Source: validating costs several calls; the widest gap between a first and a steady call without a plan that was seen
is about 3x (caches, lazily loaded kernels), so 8x cannot be the best route.
"""
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
        device: of the call.
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
            budget_ms = max(0.2 * self.settings.signature_budget_ms, self.settings.signature_budget_ms - spent_ms)
            measured = self._race({name: trials[name] for name in errors}, budget_ms)
        noisy = any(drifted(m) for m in measured.values())
        for name, measurement in measured.items():
            self.outcomes[name] = self._timed(name, measurement, firsts[name], errors[name])
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
            runners[route.name] = route.bind(self.signature)
        return runners

    def _memory_reasons(self, route: Route, free_bytes: int) -> tuple[str, ...]:
        wanted = 0 if route.name == STOCK else route.workspace_bytes(self.signature)
        allowed = int(free_bytes * self.settings.memory_share)
        if wanted <= allowed:
            return ()
        share = f"{self.settings.memory_share:.0%} of {format_bytes(free_bytes)} free"
        return (f"wants {format_bytes(wanted)} of workspace; {format_bytes(allowed)} are allowed ({share})",)

    def _first_calls(self, trials: Mapping[str, Trial]) -> dict[str, float]:
        """Run every trial once more than it needs, and keep what its first call cost, in microseconds."""
        firsts: dict[str, float] = {}
        fastest_us = float("inf")
        for name, trial in trials.items():
            route = self._route(name)
            sample = self._guarded(name, lambda trial=trial: self.clock.sample(trial, 1).cost_us)  # type: ignore[misc]  # the default binds the loop's value
            if sample is None:
                continue
            steady = sample
            if sample > HOPELESS_FIRST_CALL_RATIO * fastest_us and name != STOCK:
                # Plans and lazily loaded kernels are paid now; the second call tells whether the route is hopeless.
                second = self._guarded(name, lambda trial=trial: self.clock.sample(trial, 1).cost_us)  # type: ignore[misc]  # as above
                if second is None:
                    continue
                steady = second
            if steady > HOPELESS_FIRST_CALL_RATIO * fastest_us and name != STOCK:
                times = f"{format_us(steady)} against {format_us(fastest_us)}"
                self.outcomes[name] = Rejected((f"a single call is too slow to be worth validating: {times}",))
                continue
            fastest_us = min(fastest_us, steady)
            firsts[route.name] = sample
        return firsts

    def _validate(self, runners: Mapping[str, Runner], firsts: Mapping[str, float], own: Call) -> dict[str, float]:
        """Return the error ratio of every valid route; the others get their outcome."""
        validator = Validator(own, self.signature, accuracy=self.settings.accuracy)
        errors = {}
        for name in firsts:
            verdict = self._guarded(name, lambda name=name: validator.check(runners[name]))  # type: ignore[misc]  # as above
            if verdict is None:
                continue
            if verdict.is_valid:
                errors[name] = verdict.error_ratio
            else:
                self.outcomes[name] = Invalid(verdict.reason, self._route(name).backend.version())
        return errors

    def _race(self, trials: Mapping[str, Trial], budget_ms: float) -> dict[str, Measurement]:
        measured: dict[str, Measurement] = {}
        remaining = dict(trials)
        while remaining:
            try:
                return measured | race(remaining, self.clock, Limits(budget_ms))
            except Exception as error:
                # A route that ran twice before and fails now (memory, mostly) leaves; the others are timed again.
                name = self._blame(remaining, error)
                del remaining[name]
        return measured

    def _blame(self, trials: Mapping[str, Trial], error: Exception) -> str:
        for name, trial in trials.items():
            if self._guarded(name, lambda trial=trial: (trial(), True)) is None:  # type: ignore[misc]  # as above
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
            self.outcomes[name] = Rejected((f"ran out of memory: {one_line(error)}",))
            return
        events.logger.debug("route %s failed on %s: %s", name, self.signature, error)
        self.outcomes[name] = Failed(one_line(error), self._route(name).backend.version())

    def _route(self, name: str) -> Route:
        return next(route for route in self.routes if route.name == name)

    def _timed(self, name: str, measurement: Measurement, first_us: float, error: float) -> Timed:
        route = self._route(name)
        resolved = resolved_backend(self.call) if name == STOCK else ""
        plan_ms = max(0.0, first_us - measurement.cost_us) / 1e3 if self._plans(route, resolved) else 0.0
        return Timed(
            device_us=measurement.device_us,
            host_us=measurement.host_us,
            spread_us=measurement.spread_us,
            n=len(measurement.samples),
            error=error,
            version=route.backend.version(),
            plan_ms=plan_ms,
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
