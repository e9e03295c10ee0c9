"""The store between real processes: writers that are killed at any moment, and readers that see no half of anything.

Started as a program (``python -m tests.test_store_processes``), this file is the parent of those processes: it loads
PyTorch once, forks the writers and readers, kills writers at random, and prints what was seen as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from smartattn.environment import Provenance
from smartattn.record import Failed, Record, Timed
from smartattn.signature_text import parse_signature
from smartattn.store import Store
from tests.fakes import make_environment

REPOSITORY = Path(__file__).resolve().parent.parent
HERE = make_environment()
SIGNATURE = parse_signature("sdpa infer cpu float32 N2 Hq4 H4 L300 S300 E64 Ev64 layout=bhsd mask=none scale=positive")
PROVENANCE = Provenance(date="2026-01-02T03:04:05+00:00", driver="", threads=1, host="here", smartattn="0.1.0")
NUM_SHARED = 5
ROUTES = ("stock", "eager", "eager_inplace", "math")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def record_of(L: int, mark: int) -> Record:
    """Return a record of a few KiB in which every route carries ``mark``, so that a mix of two would show."""
    outcomes = {name: Timed(float(mark), float(mark), 0.0, n=mark, error=0.0, version=str(mark)) for name in ROUTES}
    outcomes |= {"flash": Failed(f"{mark} " * 600, str(mark))}
    return Record(dataclasses.replace(SIGNATURE, L=L, S=L), outcomes, PROVENANCE)


def is_whole(record: Record) -> bool:
    """Return whether all parts of a record carry the same mark."""
    *timed, failed = record.outcomes.values()
    return len({outcome.version for outcome in timed} | set(failed.reason.split()[:1]) | {failed.version}) == 1


class Warnings(logging.Handler):
    """Collects what smartattn warns of in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one warning."""
        self.seen.append(record.getMessage())


def write(root: Path, writer: int, lives: int, num_records: int) -> None:
    """Publish this writer's own records and shared ones, noting each own one that is done, from where it was killed."""
    log = root.parent / f"done-{writer}"
    done = {int(line) for line in log.read_text().splitlines()} if log.exists() else set()
    store, noise = Store(root), random.Random(writer * 1000 + lives)
    with log.open("a") as file:
        for number in range(num_records):
            if number in done:
                continue
            if noise.random() < 0.5:
                store.publish(HERE, record_of(1 + noise.randrange(NUM_SHARED), mark=1 + noise.randrange(9)))
            if not store.publish(HERE, record_of(own_length(writer, number), mark=1 + writer)):
                raise RuntimeError("a record was not published")
            # One short line in one write: a kill leaves it whole or absent.
            os.write(file.fileno(), f"{number}\n".encode())


def own_length(writer: int, number: int) -> int:
    """Return the length that only this writer publishes as its ``number``-th record."""
    return 1000 + writer * 100_000 + number


def read(root: Path, num_writers: int, num_records: int) -> None:
    """Look up records at random until told to stop; fail for a record that is not whole."""
    store, noise, hits = Store(root), random.Random(99), 0
    while not (root.parent / "stop").exists():
        for _ in range(50):
            own = own_length(noise.randrange(num_writers), noise.randrange(num_records))
            L = noise.choice([1 + noise.randrange(NUM_SHARED), own])
            found = store.find(HERE, record_of(L, 1).digest)
            if found is not None:
                hits += 1
                if not is_whole(found[0]) or found[0].signature.L != L:
                    raise RuntimeError("a record is torn")
    if hits == 0:
        raise RuntimeError("the reader never met a record")


