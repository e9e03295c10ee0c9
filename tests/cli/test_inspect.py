"""``doctor``, ``explain`` and ``profile``: plain data, text without control characters, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import smartattn
from smartattn import cache, cli
from smartattn.cli.command import PLAIN_WIDTH
from smartattn.selector import selector
from tests.fakes import FakeClock

SHAPES = ["--query", "1x2x16x8", "--mask", "causal", "--device", "cpu"]
TEXT = "sdpa infer cpu float32 N1 Hq2 H2 L16 S16 E8 Ev8 layout=bhsd mask=causal scale=positive"


@pytest.fixture(autouse=True)
def fake_time(monkeypatch: pytest.MonkeyPatch, quiet_machine: None) -> None:
    """Measure with a fake clock, and small ceilings."""
    clock = FakeClock()
    monkeypatch.setattr(selector, "clock", lambda device: clock)
    monkeypatch.setattr("smartattn.profiling.COPY_BYTES", {"cpu": 4096})
    monkeypatch.setattr("smartattn.profiling.MATRIX_SIZE", {"cpu": 16})


@pytest.mark.parametrize(
    "words", [["doctor"], ["explain", *SHAPES], ["profile", "--samples", "2", *SHAPES]], ids=" ".join
)
def test_text_and_data(words: list[str], capsys: pytest.CaptureFixture[str]):
    """Each command prints plain text when piped, and the same as JSON."""
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert len(text.splitlines()) > 5
    assert cli.main([*words, "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_explain_tunes_when_asked(capsys: pytest.CaptureFixture[str]):
    """Nothing is measured unless ``--tune`` says so; then the record answers."""
    cli.main(["explain", *SHAPES])
    assert "nothing was measured; --tune does it now" in capsys.readouterr().out
    assert cache.records() == ()
    cli.main(["explain", *SHAPES, "--tune", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["signature"] == TEXT
    assert data["origin"] in ("memory", "tuned", "disk")
    assert len(cache.records()) == 1
    assert smartattn.stats().tunings == 1


def test_explain_of_another_device_is_told(capsys: pytest.CaptureFixture[str]):
    """A signature of a device that is not here cannot be explained, and doctor is named."""
    assert cli.main(["explain", TEXT.replace("cpu", "xpu")]) == cli.COULD_NOT_RUN
    assert "smartattn doctor" in capsys.readouterr().err


def test_profile_shows_kernels_reading_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Times, operators by name, skipped routes with reasons, and sentences; the trace is where it says."""
    trace = tmp_path / "trace.json"
    assert cli.main(["profile", TEXT, "--samples", "2", "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    for words in (
        "masked_fill_",
        "efficient: skipped, does not exist on cpu",
        "- Writing the mask in place saves",
        "ui.perfetto",
    ):
        assert words in text
    assert json.loads(trace.read_text())["traceEvents"]


def test_profile_of_unknown_routes(capsys: pytest.CaptureFixture[str]):
    """A route that does not exist is told with the nearest."""
    assert cli.main(["profile", TEXT, "--routes", "math,egaer"]) == cli.COULD_NOT_RUN
    assert "Did you mean 'eager'" in capsys.readouterr().err


def test_doctor_exits_with_1_on_serious_problems(capsys: pytest.CaptureFixture[str]):
    """A process that cannot do its work is not good."""
    smartattn.configure(mode="off")
    assert cli.main(["doctor"]) == 1
    assert "PROBLEM  mode is 'off'" in capsys.readouterr().out


def test_tables_keep_to_the_width_of_a_log(capsys: pytest.CaptureFixture[str]):
    """Columns before the last fit into a log's line, so that the reason follows on it."""
    cli.main(["profile", TEXT, "--samples", "2"])
    head = next(line for line in capsys.readouterr().out.splitlines() if "p99" in line)
    assert len(head) <= PLAIN_WIDTH
