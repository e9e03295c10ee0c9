"""Look at, check, carry and tidy what is remembered.

``path``, ``records``, ``rows`` and ``stats`` look; ``verify`` checks; ``export`` and ``merge`` carry records between
machines; ``forget``, ``prune`` and ``clear`` remove.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smartattn import exchange, files
from smartattn.backends.registry import backends_for
from smartattn.environment import environment_of
from smartattn.errors import SettingError
from smartattn.exchange import Exported, Merged
from smartattn.listing import Row, age_days, row_of
from smartattn.pending import devices_here
from smartattn.record import Record, Rejected
from smartattn.routes import SEPARATOR
from smartattn.selector import selector
from smartattn.signature import Signature
from smartattn.signature_text import parse_signature
from smartattn.stored import PENDING, QUARANTINE, StoredRecord
from smartattn.verify import verify
from smartattn.wishes import unbind_all

__all__ = [
    "clear", "export", "forget", "iterate", "merge", "path", "prune", "records", "rows", "stats", "verify",
]  # fmt: skip


@dataclass(frozen=True)
class Pruned:
    """A record that ``prune`` removed, or would remove.

    Attributes:
        signature: text of the problem that was measured.
        environment: folder name.
        reason: why it serves no more.
        path: of its file.
    """

    signature: str
    environment: str
    reason: str
    path: Path


@dataclass(frozen=True)
class CacheStats:
    """How much is stored.

    Attributes:
        path: of the writable layer.
        num_records, num_pending, num_quarantined: in all layers and environments.
        size_bytes: of the files of all readable records.
        environments: folder name to its number of records.
        here: those folders of ``environments`` that serve this process.
        origins: ``disk`` or ``layer <path>`` to its number of records.
        routes: route to the number of records that choose it.
    """

    path: Path | None
    num_records: int
    num_pending: int
    num_quarantined: int
    size_bytes: int
    environments: dict[str, int]
    here: tuple[str, ...]
    origins: dict[str, int]
    routes: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self) | {"path": None if self.path is None else str(self.path)}


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


def rows() -> tuple[Row, ...]:
    """Return ``records`` in short: choice, gain over stock, age and noise of each."""
    return tuple(row_of(entry) for entry in iterate())


def stats() -> CacheStats:
    """Return how much is stored, where, and which routes it chooses; reads every file."""
    found = rows()
    store = selector.memory.store
    return CacheStats(
        path=path(),
        num_records=len(found),
        num_pending=sum(1 for _ in store.notes(PENDING)),
        num_quarantined=sum(1 for _ in store.notes(QUARANTINE)),
        size_bytes=sum(_size_bytes(row.path) for row in found),
        environments=dict(Counter(row.environment for row in found)),
        here=tuple(environment_of(device).folder for device in devices_here()),
        origins=dict(Counter(row.origin for row in found)),
        routes=dict(Counter(row.route or "none" for row in found).most_common()),
    )


def _size_bytes(file: str) -> int:
    try:
        return os.stat(file).st_size  # noqa: PTH116 - Path is slow for 10,000 files
    except OSError:
        return 0  # gone since it was listed


def export(file: str | Path, *, pending: bool = True) -> Exported:
    """Write every readable record of all layers and environments into one file, for ``merge`` elsewhere.

    Args:
        file: replaced in one step when it exists.
        pending: whether pending notes and quarantine entries go along.

    Raises:
        SettingError: when the file cannot be written.
    """
    return exchange.export(selector.memory.store, Path(file), pending=pending)


def merge(*sources: str | Path) -> Merged:
    """Add what exports (or other cache folders) hold to the writable layer; the newer of two records stays.

    Returns:
        What became of it; ``elsewhere`` names environments that this machine is not: their records are kept for those
        machines and not used here.

    Raises:
        SettingError: for a file that cannot be read or is no export.

    Note:
        Choices bound in this process are looked up anew. A line that makes no sense is skipped, counted and told once.
    """
    here = tuple(environment_of(device) for device in devices_here())
    try:
        return exchange.merge(selector.memory.store, tuple(map(Path, sources)), here)
    finally:
        selector.memory.clear()
        unbind_all()


def prune(*, days: float | None = None, others: bool = False, dry_run: bool = False) -> tuple[Pruned, ...]:
    """Remove records of the writable layer that serve no more, and return them.

    Those are: records of this machine whose routes all belong to other versions of their backends; with ``days``, what
    is older; with ``others``, every environment that is not this machine's with its present software.

    Args:
        days: age from which a record goes.
        others: whether records of other environments go.
        dry_run: only return what would go.

    Raises:
        SettingError: for a negative age.
    """
    if days is not None and not days >= 0:
        raise SettingError(f"days is {days!r}; it must be a number from 0 on.")
    here = {environment_of(device).digest for device in devices_here()}
    found = []
    for entry in selector.memory.store.entries():
        reason = "" if entry.origin != "disk" else _prune_reason(entry, here, days, others=others)
        if reason:
            environment = entry.path.parent.parent.name
            found.append(Pruned(str(entry.record.signature), environment, reason, entry.path))
    if found and not dry_run:
        for each in found:
            files.remove(str(each.path.parent), each.path.name)
        selector.memory.clear()
        unbind_all()
    return tuple(found)


def _prune_reason(entry: StoredRecord, here: set[str], days: float | None, *, others: bool) -> str:
    record = entry.record
    age = age_days(record.provenance.date)
    if days is not None and (age is None or age >= days):
        return "has no date" if age is None else f"is {age:.0f} days old"
    if entry.environment_digest not in here:
        return "belongs to another environment" if others else ""
    return "" if _is_current(record) else "all its routes belong to other versions of their backends"


def _is_current(record: Record) -> bool:
    backends = backends_for(record.signature.device_type)
    for name, outcome in record.outcomes.items():
        backend = backends.get(name.rpartition(SEPARATOR)[2])
        if backend is not None and not isinstance(outcome, Rejected) and outcome.version == backend.version():
            return True
    return False


def clear() -> int:
    """Delete every record, pending note and quarantine of the writable layer; return how many files went.

    Note:
        Read-only layers stay. Choices bound in this process are forgotten too.
    """
    count = selector.memory.store.clear()
    selector.memory.clear()
    selector.notes.clear()
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
        selector.notes.lift_quarantine(environment, parsed)
    unbind_all()
    return count
