"""The store: what is written comes back, everything else is a miss, and no state of the disk reaches the caller."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pickle
import tempfile
import time
from pathlib import Path

import pytest

from smartattn import files, store, stored
from smartattn.buckets import bucket_of
from smartattn.environment import SCHEMA, Provenance
from smartattn.errors import UnknownNameError
from smartattn.record import Failed, Record, Timed
from smartattn.signature_text import parse_signature
from smartattn.store import Store
from tests.fakes import make_environment

SIGNATURE = parse_signature("sdpa infer cpu float32 N2 Hq4 H4 L300 S300 E64 Ev64 layout=bhsd mask=none scale=positive")
PROVENANCE = Provenance(date="2026-01-02T03:04:05+00:00", driver="", threads=4, host="here", smartattn="0.1.0")
HERE = make_environment()
ELSEWHERE = make_environment(device_name="Imaginary 9001")


def signature_of(L: int):
    """Return a signature of length ``L``."""
    return dataclasses.replace(SIGNATURE, L=L, S=L)


def record_of(L: int = 300, device_us: float = 10.0, **changes: object) -> Record:
    """Return a record with one measured route."""
    outcomes = {"stock": Timed(device_us, 5.0, 0.1, n=9, error=0.1, version="1")}
    return Record(**{"signature": signature_of(L), "outcomes": outcomes, "provenance": PROVENANCE, **changes})


RECORD = record_of()


def file_of(root: Path, record: Record = RECORD, environment=HERE) -> Path:
    """Return the path of a record's file."""
    return root / "v1" / environment.folder / "records" / f"{record.digest}.json"