def fork(work: Callable[[], None], warnings: Warnings) -> int:
    """Run ``work`` in a child process; it ends with 0 only when nothing was raised and nothing warned of."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 2 if warnings.seen else 0
        if warnings.seen:
            print(warnings.seen, file=sys.stderr)  # noqa: T201 - the child's way to say why it failed
    except BaseException as error:
        print(repr(error), file=sys.stderr)  # noqa: T201 - as above
    finally:
        os._exit(code)


def main() -> None:
    """Run writers and readers, kill writers at random, and print what is on disk at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    for name in ("--writers", "--records", "--kills", "--readers"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    root, warnings, noise = given.root, Warnings(), random.Random(7)
    logging.getLogger("smartattn").addHandler(warnings)
    readers = [fork(lambda: read(root, given.writers, given.records), warnings) for _ in range(given.readers)]
    writers: dict[int, int] = {}
    codes: list[int] = []
    lives = kills = 0

    def start(writer: int) -> None:
        writers[fork(lambda: write(root, writer, lives, given.records), warnings)] = writer

    for writer in range(given.writers):
        start(writer)
    while writers:
        time.sleep(noise.uniform(0.0, 0.05))
        if kills < given.kills:
            victim = noise.choice(list(writers))
            os.kill(victim, signal.SIGKILL)
        for pid in list(writers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended == 0:
                continue
            writer = writers.pop(pid)
            if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
                kills, lives = kills + 1, lives + 1
                start(writer)
            else:
                codes.append(os.waitstatus_to_exitcode(status))
    (root.parent / "stop").touch()
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in readers]
    store = Store(root)
    records = {entry.record.signature.L: entry.record for entry in store.entries()}
    wanted = [own_length(w, n) for w in range(given.writers) for n in range(given.records)]
    report = {
        "codes": codes,
        "kills": kills,
        "lost": sum(L not in records for L in wanted),
        "torn": sum(not is_whole(record) for record in records.values()),
        "shared": sum(L <= NUM_SHARED for L in records),
        "num_files": len(list(root.rglob("records/*.json"))),
        "warnings": warnings.seen,
    }
    print(json.dumps(report))  # noqa: T201 - the parent's answer


def run_processes(root: Path, **numbers: int) -> dict[str, object]:
    """Run the program above and return its report."""
    arguments = [f"--{name}={value}" for name, value in numbers.items()]
    command = [sys.executable, "-m", "tests.test_store_processes", str(root), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "stderr": done.stderr}


def check(report: dict[str, object], *, num_own: int, num_kills: int, num_processes: int) -> None:
    """Check that nothing was lost, torn or complained of, and that the faults did happen."""
    assert report["codes"] == [0] * num_processes, report["stderr"]
    assert (report["lost"], report["torn"], report["warnings"]) == (0, 0, [])
    # The last of the planned kills may find every writer done.
    assert report["kills"] >= num_kills // 2
    assert report["shared"] == NUM_SHARED
    assert report["num_files"] == num_own + NUM_SHARED


def test_killed_writers_lose_and_tear_nothing(tmp_path: Path):
    """Eight writers, 20 kills, two readers: every published record is there and whole, and nobody sees an error."""
    report = run_processes(tmp_path / "store", writers=8, records=60, kills=20, readers=2)
    check(report, num_own=8 * 60, num_kills=20, num_processes=10)


@pytest.mark.slow
def test_ten_thousand_records_with_kills(tmp_path: Path):
    """Ten writers of 1,000 records each, 200 kills, two readers: none lost, none torn."""
    report = run_processes(tmp_path / "store", writers=10, records=1000, kills=200, readers=2)
    check(report, num_own=10 * 1000, num_kills=200, num_processes=12)


AS_ANOTHER_USER = """
import os, pathlib, sys
from smartattn.store import Store
from tests.test_store_processes import HERE, record_of
root = pathlib.Path(sys.argv[1])
os.environ.pop("HOME", None), os.environ.pop("XDG_CACHE_HOME", None)
os.setgid(54321), os.setuid(54321)
shared, own = Store(root), Store(None)
assert shared.find(HERE, record_of(1, 1).digest) is not None, "a readable folder of another user is read"
assert not shared.publish(HERE, record_of(2, 1)), "and not written"
assert own.publish(HERE, record_of(3, 1)), "a user without a home and a name has a private folder"
assert str(own.path()).endswith("-54321"), own.path()
os.environ["HOME"] = "/root"
assert Store(None).path() == own.path(), "a home of another user is no home"
private = Store(root.parent / "private")
assert private.find(HERE, record_of(1, 1).digest) is None, "a closed folder of another user is a miss"
assert not private.publish(HERE, record_of(1, 1))
"""


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become another user")
def test_another_users_folders(tmp_path: Path):
    """A process of a user without home, name and rights reads what it may, writes in a folder of its own, and goes on."""
    import tempfile

    # The folders that pytest gives to tests are closed to other users.
    with tempfile.TemporaryDirectory(dir=Path(os.sep, "var", "tmp")) as name:
        base = Path(name)
        base.chmod(0o755)
        Store(base / "store").publish(HERE, record_of(1, 1))
        Store(base / "private").publish(HERE, record_of(1, 1))
        (base / "private").chmod(0o700)
        (base / "tmp").mkdir()
        (base / "tmp").chmod(0o1777)
        done = subprocess.run(
            [sys.executable, "-c", AS_ANOTHER_USER, str(base / "store")],
            cwd=REPOSITORY, env={**os.environ, "TMPDIR": str(base / "tmp")},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not any(path.stat().st_uid == 54321 for path in (base / "store").rglob("*"))


if __name__ == "__main__":
    main()
