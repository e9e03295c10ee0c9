"""Look at, check and tidy what is remembered: ``path``, ``records``, ``verify``, ``forget`` and ``clear``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from smartattn.environment import environment_of
from smartattn.pending import devices_here
from smartattn.selector import selector
from smartattn.signature import Signature, parse_signature
from smartattn.stored import StoredRecord
from smartattn.verify import verify
from smartattn.wishes import unbind_all

__all__ = ["clear", "forget", "iterate", "path", "records", "verify"]


def path() -> Path | None:
    """Return the folder of the writable layer; ``None`` when this user has none (all stays in memory then)."""
    return selector.memory.store.path()


def records() -> tuple[StoredRecord, ...]:
    """Return every readable record of all layers and environments, with its path and origin.

    Note:
        Reads every file; unreadable ones are skipped and told once.
    """
    return tuple(iterate())


def iterate() -> Iterator[StoredRecord]:
    """Yield what ``records`` returns, one file at a time."""
    return selector.memory.store.entries()


def clear() -> int:
    """Delete every record, pending note and quarantine of the writable layer; return how many files went.

    Note:
        Read-only layers stay. Choices bound in this process are forgotten too.
    """
    count = selector.memory.store.clear()
    selector.memory.clear()
    selector.clear_notes()
    unbind_all()
    return count


def forget(signature: Signature | str) -> int:
    """Delete what is stored for a signature: its record, its bucket's, its pending note and its quarantine.

    Args:
        signature: a signature or its text, as records show it.

    Returns:
        How many files went. The next call of this signature is a first sight.

    Raises:
        UnknownNameError: for a text that makes no sense, saying where.
    """
    parsed = parse_signature(signature) if isinstance(signature, str) else signature
    count = selector.memory.store.forget(parsed)
    for device in devices_here():
        environment = environment_of(device)
        selector.memory.forget(environment, parsed)
        selector.lift_quarantine(environment, parsed)
    unbind_all()
    return count
