"""What tuning found, kept on disk between processes: one small JSON file per record, never pickle.

::

    <root>/v1/<environment.folder>/environment.json            the environment in full, readable
                                  /records/<digest>.json       one per signature or bucket
                                  /pending/<digest>.json       signature noted, not yet tuned
                                  /quarantine/<digest>.json    one per signature and route that failed at run time

Every file also carries the digest of the environment that it belongs to, so that one copied into another folder is a
miss. History of the schema: see ``environment.SCHEMA``; each schema has a folder of its own.

No lock is taken. A record is one file and whole in itself, so two writers of the same record have nothing to merge:
the later replaces the earlier in one step, and a reader sees one of the two. Locks on network file systems can hang or
be lost with their holder. Nothing is read or made before it is needed; unreadable is a miss, unwritable stays in
memory, and each kind of either is told once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from smartattn import files, stored
from smartattn.buckets import Bucket, bucket_of
from smartattn.environment import Environment
from smartattn.errors import UnknownNameError
from smartattn.record import Record
from smartattn.signature import Signature
from smartattn.stored import PENDING, QUARANTINE, RECORDS, VERSION_FOLDER, Note, QuarantineEntry, StoredRecord

MAX_RECORDS = 20_000
"""Records kept per environment; beyond it the oldest go.

Source: at about 4 KiB each 80 MiB, and a listing of all within a few seconds.
"""
MAX_NOTES = 2_000
"""Pending notes, and quarantine entries, kept per environment; beyond it the oldest go."""
TIDY_EVERY = 256
"""Writes of this process into one folder between two looks at its size."""
SETTLED_NS = 2_000_000_000
"""Age from which a folder's modification time is sure to tell every later change.

