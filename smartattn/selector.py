"""From a first sight to a bound choice: memory, disk, then the mode's rule.

A record is a hint about speed, never a permission: every binding asks the routes again whether they may serve this
exact signature. Inference rents, then buys; training is final at first sight, because a recompute in checkpointing
must meet the route that its forward took; in a backward pass nothing is tuned, and nobody waits for a tuning.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from smartattn import events, versions
from smartattn.buckets import bucket_of
from smartattn.choice import Choice, choose, has_plan
from smartattn.clocks import Clock, clock_for
from smartattn.environment import Environment, environment_of
from smartattn.history import CountedRunner, History
from smartattn.locks import tuning_lock
from smartattn.memory import Memory
from smartattn.notes import Notes
from smartattn.passes import interrupted_route, shared_route
from smartattn.record import Outcome, Record, Timed
from smartattn.routes import Route, matches, routes_for
from smartattn.settings import WRITING_MODES, Settings, settings
from smartattn.signature import Call, Signature
from smartattn.store import Store
from smartattn.tuner import Tuning, TuningAbortedError
from smartattn.view import View, missing_record, outcome_reasons, unavailable
from smartattn.wishes import Binding, Known, Wish, known_key

LOCK_WAIT_S = 5.0
"""How long a first sight waits while another thread or process tunes, before it takes the safe default."""
EXACT_TUNING_RATIO = 20.0
"""Time spent at one exact length, over the budget of a tuning, before that length is measured for itself.