def warnings_of(caplog) -> list[str]:
    """Return the warnings that smartattn logged."""
    return [entry.getMessage() for entry in caplog.records if entry.name == "smartattn"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the path of a folder that does not exist yet."""
    return tmp_path / "store"


@pytest.fixture
def kept(root: Path) -> Store:
    """Return a store that holds RECORD."""
    made = Store(root)
    assert made.publish(HERE, RECORD)
    return made


def test_a_published_record_is_found_by_another_store(kept: Store, root: Path):
    """What one store publishes another one finds, equal and with its origin."""
    assert Store(root).find(HERE, RECORD.digest) == (RECORD, "disk")
    assert kept.path() == root


def test_a_miss_reads_and_makes_nothing(root: Path, caplog):
    """Asking an absent folder answers with nothing, makes nothing and says nothing."""
    empty = Store(root)
    assert empty.find(HERE, RECORD.digest) is None
    assert empty.pending(HERE) == ()
    assert empty.quarantined(HERE, SIGNATURE) == {}
    assert [*empty.entries(), *empty.quarantine_entries()] == []
    assert empty.clear() == empty.forget(SIGNATURE) == 0
    assert not root.exists()
    assert warnings_of(caplog) == []


def test_making_a_store_touches_no_disk(monkeypatch):
    """The default folder is looked up at the first need, once."""
    calls = []
    monkeypatch.setattr(files, "default_root", lambda: calls.append(1))
    lazy = Store(None)
    assert calls == []
    assert lazy.path() is lazy.path() is None
    assert calls == [1]


def test_exact_and_bucket_records_live_side_by_side(kept: Store):
    """A bucket's record is found under the bucket's digest, the exact one under the signature's."""
    bucket = bucket_of(SIGNATURE)
    wide = record_of(device_us=20.0, bucket=bucket)
    assert kept.publish(HERE, wide)
    assert kept.find(HERE, bucket.digest) == (wide, "disk")
    assert kept.find(HERE, SIGNATURE.digest) == (RECORD, "disk")


def test_a_later_record_replaces_an_earlier(kept: Store, root: Path):
    """Publishing the same signature again leaves one file with the later content."""
    assert kept.publish(HERE, record_of(device_us=7.0))
    assert kept.find(HERE, RECORD.digest)[0].outcomes["stock"].device_us == 7.0
    assert len(list(file_of(root).parent.iterdir())) == 1


@pytest.mark.parametrize("field", [item.name for item in dataclasses.fields(HERE)])
def test_environments_do_not_share_records(kept: Store, field: str):
    """A change of any attribute of the environment is a miss: two torch or schema versions live side by side."""
    value = getattr(HERE, field)
    other = dataclasses.replace(HERE, **{field: value + 1 if isinstance(value, int) else f"{value}1"})
    assert other.folder != HERE.folder
    assert kept.find(other, RECORD.digest) is None
    assert kept.publish(other, record_of(device_us=3.0))
    assert kept.find(HERE, RECORD.digest) == (RECORD, "disk")


def test_layers_answer_after_the_writable_one_in_order(root: Path, tmp_path: Path):
    """The writable layer wins, then the first layer that knows the record; layers are never written."""
    layers = tuple(tmp_path / name for name in ("first", "second"))
    for number, layer in enumerate(layers, start=1):
        for L in (300, 400) if number == 2 else (300,):
            Store(layer).publish(HERE, record_of(L, device_us=number))
    before = sorted(path for layer in layers for path in layer.rglob("*"))
    stack = Store(root, layers)
    assert stack.find(HERE, RECORD.digest) == (record_of(device_us=1), f"layer {layers[0]}")
    assert stack.find(HERE, record_of(400).digest) == (record_of(400, device_us=2), f"layer {layers[1]}")
    assert stack.publish(HERE, RECORD)
    assert stack.find(HERE, RECORD.digest) == (RECORD, "disk")
    stack.note_pending(HERE, SIGNATURE, "test")
    stack.put_in_quarantine(HERE, SIGNATURE, "math", "test", "1")
    assert stack.clear() == 3
    assert sorted(path for layer in layers for path in layer.rglob("*")) == before
    assert len(list(stack.entries())) == 3


def test_a_broken_file_does_not_hide_a_layer(kept: Store, root: Path, tmp_path: Path):
    """When the writable layer's file is unreadable the layers are still asked."""
    layer = tmp_path / "layer"
    Store(layer).publish(HERE, RECORD)
    file_of(root).write_text("")
    assert Store(root, (layer,)).find(HERE, RECORD.digest) == (RECORD, f"layer {layer}")


def changed(**changes: object) -> bytes:
    """Return RECORD's stored form with values replaced."""
    return json.dumps({**stored.record_form(HERE, RECORD), **changes}).encode()


WHOLE = changed()
OUTCOME = RECORD.to_dict()["outcomes"]["stock"]
BAD_CONTENT = {
    "empty": b"",
    "truncated": WHOLE[: len(WHOLE) // 2],
    "invalid UTF-8": WHOLE[:20] + b"\xff\xfe" + WHOLE[20:],
    "zero bytes": b"\0" * 100,
    "JSON of another type": b"[1, 2]",
    "JSON null": b"null",
    "a pickle": pickle.dumps({"schema": 1}),
    "deeply nested": b"[" * 30_000 + b"]" * 30_000,
    "deeply nested objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "a number of 60,000 digits": b'{"schema": ' + b"9" * 60_000 + b"}",
    "huge": changed(later="x" * files.MAX_BYTES),
    "schema before": changed(schema=SCHEMA - 1),
    "schema after": changed(schema=SCHEMA + 1),
    "unknown field": changed(later=1),
    "wrong type": changed(outcomes=[]),
    "NaN time": changed(outcomes={"stock": {**OUTCOME, "device_us": float("nan")}}),
    "time as text": changed(outcomes={"stock": {**OUTCOME, "device_us": "fast"}}),
    "unknown backend": changed(outcomes={"nothing_like_it": OUTCOME}),
    "unknown rewrite": changed(outcomes={"nothing_like_it+math": OUTCOME}),
    "route that is a path": changed(outcomes={"../../etc/passwd": OUTCOME}),
    "route that is code": changed(outcomes={"__import__('os')": OUTCOME}),
    "no environment": json.dumps(RECORD.to_dict()).encode(),
    "another environment": changed(environment=ELSEWHERE.digest),
    "environment of another type": changed(environment=[HERE.digest]),
    "another signature": json.dumps(stored.record_form(HERE, record_of(301))).encode(),
    "a bucket's record": json.dumps(stored.record_form(HERE, record_of(bucket=bucket_of(SIGNATURE)))).encode(),
}


@pytest.mark.parametrize("content", BAD_CONTENT.values(), ids=BAD_CONTENT.keys())
def test_bad_content_is_a_miss_told_once(kept: Store, root: Path, caplog, content: bytes):
    """A file of any other content is a miss, told in one line, not listed, and put right by the next publishing."""
    file_of(root).write_bytes(content)
    assert kept.find(HERE, RECORD.digest) is None
    assert kept.find(HERE, RECORD.digest) is None
    assert list(kept.entries()) == []
    (told,) = warnings_of(caplog)
    assert "\n" not in told
    assert str(file_of(root)) in told
    assert kept.publish(HERE, RECORD)
    assert kept.find(HERE, RECORD.digest) == (RECORD, "disk")


def test_the_unchanged_content_is_a_hit(kept: Store, root: Path):
    """The form that every bad content starts from is read."""
    file_of(root).write_bytes(WHOLE)
    assert kept.find(HERE, RECORD.digest) == (RECORD, "disk")


def test_an_empty_folder_in_the_place_of_a_file_is_replaced(kept: Store, root: Path, caplog):
    """A folder where a file should be is a miss, and an empty one gives way."""
    file_of(root).unlink()
    file_of(root).mkdir()
    assert kept.find(HERE, RECORD.digest) is None
    assert len(warnings_of(caplog)) == 1
    assert kept.publish(HERE, RECORD)
    assert kept.find(HERE, RECORD.digest) == (RECORD, "disk")


def test_a_full_folder_in_the_place_of_a_file_stays(kept: Store, root: Path, caplog):
    """A folder with content in a file's place is left alone: nothing is stored, no temporary file stays."""
    file_of(root).unlink()
    file_of(root).mkdir()
    (file_of(root) / "mine").write_text("keep")
    assert not kept.publish(HERE, RECORD)
    assert (file_of(root) / "mine").read_text() == "keep"
    assert [path.name for path in file_of(root).parent.iterdir()] == [file_of(root).name]
    assert len(warnings_of(caplog)) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_in_the_place_of_a_file_does_not_block(kept: Store, root: Path, caplog):
    """A named pipe is a miss at once: opening one to read would wait for a writer."""
    file_of(root).unlink()
    os.mkfifo(file_of(root))
    assert kept.find(HERE, RECORD.digest) is None
    assert "no regular file" in warnings_of(caplog)[0]


def test_a_copied_environment_folder_is_a_miss(kept: Store, root: Path, caplog):
    """Records copied into another machine's folder are never served there nor listed, and are left as they are."""
    kept.publish(ELSEWHERE, record_of(400))
    forged = file_of(root, environment=ELSEWHERE)
    forged.write_bytes(file_of(root).read_bytes())
    assert kept.find(ELSEWHERE, RECORD.digest) is None
    assert [entry.record.digest for entry in kept.entries(ELSEWHERE)] == [record_of(400).digest]
    assert kept.publish(ELSEWHERE, record_of(500))
    assert kept.find(ELSEWHERE, RECORD.digest) is None
    assert json.loads(forged.read_bytes())["environment"] == HERE.digest
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("digest", ["", "../" * 4 + "etc/passwd", "A" * 32, "0" * 31, "0" * 32 + "\n", "\0" * 32])
def test_only_digests_become_paths(kept: Store, digest: str):
    """Text that is no digest is a miss without a look at the disk, and cannot be forgotten."""
    assert kept.find(HERE, digest) is None
    with pytest.raises(UnknownNameError):
        kept.forget(digest)


def test_a_link_out_of_the_folder_is_not_followed(kept: Store, root: Path, tmp_path: Path, caplog):
    """A record's file that is a link to outside is a miss; publishing replaces the link, not its target."""
    outside = tmp_path / "outside.json"
    outside.write_bytes(WHOLE)
    file_of(root).unlink()
    file_of(root).symlink_to(outside)
    assert kept.find(HERE, RECORD.digest) is None
    assert "leads out" in warnings_of(caplog)[0]
    assert kept.publish(HERE, record_of(device_us=1.0))
    assert outside.read_bytes() == WHOLE
    assert not file_of(root).is_symlink()


@pytest.mark.parametrize("depth", ["v1", "environment", "records"])
def test_a_folder_that_leads_outside_is_not_used(kept: Store, root: Path, tmp_path: Path, depth: str):
    """No folder below the root is followed out of it, to read, to write or to remove."""
    inner = {"v1": root / "v1", "environment": file_of(root).parent.parent, "records": file_of(root).parent}[depth]
    outside = tmp_path / "outside"
    inner.rename(outside)
    inner.symlink_to(outside)
    before = sorted(outside.rglob("*"))
    assert kept.find(HERE, RECORD.digest) is None
    assert list(kept.entries()) == []
    assert not kept.publish(HERE, record_of(400))
    assert kept.clear() == kept.forget(SIGNATURE) == 0
    assert sorted(outside.rglob("*")) == before


def test_links_inside_the_folder_work(kept: Store, root: Path):
    """A link to another place below the root is followed: mounted volumes of containers are made of such links."""
    data = root / "..data"
    data.mkdir()
    file_of(root).rename(data / "content")
    file_of(root).symlink_to(data / "content")
    assert kept.find(HERE, RECORD.digest) == (RECORD, "disk")


def test_the_root_itself_may_be_a_link(kept: Store, root: Path, tmp_path: Path):
    """Whoever sets the cache folder decides where it leads."""
    link = tmp_path / "link"
    link.symlink_to(root)
    linked = Store(link)
    assert linked.find(HERE, RECORD.digest) == (RECORD, "disk")
    assert linked.publish(HERE, record_of(400))
    assert kept.find(HERE, record_of(400).digest) is not None


@pytest.mark.parametrize("code", ["EROFS", "ENOSPC", "EACCES", "EBUSY", "ESTALE", "EIO", "EDQUOT"])
@pytest.mark.parametrize("function", ["open", "replace", "fsync", "makedirs"])
def test_an_unwritable_folder_is_told_once(root: Path, monkeypatch, caplog, code: str, function: str):
    """Each error of writing means memory only, one warning, and no temporary file left; later it may work again."""
    hits = []

    def fail(*arguments: object, **_: object) -> None:
        hits.append(arguments)
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    broken = Store(root)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, function, fail)
        assert not broken.publish(HERE, RECORD)
        assert not broken.publish(HERE, record_of(400))
        assert len(hits) >= 2
        told = [text for text in warnings_of(caplog) if "cannot write" in text]
        assert len(told) == 1
    assert [path for path in root.rglob("*") if path.name.endswith(".tmp")] == []
    assert broken.publish(HERE, RECORD)
    assert broken.find(HERE, RECORD.digest) == (RECORD, "disk")


