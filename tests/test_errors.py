"""Errors: their kinds, their texts, and that they survive a process boundary."""

from __future__ import annotations

import copy
import pickle

import pytest

from smartattn import errors


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (errors.SettingError, ValueError),
        (errors.UnknownNameError, ValueError),
        (errors.MissingRecordError, LookupError),
        (errors.RouteUnavailableError, RuntimeError),
    ],
)
def test_each_error_is_also_pythons_own_kind(kind: type[Exception], base: type[Exception]):
    """Every error can be caught as smartattn's and as the built-in kind it is."""
    assert issubclass(kind, errors.SmartAttnError)
    assert issubclass(kind, base)


def test_unknown_name_lists_all_and_nearest():
    """The text names argument, value and every valid name, and suggests the near ones."""
    error = errors.UnknownNameError.of("mode", "frozn", ("tune", "frozen", "error"))
    assert str(error) == "mode is 'frozn'; it must be one of 'error', 'frozen', 'tune'. Did you mean 'frozen'?"


def test_unknown_name_without_a_near_one_suggests_nothing():
    """A name far from all others gets no made-up suggestion."""
    assert "Did you mean" not in str(errors.UnknownNameError.of("mode", "zzz", ("tune", "frozen")))


@pytest.mark.parametrize("given", [None, 3, ("tune",), b"tune"])
def test_unknown_name_of_another_type_is_shown(given: object):
    """A value that is no string at all is reported as it is."""
    assert repr(given) in str(errors.UnknownNameError.of("mode", given, ("tune",)))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_route_unavailable_keeps_its_reasons(again):
    """Copying or pickling the error, as process pools do, keeps text and reasons."""
    error = errors.RouteUnavailableError("flash cannot serve this call", {"flash": ("has no dropout", "is off")})
    found = again(error)
    assert (str(found), found.reasons) == (str(error), error.reasons)
