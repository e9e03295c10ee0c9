"""What this process noted about signatures: those to tune later, and routes that must not be tried again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from smartattn import events
from smartattn.environment import Environment
from smartattn.routes import routes_for
from smartattn.settings import WRITING_MODES, settings
from smartattn.signature import Signature
from smartattn.store import Store
from smartattn.wishes import Binding

MAX_PENDING = 4096


class Notes:
    """Pending signatures and quarantine of this process, written to disk too in the modes that write."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[Environment, Signature]] = {}
        self._quarantine: dict[tuple[str, str], dict[str, str]] = {}

    @property
    def has_quarantine(self) -> bool:
        """Whether this process itself put any route into quarantine."""
        return bool(self._quarantine)

    def note_pending(self, environment: Environment, signature: Signature, why: str) -> None:
        """Note a signature for ``tune_pending``."""
        name = environment.digest + signature.digest
        with self._lock:
            if name in self._pending or len(self._pending) >= MAX_PENDING:
                return
            self._pending[name] = environment, signature
        events.count("pending")
        if settings().mode in WRITING_MODES:
            self._store().note_pending(environment, signature, why)

    def drop_pending(self, environment: Environment, signature: Signature) -> None:
        """Forget the note of a signature that was tuned."""
        with self._lock:
            self._pending.pop(environment.digest + signature.digest, None)

    def pending(self) -> tuple[tuple[Environment, Signature], ...]:
        """Return what this process noted and has not tuned since."""
        with self._lock:
            return tuple(self._pending.values())

    def quarantine(self, binding: Binding, reason: str) -> None:
        """Keep a route away from a signature until ``cache.forget`` lifts it."""
        signature, environment = binding.signature, binding.environment
        with self._lock:
            self._quarantine.setdefault((environment.digest, signature.digest), {})[binding.route] = reason
        events.count("quarantines")
        events.announce("quarantine", signature=str(signature), route=binding.route, reason=reason)
        route = next((r for r in routes_for(signature) if r.name == binding.route), None)
        if settings().mode in WRITING_MODES and route is not None:
            version = route.backend.version()
            self._store().put_in_quarantine(environment, signature, binding.route, reason, version)

    def quarantined(self, environment: Environment, signature: Signature) -> dict[str, str]:
        """Return the reasons of a signature's routes that are in quarantine, by name, those on disk included."""
        stored = self._store().quarantined(environment, signature)
        found = {name: entry.reason for name, entry in stored.items()}
        if self._quarantine:
            found |= self._quarantine.get((environment.digest, signature.digest), {})
        return found

    def lift_quarantine(self, environment: Environment, signature: Signature) -> None:
        """Forget this process's own quarantine of a signature; the store forgets its own."""
        with self._lock:
            self._quarantine.pop((environment.digest, signature.digest), None)

    def clear(self) -> None:
        """Forget this process's own notes; files stay."""
        with self._lock:
            self._pending.clear()
            self._quarantine.clear()