def test_a_folder_deleted_between_is_made_again(kept: Store, root: Path, monkeypatch):
    """When the folder vanishes after it was made, publishing makes it once more."""
    real, hits = os.replace, []

    def vanish_first(source: str, target: str) -> None:
        hits.append(source)
        if len(hits) == 1:
            Path(source).unlink()
            file_of(root).unlink()
            file_of(root).parent.rmdir()
        real(source, target)

    monkeypatch.setattr(files.os, "replace", vanish_first)
    assert kept.publish(HERE, record_of(400))
    assert len(hits) == 2
    assert kept.find(HERE, record_of(400).digest) is not None


def test_a_file_in_the_place_of_the_root_is_memory_only(root: Path, caplog):
    """A root that is a file is a silent miss to read and told once to write."""
    root.write_text("mine")
    blocked = Store(root)
    assert blocked.find(HERE, RECORD.digest) is None
    assert warnings_of(caplog) == []
    assert not blocked.publish(HERE, RECORD)
    assert not blocked.publish(HERE, RECORD)
    assert len(warnings_of(caplog)) == 1
    assert root.read_text() == "mine"


def test_unreadable_files_are_told_once(kept: Store, monkeypatch, caplog):
    """An error of reading is a miss; a handle that went stale raises nothing."""
    hits = []

    def fail(path: str, *_: object) -> int:
        hits.append(path)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(files.os, "open", fail)
    assert kept.find(HERE, RECORD.digest) is None
    assert list(kept.entries()) == []
    assert len(hits) >= 2
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("stage", ["fsync", "replace"])
def test_an_interrupt_leaves_nothing_half_written(kept: Store, root: Path, monkeypatch, stage: str):
    """Ctrl-C while writing passes on, removes the temporary file and leaves the old record whole."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, stage, interrupt)
    with pytest.raises(KeyboardInterrupt):
        kept.publish(HERE, record_of(device_us=1.0))
    assert [path.name for path in file_of(root).parent.iterdir()] == [file_of(root).name]
    assert kept.find(HERE, RECORD.digest) == (RECORD, "disk")


def test_noisy_records_are_not_stored(root: Path):
    """A record that calls itself noisy stays in memory, and its signature stays pending."""
    quiet = Store(root)
    quiet.note_pending(HERE, SIGNATURE, "test")
    assert not quiet.publish(HERE, record_of(provenance=dataclasses.replace(PROVENANCE, noisy=True)))
    assert quiet.find(HERE, RECORD.digest) is None
    assert quiet.pending(HERE) == (SIGNATURE,)


def test_what_no_reader_takes_back_is_not_written(root: Path, caplog):
    """A record with a time of NaN is not stored, and that is told."""
    assert not Store(root).publish(HERE, record_of(device_us=float("nan")))
    assert not file_of(root).exists()
    assert len(warnings_of(caplog)) == 1


def test_long_reasons_are_cut(root: Path):
    """A megabyte of compiler output does not keep a record off the disk."""
    wordy = record_of(outcomes={"math": Failed("x" * 1_000_000, "1")})
    assert Store(root).publish(HERE, wordy)
    found, _ = Store(root).find(HERE, wordy.digest)
    assert len(found.outcomes["math"].reason) == stored.MAX_REASON_LENGTH


def test_the_root_is_marked_only_when_it_is_ours(root: Path, tmp_path: Path):
    """A folder made for the cache gets a tag and a README line; one that held something else is not tagged."""
    Store(root).publish(HERE, RECORD)
    assert (root / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    assert "smartattn" in (root / "README.txt").read_text()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    Store(mine).publish(HERE, RECORD)
    assert sorted(path.name for path in mine.iterdir()) == ["thesis.txt", "v1"]


@pytest.mark.skipif(os.name != "posix", reason="modes and umask are POSIX")
def test_the_umask_decides_who_reads(root: Path):
    """Files are made with the caller's umask, not with a mode of the store's own."""
    old = os.umask(0o027)
    try:
        Store(root).publish(HERE, RECORD)
    finally:
        os.umask(old)
    assert file_of(root).stat().st_mode & 0o777 == 0o640


def test_the_environment_is_described(kept: Store, root: Path):
    """The folder says in full what it stands for, and a spoilt description is written anew."""
    description = file_of(root).parent.parent / "environment.json"
    assert json.loads(description.read_text()) == HERE.to_dict()
    description.write_text("{}")
    (entry,) = kept.entries()
    assert (entry.environment, entry.environment_digest) == (None, HERE.digest)
    kept.publish(HERE, RECORD)
    assert json.loads(description.read_text()) == HERE.to_dict()


def test_entries_tell_where_each_record_belongs(kept: Store, root: Path):
    """Listing yields the records of every environment with path, origin and environment; or those of one."""
    kept.publish(ELSEWHERE, record_of(400))
    found = {entry.record.digest: entry for entry in kept.entries()}
    assert {entry.environment for entry in found.values()} == {HERE, ELSEWHERE}
    assert found[RECORD.digest].path == file_of(root)
    assert found[RECORD.digest].origin == "disk"
    assert [entry.record for entry in kept.entries(ELSEWHERE)] == [record_of(400)]


@pytest.mark.parametrize(
    "changes",
    [{"later": 1}, {"torch": 2}, {"schema": True}, {"device_name": "x", "torch": "../../../x"}, {"capability": "a/b"}],
)
def test_environments_of_other_forms_are_refused(changes: dict[str, object]):
    """A stored environment with other fields or types, or one that would lead out of its folder, is refused."""
    assert stored.environment_from_dict(HERE.to_dict()) == HERE
    with pytest.raises(ValueError):
        stored.environment_from_dict({**HERE.to_dict(), **changes})


def test_pending_notes_come_back_and_go(root: Path):
    """Notes are kept once per signature and environment until they are dropped."""
    noting = Store(root)
    for L in (300, 400, 300):
        noting.note_pending(HERE, signature_of(L), "the time for tuning is spent")
    again = Store(root)
    assert set(again.pending(HERE)) == {signature_of(300), signature_of(400)}
    assert again.pending(ELSEWHERE) == ()
    again.drop_pending(HERE, signature_of(300))
    again.drop_pending(HERE, signature_of(300))
    assert noting.pending(HERE) == (signature_of(400),)


def test_a_record_drops_the_notes_that_it_answers(root: Path):
    """An exact record drops its signature's note; a bucket's record those of every signature in the bucket."""
    noting = Store(root)
    for L in (300, 301, 5000):
        noting.note_pending(HERE, signature_of(L), "test")
    noting.publish(HERE, record_of(300))
    assert set(noting.pending(HERE)) == {signature_of(301), signature_of(5000)}
    noting.note_pending(HERE, signature_of(300), "test")
    noting.publish(HERE, record_of(310, bucket=bucket_of(signature_of(310))))
    assert noting.pending(HERE) == (signature_of(5000),)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"schema": 1}', b'{"schema": 1, "signature": "sdpa"}'])
@pytest.mark.parametrize("kind", ["pending", "quarantine"])
def test_bad_notes_are_skipped(root: Path, caplog, kind: str, content: bytes):
    """A note that cannot be read is told once and hides no other; neither does one copied to another name."""
    noting = Store(root)
    noting.note_pending(HERE, SIGNATURE, "test")
    noting.put_in_quarantine(HERE, SIGNATURE, "math", "test", "1")
    folder = file_of(root).parent.parent / kind
    (folder / f"{'0' * 32}.json").write_bytes(content)
    assert noting.pending(HERE) == (SIGNATURE,)
    assert set(noting.quarantined(HERE, SIGNATURE, refresh=True)) == {"math"}
    assert len(warnings_of(caplog)) == 1
    (good,) = (path for path in folder.iterdir() if not path.name.startswith("0000"))
    (folder / f"{'0' * 32}.json").write_bytes(good.read_bytes())
    assert len(Store(root).pending(HERE)) == 1
    assert len(list(Store(root).quarantine_entries())) == 1


def test_unwritable_notes_stay_in_memory(root: Path):
    """Where nothing can be written, notes and quarantine hold for this process and can be forgotten."""
    root.write_text("a file in the way")
    blocked = Store(root)
    blocked.note_pending(HERE, SIGNATURE, "test")
    blocked.put_in_quarantine(HERE, SIGNATURE, "math", "RuntimeError: no", "1")
    assert blocked.pending(HERE) == (SIGNATURE,)
    assert blocked.pending(ELSEWHERE) == ()
    assert blocked.quarantined(HERE, SIGNATURE)["math"].origin == "memory"
    assert blocked.quarantined(HERE, signature_of(400)) == {}
    assert len(list(blocked.quarantine_entries())) == 1
    blocked.forget(signature_of(400))
    assert blocked.pending(HERE) == (SIGNATURE,)
    blocked.forget(SIGNATURE)
    assert blocked.pending(HERE) == ()
    assert blocked.quarantined(HERE, SIGNATURE) == {}


def test_quarantine_outlives_a_new_tuning(kept: Store, root: Path):
    """Entries are kept per signature and route; publishing a record erases none, forgetting the signature does."""
    kept.put_in_quarantine(HERE, SIGNATURE, "math", "RuntimeError: no", "7")
    kept.put_in_quarantine(HERE, SIGNATURE, "eager", "RuntimeError: neither", "8")
    kept.publish(HERE, RECORD)
    found = Store(root).quarantined(HERE, SIGNATURE)
    assert {name: (entry.reason, entry.version, entry.origin) for name, entry in found.items()} == {
        "math": ("RuntimeError: no", "7", "disk"),
        "eager": ("RuntimeError: neither", "8", "disk"),
    }
    assert found["math"].date.startswith("20")
    assert kept.quarantined(ELSEWHERE, SIGNATURE) == kept.quarantined(HERE, signature_of(400)) == {}
    assert kept.forget(SIGNATURE) == 3
    assert kept.quarantined(HERE, SIGNATURE) == {}


def test_quarantine_of_another_process_is_seen(kept: Store, root: Path):
    """A store that has listed the quarantine sees at once what another one adds, also within one clock tick."""
    assert kept.quarantined(HERE, SIGNATURE) == {}
    for name in ("math", "eager", "stock"):
        Store(root).put_in_quarantine(HERE, SIGNATURE, name, "test", "1")
        assert name in kept.quarantined(HERE, SIGNATURE)


def test_an_unchanged_quarantine_is_listed_once(kept: Store, root: Path, monkeypatch):
    """Once the folder is older than a coarse time stamp, asking again reads nothing; ``refresh`` does."""
    kept.put_in_quarantine(HERE, SIGNATURE, "math", "test", "1")
    folder = file_of(root).parent.parent / "quarantine"
    past_s = time.time() - 60
    os.utime(folder, (past_s, past_s))
    reads = []
    real = stored.read_notes
    monkeypatch.setattr(stored, "read_notes", lambda *arguments: reads.append(1) or real(*arguments))
    for L in (300, 400, 500):
        kept.quarantined(HERE, signature_of(L))
    assert len(reads) == 1
    assert "math" in kept.quarantined(HERE, SIGNATURE, refresh=True)
    assert len(reads) == 2


def test_layers_add_to_the_quarantine(root: Path, tmp_path: Path):
    """A layer's entries count as well; the writable layer's entry of the same route stands before them."""
    layer = tmp_path / "layer"
    for name, reason in (("math", "from the layer"), ("eager", "from the layer")):
        Store(layer).put_in_quarantine(HERE, SIGNATURE, name, reason, "1")
    stack = Store(root, (layer,))
    stack.put_in_quarantine(HERE, SIGNATURE, "math", "own", "2")
    found = stack.quarantined(HERE, SIGNATURE)
    assert {name: entry.reason for name, entry in found.items()} == {"math": "own", "eager": "from the layer"}


def test_clear_removes_records_and_nothing_else(kept: Store, root: Path):
    """Clearing removes what the store wrote, of one environment or of all, and leaves other files and folders."""
    kept.publish(ELSEWHERE, RECORD)
    (root / "mine.json").write_text("keep")
    (file_of(root).parent / "mine.json").write_text("keep")
    assert kept.clear(ELSEWHERE) == 1
    assert kept.find(HERE, RECORD.digest) is not None
    kept.note_pending(HERE, SIGNATURE, "test")
    assert kept.clear() == 2
    assert kept.find(HERE, RECORD.digest) is None
    assert (root / "mine.json").exists()
    assert (file_of(root).parent / "mine.json").exists()


def test_forget_takes_signature_bucket_or_digest(root: Path):
    """A signature takes its bucket's record along; a bucket or a digest takes what goes by it; others stay."""
    bucket = bucket_of(SIGNATURE)

    def fill() -> Store:
        full = Store(root)
        full.clear()
        for record in (RECORD, record_of(301), record_of(bucket=bucket), record_of(9000)):
            full.publish(HERE, record)
        full.publish(ELSEWHERE, RECORD)
        full.put_in_quarantine(HERE, signature_of(301), "math", "test", "1")
        return full

    assert fill().forget(SIGNATURE) == 3
    assert fill().forget(SIGNATURE, HERE) == 2
    assert fill().forget(bucket) == fill().forget(bucket.digest) == 2
    assert fill().forget(SIGNATURE.digest) == 2
    assert fill().forget(signature_of(301)) == 3
    assert Store(root).find(HERE, record_of(9000).digest) is not None