Source: a tuning then adds at most 5 % to what was spent already.
"""
MAX_KNOWN = 4096
"""Buckets whose last decision is kept ready per wish."""
RETRY_CALLS = 64
"""Calls after which a safe default that stood in for a busy tuning is looked at again (inference only)."""
CAPTURED = "first met while a graph was captured"
"""Note of a binding that stands in a captured graph; outside of it the call is still to be tuned."""
INTERRUPTED = "for the backward of a forward before the last change"
"""Note of a binding that answers one call alone."""


class Selector:
    """All that this process knows and decides.

    Attributes:
        history: counts of calls per length.
        notes: pending signatures and quarantine.
        clock: factory of clocks; tests put a fake one here.
        spent_s: seconds that tunings of this process took.
        recorder: while set, told of every first sight, which then takes the safe default; pre-warming collects by it.
    """

    def __init__(self) -> None:
        self.history = History()
        self.notes = Notes(lambda: self.memory.store)
        self.clock: Callable[[torch.device], Clock] = clock_for
        self.spent_s = 0.0
        self.recorder: Callable[[torch.device, Signature], None] | None = None
        self._memory: Memory | None = None
        self._layers: tuple[Path | None, tuple[Path, ...]] | None = None
        self._lock = threading.RLock()
        self._aborted = ""
        self._version = 0
        self._planned: set[Signature] = set()
        self._sightings: dict[str, int] = {}

    @property
    def memory(self) -> Memory:
        """Records in front of the disk; made at first use from the settings then in force."""
        with self._lock:
            if self._memory is None:
                now = settings()
                self._layers = now.cache_dir, now.layers
                self._memory = Memory(Store(now.cache_dir, now.layers))
                events.logger.setLevel(now.log.upper())
            return self._memory

    def settings_changed(self, now: Settings) -> None:
        """Open other layers when the settings name others; counts, time spent and pending signatures stay."""
        with self._lock:
            events.logger.setLevel(now.log.upper())
            layers = now.cache_dir, now.layers
            if layers != self._layers:
                self._layers = layers
                self._memory = None

    def reset(self) -> None:
        """Forget all that this process knows; files stay."""
        with self._lock:
            self.__init__()  # type: ignore[misc]  # starting over is what the constructor does

    def view(self, device: torch.device, signature: Signature, wish: Wish) -> View:
        """Return what may serve a signature on a device."""
        environment = environment_of(device)
        return View(signature, environment, wish, wish.settings(), self.notes.quarantined(environment, signature))

    def decide(self, call: Call, signature: Signature, wish: Wish) -> Binding:
        """Return the binding for a first sight; tunes when mode and circumstances allow.

        Raises:
            RouteUnavailableError: when ``backend`` was named and none of its routes can serve.
            MissingRecordError: in mode ``error`` on a miss.
        """
        known = self._decide_known(call, signature, wish)
        if known is not None:
            return known
        view = self.view(call.query.device, signature, wish)
        if wish.backend is not None:
            only = _only_route(view)
            if only is not None:
                return _bind(view, only, "explicit")
        interrupted = interrupted_route(view)
        if interrupted is not None:
            return _bind(view, *interrupted, note=INTERRUPTED)
        shared = shared_route(view, self.memory)
        if shared is not None:
            if shared[1] and view.settings.mode in WRITING_MODES:
                self.notes.note_pending(view.environment, signature, "takes the route of its other pass")
            return _bind(view, shared[0], "other pass")
        if self.recorder is not None:
            self.recorder(call.query.device, signature)
            return self.safe_default(view)
        found = self.find(view)
        if found is not None:
            binding = self.bind_record(view, *found)
            if binding is not None:
                events.count("memory_hits" if found[1] in ("memory", "tuned") else "disk_hits")
                return binding
        events.count("misses")
        mode = view.settings.mode
        if mode == "tune":
            return self._tune_or_default(call, view)
        if mode == "error":
            raise missing_record(signature)
        if mode == "record":
            self.notes.note_pending(view.environment, signature, "met in mode 'record'")
        return self.safe_default(view)

    def _decide_known(self, call: Call, signature: Signature, wish: Wish) -> Binding | None:
        """Bind a new length of a bucket as the length before it; ``None`` when that needs a closer look.

        Note:
            One look-up and the eligibility of one route: a loop whose lengths grow meets this at every step.
        """
        if self.recorder is not None or self.notes.has_quarantine:
            return None
        known = wish.known.get(known_key(signature))
        if known is None or known.version != self._version or signature in self._planned:
            return None
        if self.history.num_calls(signature) or self.memory.has_exact(signature):
            return None
        if known.is_final and (versions.graph_task_id() != -1 or not self._is_expected(signature, known)):
            return None
        environment = environment_of(call.query.device)
        if environment != known.environment or self.memory.store.has_quarantine(environment):
            return None
        if known.route.reasons(signature, environment):
            return None
        events.count("memory_hits")
        return self._bind_choice(signature, known)

    def _is_expected(self, signature: Signature, known: Known) -> bool:
        """Return whether the calls to expect at a new length still lead to the choice that the last one was given."""
        if known.choice.faster:
            return self.history.expected_calls(signature) < known.choice.break_even_calls
        return not known.in_question or known.is_declared

    def _bind_choice(self, signature: Signature, known: Known) -> Binding:
        run = known.route.bind(signature, known.environment)
        if known.limit is not None or known.in_question:
            run = CountedRunner(run, known.limit)
            self.history.watch(signature, run)
        return Binding(run, known.route.name, known.origin, signature, known.environment, known.choice)

    def find(self, view: View) -> tuple[Record, str] | None:
        """Return the record that may answer with its origin; ``None`` on a miss or when mode ``tune`` finds it stale."""
        found = self.memory.find(view.environment, view.signature)
        if found is None:
            return None
        is_tuning = view.settings.mode == "tune"
        if is_tuning and (is_stale(found[0]) or self._deserves_exact(view, found[0])):
            return None
        return found

    def _deserves_exact(self, view: View, record: Record) -> bool:
        """Return whether a length that a bucket answers for has taken so much time that it may be measured itself."""
        signature = view.signature
        if record.signature == signature or _is_final(view):
            return False
        choice = self.consider(view, record)
        num_calls = self.history.num_calls(signature)
        return choice is not None and num_calls >= _exact_tuning_calls(view, choice)

    def consider(self, view: View, record: Record) -> Choice | None:
        """Return what a record says is best for this exact signature now; ``None`` when nothing in it may serve."""
        signature = view.signature
        num_calls: float = self.history.num_calls(signature)
        if _is_final(view):
            num_calls = max(num_calls, self.history.expected_calls(signature))
        return choose(
            record.outcomes,
            view.is_allowed(record),
            dynamic=_dynamic(view, record),
            num_calls=num_calls,
            is_planned=signature in self._planned,
        )

    def bind_record(self, view: View, record: Record, origin: str) -> Binding | None:
        """Bind what a record says is best for this exact signature; ``None`` when nothing in it may serve.

        Note:
            An inference choice that waits for a plan to pay, or for its own tuning, counts its calls and asks again.
        """
        signature = view.signature
        choice = self.consider(view, record)
        route = None if choice is None else view.route(choice.route)
        if choice is None or route is None:
            return None
        num_calls = self.history.num_calls(signature)
        is_final = _is_final(view)
        limits = [] if is_final else self._limits(view, record, choice, num_calls)
        known = Known(
            version=self._version,
            environment=view.environment,
            route=route,
            choice=choice,
            origin=origin,
            limit=min(limits, default=None),
            in_question=any(isinstance(o, Timed) and has_plan(o) for o in record.outcomes.values()),
            is_final=is_final,
            is_declared=_dynamic(view, record) is not None,
        )
        is_typical = num_calls == 0 and record.bucket is not None and record.signature != signature
        has_free_passes = signature.dropout == "none"
        if is_typical and has_free_passes and view.wish.backend is None and not view.quarantined:
            if len(view.wish.known) >= MAX_KNOWN:
                view.wish.known.clear()
            view.wish.known[known_key(signature)] = known
        return self._bind_choice(signature, known)

    def _limits(self, view: View, record: Record, choice: Choice, num_calls: int) -> list[int]:
        found = [choice.break_even_calls - num_calls] if choice.faster else []
        if view.settings.mode == "tune" and record.signature != view.signature:
            found.append(_exact_tuning_calls(view, choice) - num_calls)
        return [max(1, limit) for limit in found]

    def safe_default(self, view: View, outcomes: Mapping[str, Outcome] | None = None, note: str = "") -> Binding:
        """Bind the safe default."""
        events.count("safe_defaults")
        route = view.safe_route(outcomes or {})
        return _bind(view, route, "safe default", note=note)

    def _tune_or_default(self, call: Call, view: View) -> Binding:
        why_not = self._why_not_tune(view)
        if why_not:
            return self._postpone(view, why_not)
        with tuning_lock(call.query.device, LOCK_WAIT_S) as is_held:
            if not is_held:
                return self._postpone(view, "another tuning was running", is_passing=True)
            # Whoever held the lock before may have tuned this very signature.
            found = self.find(view)
            record = found[0] if found is not None else self._tune(call, view)
        if record is None:
            return self._postpone(view, "its tuning failed")
        return self.bind_record(view, record, "tuned" if found is None else found[1]) or self._unanswered(view, record)

    def _unanswered(self, view: View, record: Record) -> Binding:
        if view.wish.backend is not None:
            route = view.safe_route(record.outcomes)
            if matches(route, view.wish.backend):
                # Too slow to be worth timing, say, but eligible and not found wrong: it was asked for by name.
                return _bind(view, route, "explicit", note="was not measured")
            reasons = {r.name: outcome_reasons(record, r, view) for r in view.wished_routes()}
            raise unavailable(view, reasons)
        return self.safe_default(view, record.outcomes, "no route was found valid")

    def _why_not_tune(self, view: View) -> str:
        if self._aborted:
            return self._aborted
        if versions.graph_task_id() != -1:
            return "first met in a backward pass"
        if versions.is_capturing(view.signature.device_type):
            return CAPTURED
        if view.settings.agreement == "group":
            return "agreement is 'group': left to tune_pending between steps"
        if self.spent_s >= view.settings.process_budget_s:
            events.warn_once(
                "process budget",
                "smartattn has spent its %g s of tuning in this process; new shapes take the nearest known choice or "
                "the safe default. Pre-warm them, call smartattn.tune_pending(), or raise process_budget_s.",
                view.settings.process_budget_s,
            )
            return "process_budget_s was spent"
        if not view.signature.wants_grad:
            digest = bucket_of(view.signature).digest
            seen = self._sightings[digest] = self._sightings.get(digest, 0) + 1
            if seen < view.settings.tune_after:
                return f"seen {seen} of {view.settings.tune_after} times (tune_after)"
        return ""

    def _postpone(self, view: View, why: str, *, is_passing: bool = False) -> Binding:
        """Bind the nearest known choice, else the safe default, and note the signature for later."""
        self.notes.note_pending(view.environment, view.signature, why)
        # In a capture a route that was never run at this length might plan, which a capture does not survive.
        near = None if why == CAPTURED else self.memory.nearest(view.environment, view.signature)
        if near is not None:
            binding = self.bind_record(view, near, "nearest bucket")
            if binding is not None:
                return binding
        binding = self.safe_default(view, note=why)
        is_waiting = is_passing or why.startswith("seen ")
        if _is_final(view) or not is_waiting:
            return binding
        limit = RETRY_CALLS if is_passing else 1
        counted = CountedRunner(binding.run, limit)
        return Binding(counted, binding.route, binding.origin, view.signature, view.environment, note=why)

    def tune_now(
        self,
        call: Call,
        signature: Signature,
        wish: Wish,
        *,
        dynamic: bool = False,
        renew: tuple[Record, frozenset[str]] | None = None,
    ) -> Record | None:
        """Tune a signature whatever the mode says about misses; ``None`` when the device stays busy or it broke.

        Args:
            call: inputs of the signature.
            signature: what to tune.
            wish: whose settings apply.
            dynamic: whether the record is for lengths that keep changing.
            renew: a record of this signature, and the routes to measure again; its other outcomes stay.

        Raises:
            The accelerator's own error, when one that outlives its call was met.
        """
        view = self.view(call.query.device, signature, wish)
        with tuning_lock(call.query.device, LOCK_WAIT_S) as is_held:
            if not is_held:
                return None
            return self._tune(call, view, dynamic=dynamic, renew=renew)

    def _tune(
        self,
        call: Call,
        view: View,
        *,
        dynamic: bool = False,
        renew: tuple[Record, frozenset[str]] | None = None,
    ) -> Record | None:
        """Tune and keep the record; ``None`` when the tuning itself broke (told once, with its traceback)."""
        clock = self.clock(call.query.device)
        start_s = clock.now_s()
        known = self.memory.find(view.environment, view.signature)
        answers_bucket = known is None or known[0].signature == view.signature or is_stale(known[0])
        bucket = bucket_of(view.signature) if answers_bucket else None
        every = routes_for(view.signature)
        routes = every if renew is None else tuple(route for route in every if route.name in renew[1])
        tuning = Tuning(
            call, view.signature, view.environment, routes, view.settings, clock, view.quarantined, bucket
        )  # fmt: skip
        try:
            record = tuning.run()
        except TuningAbortedError as error:
            self._aborted = f"tuning stopped in this process: {error}"
            events.warn_once("aborted", "smartattn stopped tuning in this process: %s", error)
            raise error.__cause__ or error from None
        except Exception:
            events.logger.exception("smartattn could not tune %s; the safe default answers it", view.signature)
            return None
        finally:
            taken_s = clock.now_s() - start_s
            self.spent_s += taken_s
        if renew is not None:
            outcomes = {**renew[0].outcomes, **record.outcomes}
            order = [*(route.name for route in every if route.name in outcomes), *outcomes]
            record = dataclasses.replace(record, outcomes={name: outcomes[name] for name in order})
        if dynamic:
            record = dataclasses.replace(record, dynamic=True)
        events.count("tunings")
        events.count("tuning_s", taken_s)
        # What lacked memory, or has nothing to run, is a fact about this moment and not about the signature.
        is_lasting = not tuning.lacks_memory and any(isinstance(o, Timed) for o in record.outcomes.values())
        self.keep(view.environment, record, view.settings, is_lasting=is_lasting)
        self._planned.add(view.signature)
        events.announce("tuning", signature=str(view.signature), seconds=taken_s, record=record.to_dict())
        return record

    def keep(self, environment: Environment, record: Record, now: Settings, *, is_lasting: bool = True) -> None:
        """Keep a record in memory, and on disk when the mode writes and the record will hold later too."""
        self.notes.drop_pending(environment, record.signature)
        is_published = is_lasting and now.mode in WRITING_MODES and not record.provenance.noisy
        self.memory.add(environment, record, publish=is_published)
        self._version += 1


selector = Selector()
"""The one selector of this process."""


def _exact_tuning_calls(view: View, choice: Choice) -> int:
    """Return after how many calls at one length a tuning of its own adds little to what was spent."""
    return math.ceil(EXACT_TUNING_RATIO * view.settings.tuning_budget_ms * 1e3 / max(choice.cost_us, 1.0))


def _is_final(view: View) -> bool:
    # frozen never switches; deterministic programs expect the same bits from the same call; with dropout both passes
    # of a call have one choice, and that of training is final.
    is_deterministic = view.signature.deterministic != "off"
    has_dropout = view.signature.dropout != "none"
    return view.signature.wants_grad or has_dropout or is_deterministic or view.settings.mode == "frozen"


def is_stale(record: Record) -> bool:
    """Return whether mode ``tune`` should measure again: another thread count on CPU, another driver elsewhere."""
    if record.signature.device_type == "cpu":
        return record.provenance.threads != torch.get_num_threads()
    return record.provenance.driver != versions.driver_version()


def _dynamic(view: View, record: Record) -> bool | None:
    if view.settings.dynamic is not None:
        return view.settings.dynamic
    return True if record.dynamic else None


def _bind(view: View, route: Route, origin: str, choice: Choice | None = None, note: str = "") -> Binding:
    return Binding(
        route.bind(view.signature, view.environment), route.name, origin, view.signature, view.environment, choice, note
    )


def _only_route(view: View) -> Route | None:
    """Return the route of an explicit backend when just one can serve; raise when none can."""
    wished = view.wished_routes()
    eligible = [route for route in wished if not view.reasons(route)]
    if not eligible:
        raise unavailable(view, {route.name: view.reasons(route) for route in wished})
    return eligible[0] if len(eligible) == 1 else None
