"""The only place that turns numbers into text for people: times, bytes, ratios and plain tables."""

from __future__ import annotations

from collections.abc import Sequence


def format_us(value_us: float | None) -> str:
    """Format microseconds with the unit that keeps three digits readable."""
    if value_us is None:
        return "-"
    for limit, divisor, unit in ((1e3, 1.0, "us"), (1e6, 1e3, "ms")):
        if abs(value_us) < limit:
            return f"{value_us / divisor:.3g} {unit}"
    return f"{value_us / 1e6:.3g} s"


def format_bytes(value_bytes: int | None) -> str:
    """Format a count of bytes in binary units."""
    if value_bytes is None:
        return "-"
    size = float(value_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_ratio(value: float | None) -> str:
    """Format a speed-up, ``1.00x`` meaning equal."""
    return "-" if value is None else f"{value:.2f}x"


def shorten(text: str, width: int) -> str:
    """Cut ``text`` to ``width`` characters, marking the cut with three dots."""
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int = 100) -> str:
    """Lay out rows under a header in plain text; the last column takes what is left of ``width``."""
    columns = list(zip(header, *rows, strict=True)) if rows else [(name,) for name in header]
    widths = [max(len(cell) for cell in column) for column in columns]
    left = width - sum(widths[:-1]) - 2 * (len(widths) - 1)
    widths[-1] = max(len(header[-1]), min(widths[-1], left), 12)
    lines = ["  ".join(name.ljust(size) for name, size in zip(header, widths, strict=True)).rstrip()]
    lines.append("  ".join("-" * size for size in widths))
    for row in rows:
        cells = [shorten(cell, size).ljust(size) for cell, size in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
