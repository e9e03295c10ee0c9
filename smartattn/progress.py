"""How far a long work is: told to a function, or drawn on a terminal's error stream."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from smartattn import events
from smartattn.formatting import shorten


@dataclass(frozen=True, slots=True)
class Progress:
    """One step done.

    Attributes:
        num_done: steps done so far.
        num_steps: all of them.
        what: the step just done.
    """

    num_done: int
    num_steps: int
    what: str


Report = Callable[[Progress], None]
"""Told of each step when it is done."""
WIDTH = 100


@contextlib.contextmanager
def report_on(wanted: bool | Report, num_steps: int) -> Iterator[Report]:
    """Yield what to tell of each step: the caller's own function, a line on the terminal, or the log."""
    if callable(wanted):
        yield wanted
        return
    is_drawn = wanted and sys.stderr.isatty()
    start_s = time.monotonic()

    def report(step: Progress) -> None:
        left_s = seconds_left(step, time.monotonic() - start_s)
        if is_drawn:
            line = shorten(f"[{step.num_done}/{num_steps}] {left_s:.0f} s left  {step.what}", WIDTH - 1)
            sys.stderr.write(f"\r{line:{WIDTH - 1}}")
            sys.stderr.flush()
        else:
            events.logger.info("tuned %d of %d: %s", step.num_done, num_steps, step.what)

    try:
        yield report
    finally:
        if is_drawn:
            sys.stderr.write(f"\r{'':{WIDTH - 1}}\r")
            sys.stderr.flush()


def seconds_left(step: Progress, taken_s: float) -> float:
    """Return the time left if the rest takes as long per step as what is done."""
    return taken_s / max(1, step.num_done) * (step.num_steps - step.num_done)
