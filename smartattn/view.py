"""One signature as a choice sees it: which routes may serve it here, for this wish, and why not the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from smartattn.choice import STOCK
from smartattn.environment import Environment
from smartattn.errors import MissingRecordError, RouteUnavailableError
from smartattn.record import Failed, Invalid, Outcome, Record, Timed
from smartattn.routes import Route, matches, parse_route, routes_for
from smartattn.settings import Settings
from smartattn.signature import Signature
from smartattn.wishes import Wish

SAFE_DEFAULTS = (STOCK, "flash", "efficient", "math")
"""Order in which the safe default is looked for: PyTorch's own choice unless a guard says that it is wrong here.

Source: without a mask Flash takes half of Efficient's time (1641 against 3128 us at 2048 keys on an H200).
"""


@dataclass(frozen=True)
class View:
    """What may serve one signature.

    Attributes:
        signature: of the call.
        environment: where it runs.
        wish: what the place asks for.
        settings: of the process with the wish's own on top.
        quarantined: route name to reason.
    """

    signature: Signature
    environment: Environment
    wish: Wish
    settings: Settings
    quarantined: Mapping[str, str]
    _seen: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    def reasons(self, route: Route) -> tuple[str, ...]:
        """Return all the reasons against a route for this wish, signature and environment."""
        name = route.name
        if name not in self._seen:
            self._seen[name] = self._find_reasons(route)
        return self._seen[name]

    def _find_reasons(self, route: Route) -> tuple[str, ...]:
        found = route.reasons(self.signature, self.environment)
        if route.name in self.quarantined:
            found += (f"is in quarantine: {self.quarantined[route.name]}",)
        if self.wish.backend is not None and not matches(route, self.wish.backend):
            found += (f"is not what backend={self.wish.backend!r} asks for",)
        if self.wish.double_backward and not route.backend.capabilities.supports_double_backward:
            found += ("has no second derivatives; double_backward=True asks for them",)
        if not route.backend.is_exact and self.settings.accuracy != "approximate":
            found += (f"is approximate; accuracy is {self.settings.accuracy!r}",)
        if self.wish.backend is None and self.signature.dropout != "none" and not self.signature.wants_grad:
            # A reentrant checkpoint runs its forward as inference and must draw the same numbers when it recomputes.
            training = dataclasses.replace(self.signature, pass_name="train", grads="qkv")  # noqa: S106 - a pass of a network
            against = [text for text in route.reasons(training, self.environment) if text not in found]
            found += tuple(f"in training, which has the same choice where there is dropout: {text}" for text in against)
        return found

    def route(self, name: str) -> Route | None:
        """Return the route of a stored name; ``None`` for one that does not exist here."""
        try:
            return parse_route(name, self.signature.device_type)
        except ValueError:
            return None

    def is_allowed(self, record: Record) -> Callable[[str], bool]:
        """Return the test that a record's routes must pass: known here, measured in this version, no reasons."""

        def test(name: str) -> bool:
            route = self.route(name)
            outcome = record.outcomes.get(name)
            if route is None or not isinstance(outcome, Timed) or outcome.version != route.backend.version():
                return False
            return not self.reasons(route)

        return test

    def wished_routes(self) -> tuple[Route, ...]:
        """Return the routes that the wish names, or all."""
        backend = self.wish.backend
        routes = routes_for(self.signature)
        if backend is None:
            return routes
        found = tuple(route for route in routes if matches(route, backend))
        if found:
            return found
        route = self.route(backend)
        if route is None:
            raise unavailable(self, {backend: (f"does not run on {self.signature.device_type}",)})
        return (route,)

    def safe_route(self, outcomes: Mapping[str, Outcome]) -> Route:
        """Return the safe default: the first that has no reasons and that ``outcomes`` do not call wrong."""
        for route in self.safe_candidates():
            if not isinstance(outcomes.get(route.name), Invalid | Failed) and not self.reasons(route):
                return route
        # Nothing is known to be right: PyTorch's own answer, or its own error.
        return parse_route(STOCK, self.signature.device_type)

    def safe_candidates(self) -> tuple[Route, ...]:
        """Return where the safe default is looked for, in this order."""
        if self.wish.backend is not None:
            return self.wished_routes()
        return tuple(route for name in SAFE_DEFAULTS if (route := self.route(name)) is not None)


def outcome_reasons(record: Record, route: Route, view: View) -> tuple[str, ...]:
    """Return all that speaks against a route: reasons, and what a tuning found wrong with it."""
    outcome = record.outcomes.get(route.name)
    found = getattr(outcome, "reason", "")
    return view.reasons(route) + ((f"{outcome.is_}: {found}",) if outcome is not None and found else ())


def missing_record(signature: Signature) -> MissingRecordError:
    """Return the error of mode ``error`` on a miss."""
    return MissingRecordError(
        f"nothing is stored for {signature}; mode is 'error'. Tune it first (mode 'tune', or pre-warm), or "
        f"choose mode 'frozen' to run the safe default instead."
    )


def unavailable(view: View, reasons: dict[str, tuple[str, ...]]) -> RouteUnavailableError:
    """Return the error of an explicit backend that cannot serve, from all the reasons by route."""
    lines = "\n".join(f"  {name}: {'; '.join(found) or 'was not measured'}" for name, found in reasons.items())
    return RouteUnavailableError(
        f"backend={view.wish.backend!r} cannot serve {view.signature}:\n{lines}\n"
        f"Leave backend unset to let any eligible route serve.",
        reasons,
    )
