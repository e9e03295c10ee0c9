"""Settings: every variable and argument, what they refuse and how they say so."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from pathlib import Path

import pytest

from smartattn import settings as settings_function
from smartattn.errors import SettingError, SmartAttnError, UnknownNameError
from smartattn.settings import (
    ACCURACIES,
    AGREEMENTS,
    EFFORTS,
    LOG_LEVELS,
    MODES,
    Settings,
    configure,
    on_change,
    read_environment,
    settings,
    variable_of,
)

NAMES = [field.name for field in dataclasses.fields(Settings)]

READABLE = {
    "mode": ("frozen", "frozen"),
    "cache_dir": ("/some/where", Path("/some/where")),
    "layers": (os.pathsep.join(["/a", "/b"]), (Path("/a"), Path("/b"))),
    "accuracy": ("strict", "strict"),
    "dynamic": ("true", True),
    "effort": ("max", "max"),
    "signature_budget_ms": ("12.5", 12.5),
    "process_budget_s": ("0", 0.0),
    "tune_after": ("3", 3),
    "memory_share": ("0.5", 0.5),
    "recognize_masks": ("off", False),
    "log": ("debug", "debug"),
    "agreement": ("group", "group"),
}
"""Setting to the text of its environment variable and what it means; none is the default."""

WRONG = [
    ("mode", "tuen", "'error', 'frozen', 'off', 'record', 'tune'. Did you mean 'tune'?"),
    ("accuracy", "exact", "'approximate', 'standard', 'strict'"),
    ("effort", "much", "'max', 'quick', 'standard'"),
    ("log", "loud", "'debug', 'error', 'info', 'warning'"),
    ("agreement", "all", "'group', 'process'"),
    ("dynamic", "perhaps", "true, false or none"),
    ("recognize_masks", "2", "true or false"),
    ("signature_budget_ms", "soon", "a number from 0 to 1e+09"),
    ("signature_budget_ms", "nan", "a number from 0 to 1e+09"),
    ("process_budget_s", "-1", "a number from 0 to 1e+09"),
    ("tune_after", "0", "a number from 1 to 1e+09"),
    ("memory_share", "1.5", "a number from 0 to 1"),
]


def test_every_setting_is_tested_here():
    """A new setting cannot be forgotten."""
    assert set(READABLE) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_environment_variable_sets_its_setting_alone(name: str):
    """Each variable changes its own setting and no other."""
    text, value = READABLE[name]
    found = read_environment({variable_of(name): text})
    assert found == dataclasses.replace(Settings(), **{name: value})
    assert found != Settings()


def test_variables_are_named_after_their_settings():
    """All variables carry the prefix and the setting's name; the layers' documented one is CACHE_LAYERS."""
    assert variable_of("cache_dir") == "SMARTATTN_CACHE_DIR"
    assert variable_of("layers") == "SMARTATTN_CACHE_LAYERS"
    assert read_environment({"SMARTATTN_LAYERS": "/a"}).layers == (Path("/a"),)


def test_no_variable_means_the_defaults():
    """An empty environment, or one with other programs' variables, gives the defaults."""
    assert read_environment({}) == read_environment({"SMARTATTENTION_MODE": "off", "MODE": "off"}) == Settings()


@pytest.mark.parametrize(("name", "text", "allowed"), WRONG)
def test_wrong_variable_is_named_with_what_it_may_be(name: str, text: str, allowed: str):
    """A wrong value raises, naming the variable, the value and all that is allowed."""
    with pytest.raises(SmartAttnError) as caught:
        read_environment({variable_of(name): text})
    message = str(caught.value)
    assert f"environment variable {variable_of(name)} is {text!r}" in message
    assert allowed in message


@pytest.mark.parametrize(("name", "text", "allowed"), WRONG)
def test_wrong_argument_is_named_and_changes_nothing(name: str, text: str, allowed: str):
    """A wrong argument of ``configure`` raises the same way, and no setting of that call is taken over."""
    before = settings()
    with pytest.raises(SmartAttnError) as caught:
        configure(**{"process_budget_s": 7, name: text})
    assert f"{name} is {text!r}" in str(caught.value)
    assert allowed in str(caught.value)
    assert settings() == before


@pytest.mark.parametrize("given", [3, object(), 2.5])
def test_paths_of_another_type_are_refused(given: object):
    """What is neither text nor a path is no folder."""
    with pytest.raises(SettingError, match="cache_dir is"):
        configure(cache_dir=given)
    with pytest.raises(SettingError, match="layers is"):
        configure(layers=given)


def test_unknown_setting_is_an_unknown_name():
    """A misspelt setting lists all of them and the nearest."""
    with pytest.raises(UnknownNameError, match="Did you mean 'cache_dir'"):
        configure(cachedir="/a")


def test_configure_returns_the_old_settings():
    """What ``configure`` returns restores the settings before it."""
    before = settings()
    old = configure(mode="frozen", layers=["/a", Path("/b")], memory_share=1)
    assert old == before
    assert (settings().mode, settings().layers) == ("frozen", (Path("/a"), Path("/b")))
    configure(**vars(old))
    assert settings() == before


def test_configure_keeps_what_it_was_not_told():
    """Settings that are not named stay as they are."""
    configure(mode="record")
    configure(effort="quick")
    assert (settings().mode, settings().effort) == ("record", "quick")


@pytest.mark.parametrize("given", [None, True, False])
def test_dynamic_takes_all_three(given: bool | None):
    """``dynamic`` is true, false, or left to be learnt."""
    configure(dynamic=given)
    assert settings().dynamic is given


def test_change_is_told(monkeypatch: pytest.MonkeyPatch):
    """Whoever asked is called with the new settings after each change."""
    seen: list[Settings] = []
    monkeypatch.setattr(sys.modules["smartattn.settings"], "_on_change", [])
    on_change(seen.append)
    configure(mode="off")
    assert seen == [settings()]


@pytest.mark.parametrize(
    ("values", "size"), [(MODES, 5), (ACCURACIES, 3), (EFFORTS, 3), (LOG_LEVELS, 4), (AGREEMENTS, 2)]
)
def test_choices_are_distinct(values: tuple[str, ...], size: int):
    """No choice is listed twice."""
    assert len(set(values)) == size


def test_settings_are_what_the_package_exports():
    """``smartattn.settings`` is the function, though a module has the same name."""
    assert settings_function is settings


def test_effort_scales_the_budget_of_a_tuning():
    """A quarter, all or four times ``signature_budget_ms``."""
    budgets = [Settings(effort=effort, signature_budget_ms=100.0).tuning_budget_ms for effort in EFFORTS]
    assert budgets == [25.0, 100.0, 400.0]


def test_log_is_the_level_of_the_logger():
    """The setting lets through what is at least as severe."""
    configure(log="error")
    assert logging.getLogger("smartattn").level == logging.ERROR
    configure(log="warning")
    assert logging.getLogger("smartattn").level == logging.WARNING
