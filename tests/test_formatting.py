"""Numbers and tables as people read them."""

from __future__ import annotations

import pytest

from smartattn.formatting import format_bytes, format_ratio, format_table, format_us, shorten


@pytest.mark.parametrize(
    ("value_us", "text"),
    [
        (None, "-"),
        (0.0, "0 us"),
        (0.1234, "0.123 us"),
        (999.4, "999 us"),
        (1e3, "1 ms"),
        (52_000, "52 ms"),
        (2.5e6, "2.5 s"),
    ],
)
def test_times_take_the_unit_that_reads_best(value_us: float | None, text: str):
    """Microseconds turn into us, ms or s with three digits."""
    assert format_us(value_us) == text


def test_negative_times_keep_their_sign_and_unit():
    """A difference of times may be negative."""
    assert format_us(-1500) == "-1.5 ms"


@pytest.mark.parametrize(
    ("value_bytes", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_bytes_take_binary_units(value_bytes: int | None, text: str):
    """Bytes turn into B, KiB, MiB, GiB or TiB."""
    assert format_bytes(value_bytes) == text


def test_ratio_shows_two_digits():
    """A ratio of 1 reads 1.00x and a missing one a dash."""
    assert (format_ratio(1), format_ratio(None)) == ("1.00x", "-")


@pytest.mark.parametrize("width", range(12))
def test_shorten_never_exceeds_its_width_beyond_the_mark(width: int):
    """A cut text ends in three dots and fits, save where the dots alone are wider."""
    found = shorten("abcdefghijk", width)
    assert len(found) <= max(width, 3)
    assert found == "abcdefghijk" or found.endswith("...")


def test_table_aligns_columns_and_cuts_the_last_one():
    """Columns line up, only the last one is cut, and no line is wider than asked."""
    table = format_table(("route", "reason"), [("stock", "short"), ("fold_gqa+flash", "x" * 200)], width=60)
    header, rule, *rows = table.splitlines()
    assert {line.index("  ") for line in (rule,)} == {len("fold_gqa+flash")}
    assert header.index("reason") == rows[0].index("short") == rows[1].index("xxx")
    assert max(map(len, table.splitlines())) <= 60
    assert rows[1].endswith("...")


def test_table_without_rows_is_its_header():
    """No rows give the header and its rule."""
    assert format_table(("a", "b"), []).splitlines()[0].split() == ["a", "b"]
