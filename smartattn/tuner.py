"""Tuning one signature: eligible -> first call -> validate -> measure -> record. Never touches the disk.

Order matters: reasons cost nothing, so they come first; a first call shows hopeless routes before the costlier
validation; only valid routes are raced. Every route ends as one outcome, whatever happens to it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from smartattn import events, versions
from smartattn.backends.base import Runner
from smartattn.backends.registry import backends_for
from smartattn.backends.stock import resolved_backend
from smartattn.buckets import Bucket
from smartattn.choice import NEGLIGIBLE_PLAN_MS, STOCK
from smartattn.clocks import Clock
from smartattn.environment import Environment, provenance_now
from smartattn.formatting import format_bytes, format_us
from smartattn.measurement import Measurement, Sample
from smartattn.record import Failed, Invalid, Outcome, Record, Rejected, Timed
from smartattn.routes import Route
from smartattn.settings import Settings
from smartattn.signature import Call, Signature
from smartattn.timing import Limits, Trial, is_unsettled, race
from smartattn.trials import leaf_copies, load_libraries, shortened, trial_of, untraced
from smartattn.validation import Validator

HOPELESS_RATIOS = ((50e3, 1.5), (5e3, 3.0), (0.0, 8.0))
"""From which fastest first call, in microseconds, a route that many times slower is not even validated.

Source: validating costs several calls. Short first calls hold caches and lazily loaded kernels (up to about 3x seen),
long ones do not: calls of 50 ms and more repeated within a third on a busy machine.
"""
LONG_CALL_US = 5e3
"""First call from which it counts as a sample: what is cold about it no longer shows."""
SURE_CALL_US = 50e3
"""First call from which one is enough to call a route slow.

Source: on two shared cores other programs take turns of 4 to 8 ms, which made calls of 0.2 ms look like 8 ms.
"""
MAX_REASON_CHARACTERS = 300
Result = TypeVar("Result")
_neighbours = itertools.count()


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
            self.outcomes[name] = self._timed(name, measurement, errors[name])
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

    def _first_calls(self, trials: Mapping[str, Trial]) -> dict[str, float]:
        """Return what one call of every route costs in microseconds; hopeless ones get their outcome (stock stays)."""
        load_libraries(self.device)
        firsts: dict[str, float] = {}
        for name, trial in trials.items():
            once = functools.partial(self.clock.once_us, trial)
            first = self._guarded(name, once)
            if first is not None and self._plans(name):
                second = self._guarded(name, once)
                if second is not None:
                    self.plans_ms[name] = max(0.0, first - second) / 1e3
                first = second
            if first is not None:
                firsts[name] = first
        self._settle_plans(firsts)
        limit_us = self._hopeless_us(firsts)
        for name, first in list(firsts.items()):
            if first <= limit_us:
                continue
            # Lazily loaded kernels are paid now, so a second call tells whether it is the route that is slow.
            again = functools.partial(self.clock.once_us, trials[name])
            second = self._guarded(name, again) if first < SURE_CALL_US else first
            steady = None if second is None else min(first, second)
            if steady is None:
                del firsts[name]
            elif steady <= limit_us or name == STOCK:
                firsts[name] = steady
            else:
                times = f"{format_us(steady)} against {format_us(min(firsts.values()))}"
                self.outcomes[name] = Rejected((f"a single call is too slow to be worth validating: {times}",))
                del firsts[name]
        return firsts

    def _settle_plans(self, firsts: Mapping[str, float]) -> None:
        """Give every route of a planning backend that backend's plan cost.

        Two routes of one backend share its plan, and the program may have made it before; then a neighbouring length,
        never met, shows what one costs.
        """
        by_backend: dict[str, list[str]] = {}
        for name in firsts:
            if self._plans(name) and not self._route(name).rewrites:
                by_backend.setdefault(self._planner(name), []).append(name)
        for names in by_backend.values():
            plan_ms = max(self.plans_ms.get(name, 0.0) for name in names)
            if plan_ms < NEGLIGIBLE_PLAN_MS:
                plan_ms = max(plan_ms, self._neighbour_plan_ms(names[-1]))
            self.plans_ms.update(dict.fromkeys(names, plan_ms))

    def _neighbour_plan_ms(self, name: str) -> float:
        other = shortened(self.call, 1 + next(_neighbours) % 24)
        if other is None:
            return 0.0
        trial = trial_of(self._route(name).bind(self.signature), leaf_copies(other), self.signature)
        try:
            first, second = self.clock.once_us(trial), self.clock.once_us(trial)
        except Exception as error:
            if versions.is_sticky_error(error):
                raise TuningAbortedError(f"route {name!r} left the accelerator unusable: {one_line(error)}") from error
            events.logger.debug("route %s could not run beside %s: %s", name, self.signature, error)
            return 0.0
        return max(0.0, first - second) / 1e3

    def _planner(self, name: str) -> str:
        return resolved_backend(self.call) if name == STOCK else self._route(name).backend.name

    def _plans(self, name: str) -> bool:
        if name != STOCK:
            return self._route(name).backend.plans_per_shape
        backend = backends_for(self.signature.device_type).get(self._planner(name))
        return backend is not None and backend.plans_per_shape

    def _hopeless_us(self, firsts: Mapping[str, float]) -> float:
        fastest_us = min(firsts.values(), default=0.0)
        return fastest_us * next(ratio for from_us, ratio in HOPELESS_RATIOS if fastest_us >= from_us)

    def _validate(self, runners: Mapping[str, Runner], firsts: Mapping[str, float], own: Call) -> dict[str, float]:
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
        self, trials: Mapping[str, Trial], firsts: Mapping[str, float], spent_ms: float
    ) -> dict[str, Measurement]:
        measured: dict[str, Measurement] = {}
        remaining = dict(trials)
        limit_us = self._hopeless_us(firsts)
        stock_us = firsts[STOCK] if STOCK in remaining else 0.0
        if stock_us > max(limit_us, LONG_CALL_US) and len(remaining) > 1:
            # Far behind, and slow: what its first call told is all that the record needs.
            measured[STOCK] = Measurement((Sample(stock_us, stock_us),))
            del remaining[STOCK]
        budget_ms = self.settings.tuning_budget_ms
        while remaining:
            long_us = {name: firsts[name] for name in remaining if firsts[name] >= LONG_CALL_US}
            looks = {name: Sample(us, us) for name, us in long_us.items()}
            # Two rounds are the least that can put routes in order, whatever was spent before.
            two_rounds_ms = 2 * sum(long_us.values()) / 1e3
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
        name = list(trials)[-1]
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

    def _timed(self, name: str, measurement: Measurement, error: float) -> Timed:
        route = self._route(name)
        resolved = resolved_backend(self.call) if name == STOCK else ""
        return Timed(
            device_us=measurement.device_us,
            host_us=measurement.host_us,
            spread_us=measurement.spread_us,
            n=len(measurement.samples),
            error=error,
            version=route.backend.version(),
            plan_ms=self.plans_ms.get(name, 0.0),
            peak_bytes=0 if name == STOCK else route.workspace_bytes(self.signature),
            resolved=resolved,
        )


def one_line(error: BaseException) -> str:
    """Return type and text of an error on one line, cut to a length that fits a record."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:MAX_REASON_CHARACTERS]
