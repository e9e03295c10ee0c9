"""The cache as a module: rows, counts, pruning, export and merge on the process's own layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import smartattn
from smartattn import cache
from smartattn.errors import SettingError
from smartattn.selector import selector
from tests.test_exchange import HERE, THERE, problem, record


@pytest.fixture
def filled(cache_dir: Path) -> None:
    """Put records of this machine and of another one into the cache."""
    store = selector.memory.store
    store.publish(HERE, record(8))
    store.publish(HERE, record(9))
    store.publish(THERE, record(8))
    store.note_pending(HERE, problem(20), "why")
    store.put_in_quarantine(HERE, problem(8), "math", "was wrong", "1")


def test_stats_count_what_is_there(filled: None, cache_dir: Path):
    """Records by environment, origin and route, notes, and bytes."""
    found = cache.stats()
    assert (found.num_records, found.num_pending, found.num_quarantined) == (3, 1, 1)
    assert found.environments == {HERE.folder: 2, THERE.folder: 1}
    assert HERE.folder in found.here
    assert THERE.folder not in found.here
    assert found.routes == {"stock": 3}
    assert found.origins == {"disk": 3}
    assert found.size_bytes == sum(p.stat().st_size for p in cache_dir.glob("v1/*/records/*.json"))
    assert found.to_dict()["path"] == str(cache_dir)


def test_rows_are_the_records(filled: None):
    """One row per record."""
    assert [row.signature for row in cache.rows()] == [str(e.record.signature) for e in cache.records()]


def test_prune_takes_what_other_versions_measured(filled: None):
    """Records of this machine whose versions are all gone are removed; other machines' stay."""
    assert {each.environment for each in cache.prune(dry_run=True)} == {HERE.folder}
    assert cache.stats().num_records == 3, "a dry run removes nothing"
    found = cache.prune()
    assert {each.reason for each in found} == {"all its routes belong to other versions of their backends"}
    assert cache.stats().environments == {THERE.folder: 1}


def test_prune_keeps_what_serves(quiet_machine: None):
    """A record of the present versions stays."""
    smartattn.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 16).unbind())
    assert cache.prune(others=True, days=1) == ()
    assert cache.stats().num_records == 1


def test_prune_by_age_and_by_environment(filled: None):
    """``days`` takes what is older, ``others`` what is not this machine's."""
    assert [each.environment for each in cache.prune(others=True, dry_run=True)].count(THERE.folder) == 1
    assert len(cache.prune(days=1)) == 3, "all of them are dated January"
    assert cache.records() == ()
    with pytest.raises(SettingError, match="days is -1"):
        cache.prune(days=-1)


def test_export_and_merge_between_caches(filled: None, tmp_path: Path):
    """What one cache exports another one has after a merge, and bound choices are looked up anew."""
    cache.export(tmp_path / "all.jsonl")
    smartattn.configure(cache_dir=tmp_path / "other")
    assert cache.records() == ()
    merged = cache.merge(tmp_path / "all.jsonl")
    assert merged.num_added == 3
    assert THERE.folder in merged.elsewhere
    assert len(cache.records()) == 3


def test_a_shipped_export_answers_without_tuning(tmp_path: Path, quiet_machine: None):
    """Tuned in one cache, merged into another, frozen there: the choice comes from disk."""
    inputs = torch.randn(3, 1, 2, 40, 16).unbind()
    smartattn.scaled_dot_product_attention(*inputs)
    cache.export(tmp_path / "all.jsonl")
    smartattn.configure(cache_dir=tmp_path / "other", mode="frozen")
    cache.merge(tmp_path / "all.jsonl")
    before = smartattn.stats().tunings
    found = smartattn.explain(*inputs)
    assert found.origin == "disk"
    assert smartattn.stats().tunings == before
