"""Counters, listeners and one-time warnings."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from smartattn import events


def test_every_counter_counts_under_its_own_name():
    """Each field of ``Stats`` moves when it is counted, and no other does."""
    for field in dataclasses.fields(events.Stats):
        events.reset_stats()
        if field.name == "hits":
            events.hot_hits[0] += 2
        else:
            events.count(field.name, 2)
        expected = dataclasses.asdict(events.Stats()) | {field.name: 2}
        assert events.stats().to_dict() == expected


def test_stats_are_a_snapshot():
    """What was returned does not change when more is counted."""
    before = events.stats()
    events.count("misses")
    assert (before.misses, events.stats().misses) == (0, 1)


def test_seconds_stay_fractions():
    """Tuning seconds are not cut to whole ones."""
    events.count("tuning_s", 0.25)
    events.count("tuning_s", 0.5)
    assert events.stats().tuning_s == 0.75


def test_listener_gets_plain_data_until_it_is_removed():
    """A listener is told each event with its data, and nothing once it is removed; removing twice is harmless."""
    seen = []
    remove = events.add_listener(seen.append)
    events.announce("tuning", signature="sdpa ...", tuning_s=0.1)
    remove()
    remove()
    events.announce("fallback")
    assert seen == [{"event": "tuning", "signature": "sdpa ...", "tuning_s": 0.1}]


def test_a_listener_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture):
    """What a listener raises is logged; the caller and the other listeners go on."""
    seen = []
    events.add_listener(lambda data: 1 / 0)
    events.add_listener(seen.append)
    with caplog.at_level(logging.ERROR, logger="smartattn"):
        events.announce("quarantine")
    assert len(seen) == 1
    assert "ZeroDivisionError" in caplog.text


def test_listeners_each_get_their_own_data():
    """A listener that changes what it got does not change what the next one gets."""
    seen = []
    events.add_listener(lambda data: data.clear())
    events.add_listener(seen.append)
    events.announce("tuning")
    assert seen == [{"event": "tuning"}]


def test_a_listener_may_remove_itself_while_it_is_told():
    """Removing a listener from inside one skips nobody."""
    seen = []
    removers = []
    removers.append(events.add_listener(lambda data: removers[0]()))
    events.add_listener(seen.append)
    events.announce("tuning")
    assert len(seen) == 1


def test_warn_once_warns_once_per_topic(caplog: pytest.LogCaptureFixture):
    """A topic is logged at its first coming up only, and again after a reset."""
    with caplog.at_level(logging.WARNING, logger="smartattn"):
        events.warn_once("full", "disk %s is full", "/a")
        events.warn_once("full", "disk %s is full", "/a")
        events.warn_once("other", "another")
        events.reset_stats()
        events.warn_once("full", "disk %s is full", "/b")
    assert [record.getMessage() for record in caplog.records] == ["disk /a is full", "another", "disk /b is full"]