def test_the_number_of_records_is_bounded(root: Path, monkeypatch):
    """Beyond the bound the oldest records go and the new one stays."""
    monkeypatch.setattr(store, "MAX_RECORDS", 20)
    monkeypatch.setattr(store, "TIDY_EVERY", 1)
    bounded = Store(root)
    for L in range(200, 230):
        record = record_of(L)
        assert bounded.publish(HERE, record)
        os.utime(file_of(root, record), (L, L))
        assert bounded.find(HERE, record.digest) is not None
    left = sorted(entry.record.signature.L for entry in bounded.entries())
    assert 15 <= len(left) <= 20
    assert left == list(range(230 - len(left), 230))


def test_leftovers_of_killed_writers_go_after_an_hour(root: Path, kept: Store):
    """An old temporary file is removed by the next process that writes there; a young one may be in use."""
    folder = file_of(root).parent
    for name, age_s in ((".old.json.1.aa.tmp", 7200), (".young.json.2.bb.tmp", 60)):
        (folder / name).write_text("half")
        os.utime(folder / name, (time.time() - age_s, time.time() - age_s))
    assert len(list(kept.entries())) == 1
    Store(root).publish(HERE, record_of(400))
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".tmp") == [".young.json.2.bb.tmp"]


@pytest.fixture
def homeless(monkeypatch, tmp_path: Path) -> Path:
    """Leave this process without a home, a user name and a cache variable; return the folder for temporary files."""
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    pwd = pytest.importorskip("pwd", reason="this system has no password database")

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_without_a_home_a_private_folder_serves(homeless: Path):
    """A user without home and password entry gets a folder of their own, closed to others, and it works."""
    lost = Store(None)
    assert lost.publish(HERE, RECORD)
    assert lost.path() == homeless / f"smartattn-cache-{os.getuid()}"
    assert lost.path().stat().st_mode & 0o777 == 0o700
    assert Store(None).find(HERE, RECORD.digest) == (RECORD, "disk")


