"""Rows of a list: choice, gain, noise and age of any machine's record."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch

from smartattn.environment import environment_of
from smartattn.listing import age_days, format_age, row_of
from smartattn.store import Store
from tests.test_exchange import HERE, THERE, problem, record


@pytest.mark.parametrize("environment", [HERE, THERE], ids=["here", "elsewhere"])
def test_a_row_says_what_a_record_chooses(tmp_path: Path, environment):
    """Choice, gain over stock and noise come from the outcomes, environment and name from the path."""
    store = Store(tmp_path)
    store.publish(environment, record(us=20.0))
    (entry,) = store.entries()
    row = row_of(entry)
    assert (row.route, row.cost_us, row.gain) == ("stock", 20.0, 1.0)
    assert row.noise == pytest.approx(0.1 / 20)
    assert (row.environment, row.digest, row.origin) == (environment.folder, problem().digest, "disk")
    assert Path(row.path) == entry.path
    assert row.to_dict()["signature"] == str(problem())
    assert environment_of(torch.device("cpu")) == HERE


def test_age_has_one_unit():
    """Ages are told in minutes, hours or days; a date that is none has none."""
    now = datetime.datetime.now(datetime.timezone.utc)

    def ago(**since: float) -> str:
        return (now - datetime.timedelta(**since)).isoformat(timespec="seconds")

    assert format_age(ago(minutes=5)) == "5 min"
    assert format_age(ago(hours=30)) == "30 h"
    assert format_age(ago(days=9)) == "9 d"
    assert format_age("yesterday") == "-"
    assert age_days(ago(days=9)[:19]) == pytest.approx(9, abs=0.1), "a date without a zone is taken for UTC"
