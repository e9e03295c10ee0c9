"""What a command is, and the console that all of them print to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from rich.console import Console

Data: TypeAlias = dict[str, Any]
PLAIN_WIDTH = 120
"""Columns when the output is no terminal: wide enough for a table, the same in every log."""


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: word on the command line.
        summary: one line of help.
        example: a whole command line that works.
        add_arguments: declares the command's own arguments.
        run: keyword function of those arguments; returns plain data and prints nothing.
        show: prints that data.
        is_good: whether the data means exit code 0.
    """

    name: str
    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[..., Data]
    show: Callable[[Data, Console], None]
    is_good: Callable[[Data], bool] = lambda data: True  # noqa: ARG005 - most commands have nothing to judge

    def add_to(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add this command's parser, with ``--json`` as every command has it."""
        parser = subparsers.add_parser(
            self.name,
            help=self.summary,
            description=self.summary,
            epilog=f"example:\n  {self.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--json", action="store_true", help="print the data as JSON")
        self.add_arguments(parser)


def make_console() -> Console:
    """Return a console that is plain text of a fixed width when its output is piped."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(width=PLAIN_WIDTH, color_system=None, highlight=False)
