"""Progress: whom it is told to, and that nothing is written where nobody looks."""

from __future__ import annotations

import io
import sys

import pytest

from smartattn.progress import Progress, report_on, seconds_left


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_function_is_told_of_each_step():
    """The caller's own function gets the steps and nothing is drawn."""
    told: list[Progress] = []
    with report_on(told.append, 2) as report:
        report(Progress(1, 2, "a"))
    assert told == [Progress(1, 2, "a")]


def test_a_terminal_gets_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch):
    """On a terminal the step is drawn over the one before, and wiped at the end."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with report_on(wanted=True, num_steps=2) as report:
        report(Progress(1, 2, "sdpa " + "x" * 300))
    text = sys.stderr.getvalue()
    assert "[1/2]" in text
    assert "\n" not in text
    assert max(map(len, text.split("\r"))) < 100
    assert text.endswith("\r")


def test_no_terminal_gets_nothing(capsys: pytest.CaptureFixture[str]):
    """Piped or unwanted, nothing is written."""
    for wanted in (True, False):
        with report_on(wanted=wanted, num_steps=1) as report:
            report(Progress(1, 1, "a"))
    assert capsys.readouterr() == ("", "")


def test_time_left_follows_what_is_done():
    """Two of six steps in 10 s leave 20 s."""
    assert seconds_left(Progress(2, 6, ""), 10.0) == 20.0
