"""What happened: counters for ``stats()`` and listeners that are told about tunings, fallbacks and quarantines.

Counting a hit must cost next to nothing, so ``hits`` is one list cell that the hot path bumps without a lock; under
threads it may miss a few. Everything else is counted under a lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

logger = logging.getLogger("smartattn")
hot_hits = [0]


@dataclass(frozen=True)
class Stats:
    """Counters of this process since start or the last ``reset``.

    Attributes:
        hits: calls answered by a choice already bound in memory (approximate under threads).
        memory_hits: first sights of an exact call that a record in memory answered.
        disk_hits: first sights that a record on disk answered.
        misses: first sights for which no record was found.
        tunings: signatures measured.
        tuning_s: seconds spent tuning.
        safe_defaults: first sights answered by the safe default.
        passthroughs: calls handed to PyTorch's own attention untouched.
        fallbacks: calls whose route failed at run time and that the safe default answered.
        quarantines: routes put into quarantine.
        pending: signatures noted for later.
    """

    hits: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    tunings: int = 0
    tuning_s: float = 0.0
    safe_defaults: int = 0
    passthroughs: int = 0
    fallbacks: int = 0
    quarantines: int = 0
    pending: int = 0

    def to_dict(self) -> dict[str, int | float]:
        """Return the counters as plain data."""
        return asdict(self)


_lock = threading.Lock()
_counts: dict[str, float] = {}
_listeners: list[Callable[[Mapping[str, Any]], None]] = []
_warned: set[str] = set()


def count(name: str, amount: float = 1) -> None:
    """Add ``amount`` to the counter ``name``."""
    with _lock:
        _counts[name] = _counts.get(name, 0) + amount


def stats() -> Stats:
    """Return the counters of this process."""
    with _lock:
        counts = dict(_counts)
    tuning_s = counts.pop("tuning_s", 0.0)
    return Stats(hits=hot_hits[0], tuning_s=tuning_s, **{name: int(value) for name, value in counts.items()})


def reset_stats() -> None:
    """Set every counter to zero and let one-time warnings be given again."""
    with _lock:
        _counts.clear()
        _warned.clear()
        hot_hits[0] = 0


def add_listener(listener: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]:
    """Call ``listener`` with plain data once per tuning, fallback or quarantine, never on a hit.

    Args:
        listener: takes one mapping with the key ``event`` (``tuning``, ``fallback`` or ``quarantine``),
            ``signature``, and what belongs to the event. It runs on the calling thread; what it raises is logged.

    Returns:
        A function that removes the listener again.
    """
    _listeners.append(listener)

    def remove() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return remove


def announce(event: str, **data: object) -> None:
    """Tell every listener about ``event``."""
    for listener in tuple(_listeners):
        try:
            listener({"event": event, **data})
        except Exception:
            logger.exception("a listener given to smartattn.add_listener raised on %r", event)


def warn_once(topic: str, message: str, *args: object) -> None:
    """Log ``message`` as a warning the first time that ``topic`` comes up in this process."""
    with _lock:
        if topic in _warned:
            return
        _warned.add(topic)
    logger.warning(message, *args)
