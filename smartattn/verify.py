"""Checking again what is stored: every choice of this environment against the reference, on every probe.

A record proves that its routes were right when they were measured. A driver, a library or a flag beside PyTorch may
have changed since, and a file may come from elsewhere; this finds out without measuring anything again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from smartattn import events, versions
from smartattn.choice import choose
from smartattn.environment import environment_of
from smartattn.inputs import synthesize
from smartattn.pending import devices_here
from smartattn.record import Failed, Invalid, Record, Timed
from smartattn.routes import Route, parse_route
from smartattn.selector import selector
from smartattn.tuner import one_line
from smartattn.validation import Validator
from smartattn.view import View
from smartattn.wishes import Binding, unbind_all, wish_of

STATUSES = ("valid", "invalid", "failed", "skipped")


@dataclass(frozen=True, slots=True)
class Verification:
    """What became of one stored choice.

    Attributes:
        signature: text of the exact problem that was measured.
        bucket: whether the record answers for a whole bucket of lengths.
        route: name of the route; empty when no stored route may serve here.
        status: ``valid``; ``invalid`` (wrong values) and ``failed`` (raised), both in quarantine now; ``skipped``.
        reason: why it is not valid.
        error_ratio: largest error as a share of what is allowed; infinite for NaN and for what raised.
        origin: ``memory``, ``disk`` or ``layer <path>``.
        date: of the record, UTC.
    """

    signature: str
    bucket: bool
    route: str
    status: str
    reason: str = ""
    error_ratio: float = 0.0
    origin: str = ""
    date: str = ""

    @property
    def is_quarantined(self) -> bool:
        """Whether the route was put into quarantine."""
        return self.status in ("invalid", "failed")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; an infinite error becomes ``None``."""
        data = dataclasses.asdict(self)
        data["error_ratio"] = self.error_ratio if math.isfinite(self.error_ratio) else None
        return data

    def __str__(self) -> str:
        return f"{self.status:8} {self.route or '-'}  {self.signature}{': ' if self.reason else ''}{self.reason}"


def verify(*, every_route: bool = False, device: torch.device | str | None = None) -> tuple[Verification, ...]:
    """Check every stored choice of this environment against the reference, and quarantine what fails.

    Args:
        every_route: check all measured routes of a record, not only those that it may choose now.
        device: only records of this device; default: the CPU and the current GPU.

    Returns:
        One entry per record and route. Records of other environments are left alone; those of read-only layers are
        checked too, and overruled in the writable layer when they fail.

    Raises:
        The accelerator's own error, when one that outlives its call was met.

    Note:
        Call it between steps. Makes up inputs for each signature and runs all probes that ``accuracy="strict"`` runs,
        under the bounds of the ``accuracy`` in force: about 0.1 s and the inputs' memory per record. What failed is
        bound no more, in any mode; modes ``tune`` and ``record`` also write it down.
        ``cache.forget(signature)`` lifts it.
    """
    devices = devices_here() if device is None else (torch.device(device),)
    found = tuple(each for one in devices for each in _verify_device(one, every_route=every_route))
    if any(each.is_quarantined for each in found):
        unbind_all()
    return found


def _verify_device(device: torch.device, *, every_route: bool) -> Iterator[Verification]:
    environment = environment_of(device)
    records: dict[str, tuple[Record, str]] = {}
    # In the order in which they answer: memory before disk, the writable layer before the others.
    for record, origin in selector.memory.records():
        if record.signature.device_type == device.type:
            records.setdefault(record.digest, (record, "memory" if origin == "tuned" else origin))
    for entry in selector.memory.store.entries(environment):
        records.setdefault(entry.record.digest, (entry.record, entry.origin))
    for record, origin in records.values():
        yield from _verify_record(device, record, origin, every_route=every_route)


