"""Small JSON files in a folder that may be shared, full, read-only, hostile or gone: reading and writing never raise.

Readers take no lock: a file is written under a temporary name in the same folder and then replaces the old one in one
step, so a reader sees the old file or the new one, never a half. What is wrong with a file or folder is told once per
kind and process. Files are opened by their resolved path, which must lie inside the folder that was given; nothing in
a file is ever executed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from smartattn import events

MAX_BYTES = 64 * 1024
"""Largest file that is read or written.

Source: a record of every route with its reasons takes about 4 KiB; this is sixteen times as much.
"""
TEMPORARY_SUFFIX = ".tmp"
TEMPORARY_AGE_S = 3600.0
"""Age from which a temporary file is taken for the leftover of a killed process; writing one takes milliseconds."""
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
# The folder went away, or its network handle did, between two steps: making it anew once may help.
_GONE = (errno.ENOENT, errno.ESTALE)


def tell_skipped(kind: str, path: str, detail: object = "") -> None:
    """Warn once per ``kind`` that a file is taken for absent."""
    extra = f" ({detail})" if detail else ""
    events.warn_once(f"skipped file: {kind}", "skipped %s: %s%s; more of this kind are not told", path, kind, extra)


def tell_unwritable(path: str, detail: object) -> None:
    """Warn once per kind of error that something cannot be written and stays in memory."""
    kind = errno.errorcode.get(detail.errno or 0, "") if isinstance(detail, OSError) else str(detail)
    events.warn_once(f"unwritable: {kind}", "cannot write %s (%s); it is kept in memory only", path, detail)


def resolve_folder(root: Path, *parts: str) -> str | None:
    """Return the real path of a folder under ``root``; ``None``, told once, when it leads out of ``root``.

    ``root`` itself may be a link: whoever configured it chose where it leads. The folder need not exist.
    """
    try:
        base = os.path.realpath(root)
        found = os.path.realpath(os.path.join(base, *parts))  # noqa: PTH118 - Path is slow for 10,000 files
    except (OSError, ValueError) as error:
        tell_skipped("unreadable", str(root), error)
        return None
    if _is_inside(found, base):
        return found
    tell_skipped("leads out of the cache folder", os.path.join(root, *parts))  # noqa: PTH118 - see above
    return None


def _is_inside(path: str, base: str) -> bool:
    return path == base or path.startswith(base.rstrip(os.sep) + os.sep)


def read_object(root: Path, folder: str, name: str) -> dict[str, Any] | None:
    """Return the JSON object in ``folder/name``, or ``None``; what is wrong with the file is told once per kind.

    Args:
        root: folder that nothing may lead out of.
        folder: from ``resolve_folder``.
        name: of the file.
    """
    path = f"{folder}{os.sep}{name}"
    try:
        content = _read_bytes(root, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        tell_skipped("unreadable", path, error)
        return None
    return None if content is None else parse_object(content, path)


def parse_object(content: bytes, path: str) -> dict[str, Any] | None:
    """Return the JSON object that ``content``, read from ``path``, holds; ``None``, told once per kind, if none."""
    try:
        data = _DECODER.decode(content.decode())
    except (ValueError, RecursionError) as error:
        tell_skipped("no valid JSON", path, error)
        return None
    if not isinstance(data, dict):
        tell_skipped("no JSON object", path)
        return None
    return data


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _read_bytes(root: Path, path: str) -> bytes | None:
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except OSError as error:
        # ELOOP is how O_NOFOLLOW refuses a link. Links inside the folder are normal in mounted container volumes.
        if error.errno != errno.ELOOP:
            raise
        real = os.path.realpath(path)
        if not _is_inside(real, os.path.realpath(root)):
            tell_skipped("leads out of the cache folder", path)
            return None
        descriptor = os.open(real, _READ_FLAGS)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            tell_skipped("no regular file", path)
            return None
        content = os.read(descriptor, MAX_BYTES + 1) if status.st_size <= MAX_BYTES else b""
        if status.st_size > MAX_BYTES or len(content) > MAX_BYTES:
            tell_skipped(f"larger than {MAX_BYTES} bytes", path, status.st_size)
            return None
        return content
    finally:
        os.close(descriptor)


def write_object(root: Path, parts: tuple[str, ...], name: str, data: dict[str, Any]) -> bool:
    """Write ``data`` to ``root/parts/name`` in one step and return whether it is there; what fails is told once.

    Note:
        Flushes to the disk (about half a millisecond on a local SSD), so that also after a power cut the name holds
        either the old content or the new.
    """
    path = os.path.join(root, *parts, name)  # noqa: PTH118 - see resolve_folder
    try:
        content = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:  # NaN, for example, which no reader would take back
        tell_unwritable(path, error)
        return False
    if len(content) > MAX_BYTES:
        tell_unwritable(path, f"larger than {MAX_BYTES} bytes")
        return False
    for is_last in (False, True):
        try:
            folder = resolve_folder(root, *parts)
            if folder is None:
                return False
            _make_folder(root, folder)
            _replace(folder, name, content)
        except OSError as error:
            if is_last or error.errno not in _GONE:
                tell_unwritable(path, error)
                return False
        else:
            return True
    return False


def _make_folder(root: Path, folder: str) -> None:
    if os.path.isdir(folder):  # noqa: PTH112 - see resolve_folder
        return
    is_ours = not root.exists() or not any(root.iterdir())
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - see resolve_folder
    if is_ours:
        # Only a folder that held nothing else is marked: the tag makes backup programs leave all of it out.
        with contextlib.suppress(OSError):  # a convenience for people; the cache works without
            (root / "CACHEDIR.TAG").write_text(
                "Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache made by smartattn.\n"
            )
            (root / "README.txt").write_text(
                "Attention routes that smartattn measured on this machine. It is safe to delete this folder.\n"
            )


def _replace(folder: str, name: str, content: bytes) -> None:
    path = f"{folder}{os.sep}{name}"
    temporary = f"{folder}{os.sep}.{name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
    try:
        # 0o666 less the umask: the file is as readable to others as everything else that this user makes.
        descriptor = os.open(temporary, _WRITE_FLAGS, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.replace(temporary, path)  # noqa: PTH105 - see resolve_folder
        except IsADirectoryError:
            os.rmdir(path)  # noqa: PTH106 - an empty folder in the file's place; one with content raises
            os.replace(temporary, path)  # noqa: PTH105 - see resolve_folder
    except BaseException:
        with contextlib.suppress(OSError):  # it may not exist yet, or its folder may be gone
            os.unlink(temporary)  # noqa: PTH108 - see resolve_folder
        raise


def list_names(folder: str, suffix: str = ".json") -> list[str]:
    """Return the names in ``folder`` that end in ``suffix``, in order; empty when it cannot be listed."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - see resolve_folder
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        tell_skipped("unreadable", folder, error)
        return []
    return sorted(name for name in names if name.endswith(suffix) and not name.startswith("."))


