"""Routes: zero or more rewrites, then one backend. Routes are what is validated, measured, stored and run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smartattn import guards
from smartattn.backends.base import Backend, Runner
from smartattn.backends.registry import backend_names, backends_for
from smartattn.environment import Environment
from smartattn.errors import UnknownNameError
from smartattn.rewrites.base import Rewrite
from smartattn.rewrites.registry import REWRITES
from smartattn.signature import Signature

SEPARATOR = "+"


@dataclass(frozen=True, slots=True)
class Route:
    """One way to compute a call.

    Attributes:
        rewrites: applied to the inputs in this order, undone in reverse.
        backend: computes what is left.
    """

    rewrites: tuple[Rewrite, ...]
    backend: Backend

    @property
    def name(self) -> str:
        """Name in records and in ``backend=``, such as ``fold_gqa+flash``."""
        return SEPARATOR.join((*(rewrite.name for rewrite in self.rewrites), self.backend.name))

    def _stages(self, signature: Signature) -> Iterator[tuple[Rewrite, Signature]]:
        for rewrite in self.rewrites:
            yield rewrite, signature
            signature = rewrite.transform(signature)

    def remaining(self, signature: Signature) -> Signature:
        """Return the signature that reaches the backend."""
        for rewrite in self.rewrites:
            signature = rewrite.transform(signature)
        return signature

    def reasons(self, signature: Signature, environment: Environment) -> tuple[str, ...]:
        """Return all the reasons why this route cannot serve the signature here; empty when it is eligible.

        A rewrite that does not apply ends the list, since nothing can be said about what would follow it.
        """
        for rewrite, before in self._stages(signature):
            found = rewrite.reasons(before)
            if found:
                return tuple(f"{rewrite.name}: {text}" for text in found)
        left = self.remaining(signature)
        return self.backend.reasons(left, environment) + guards.reasons(self.backend.name, left, environment)

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the estimated bytes beyond the output: copies of the rewrites and buffers of the backend."""
        copies = sum(rewrite.workspace_bytes(before) for rewrite, before in self._stages(signature))
        return copies + self.backend.workspace_bytes(self.remaining(signature))

    def bind(self, signature: Signature) -> Runner:
        """Return the callable that the hot path runs; only for a signature without ``reasons``."""
        run = self.backend.bind(self.remaining(signature))
        for rewrite, before in reversed(list(self._stages(signature))):
            run = rewrite.bind(before, run)
        return run


def routes_for(signature: Signature) -> tuple[Route, ...]:
    """Return every route that may be thought of for a signature, eligible or not, in the order that breaks ties."""
    backends = backends_for(signature.device_type).values()
    return tuple(Route((), backend) for backend in backends)


def parse_route(name: str, device_type: str) -> Route:
    """Return the route called ``name``.

    Raises:
        UnknownNameError: names the part that does not exist and the nearest ones that do.
    """
    *rewrite_names, backend_name = name.split(SEPARATOR)
    backends = backends_for(device_type)
    if backend_name not in backends:
        raise UnknownNameError.of(f"backend of route {name!r} on {device_type}", backend_name, backends)
    rewrites = {rewrite.name: rewrite for rewrite in REWRITES}
    for rewrite_name in rewrite_names:
        if rewrite_name not in rewrites:
            raise UnknownNameError.of(f"rewrite of route {name!r}", rewrite_name, rewrites)
    return Route(tuple(rewrites[part] for part in rewrite_names), backends[backend_name])


def check_route_name(name: str) -> str:
    """Return ``name`` when it is a backend or route that exists on some device, else raise ``UnknownNameError``."""
    *rewrite_names, backend_name = name.split(SEPARATOR) if isinstance(name, str) else [str(name)]
    if backend_name not in backend_names():
        raise UnknownNameError.of("backend", name, backend_names())
    known = {rewrite.name for rewrite in REWRITES}
    for rewrite_name in rewrite_names:
        if rewrite_name not in known:
            raise UnknownNameError.of(f"rewrite of route {name!r}", rewrite_name, known)
    return name


def matches(route: Route, wish: str) -> bool:
    """Return whether a wish (a backend's name or a route's) allows ``route``."""
    return wish in (route.name, route.backend.name)
