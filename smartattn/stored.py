"""The forms that the store keeps, read back with every check: a file of any other content is taken for absent.

Each file is an object with the digest of its ``environment`` beside its content. Nothing here writes.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smartattn import files
from smartattn.buckets import bucket_of
from smartattn.environment import SCHEMA, Environment
from smartattn.formatting import shorten
from smartattn.record import Record, record_from_dict
from smartattn.routes import check_route_name
from smartattn.signature import Signature, digest_of
from smartattn.signature_text import parse_signature

VERSION_FOLDER = f"v{SCHEMA}"
RECORDS, PENDING, QUARANTINE = "records", "pending", "quarantine"
DESCRIPTION = "environment.json"
MAX_REASON_LENGTH = 2_000
"""Characters kept of one reason: compiler output can be longer than a file may be."""
_DIGEST = re.compile(r"[0-9a-f]{32}")
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

IsOwn = Callable[[str], bool]
"""Whether an environment digest found in a file is the one that its folder stands for."""


@dataclass(frozen=True)
class StoredRecord:
    """A record with where it was found.

    Attributes:
        record: what is stored.
        path: its file.
        origin: ``disk`` or ``layer <path>``.
        environment: where it was measured; ``None`` when the folder's description is unreadable.
        environment_digest: of that environment.
    """

    record: Record
    path: Path
    origin: str
    environment: Environment | None
    environment_digest: str


@dataclass(frozen=True)
class QuarantineEntry:
    """A route that failed at run time and is not to be bound again for a signature.

    Attributes:
        signature: of the call that failed.
        route_name: of the route.
        reason: type and text of the error.
        version: of the backend at the time; another version deserves another try.
        date: UTC, ISO 8601.
        environment_digest: of the environment where it failed.
        origin: ``disk``, ``layer <path>`` or ``memory``.
    """

    signature: Signature
    route_name: str
    reason: str
    version: str
    date: str
    environment_digest: str
    origin: str


class Note(NamedTuple):
    """A pending note or a quarantine entry as read: its file's name, its signature and all of its content."""

    name: str
    signature: Signature
    data: dict[str, Any]


def is_digest(text: str) -> bool:
    """Return whether ``text`` can be the name of a stored file."""
    return _DIGEST.fullmatch(text) is not None


def quarantine_digest(signature: Signature, route_name: str) -> str:
    """Return the name of a quarantine entry's file."""
    return digest_of(f"{signature}\n{route_name}")


def record_form(environment: Environment, record: Record) -> dict[str, Any]:
    """Return the stored form of a record; over-long reasons are cut."""
    data = {"environment": environment.digest, **record.to_dict()}
    for outcome in data["outcomes"].values():
        if "reason" in outcome:
            outcome["reason"] = shorten(outcome["reason"], MAX_REASON_LENGTH)
        if "reasons" in outcome:
            outcome["reasons"] = [shorten(reason, MAX_REASON_LENGTH) for reason in outcome["reasons"]]
    return data


def note_form(environment: Environment, signature: Signature, **content: str) -> dict[str, Any]:
    """Return the stored form of a pending note or a quarantine entry; over-long text is cut."""
    return {
        "schema": SCHEMA,
        "environment": environment.digest,
        "signature": str(signature),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **{name: shorten(text, MAX_REASON_LENGTH) for name, text in content.items()},
    }


def environment_from_dict(data: object) -> Environment:
    """Return the environment of a stored form; raise ``ValueError`` for anything else."""
    fields = {item.name: item for item in dataclasses.fields(Environment)}
    if not isinstance(data, dict) or set(data) != set(fields):
        raise ValueError("an environment has exactly the fields " + ", ".join(fields))
    for name, item in fields.items():
        expected = {"str": str, "int": int}[str(item.type)]
        if type(data[name]) is not expected:
            raise ValueError(f"{name} of an environment cannot be {data[name]!r}")
    environment = Environment(**data)
    if not _FOLDER.fullmatch(environment.folder):
        raise ValueError(f"{environment.folder!r} cannot name a folder")
    return environment


def environment_folders(root: Path) -> list[str]:
    """Return the names of all environments' folders under ``root``."""
    base = files.resolve_folder(root, VERSION_FOLDER)
    names = [] if base is None else files.list_names(base, suffix="")
    return [name for name in names if _FOLDER.fullmatch(name)]