def test_a_home_that_does_not_exist_is_not_made(homeless: Path, monkeypatch):
    """HOME set to a folder that is not there is no home."""
    monkeypatch.setenv("HOME", str(homeless / "nonexistent"))
    assert Store(None).path() == homeless / f"smartattn-cache-{os.getuid()}"
    assert not (homeless / "nonexistent").exists()


@pytest.mark.parametrize("plant", ["open to others", "link", "file"])
def test_a_planted_private_folder_is_refused(homeless: Path, caplog, plant: str):
    """A folder in the private one's place that others could have made is not used: memory only, told once."""
    place = homeless / f"smartattn-cache-{os.getuid()}"
    if plant == "open to others":
        place.mkdir()
        place.chmod(0o777)
    elif plant == "link":
        (homeless / "real").mkdir(mode=0o700)
        place.symlink_to(homeless / "real")
    else:
        place.write_text("planted")
    refused = Store(None)
    assert refused.path() is None
    assert not refused.publish(HERE, RECORD)
    assert refused.find(HERE, RECORD.digest) is None
    refused.put_in_quarantine(HERE, SIGNATURE, "math", "test", "1")
    assert set(refused.quarantined(HERE, SIGNATURE)) == {"math"}
    assert len(warnings_of(caplog)) == 1


def test_the_users_cache_folder_is_the_default(monkeypatch, tmp_path: Path):
    """With a home the platform's cache folder is used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = Store(None).path()
    assert path is not None
    assert path.is_absolute()
    assert path.name.lower() == "smartattn" or os.name == "nt"


def test_a_store_can_be_copied_to_another_process(kept: Store):
    """A store holds no lock and no open file, so it survives pickling and forking."""
    assert pickle.loads(pickle.dumps(kept)).find(HERE, RECORD.digest) == (RECORD, "disk")