Source: coarsest time stamps of file systems in use (FAT: 2 s).
"""


class _Listing(NamedTuple):
    modified_ns: int
    is_settled: bool
    entries: dict[str, dict[str, QuarantineEntry]]


class Store:
    """The writable cache folder and the read-only layers below it.

    Args:
        root: folder of the writable layer; ``None`` is the user's cache folder, looked up at first need.
        layers: read-only folders of the same form, asked in this order after ``root``.
    """

    def __init__(self, root: Path | None, layers: tuple[Path, ...] = ()) -> None:
        self._root = root
        self._has_looked_up_root = root is not None
        self._layers = layers
        self._num_writes: dict[str, int] = {}
        self._listings: dict[str, _Listing] = {}
        # What could not be written, by environment digest and by file name.
        self._unwritten_pending: dict[str, dict[str, Signature]] = {}
        self._unwritten_quarantine: dict[str, dict[str, QuarantineEntry]] = {}

    def path(self) -> Path | None:
        """Return the folder of the writable layer; ``None`` when this user has none (then all stays in memory)."""
        if not self._has_looked_up_root:
            self._root = files.default_root()
            self._has_looked_up_root = True
        return self._root

    def find(self, environment: Environment, digest: str) -> tuple[Record, str] | None:
        """Return the record of a signature's or bucket's digest and its origin (``disk`` or ``layer <path>``).

        Note:
            Reads one small file per layer until one answers, without a lock; never raises for what it finds.
        """
        if not stored.is_digest(digest):
            return None
        for root, origin in self._places():
            file = f"{root}{os.sep}{VERSION_FOLDER}{os.sep}{environment.folder}{os.sep}{RECORDS}{os.sep}{digest}.json"
            # The usual miss, at the price of one stat.
            if not os.path.exists(file):  # noqa: PTH110 - a Path costs more than the stat
                continue
            folder = files.resolve_folder(root, VERSION_FOLDER, environment.folder, RECORDS)
            if folder is not None:
                is_own = stored.own_of(environment, environment.folder)
                found = stored.read_record(root, folder, f"{digest}.json", is_own)
                if found is not None:
                    return found[0], origin
        return None

    def publish(self, environment: Environment, record: Record) -> bool:
        """Store a record, drop the pending notes that it answers, and return whether it is on disk.

        A noisy record is not stored. Never raises for a folder that cannot be written: that is told once.

        Note:
            Writes, flushes and replaces one file (about a millisecond). When interrupted it leaves nothing behind.
        """
        if record.provenance.noisy:
            return False
        data = stored.record_form(environment, record)
        if not self._write(environment, RECORDS, record.digest, data, MAX_RECORDS):
            return False
        self.drop_pending(environment, record.signature)
        if record.bucket is not None:
            for signature in self.pending(environment):
                if bucket_of(signature).digest == record.digest:
                    self.drop_pending(environment, signature)
        return True

    def note_pending(self, environment: Environment, signature: Signature, why: str) -> None:
        """Note a signature for later tuning, with the reason why it was not tuned at once."""
        folder = self._own_folder(environment, PENDING)
        if folder is not None and os.path.lexists(f"{folder}{os.sep}{signature.digest}.json"):
            return
        data = stored.note_form(environment, signature, why=why)
        if not self._write(environment, PENDING, signature.digest, data, MAX_NOTES):
            unwritten = self._unwritten_pending.setdefault(environment.digest, {})
            if len(unwritten) < MAX_NOTES:
                unwritten[signature.digest] = signature

    def pending(self, environment: Environment) -> tuple[Signature, ...]:
        """Return the signatures noted for this environment, in the order of their digests."""
        found = dict(self._unwritten_pending.get(environment.digest, {}))
        root, is_own = self.path(), stored.own_of(environment, environment.folder)
        if root is not None:
            for note in stored.read_notes(root, environment.folder, PENDING, is_own):
                found[note.signature.digest] = note.signature
        return tuple(found[digest] for digest in sorted(found))

    def drop_pending(self, environment: Environment, signature: Signature) -> None:
        """Remove the note of a signature, if there is one."""
        self._unwritten_pending.get(environment.digest, {}).pop(signature.digest, None)
        folder = self._own_folder(environment, PENDING)
        if folder is not None:
            files.remove(folder, f"{signature.digest}.json")

    def put_in_quarantine(
        self, environment: Environment, signature: Signature, route_name: str, reason: str, version: str
    ) -> None:
        """Keep a route from being bound again for a signature, in this process and, if it can be written, in others.

        The entry has a file of its own, so that a new tuning cannot erase it; ``forget`` and ``clear`` do.
        """
        digest = stored.quarantine_digest(signature, route_name)
        data = stored.note_form(environment, signature, route=route_name, reason=reason, version=version)
        if not self._write(environment, QUARANTINE, digest, data, MAX_NOTES):
            unwritten = self._unwritten_quarantine.setdefault(environment.digest, {})
            unwritten[digest] = stored.quarantine_entry(signature, data, "memory")
        self._listings.clear()

    def quarantined(
        self, environment: Environment, signature: Signature, *, refresh: bool = False
    ) -> dict[str, QuarantineEntry]:
        """Return the quarantined routes of a signature by name, those of the layers included.

        Note:
            Asks for each folder's modification time and lists it only when that moved, or with ``refresh``.
        """
        found: dict[str, QuarantineEntry] = {}
        for root, origin in reversed(tuple(self._places())):
            found.update(self._quarantine_of(root, origin, environment, refresh=refresh).get(str(signature), {}))
        for entry in tuple(self._unwritten_quarantine.get(environment.digest, {}).values()):
            if entry.signature == signature:
                found[entry.route_name] = entry
        return found

    def has_quarantine(self, environment: Environment) -> bool:
        """Return whether any route may be in quarantine here: whether such a folder exists at all.

        Note:
            One stat per layer.
        """
        if self._unwritten_quarantine.get(environment.digest):
            return True
        folder = f"{VERSION_FOLDER}{os.sep}{environment.folder}{os.sep}{QUARANTINE}"
        return any(os.path.exists(f"{root}{os.sep}{folder}") for root, _ in self._places())  # noqa: PTH110 - called per new length

    def quarantine_entries(self) -> Iterator[QuarantineEntry]:
        """Yield every quarantined route of all environments and layers."""
        for root, origin in self._places():
            for name in stored.environment_folders(root):
                for note in stored.read_notes(root, name, QUARANTINE, stored.own_of(None, name)):
                    yield stored.quarantine_entry(note.signature, note.data, origin)
        for unwritten in tuple(self._unwritten_quarantine.values()):
            yield from tuple(unwritten.values())

    def notes(self, kind: str) -> Iterator[tuple[Environment, Note]]:
        """Yield every note of a kind (``pending``, ``quarantine``) whose environment is described, of all layers."""
        for root, _ in self._places():
            for name in stored.environment_folders(root):
                described = stored.read_description(root, name)
                if described is not None:
                    for note in stored.read_notes(root, name, kind, stored.own_of(described, name)):
                        yield described, note

    def entries(self, environment: Environment | None = None) -> Iterator[StoredRecord]:
        """Yield every readable record, of one environment or of all, the writable layer first.

        Note:
            Reads every file, 0.1 to 0.2 ms each.
        """
        known_routes: set[str] = set()
        for root, origin in self._places():
            for name in [environment.folder] if environment else stored.environment_folders(root):
                described = environment or stored.read_description(root, name)
                is_own = stored.own_of(described, name)
                folder = files.resolve_folder(root, VERSION_FOLDER, name, RECORDS)
                for file in [] if folder is None else files.list_names(folder):
                    found = stored.read_record(root, str(folder), file, is_own, known_routes)
                    if found is not None:
                        yield StoredRecord(found[0], Path(f"{folder}{os.sep}{file}"), origin, described, found[1])

    def count(self) -> Iterator[tuple[Path, str, int]]:
        """Yield each layer's root, environment folder and number of files with records, without reading them."""
        for root, _ in self._places():
            for name in stored.environment_folders(root):
                folder = files.resolve_folder(root, VERSION_FOLDER, name, RECORDS)
                yield root, name, 0 if folder is None else len(files.list_names(folder))

    def clear(self, environment: Environment | None = None) -> int:
        """Remove all records, notes and quarantine entries of the writable layer, of one environment or of all.

        Folders stay: another process may be about to write into them.

        Returns:
            How many files were removed.
        """
        self._forget_unwritten(lambda _: True, environment)
        return sum(
            files.remove(folder, name)
            for environment_name in self._own_environments(environment)
            for kind in (RECORDS, PENDING, QUARANTINE)
            if (folder := self._own_folder(environment_name, kind)) is not None
            for name in files.list_names(folder)
            if stored.is_digest(name.removesuffix(".json"))
        )

    def forget(self, what: Signature | Bucket | str, environment: Environment | None = None) -> int:
        """Remove what is known of a signature (also its bucket's record), of a bucket, or of a digest of either.

        Args:
            what: signature, bucket, or the name of a record's file without its ending.
            environment: only there; in every environment of the writable layer without it.

        Returns:
            How many files were removed: records, pending notes and quarantine entries.

        Raises:
            UnknownNameError: for text that is no digest.
        """
        if isinstance(what, str) and not stored.is_digest(what):
            raise UnknownNameError(f"{what!r} is no digest; a digest has 32 hexadecimal digits")
        digests = [what] if isinstance(what, str) else [what.digest]
        if isinstance(what, Signature):
            digests.append(bucket_of(what).digest)

        def is_meant(signature: Signature) -> bool:
            if isinstance(what, Signature):
                return signature == what
            return signature.digest in digests or bucket_of(signature).digest in digests

        self._forget_unwritten(is_meant, environment)
        return sum(self._forget_in(name, digests, is_meant) for name in self._own_environments(environment))

    def _forget_in(self, environment_name: str, digests: list[str], is_meant: Callable[[Signature], bool]) -> int:
        root, records = self.path(), self._own_folder(environment_name, RECORDS)
        count = 0 if records is None else sum(files.remove(records, f"{digest}.json") for digest in digests)
        for kind in (PENDING, QUARANTINE):
            folder = self._own_folder(environment_name, kind)
            if root is not None and folder is not None:
                for note in stored.read_notes(root, environment_name, kind, stored.own_of(None, environment_name)):
                    if is_meant(note.signature):
                        count += files.remove(folder, note.name)
        return count

    def _forget_unwritten(self, is_meant: Callable[[Signature], bool], environment: Environment | None) -> None:
        self._listings.clear()
        for digest in (*self._unwritten_pending, *self._unwritten_quarantine):
            if environment is None or environment.digest == digest:
                pending = self._unwritten_pending.get(digest, {})
                self._unwritten_pending[digest] = {k: v for k, v in pending.items() if not is_meant(v)}
                routes = self._unwritten_quarantine.get(digest, {})
                self._unwritten_quarantine[digest] = {k: v for k, v in routes.items() if not is_meant(v.signature)}

    def _places(self) -> Iterator[tuple[Path, str]]:
        root = self.path()
        if root is not None:
            yield root, "disk"
        for layer in self._layers:
            yield layer, f"layer {layer}"

    def _own_environments(self, environment: Environment | None) -> list[str]:
        root = self.path()
        if root is None:
            return []
        return stored.environment_folders(root) if environment is None else [environment.folder]

    def _own_folder(self, environment: Environment | str, kind: str) -> str | None:
        root = self.path()
        name = environment if isinstance(environment, str) else environment.folder
        return None if root is None else files.resolve_folder(root, VERSION_FOLDER, name, kind)

    def _write(self, environment: Environment, kind: str, digest: str, data: dict[str, Any], max_files: int) -> bool:
        root = self.path()
        if root is None:
            return False
        home, name = (VERSION_FOLDER, environment.folder), f"{digest}.json"
        if not files.write_object(root, (*home, kind), name, data):
            return False
        if stored.read_description(root, environment.folder) != environment:
            files.write_object(root, home, stored.DESCRIPTION, environment.to_dict())
        folder = files.resolve_folder(root, *home, kind)
        if folder is not None:
            num_writes = self._num_writes.get(folder, 0)
            self._num_writes[folder] = num_writes + 1
            if num_writes % TIDY_EVERY == 0:
                files.tidy(folder, max_files, keep=name)
        return True

    def _quarantine_of(
        self, root: Path, origin: str, environment: Environment, *, refresh: bool
    ) -> dict[str, dict[str, QuarantineEntry]]:
        folder = files.resolve_folder(root, VERSION_FOLDER, environment.folder, QUARANTINE)
        try:
            modified_ns = 0 if folder is None else os.stat(folder).st_mtime_ns  # noqa: PTH116 - see files
        except OSError:
            return {}  # the usual case: nothing was ever put there
        cached = self._listings.get(str(folder))
        if cached is not None and cached.modified_ns == modified_ns and cached.is_settled and not refresh:
            return cached.entries
        is_settled = time.time_ns() - modified_ns > SETTLED_NS
        entries: dict[str, dict[str, QuarantineEntry]] = {}
        is_own = stored.own_of(environment, environment.folder)
        for note in stored.read_notes(root, environment.folder, QUARANTINE, is_own):
            entry = stored.quarantine_entry(note.signature, note.data, origin)
            entries.setdefault(str(note.signature), {})[entry.route_name] = entry
        self._listings[str(folder)] = _Listing(modified_ns, is_settled, entries)
        return entries
