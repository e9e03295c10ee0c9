"""``smartattn warm``: what can be named, what a factory may return or raise, exit codes and what stays when interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import smartattn
from smartattn import cache, cli
from smartattn.cli.warm import load_model, read_ranges, warm
from smartattn.errors import SettingError, UnknownNameError
from smartattn.selector import selector
from tests.fakes import FakeClock

TEXT = "sdpa infer cpu float32 N1 Hq2 H2 L16 S16 E8 Ev8 layout=bhsd mask=none scale=positive"


@pytest.fixture(autouse=True)
def fake_time(monkeypatch: pytest.MonkeyPatch, quiet_machine: None) -> None:
    """Measure with a fake clock."""
    clock = FakeClock()
    monkeypatch.setattr(selector, "clock", lambda device: clock)


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module with factories into the current folder."""
    (tmp_path / "shapes_of_ours.py").write_text(
        "import torch\n"
        "from torch.nn import functional as F\n"
        "def attend(query):\n    return F.scaled_dot_product_attention(query, query, query)\n"
        "def model():\n    return attend, (torch.zeros(1, 2, 30, 8),)\n"
        "def whole():\n    return attend, (), {'query': torch.zeros(1, 2, 200, 8)}\n"
        "def broken():\n    raise FileNotFoundError('weights.bin')\n"
        "def number():\n    return 5\n"
    )
    (tmp_path / "syntax_of_ours.py").write_text("def model(:\n")
    monkeypatch.chdir(tmp_path)


def test_signatures_and_json(capsys: pytest.CaptureFixture[str]):
    """A signature is tuned and stored, and the data is JSON on standard output alone."""
    assert cli.main(["warm", "--signature", TEXT, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(entry["signature"], entry["status"]) for entry in data["entries"]] == [(TEXT, "tuned")]
    assert len(cache.records()) == 1


def test_text_is_plain_and_names_what_was_saved(capsys: pytest.CaptureFixture[str]):
    """Piped output has no control characters; each line has route, gain and signature."""
    assert cli.main(["warm", "--signature", TEXT]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "vs stock" in text
    assert "1 signatures in" in text


def test_workloads_by_name_and_model(monkeypatch: pytest.MonkeyPatch):
    """A name is one case, the part before the slash all of a model's; passes leave out what never trains."""
    asked = []
    monkeypatch.setattr("smartattn.cli.warm.prewarm_signatures", lambda found, **rest: asked.extend(found) or _empty())
    warm(workload=["whisper", "vit-b16/encoder"], passes="infer,train", device="cpu")
    assert [(s.pass_name, s.L, s.S) for s in asked] == [
        ("infer", 1500, 1500), ("train", 1500, 1500), ("infer", 1, 1500), ("infer", 197, 197), ("train", 197, 197),
    ]  # fmt: skip


def _empty() -> object:
    return smartattn.Summary((), 0.0)


def test_pending(capsys: pytest.CaptureFixture[str]):
    """What waits is tuned."""
    smartattn.configure(mode="record")
    smartattn.scaled_dot_product_attention(*torch.zeros(3, 1, 2, 16, 8).unbind())
    smartattn.configure(mode="tune")
    assert cli.main(["warm", "--pending", "--json"]) == 0
    assert [e["signature"] for e in json.loads(capsys.readouterr().out)["entries"]] == [TEXT]


def test_models_with_lengths(factories: None):
    """A factory's model is run with its arguments, and lengths spread what it asks."""
    data = warm(model="shapes_of_ours:model", lengths=["key=1:181"])
    assert [entry["signature"].split()[7] for entry in data["entries"]] == ["L128", "L181"]
    assert [e["signature"].split()[7] for e in warm(model="shapes_of_ours:whole")["entries"]] == ["L200"]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (
            "shapes_of_ours:broken",
            SettingError,
            ["FileNotFoundError: weights.bin", "shapes_of_ours.py:10", "Check that"],
        ),
        ("shapes_of_ours:number", SettingError, ["returned int", "(model, args, kwargs)"]),
        ("shapes_of_ours:modell", UnknownNameError, ["Did you mean 'model'"]),
        ("syntax_of_ours:model", SettingError, ["importing its module: SyntaxError"]),
        ("no_such_module_here:model", UnknownNameError, ["there is no 'no_such_module_here'"]),
        ("shapes_of_ours", SettingError, ["pkg.module:factory"]),
    ],
)
def test_what_is_wrong_with_a_factory_is_told(factories: None, text: str, error, words: list[str]):
    """The factory's own error, its place and what to check; or the names that exist."""
    with pytest.raises(error) as caught:
        load_model(text)
    assert all(word in str(caught.value) for word in words)


def test_a_broken_factory_exits_with_2(factories: None, capsys: pytest.CaptureFixture[str]):
    """The command says it without a traceback."""
    assert cli.main(["warm", "--model", "shapes_of_ours:broken"]) == cli.COULD_NOT_RUN
    text = capsys.readouterr().err
    assert "FileNotFoundError: weights.bin" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "give --workload, --signature, --pending or --model"),
        (["--workload", "bret"], "Did you mean 'bert'"),
        (["--signature", "sdpa infr"], "Did you mean infer?"),
        (["--signature", TEXT, "--lengths", "key=5"], "it must be like key=1:4096"),
        (["--signature", TEXT, "--lengths", "keys=1:5"], "Did you mean 'key'?"),
        (["--workload", "bert", "--dtype", "bfloat"], "Did you mean 'bfloat16'"),
    ],
)
def test_wrong_words_are_told(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]):
    """Each wrong word comes back with what is valid and near, and exit code 2."""
    assert cli.main(["warm", "--device", "cpu", *words]) == cli.COULD_NOT_RUN
    assert hint in capsys.readouterr().err


def test_ranges():
    """Ranges are read by axis."""
    assert read_ranges(["key=1:4096", "batch=1:8"]) == {"key": (1, 4096), "batch": (1, 8)}
    assert read_ranges([]) is None


def test_what_is_not_complete_exits_with_1(capsys: pytest.CaptureFixture[str]):
    """A signature that this machine cannot tune makes the exit code 1, with the reason."""
    assert cli.main(["warm", "--signature", TEXT.replace("cpu", "xpu")]) == 1
    assert "no xpu device" in capsys.readouterr().out


def test_interrupting_says_what_stays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Ctrl-C ends with a line on what is stored, and exit code 1."""

    def interrupted(*args: object, **rest: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("smartattn.cli.warm.prewarm_signatures", interrupted)
    assert cli.main(["warm", "--signature", TEXT]) == 1
    assert "Interrupted after 0 of 0: what was tuned is stored." in capsys.readouterr().out
