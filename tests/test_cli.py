"""The command line: help with examples, data and text, exit codes, and what it says without rich."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import smartattn
from smartattn import cli
from smartattn.cli.commands import COMMANDS
from smartattn.cli.demo import digest_of

ROOT = Path(smartattn.__file__).parent.parent


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smartattn", *words]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, check=False, timeout=280
    )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_shows_an_example_of_the_command(command, capsys: pytest.CaptureFixture[str]):
    """Each command's help says what it does and gives a whole command line that names it."""
    with pytest.raises(SystemExit) as caught:
        cli.main([command.name, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert command.summary.split()[0] in text
    assert f"example:\n  smartattn {command.name}" in text
    assert "--json" in text


def test_commands_have_distinct_names():
    """No two commands share a word."""
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)


def test_version_is_told(capsys: pytest.CaptureFixture[str]):
    """``--version`` prints the package's version."""
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"smartattn {smartattn.__version__}\n"


@pytest.mark.parametrize("words", [[], ["dmo"], ["demo", "--nonsense"]])
def test_wrong_words_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]):
    """A missing or unknown command or option is told on standard error with the usage."""
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == cli.COULD_NOT_RUN
    assert "usage: smartattn" in capsys.readouterr().err


def test_without_rich_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Without rich the command line says which extra brings it, and imports nothing that needs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["demo"]) == cli.COULD_NOT_RUN
    assert "pip install 'smartattn[cli]'" in capsys.readouterr().err


def test_a_wrong_setting_is_told_without_a_traceback():
    """An error of smartattn's own is one line and exit code 2."""
    done = run("demo", SMARTATTN_MODE="tuen")
    assert done.returncode == cli.COULD_NOT_RUN
    assert done.stderr.splitlines()[-1].startswith("smartattn demo: environment variable SMARTATTN_MODE is 'tuen'")
    assert "Traceback" not in done.stderr


def test_demo(cache_dir: Path):
    """The demonstration's outputs agree, its records lie beside the user's own, and the second process reads them."""
    done = run("demo", "--json", "--device", "cpu", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr or done.stdout
    data = json.loads(done.stdout)
    assert data["max_difference"] <= data["tolerance"]
    assert len(data["signatures"]) == 3
    assert data["stats"]["tunings"] >= 3
    assert Path(data["cache_dir"]) == cache_dir / "demo"
    assert smartattn.cache.records() == (), "the user's own records are untouched"
    # On a busy machine some records are too noisy to be stored; those, and no others, are measured again.
    second = data["second"]["stats"]
    assert second["tunings"] <= data["stats"]["tunings"] - data["num_stored"]
    assert second["tunings"] + second["disk_hits"] >= 3


def test_demo_text_is_plain_when_piped():
    """Piped output has no control characters and no line wider than a log takes, but for signatures and paths."""
    done = run("demo", "--device", "cpu", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr or done.stdout
    assert "\x1b" not in done.stdout
    assert "equal to rounding" in done.stdout
    assert "Second process:" in done.stdout
    rows = [line for line in done.stdout.splitlines() if not line.startswith(("sdpa ", "Stored in "))]
    assert max(map(len, rows)) <= 120


def test_the_demo_needs_no_numpy(monkeypatch: pytest.MonkeyPatch):
    """PyTorch does not bring NumPy along, so nothing in the demo may ask a tensor for an array."""

    def absent(self, *rest, **options):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", absent)
    one = digest_of({"a": torch.arange(6.0).view(2, 3).T})
    assert one == digest_of({"a": torch.arange(6.0).view(2, 3).T.contiguous()})
    assert one != digest_of({"a": torch.zeros(3, 2)})
