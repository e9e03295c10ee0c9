"""``smartattn cache``: lists with filters, full records, and removals that do nothing without ``--yes``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smartattn import cache, cli
from smartattn.cli.cache import ACTIONS
from smartattn.selector import selector
from tests.test_exchange import HERE, THERE, problem, record


@pytest.fixture
def filled(cache_dir: Path) -> None:
    """Put records of this machine and of another one into the cache."""
    store = selector.memory.store
    store.publish(HERE, record(8))
    store.publish(HERE, record(9))
    store.publish(THERE, record(8))
    store.put_in_quarantine(HERE, problem(8), "math", "was wrong", "1")


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert cli.main(["cache", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words", [["path"], ["list"], ["list", "--quarantine"], ["stats"], ["show", str(problem(8))]], ids=" ".join
)
def test_looking_prints_plain_text(filled: None, words: list[str], capsys: pytest.CaptureFixture[str]):
    """What only looks exits with 0 and prints text without control characters, and removes nothing."""
    assert cli.main(["cache", *words]) == 0
    text = capsys.readouterr().out
    assert text.strip()
    assert "\x1b" not in text
    assert len(cache.records()) == 3


def test_json_may_stand_before_the_action(filled: None, capsys: pytest.CaptureFixture[str]):
    """``--json`` works on either side of the action."""
    assert cli.main(["cache", "--json", "path"]) == 0
    assert json.loads(capsys.readouterr().out)["path"]


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ([], 3), (["--backend", "stock"], 3), (["--backend", "flash"], 0), (["--family", "L8 infer"], 2),
        (["--family", "train"], 0), (["--device", "imaginary"], 1),
    ],
)  # fmt: skip
def test_list_filters(filled: None, words: list[str], number: int, capsys: pytest.CaptureFixture[str]):
    """Filters by backend, words of the signature and device leave what fits."""
    assert len(run(capsys, "list", *words)["records"]) == number


def test_list_shows_choice_gain_noise_and_age(filled: None, capsys: pytest.CaptureFixture[str]):
    """A line has id, choice, cost, gain, noise, age and signature."""
    cli.main(["cache", "list"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(problem(8).digest[:8]))
    assert line.split()[1:6] == ["stock", "10", "us", "1.00x", "1%"]
    assert "infer cpu float32 N1 Hq2 H2 L8 S8" in line


def test_show_gives_every_outcome(filled: None, capsys: pytest.CaptureFixture[str]):
    """A record in full has each route's outcome, also by the first digits of its id."""
    data = run(capsys, "show", problem(8).digest[:8])
    assert len(data["records"]) == 2
    assert set(data["records"][0]["outcomes"]) == {"stock", "math"}
    assert data["records"][0]["provenance"]["host"]


@pytest.mark.parametrize("words", [["clear"], ["forget", str(problem(9))], ["prune"]], ids=" ".join)
def test_removals_need_yes(filled: None, words: list[str], capsys: pytest.CaptureFixture[str]):
    """Without ``--yes`` nothing goes and the exit code is 1; a dry run is 0; with it things go."""
    assert run(capsys, *words, code=1)["needs_yes"]
    assert run(capsys, *words, "--dry-run")["num_to_remove"] >= 1
    assert run(capsys, *words, "--dry-run", "--yes")["num_removed"] == 0
    assert len(cache.records()) == 3
    assert run(capsys, *words, "--yes")["num_removed"] >= 1
    assert len(cache.records()) < 3
    assert not run(capsys, *words)["needs_yes"], "nothing is left to remove"


def test_export_and_merge(filled: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """An export goes into another cache; records of other machines are said not to be used."""
    path = str(tmp_path / "all.jsonl")
    assert run(capsys, "export", path)["num_records"] == 3
    run(capsys, "clear", "--yes")
    assert cli.main(["cache", "merge", path]) == 0
    text = capsys.readouterr().out
    assert "3 added" in text
    assert "not used on this machine" in text
    assert len(cache.records()) == 3


def test_a_merge_with_bad_lines_exits_with_1(filled: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Lines that make no sense are counted, and the exit code says so."""
    path = tmp_path / "all.jsonl"
    run(capsys, "export", str(path))
    path.write_text(path.read_text() + "nonsense\n")
    assert run(capsys, "merge", str(path), code=1)["num_skipped"] == 1


def test_wrong_files_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A file that is no export exits with 2."""
    (tmp_path / "file").write_text("hello\n")
    assert cli.main(["cache", "merge", str(tmp_path / "file")]) == cli.COULD_NOT_RUN
    assert "is no export of smartattn" in capsys.readouterr().err


def test_verify_checks_what_is_stored(capsys: pytest.CaptureFixture[str], quiet_machine: None):
    """A stored choice is checked, and a good one exits with 0."""
    cli.main(["explain", str(problem(8)), "--tune"])
    capsys.readouterr()
    found = run(capsys, "verify")["verified"]
    assert [each["status"] for each in found] == ["valid"]


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_has_help(action: str, capsys: pytest.CaptureFixture[str]):
    """Each action says what it does."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["cache", action, "--help"])
    assert caught.value.code == 0
    assert ACTIONS[action].summary.split()[0] in capsys.readouterr().out
