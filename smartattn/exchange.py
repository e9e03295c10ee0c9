"""Records between machines: one file that holds what a cache holds, written whole, merged line by line.

The file is JSON Lines. The first line says what it is; an ``environment`` line stands before what was found there::

    {"smartattn": "export", "schema": 1, "date": "..."}
    {"environment": {...}}
    {"record": {...}}         as in the store, with the digest of its environment
    {"pending": {...}}
    {"quarantine": {...}}

A line is checked as a file of the store is: it can only name known routes, and whatever is wrong with it is skipped and
counted. Records go where their environment says, so an export of another machine never answers here.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smartattn import files, stored
from smartattn.environment import SCHEMA, Environment
from smartattn.errors import SettingError
from smartattn.record import Record, record_from_dict
from smartattn.routes import check_route_name
from smartattn.store import Store
from smartattn.stored import PENDING, QUARANTINE

MAX_LINE_BYTES = files.MAX_BYTES + 1024
"""Longest line that is read: the largest stored file and the words around it."""


@dataclass(frozen=True)
class Exported:
    """What went into a file.

    Attributes:
        path: the file.
        num_records, num_pending, num_quarantined: how many of each.
        num_skipped: records whose environment's description is unreadable, so that nobody could place them.
        environments: folder names.
    """

    path: Path
    num_records: int
    num_pending: int
    num_quarantined: int
    num_skipped: int
    environments: tuple[str, ...]


@dataclass(frozen=True)
class Merged:
    """What became of the lines of exports.

    Attributes:
        num_added: records that were new here.
        num_replaced: records that replaced an older one.
        num_kept: records that a newer or equal one here outranks.
        num_pending: notes added.
        num_quarantined: quarantine entries added.
        num_skipped: lines that make no sense to this version.
        num_unwritten: records that the writable layer did not take.
        environments: folder name to its number of records in the files.
        elsewhere: those of ``environments`` that this machine is not; their records are kept and not used here.
    """

    num_added: int
    num_replaced: int
    num_kept: int
    num_pending: int
    num_quarantined: int
    num_skipped: int
    num_unwritten: int
    environments: dict[str, int]
    elsewhere: tuple[str, ...]


def export(store: Store, path: Path, *, pending: bool = True) -> Exported:
    """Write everything readable of a store, its layers included, into one file that replaces ``path`` in one step.

    Raises:
        SettingError: when the file cannot be written.
    """
    counts: Counter[str] = Counter()
    names: list[str] = []
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{files.TEMPORARY_SUFFIX}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for line in _lines(store, counts, names, pending=pending):
                file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise SettingError(f"cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(
        path, counts["record"], counts["pending"], counts["quarantine"], counts["skipped"], tuple(names)
    )  # fmt: skip


def _lines(store: Store, counts: Counter[str], names: list[str], *, pending: bool) -> Iterator[dict[str, Any]]:
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    yield {"smartattn": "export", "schema": SCHEMA, "date": date}
    described: dict[str, Environment] = {}
    seen: set[tuple[str, str]] = set()

    def first_of(environment: Environment) -> Iterator[dict[str, Any]]:
        if environment.folder not in described:
            described[environment.folder] = environment
            names.append(environment.folder)
            yield {"environment": environment.to_dict()}

    for entry in store.entries():
        if entry.environment is None:
            counts["skipped"] += 1
        elif (entry.environment_digest, entry.record.digest) not in seen:
            seen.add((entry.environment_digest, entry.record.digest))
            yield from first_of(entry.environment)
            counts["record"] += 1
            yield {"record": stored.record_form(entry.environment, entry.record)}
    for kind in (PENDING, QUARANTINE) if pending else ():
        for environment, note in store.notes(kind):
            if (kind + environment.digest, note.name) not in seen:
                seen.add((kind + environment.digest, note.name))
                yield from first_of(environment)
                counts[kind] += 1
                yield {kind: note.data}


def merge(store: Store, paths: tuple[Path, ...], here: tuple[Environment, ...]) -> Merged:
    """Add what exports hold to the writable layer of a store; of two records of one problem the newer stays.

    Args:
        store: where to.
        paths: files written by ``export``, or cache folders.
        here: environments of this machine.

    Raises:
        SettingError: for a file that cannot be read or is no export; those before it are merged.
    """
    merging = _Merging(store)
    for path in paths:
        if path.is_dir():
            counts: Counter[str] = Counter()
            for number, line in enumerate(_lines(Store(path), counts, [], pending=True)):
                if number:
                    merging.take(line, str(path))
        else:
            merging.take_file(path)
    count = merging.counts
    own = {environment.digest for environment in here}
    return Merged(
        num_added=count["added"],
        num_replaced=count["replaced"],
        num_kept=count["kept"],
        num_pending=count[PENDING],
        num_quarantined=count[QUARANTINE],
        num_skipped=count["skipped"],
        num_unwritten=count["unwritten"],
        environments={environment.folder: merging.records[digest] for digest, environment in merging.known.items()},
        elsewhere=tuple(e.folder for digest, e in merging.known.items() if digest not in own),
    )


class _Merging:
    """One merge in progress.

    Attributes:
        counts: what became of the lines.
        records: records read, by environment digest.
        known: environments met, by digest.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.counts: Counter[str] = Counter()
        self.records: Counter[str] = Counter()
        self.known: dict[str, Environment] = {}

    def take_file(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                header = files.parse_object(file.readline(MAX_LINE_BYTES), str(path))
                if header is None or header.get("smartattn") != "export":
                    raise SettingError(f"{path} is no export of smartattn; write one with smartattn.cache.export().")
                if header.get("schema") != SCHEMA:
                    given = header.get("schema")
                    raise SettingError(f"{path} has schema {given!r}; this version of smartattn reads {SCHEMA}.")
                while line := file.readline(MAX_LINE_BYTES):
                    if not line.endswith(b"\n"):
                        # Too long, or cut off when it was copied.
                        self._skip("no whole line", path)
                        while line and not line.endswith(b"\n"):
                            line = file.readline(MAX_LINE_BYTES)
                        continue
                    data = files.parse_object(line, str(path))
                    if data is None:
                        self.counts["skipped"] += 1
                    else:
                        self.take(data, str(path))
        except OSError as error:
            raise SettingError(f"cannot read {path}: {error}") from error

    def take(self, line: dict[str, Any], path: str) -> None:
        """Merge one line; whatever is wrong with it is skipped."""
        try:
            ((kind, data),) = line.items()
            if kind == "environment":
                environment = stored.environment_from_dict(data)
                self.known[environment.digest] = environment
                return
            environment = self.known[data["environment"]]
            if kind == "record":
                self._take_record(environment, data)
            elif kind in (PENDING, QUARANTINE):
                self._take_note(kind, environment, data)
            else:
                self._skip("an unknown kind of line", path)
        except Exception as error:  # a hostile line may fail in ways that nobody listed
            self._skip("a line that this version does not read", path, error)

    def _skip(self, what: str, path: object, error: object = "") -> None:
        self.counts["skipped"] += 1
        files.tell_skipped(what, str(path), error)

    def _take_record(self, environment: Environment, data: dict[str, Any]) -> None:
        record = record_from_dict({name: value for name, value in data.items() if name != "environment"})
        for name in record.outcomes:
            check_route_name(name)
        self.records[environment.digest] += 1
        known = self.store.find(environment, record.digest)
        if known is not None and not _is_newer(record, known[0]):
            self.counts["kept"] += 1
        elif not self.store.publish(environment, record):
            self.counts["unwritten"] += 1
        else:
            self.counts["added" if known is None else "replaced"] += 1

    def _take_note(self, kind: str, environment: Environment, data: dict[str, Any]) -> None:
        note = stored.note_of(data, stored.own_of(environment, environment.folder), kind)
        if note is None or not stored.is_digest(note.name.removesuffix(".json")):
            raise ValueError("no note")
        if kind == PENDING:
            self.store.note_pending(environment, note.signature, str(data.get("why", "")))
        else:
            entry = stored.quarantine_entry(note.signature, data, "disk")
            check_route_name(entry.route_name)
            self.store.put_in_quarantine(
                environment, entry.signature, entry.route_name, entry.reason, entry.version
            )  # fmt: skip
        self.counts[kind] += 1


def _is_newer(record: Record, known: Record) -> bool:
    # ISO 8601 in UTC sorts as text; a date in another form counts as old.
    return record.provenance.date > known.provenance.date
