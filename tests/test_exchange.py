"""Export and merge: whole there and back, the newer stays, other machines' records are kept apart, hostile lines skipped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from smartattn import exchange, stored
from smartattn.environment import Environment, environment_of, provenance_now
from smartattn.errors import SettingError
from smartattn.exchange import export, merge
from smartattn.record import Record, Rejected, Timed
from smartattn.signature import Signature
from smartattn.signature_text import parse_signature
from smartattn.store import Store
from tests.fakes import make_environment

TEXT = "sdpa infer cpu float32 N1 Hq2 H2 L{L} S{L} E16 Ev16 layout=bhsd mask=none scale=positive"
HERE = environment_of(torch.device("cpu"))
THERE = make_environment(torch="9.9.9")


def problem(L: int = 8) -> Signature:
    return parse_signature(TEXT.format(L=L))


def record(L: int = 8, *, us: float = 10.0, date: str = "2026-01-01T00:00:00+00:00") -> Record:
    outcomes = {"stock": Timed(us, us, 0.1, 9, 0.5, "1"), "math": Rejected(("too slow",))}
    provenance = dataclasses.replace(provenance_now("cpu"), date=date)
    return Record(problem(L), outcomes, provenance)


@pytest.fixture
def source(tmp_path: Path) -> Store:
    """Give a store with records of two environments, a pending note and a quarantine entry."""
    store = Store(tmp_path / "source")
    for environment in (HERE, THERE):
        store.publish(environment, record(8))
        store.publish(environment, record(9))
    store.note_pending(HERE, problem(20), "met in mode 'record'")
    store.put_in_quarantine(HERE, problem(8), "math", "was wrong", "1")
    return store


def contents(store: Store) -> set[tuple[str, str, str]]:
    return {(e.environment_digest, str(e.record.signature), json.dumps(e.record.to_dict())) for e in store.entries()}


def test_everything_comes_back(source: Store, tmp_path: Path):
    """Records, pending notes and quarantine of every environment are the same after an export and a merge."""
    target = Store(tmp_path / "target")
    exported = export(source, tmp_path / "all.jsonl")
    assert (exported.num_records, exported.num_pending, exported.num_quarantined) == (4, 1, 1)
    merged = merge(target, (tmp_path / "all.jsonl",), (HERE,))
    assert (merged.num_added, merged.num_kept, merged.num_skipped) == (4, 0, 0)
    assert contents(target) == contents(source)
    assert target.pending(HERE) == (problem(20),)
    assert list(target.quarantined(HERE, problem(8))) == ["math"]


def test_other_environments_are_named_and_do_not_serve(source: Store, tmp_path: Path):
    """Records of another machine are merged for it; the summary says that they are not used here."""
    export(source, tmp_path / "all.jsonl")
    target = Store(tmp_path / "target")
    merged = merge(target, (tmp_path / "all.jsonl",), (make_environment(torch="1.1.1"),))
    assert set(merged.elsewhere) == {HERE.folder, THERE.folder}
    assert merged.environments == {HERE.folder: 2, THERE.folder: 2}
    assert target.find(make_environment(torch="1.1.1"), problem(8).digest) is None


@pytest.mark.parametrize(("theirs", "us"), [("2026-02-01T00:00:00+00:00", 20.0), ("2025-12-01T00:00:00+00:00", 10.0)])
def test_the_newer_record_stays(tmp_path: Path, theirs: str, us: float):
    """Of two records of one problem the later date wins, whichever side it is on."""
    other, target = Store(tmp_path / "other"), Store(tmp_path / "target")
    other.publish(HERE, record(us=20.0, date=theirs))
    target.publish(HERE, record(us=10.0))
    export(other, tmp_path / "other.jsonl")
    merged = merge(target, (tmp_path / "other.jsonl",), (HERE,))
    found = target.find(HERE, problem().digest)
    assert found is not None
    assert found[0].outcomes["stock"].device_us == us
    assert (merged.num_replaced, merged.num_kept) == ((1, 0) if us == 20.0 else (0, 1))


def test_merging_twice_changes_nothing(source: Store, tmp_path: Path):
    """A second merge of the same file keeps what is there."""
    export(source, tmp_path / "all.jsonl")
    target = Store(tmp_path / "target")
    merge(target, (tmp_path / "all.jsonl",), (HERE,))
    again = merge(target, (tmp_path / "all.jsonl",), (HERE,))
    assert (again.num_added, again.num_replaced, again.num_kept) == (0, 0, 4)


def test_a_cache_folder_merges_like_its_export(source: Store, tmp_path: Path):
    """A folder of another cache is taken as it is."""
    target = Store(tmp_path / "target")
    assert merge(target, (tmp_path / "source",), (HERE,)).num_added == 4
    assert contents(target) == contents(source)


def test_layers_are_exported_and_the_first_wins(tmp_path: Path):
    """An export holds one record per problem: that which would answer."""
    base = Store(tmp_path / "base")
    base.publish(HERE, record(8, us=50.0))
    base.publish(HERE, record(9))
    top = Store(tmp_path / "top", (tmp_path / "base",))
    top.publish(HERE, record(8, us=5.0))
    assert export(top, tmp_path / "all.jsonl").num_records == 2
    target = Store(tmp_path / "target")
    merge(target, (tmp_path / "all.jsonl",), (HERE,))
    found = target.find(HERE, problem(8).digest)
    assert found is not None
    assert found[0].outcomes["stock"].device_us == 5.0


def test_pending_can_stay_at_home(source: Store, tmp_path: Path):
    """Without ``pending`` only records go."""
    exported = export(source, tmp_path / "all.jsonl", pending=False)
    assert (exported.num_records, exported.num_pending, exported.num_quarantined) == (4, 0, 0)


def lines_with(source: Store, path: Path, *more: object) -> Path:
    export(source, path)
    with path.open("a", encoding="utf-8") as file:
        file.writelines((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in more)
    return path


def form(**changes: object) -> dict[str, object]:
    return {"record": {**stored.record_form(HERE, record(30)), **changes}}


HOSTILE = [
    "no json",
    "[" * 100_000,
    [],
    {"record": None},
    {"record": {"environment": HERE.digest}},
    form(environment="0" * 32),
    form(environment=7),
    form(schema=2),
    form(signature="sdpa ../../etc"),
    form(outcomes={"../../sh": {"is": "timed"}}),
    form(outcomes={"math": {"is": "rejected", "reasons": [{}]}}),
    form(extra=1),
    {"unknown": {"environment": HERE.digest}},
    {"environment": {**HERE.to_dict(), "device_name": 5}},
    {"environment": {**HERE.to_dict(), "torch": "../../../up"}},
    {"pending": {"environment": HERE.digest, "schema": 1, "signature": "nothing", "date": ""}},
    {"quarantine": {"environment": HERE.digest, "schema": 1, "signature": str(problem()), "date": "", "route": 1}},
    {"quarantine": {"environment": HERE.digest, "schema": 1, "signature": str(problem()), "date": "", "route": "rm",
                    "reason": "", "version": ""}},
    {"record": "x" * 200_000},
]  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: str(line)[:40])
def test_hostile_lines_are_skipped(source: Store, tmp_path: Path, line: object):
    """A line that makes no sense is counted and skipped, the others are merged, and nothing lies outside the folder."""
    path = lines_with(source, tmp_path / "all.jsonl", line, form())
    target = Store(tmp_path / "deep" / "target")
    merged = merge(target, (path,), (HERE,))
    assert merged.num_skipped == 1
    assert merged.num_added == 5, "what stands before and after it is merged"
    assert {p.name for p in (tmp_path / "deep").iterdir()} == {"target"}


def test_a_cut_off_file_gives_what_is_whole(source: Store, tmp_path: Path):
    """A last line without its end is skipped."""
    path = lines_with(source, tmp_path / "all.jsonl", form())
    path.write_bytes(path.read_bytes()[:-20])
    merged = merge(Store(tmp_path / "target"), (path,), (HERE,))
    assert (merged.num_added, merged.num_skipped) == (4, 1)


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\x00\xff\n", b'{"smartattn": "export", "schema": 99}\n'])
def test_other_files_are_refused(tmp_path: Path, content: bytes):
    """What is no export of this schema is named and nothing is merged."""
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(SettingError, match=r"file (is no export|has schema 99)"):
        merge(Store(tmp_path / "target"), (tmp_path / "file",), (HERE,))
    assert not (tmp_path / "target").exists()


def test_missing_and_unwritable_files_are_told(tmp_path: Path):
    """A file that is not there, and one that cannot be written, raise with their path."""
    with pytest.raises(SettingError, match=r"cannot read .*absent"):
        merge(Store(tmp_path / "target"), (tmp_path / "absent",), (HERE,))
    with pytest.raises(SettingError, match=r"cannot write .*all"):
        export(Store(tmp_path / "target"), tmp_path / "absent" / "all")


def test_a_failed_export_leaves_the_old_file(source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """When writing breaks off, the file of before stays and no other is left."""
    path = tmp_path / "all.jsonl"
    path.write_text("before")
    hits = []

    def broken(environment: Environment, found: Record) -> dict[str, object]:
        hits.append(found)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exchange.stored, "record_form", broken)
    with pytest.raises(SettingError, match="No space left"):
        export(source, path)
    assert hits
    assert path.read_text() == "before"
    assert {p.name for p in tmp_path.iterdir() if p.suffix in (".jsonl", ".tmp")} == {"all.jsonl"}