def remove(folder: str, name: str) -> bool:
    """Remove a file (a link itself, never what it leads to) and return whether it was there."""
    path = f"{folder}{os.sep}{name}"
    try:
        os.unlink(path)  # noqa: PTH108 - see resolve_folder
    except FileNotFoundError:
        return False
    except OSError as error:
        events.warn_once("cannot remove", "cannot remove %s (%s)", path, error)
        return False
    return True


def tidy(folder: str, max_files: int, keep: str) -> None:
    """Remove leftovers of killed writers, and the oldest files beyond ``max_files``; never raises ``OSError``.

    A twentieth more than needed is removed, so that a full folder is not sorted for every new file.
    """
    files: list[tuple[float, str]] = []
    now = time.time()
    for modified, name in _modified(folder):
        if name.endswith(TEMPORARY_SUFFIX):
            if now - modified > TEMPORARY_AGE_S:
                remove(folder, name)
        elif name != keep:
            files.append((modified, name))
    if len(files) >= max_files:
        excess = len(files) + 1 - max_files + max_files // 20
        for _, name in sorted(files)[:excess]:
            remove(folder, name)


def _modified(folder: str) -> Iterator[tuple[float, str]]:
    try:
        with os.scandir(folder) as found:
            for entry in found:
                if entry.name.endswith(".json") or (entry.name[0] == "." and entry.name.endswith(TEMPORARY_SUFFIX)):
                    with contextlib.suppress(OSError):  # another process removed it just now
                        yield entry.stat(follow_symlinks=False).st_mtime, entry.name
    except OSError as error:
        tell_skipped("unreadable", folder, error)


def private_folder(name: str) -> Path | None:
    """Return a folder of this user's own in the folder for temporary files, made now; ``None`` if there is none.

    It is made at once, with no access for others: an absent one could be planted by another user before it is used.
    One that belongs to someone else, that others may write to, or that is a link is refused.
    """
    user = os.getuid() if hasattr(os, "getuid") else None
    try:
        path = Path(tempfile.gettempdir()) / (name if user is None else f"{name}-{user}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
    except OSError as error:
        events.warn_once("no private folder", "no folder for temporary files can be used (%s)", error)
        return None
    is_private = user is None or (status.st_uid == user and not status.st_mode & 0o022)
    if not stat.S_ISDIR(status.st_mode) or not is_private:
        events.warn_once("no private folder", "%s is not used: it is not this user's own folder", path)
        return None
    return path


def default_root() -> Path | None:
    """Return the user's cache folder for smartattn; without a usable home, a private folder; ``None`` without both."""
    try:
        from platformdirs import user_cache_dir  # noqa: PLC0415 - only a first miss needs it

        path = Path(user_cache_dir("smartattn", appauthor=False))
        home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.expanduser raises without a home
    except Exception as error:  # a user without an entry in the password database fails in several ways
        # No fault of the user's in a container, and the private folder serves: nothing to warn of.
        events.logger.info("this user's cache folder cannot be found (%s)", error)
    else:
        if path.is_absolute() and _is_usable(path) and (home not in path.parents or home.is_dir()):
            return path
    return private_folder("smartattn-cache")


def _is_usable(path: Path) -> bool:
    """Return whether ``path`` exists, or could be made by this user."""
    for candidate in (path, *path.parents):
        if os.path.lexists(candidate):
            return candidate == path or os.access(candidate, os.W_OK | os.X_OK)
    return False