def read_description(root: Path, name: str) -> Environment | None:
    """Return the environment that the folder ``name`` describes; ``None`` when it describes none, or another one."""
    folder = files.resolve_folder(root, VERSION_FOLDER, name)
    data = None if folder is None else files.read_object(root, folder, DESCRIPTION)
    if data is None:
        return None
    try:
        environment = environment_from_dict(data)
    except ValueError as error:
        files.tell_skipped("describes no environment", f"{folder}/{DESCRIPTION}", error)
        return None
    return environment if environment.folder == name else None


def own_of(environment: Environment | None, name: str) -> IsOwn:
    """Return the test for environment digests in the folder ``name``, described by ``environment`` if at all."""
    if environment is not None:
        return environment.digest.__eq__
    # The folder's name ends in the first digits of the digest: enough to list a file, never used to serve one.
    return lambda given: is_digest(given) and given[:8] == name[-8:]


def read_record(
    root: Path, folder: str, name: str, is_own: IsOwn, known_routes: set[str] | None = None
) -> tuple[Record, str] | None:
    """Return the record in a file and its environment's digest; ``None``, told once per kind, for anything else.

    Args:
        root: folder that nothing may lead out of.
        folder: of the record, from ``files.resolve_folder``.
        name: of its file.
        is_own: from ``own_of``.
        known_routes: names that need no look-up; those that are found to exist are added.
    """
    known_routes = set() if known_routes is None else known_routes
    data = files.read_object(root, folder, name)
    if data is None:
        return None
    path, digest = f"{folder}/{name}", data.pop("environment", None)
    if not isinstance(digest, str) or not is_own(digest):
        files.tell_skipped("belongs to another environment", path)
        return None
    try:
        record = record_from_dict(data)
        for route_name in record.outcomes:
            if route_name not in known_routes:
                known_routes.add(check_route_name(route_name))
        if name != f"{record.digest}.json":
            raise ValueError("the name is not that of its signature")
    except Exception as error:  # a hostile file may fail in ways that nobody listed; none may reach the caller
        files.tell_skipped("holds no record that this version reads", path, error)
        return None
    return record, digest


def read_notes(root: Path, environment_name: str, kind: str, is_own: IsOwn) -> Iterator[Note]:
    """Yield every readable note of ``kind`` (``pending`` or ``quarantine``) in an environment's folder."""
    folder = files.resolve_folder(root, VERSION_FOLDER, environment_name, kind)
    for name in [] if folder is None else files.list_names(folder):
        data = files.read_object(root, str(folder), name)
        if data is None:
            continue
        note = note_of(data, is_own, kind)
        if note is None or name != note.name:
            files.tell_skipped("holds no note that this version reads", f"{folder}/{name}")
        else:
            yield note


def note_of(data: dict[str, Any], is_own: IsOwn, kind: str) -> Note | None:
    """Return the note of ``kind`` in a stored form, under the name that its file must have; ``None`` for other data."""
    texts = {key: data.get(key) for key in ("environment", "signature", "date")}
    if data.get("schema") != SCHEMA or not all(isinstance(text, str) for text in texts.values()):
        return None
    if not is_own(str(texts["environment"])):
        return None
    try:
        signature = parse_signature(str(texts["signature"]))
        bucket_of(signature)  # sizes that no bucket can hold fail here
    except Exception:  # as in read_record; the caller tells it
        return None
    note = Note("", signature, data)
    return note._replace(name=f"{_name_of(note, kind)}.json")


def _name_of(note: Note, kind: str) -> str:
    if kind == PENDING:
        return note.signature.digest
    texts = [note.data.get(key) for key in ("route", "reason", "version")]
    return quarantine_digest(note.signature, str(texts[0])) if all(isinstance(t, str) for t in texts) else ""


def quarantine_entry(signature: Signature, data: dict[str, Any], origin: str) -> QuarantineEntry:
    """Return the entry of a checked stored form."""
    return QuarantineEntry(
        signature=signature,
        route_name=data["route"],
        reason=data["reason"],
        version=data["version"],
        date=data["date"],
        environment_digest=data["environment"],
        origin=origin,
    )
