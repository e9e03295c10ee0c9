"""One tuning at a time per accelerator: processes that time on the same GPU at once measure each other.

The lock files lie in a folder of this user's own below the folder for temporary files, never in the cache folder: that
may be on a network file system, where locks can hang or outlive their holder. The user's run-time folder is no better
place: it exists in a login session only, and a job started elsewhere would not see the same lock.

A lock belongs to the process that took it: the system frees it when that process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator

import filelock
import torch

from smartattn import events
from smartattn.files import private_folder

POLL_S = 0.02
"""Pause between two looks at a lock that another process holds; short against any tuning."""


class _Turn:
    """Whose turn it is among the threads of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None


_turn = _Turn()
# A forked child must not free what its parent holds, so lock objects that it inherits are kept from being finalised.
_inherited: list[filelock.BaseFileLock] = []
_held: list[filelock.BaseFileLock] = []


def _reset_after_fork() -> None:
    global _turn  # noqa: PLW0603 - the child starts with a lock that nobody holds
    _turn = _Turn()
    _inherited.extend(_held)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def accelerator_name(device: torch.device) -> str:
    """Return the name that all processes of this host give to the accelerator behind ``device``."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        # The index is no identity: CUDA_VISIBLE_DEVICES renumbers the devices of each process.
        identity = getattr(properties, "uuid", None) or f"{socket.gethostname()}-{device.index or 0}"
        return _as_file_name(f"cuda-{identity}")
    index = "" if device.index is None or device.type == "cpu" else f"-{device.index}"
    return _as_file_name(f"{device.type}{index}-{socket.gethostname()}")


def _as_file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text)[:120]


@contextlib.contextmanager
def tuning_lock(device: torch.device, timeout_s: float) -> Iterator[bool]:
    """Hold the accelerator for tuning while the block runs; yield whether it may be tuned on.

    Args:
        device: where to tune.
        timeout_s: the longest wait in seconds, for threads and processes together; 0 does not wait.

    Yields:
        ``True`` when the lock is held, and also, told once, where the system refuses locks: such a machine must tune
        as well. ``False`` when the wait was too long, or this thread already holds the lock.

    Note:
        One file is opened and locked; a held lock is looked at every 20 ms. Take it after the stream was drained.
    """
    turn, thread = _turn, threading.get_ident()
    deadline_s = time.monotonic() + max(0.0, timeout_s)
    if turn.owner == thread or not turn.lock.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX)):
        yield False
        return
    turn.owner = thread
    lock: filelock.BaseFileLock | None = None
    pid = os.getpid()
    try:
        lock = _lock_of(device)
        is_free = lock is None or _take(lock, max(0.0, deadline_s - time.monotonic()))
        yield is_free
    finally:
        if os.getpid() == pid:
            if lock is not None:
                _release(lock)
            turn.owner = None
            turn.lock.release()


def _lock_of(device: torch.device) -> filelock.BaseFileLock | None:
    folder = private_folder("smartattn-locks")
    return None if folder is None else filelock.FileLock(str(folder / f"{accelerator_name(device)}.lock"))


def _take(lock: filelock.BaseFileLock, timeout_s: float) -> bool:
    try:
        lock.acquire(timeout=timeout_s, poll_interval=POLL_S)
    except filelock.Timeout:
        return False
    except (OSError, RuntimeError, ValueError) as error:
        events.warn_once("lock refused", "tuning without a lock: %s cannot be locked (%s)", lock.lock_file, error)
        return True
    _held.append(lock)
    return True


def _release(lock: filelock.BaseFileLock) -> None:
    if lock in _held:
        _held.remove(lock)
    try:
        lock.release()
    except (OSError, RuntimeError) as error:
        events.warn_once("lock not freed", "%s cannot be freed before this process ends (%s)", lock.lock_file, error)
