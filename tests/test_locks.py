"""The tuning lock: one holder per accelerator, a bounded wait for everyone else, and never in the way of the program."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

import filelock
import pytest
import torch

from smartattn import locks
from smartattn.locks import accelerator_name, tuning_lock

CPU = torch.device("cpu")
SOON_S = 0.05

# Holds a lock file until its input closes; light, since it loads neither torch nor smartattn.
HOLDER = """
import filelock, sys
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Put the lock files of this test into a folder of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(locks, "_turn", locks._Turn())
    return tmp_path


def warnings_of(caplog) -> list[str]:
    """Return the warnings that smartattn logged."""
    return [entry.getMessage() for entry in caplog.records if entry.name == "smartattn"]


def lock_file(folder: Path, device: torch.device = CPU) -> Path:
    """Return the file behind a device's lock, in a folder made as the lock makes it."""
    with tuning_lock(device, 0.0) as is_held:
        assert is_held
    (found,) = folder.rglob(f"{accelerator_name(device)}.lock")
    return found


def held_elsewhere(path: Path) -> subprocess.Popen[str]:
    """Return a process that holds the lock file ``path``."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_lock_is_taken_and_given_back(folder: Path):
    """A free lock is held inside the block and free after it, as often as wanted, with or without patience."""
    for timeout_s in (0.0, 1.0, -1.0, 1e12, float("inf")):
        with tuning_lock(CPU, timeout_s) as is_held:
            assert is_held
            path = folder / f"smartattn-locks-{os.getuid()}" / f"{accelerator_name(CPU)}.lock"
            with pytest.raises(filelock.Timeout):
                filelock.FileLock(str(path), is_singleton=False).acquire(timeout=0)
    filelock.FileLock(str(lock_file(folder))).acquire(timeout=0)


def test_the_folder_is_closed_to_others(folder: Path):
    """The lock files lie in a folder that only this user may use."""
    assert lock_file(folder).parent.stat().st_mode & 0o777 == 0o700


def test_a_lock_held_by_another_process_is_waited_for_no_longer_than_asked(folder: Path):
    """While another process holds the lock the answer is no; when that process is killed it is yes at once."""
    process = held_elsewhere(lock_file(folder))
    for timeout_s in (0.0, SOON_S):
        with tuning_lock(CPU, timeout_s) as is_held:
            assert not is_held
    process.kill()
    process.communicate()
    with tuning_lock(CPU, 0.0) as is_held:
        assert is_held


def test_a_wait_ends_when_the_other_process_lets_go(folder: Path):
    """A waiting process gets the lock as soon as the holder ends."""
    process = held_elsewhere(lock_file(folder))
    timer = threading.Timer(SOON_S, process.stdin.close)
    timer.start()
    with tuning_lock(CPU, 60.0) as is_held:
        assert is_held
    timer.join()
    process.wait(timeout=60)


def test_the_same_thread_does_not_wait_for_itself():
    """Inside the block the same thread is told no at once, whatever its patience, and the block stays its own."""
    with tuning_lock(CPU, 0.0) as outer:
        with tuning_lock(CPU, 1e6) as inner:
            assert (outer, inner) == (True, False)
        with tuning_lock(CPU, 1e6) as again:
            assert not again
    with tuning_lock(CPU, 0.0) as after:
        assert after


def test_threads_take_turns():
    """Of two threads one holds the lock; the other is told no in time, or gets it after the first."""
    inside, leave, answers = threading.Event(), threading.Event(), []

    def hold() -> None:
        with tuning_lock(CPU, 60.0) as is_held:
            answers.append(is_held)
            inside.set()
            leave.wait(60)

    def wait() -> None:
        with tuning_lock(CPU, 60.0) as is_held:
            answers.append(is_held)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(60)
    with tuning_lock(CPU, SOON_S) as is_held:
        assert not is_held
    waiter = threading.Thread(target=wait)
    waiter.start()
    leave.set()
    holder.join(60)
    waiter.join(60)
    assert answers == [True, True]


def test_never_two_threads_at_once():
    """Sixteen threads with eight turns each never meet inside."""
    inside, most, turns = [0], [0], [0]

    def work() -> None:
        for _ in range(8):
            with tuning_lock(CPU, 60.0) as is_held:
                if is_held:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    turns[0] += 1
                    inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most[0], turns[0]) == (1, 16 * 8)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOLCK, "No locks"), OSError(errno.ESTALE, "Stale"), RuntimeError("no")]
)
def test_a_refused_lock_does_not_stop_tuning(monkeypatch, caplog, error: Exception):
    """Where the system refuses locks the answer is yes, and it is told once."""
    hits = []

    def refuse(self: object, **_: object) -> None:
        hits.append(self)
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    for _ in range(2):
        with tuning_lock(CPU, 1.0) as is_held:
            assert is_held
    assert len(hits) == 2
    assert len(warnings_of(caplog)) == 1


def test_without_a_folder_tuning_goes_on(folder: Path, caplog):
    """When the lock folder belongs to others, or is none, the answer is yes, told once."""
    (folder / f"smartattn-locks-{os.getuid()}").write_text("in the way")
    for _ in range(2):
        with tuning_lock(CPU, 1.0) as is_held:
            assert is_held
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError("mine")])
def test_what_the_block_raises_passes_and_frees(error: BaseException):
    """An error of the block, also an OSError, reaches the caller unchanged and the lock is free again."""
    with pytest.raises(type(error)) as caught, tuning_lock(CPU, 0.0):
        raise error
    assert caught.value is error
    with tuning_lock(CPU, 0.0) as is_held:
        assert is_held


def test_a_failed_release_is_told(monkeypatch, caplog):
    """When the system will not free the lock, the block's result stands and that is told."""

    def fail(self: object) -> None:
        raise OSError(errno.EIO, "gone")

    with monkeypatch.context() as patch:
        patch.setattr(filelock.FileLock, "release", fail)
        with tuning_lock(CPU, 0.0) as is_held:
            assert is_held
    assert len(warnings_of(caplog)) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_waits_for_its_parent_and_frees_nothing(folder: Path):
    """A child forked inside the block is told no, its leaving frees nothing, and afterwards it may take the lock."""
    path = lock_file(folder)

    def in_child() -> bool:
        with tuning_lock(CPU, SOON_S) as is_held:
            return is_held

    def answer_of(leaves_block: bool) -> int:
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        code = 9
        try:
            if leaves_block:
                block.__exit__(None, None, None)
            code = int(in_child())
        finally:
            os._exit(code)

    block = tuning_lock(CPU, 0.0)
    with block as is_held:
        assert is_held
        assert answer_of(leaves_block=False) == 0
        assert answer_of(leaves_block=True) == 0
        with pytest.raises(filelock.Timeout):
            filelock.FileLock(str(path)).acquire(timeout=0)
    assert answer_of(leaves_block=False) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_while_another_thread_tunes_can_tune_later(folder: Path):
    """The thread that held the lock does not exist in the child; there the lock depends on the parent alone."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with tuning_lock(CPU, 60.0):
            inside.set()
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(60)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            with tuning_lock(CPU, 0.0) as early:
                os.write(write_end, b"1")
            with tuning_lock(CPU, 60.0) as late:
                code = int(late and not early)
        finally:
            os._exit(code)
    os.read(read_end, 1)
    leave.set()
    holder.join(60)
    os.close(read_end)
    os.close(write_end)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_names_follow_the_accelerator(monkeypatch):
    """A GPU is known by its UUID, however it is numbered; without one by host and index; names are plain file names."""
    uuids = {0: "aaaa-1", 1: "bbbb-2", 2: "aaaa-1"}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=uuids.get(device.index))
    )
    names = [accelerator_name(torch.device("cuda", index)) for index in range(5)]
    assert names[0] == names[2] == "cuda-aaaa-1"
    assert len(set(names)) == 4
    others = [accelerator_name(torch.device(text)) for text in ("cpu", "cpu:0", "mps", "xpu:1", "xpu:0")]
    assert others[0] == others[1]
    assert len({*names, *others}) == 8
    assert all(name == Path(name).name for name in [*names, *others])


def test_accelerators_have_locks_of_their_own(folder: Path):
    """A lock that another process holds for one device does not keep another device from being tuned."""
    process = held_elsewhere(lock_file(folder))
    with tuning_lock(torch.device("meta"), 0.0) as is_held:
        assert is_held
    process.communicate()


@pytest.mark.gpu
def test_a_gpu_is_locked_by_its_uuid(folder: Path):
    """On a real GPU the lock's file carries the UUID and keeps a second process out."""
    device = torch.device("cuda", 0)
    path = lock_file(folder, device)
    assert str(torch.cuda.get_device_properties(device).uuid) in path.name
    process = held_elsewhere(path)
    with tuning_lock(device, SOON_S) as is_held:
        assert not is_held
    process.communicate()