def _verify_record(device: torch.device, record: Record, origin: str, *, every_route: bool) -> Iterator[Verification]:
    view = selector.view(device, record.signature, wish_of())
    about = {
        "signature": str(record.signature), "bucket": record.bucket is not None,
        "origin": origin, "date": record.provenance.date,
    }  # fmt: skip
    routes = _routes_of(view, record, every_route=every_route)
    if not routes:
        yield Verification(route="", status="skipped", reason="no stored route may serve here", **about)  # type: ignore[arg-type]  # one dict for all ends
        return
    validator = _validator_of(device, record, view)
    if isinstance(validator, str):
        yield from (Verification(route=route.name, status="skipped", reason=validator, **about) for route in routes)  # type: ignore[arg-type]  # as above
        return
    for route in routes:
        status, reason, error_ratio = _check(validator, route, view)
        if status in ("invalid", "failed"):
            record = _put_away(view, record, route, status, reason)
        yield Verification(route=route.name, status=status, reason=reason, error_ratio=error_ratio, **about)  # type: ignore[arg-type]  # as above


def _routes_of(view: View, record: Record, *, every_route: bool) -> list[Route]:
    """Return the routes that the record may choose here: with its plan paid and without, or all measured ones."""
    is_allowed = view.is_allowed(record)
    if every_route:
        names = [name for name, outcome in record.outcomes.items() if isinstance(outcome, Timed) and is_allowed(name)]
    else:
        choices = (
            choose(record.outcomes, is_allowed, dynamic=dynamic, num_calls=0, is_planned=False)
            for dynamic in (False, True)
        )
        names = list(dict.fromkeys(choice.route for choice in choices if choice is not None))
    return [parse_route(name, view.signature.device_type) for name in names]


def _validator_of(device: torch.device, record: Record, view: View) -> Validator | str:
    """Return a validator on made-up inputs, or why there is none."""
    try:
        call = synthesize(record.signature, device)
    except (RuntimeError, MemoryError, ValueError) as error:
        if versions.is_sticky_error(error):
            raise
        return f"no inputs can be made up: {one_line(error)}"
    accuracy = view.settings.accuracy
    return Validator(call, record.signature, accuracy=accuracy, is_own_mask=False, has_all_probes=True)


def _check(validator: Validator, route: Route, view: View) -> tuple[str, str, float]:
    """Return status, reason and error of one route."""
    error = _error_of(validator, route, view)
    if not isinstance(error, Exception):
        return error
    if versions.is_sticky_error(error):
        raise error
    if versions.is_out_of_memory(error):
        versions.release_memory(validator.call.query.device)
        return "skipped", f"out of memory: {one_line(error)}", 0.0
    if isinstance(_error_of(validator, parse_route("math", view.signature.device_type), view), Exception):
        # Probes that Math cannot run either say nothing about the route.
        return "skipped", f"its probes cannot be run: {one_line(error)}", 0.0
    return "failed", one_line(error), math.inf


def _error_of(validator: Validator, route: Route, view: View) -> tuple[str, str, float] | Exception:
    try:
        verdict = validator.check(route.bind(view.signature, view.environment))
    except Exception as error:
        return error
    return "valid" if verdict.is_valid else "invalid", verdict.reason, verdict.error_ratio


def _put_away(view: View, record: Record, route: Route, status: str, reason: str) -> Record:
    """Quarantine a route, and keep the record with what was found, so that its whole bucket is warned."""
    text = f"found {status} by verify: {reason}"
    outcome: Invalid | Failed = (Invalid if status == "invalid" else Failed)(text, route.backend.version())
    events.warn_once(
        f"verify {route.name} {view.signature.digest}",
        "smartattn.verify found route %r %s for %s (%s); it is in quarantine until smartattn.cache.forget() lifts it",
        route.name, status, view.signature, reason,
    )  # fmt: skip
    run = route.bind(view.signature, view.environment)
    selector.notes.quarantine(Binding(run, route.name, "verified", view.signature, view.environment), text)
    changed = dataclasses.replace(record, outcomes={**record.outcomes, route.name: outcome})
    selector.keep(view.environment, changed, view.settings)
    return changed
