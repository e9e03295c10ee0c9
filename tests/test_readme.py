"""README: its examples run, its tables are complete, and its commands are those that continuous integration runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from smartattn.settings import MODES, Settings, variable_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
MAIN_JOB = 'pip install -e ".[cli]" && smartattn demo'
TESTS = 'pip install -e ".[dev]" && pytest'


def title_of(code: str) -> str:
    return next(line for line in code.splitlines() if line.strip()).strip("# ")[:40]


@pytest.mark.parametrize("code", PYTHON, ids=title_of)
def test_example_runs(code: str, tmp_path: Path):
    """Each Python example runs as a program of its own, and prints no warning of ours."""
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], env=environ, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "smartattn" not in done.stderr, done.stderr


def test_there_are_examples():
    """Every fenced block says its language, and there are Python ones."""
    assert all(language for language, _ in BLOCKS)
    assert len(PYTHON) >= 4


@pytest.mark.parametrize("command", [MAIN_JOB, TESTS])
def test_commands_stand_in_readme(command: str):
    """README gives both commands, each on a line of its own."""
    assert command in README.splitlines()


def test_ci_runs_readmes_test_command():
    """Continuous integration runs the test command of README, to the letter."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert TESTS in script.splitlines()


def test_every_setting_and_mode_is_documented():
    """The settings table names each setting with its environment variable, the modes table each mode."""
    for name in vars(Settings()):
        assert re.search(rf"^\| `{name}` \| `{variable_of(name)}` \|", README, re.MULTILINE), name
    for mode in MODES:
        assert re.search(rf"^\| `{mode}`", README, re.MULTILINE), mode


def test_links_inside_the_repository_lead_somewhere():
    """Every relative link names a file that exists."""
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
