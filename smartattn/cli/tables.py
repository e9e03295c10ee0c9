"""Tables of the command line: aligned text, cut to a terminal's width, whole when piped."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from smartattn.formatting import shorten

MAX_PIPED_CHARACTERS = 2000


def print_table(console: Console, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header; only the last column is cut, and only on a terminal.

    Lines are laid out here: a library's table would take seconds for thousands of rows.
    """
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)][:-1]
    left = console.width - sum(widths) - 2 * len(widths) if console.is_terminal else MAX_PIPED_CHARACTERS
    lines = []
    for cells in (header, *rows):
        fixed = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
        lines.append(f"{fixed}  {shorten(cells[-1], max(12, left))}".strip("\n").rstrip())
    console.print(f"[dim]{escape(lines[0])}[/dim]", soft_wrap=True)
    console.out("\n".join(lines[1:]), highlight=False)
