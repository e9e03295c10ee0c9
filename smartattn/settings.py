"""Process-wide settings: one frozen value, read once from the environment, replaced by ``configure``.

The setter is process-wide on purpose: PyTorch runs backward passes on threads of its own, and those must see the same
settings as the forward pass did. Wishes for one place only are arguments of ``SmartAttention``.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smartattn.errors import SettingError, UnknownNameError

MODES = ("tune", "record", "frozen", "error", "off")
WRITING_MODES = ("tune", "record")
"""Modes that may write to the cache folder."""
ACCURACIES = ("standard", "strict", "approximate")
EFFORT_RATIOS = {"quick": 0.25, "standard": 1.0, "max": 4.0}
"""Time that a tuning may take, over ``signature_budget_ms``."""
EFFORTS = tuple(EFFORT_RATIOS)
LOG_LEVELS = ("debug", "info", "warning", "error")
AGREEMENTS = ("process", "group")
ENVIRONMENT_PREFIX = "SMARTATTN_"


@dataclass(frozen=True)
class Settings:
    """The settings in force.

    Attributes:
        mode: ``tune`` measures what it has not seen; ``record`` notes it as pending; ``frozen`` only reads;
            ``error`` raises on a miss; ``off`` is PyTorch's own attention, always.
        cache_dir: folder of the writable layer; ``None`` is the user's cache folder of this platform.
        layers: read-only folders that are asked after ``cache_dir``, in this order.
        accuracy: ``standard``, ``strict`` (1.5x Math's mean error, all probes) or ``approximate`` (admits
            approximate plug-ins).
        dynamic: ``True``: lengths keep changing, never pay a plan for one; ``False``: lengths repeat, take the
            fastest at once; ``None``: learn it from the calls.
        effort: how long a tuning may look for a better route.
        signature_budget_ms: the most milliseconds that tuning one signature may take.
        process_budget_s: the most seconds that all tunings of this process may take together.
        tune_after: how often an inference bucket must be met before it is tuned.
        memory_share: share of the free memory that a route's workspace may take, 0 to 1.
        recognize_masks: whether the values of dense masks are read to find out what they mean.
        log: least severe level that the ``smartattn`` logger lets through.
        agreement: ``process`` tunes in a step; ``group`` notes what it misses as pending, for ``tune_pending`` between steps.
    """

    mode: str = "tune"
    cache_dir: Path | None = None
    layers: tuple[Path, ...] = ()
    accuracy: str = "standard"
    dynamic: bool | None = None
    effort: str = "standard"
    signature_budget_ms: float = 400.0
    process_budget_s: float = 120.0
    tune_after: int = 1
    memory_share: float = 0.25
    recognize_masks: bool = True
    log: str = "warning"
    agreement: str = "process"

    @property
    def tuning_budget_ms(self) -> float:
        """Milliseconds that one tuning may take: ``signature_budget_ms`` scaled by ``effort``."""
        return self.signature_budget_ms * EFFORT_RATIOS[self.effort]


def check_choice(what: str, given: object, allowed: tuple[str, ...]) -> str:
    """Return ``given`` when it is one of ``allowed``, else raise ``UnknownNameError``."""
    if not isinstance(given, str) or given not in allowed:
        raise UnknownNameError.of(what, given, allowed)
    return given


def _number(what: str, given: object, low: float, high: float) -> float:
    try:
        value = float(given)  # type: ignore[arg-type]  # whatever float() refuses is reported below
    except (TypeError, ValueError):
        value = float("nan")
    if not low <= value <= high:
        raise SettingError(f"{what} is {given!r}; it must be a number from {low:g} to {high:g}.")
    return value


def _flag(what: str, given: object) -> bool:
    if isinstance(given, bool):
        return given
    text = str(given).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise SettingError(f"{what} is {given!r}; it must be true or false.")


def _tristate(what: str, given: object) -> bool | None:
    if given is None or str(given).strip().lower() in ("", "none", "auto"):
        return None
    try:
        return _flag(what, given)
    except SettingError:
        raise SettingError(f"{what} is {given!r}; it must be true, false or none.") from None


def _path(what: str, given: object) -> Path | None:
    if given is None or given == "":
        return None
    if not isinstance(given, str | os.PathLike):
        raise SettingError(f"{what} is {given!r}; it must be a path or None.")
    return Path(given)


def _paths(what: str, given: object) -> tuple[Path, ...]:
    parts: list[object]
    if isinstance(given, str):
        parts = [part for part in given.split(os.pathsep) if part]
    elif isinstance(given, os.PathLike):
        parts = [given]
    elif isinstance(given, list | tuple):
        parts = list(given)
    else:
        raise SettingError(f"{what} is {given!r}; it must be a sequence of paths.")
    found = [_path(what, part) for part in parts]
    return tuple(path for path in found if path is not None)


_READERS: dict[str, Callable[[str, object], Any]] = {
    "mode": lambda what, given: check_choice(what, given, MODES),
    "cache_dir": _path,
    "layers": _paths,
    "accuracy": lambda what, given: check_choice(what, given, ACCURACIES),
    "dynamic": _tristate,
    "effort": lambda what, given: check_choice(what, given, EFFORTS),
    "signature_budget_ms": lambda what, given: _number(what, given, 0, 1e9),
    "process_budget_s": lambda what, given: _number(what, given, 0, 1e9),
    "tune_after": lambda what, given: int(_number(what, given, 1, 1e9)),
    "memory_share": lambda what, given: _number(what, given, 0, 1),
    "recognize_masks": _flag,
    "log": lambda what, given: check_choice(what, given, LOG_LEVELS),
    "agreement": lambda what, given: check_choice(what, given, AGREEMENTS),
}
# SMARTATTN_CACHE_LAYERS is the documented name of this one; every other variable is the setting's own name.
_VARIABLES = {"layers": "CACHE_LAYERS"}


def variable_of(name: str) -> str:
    """Return the environment variable that sets the setting ``name``."""
    return ENVIRONMENT_PREFIX + _VARIABLES.get(name, name.upper())


def read_environment(environ: dict[str, str] | os._Environ[str]) -> Settings:
    """Read all ``SMARTATTN_*`` variables; raise ``SettingError`` or ``UnknownNameError`` naming the variable."""
    given = {}
    for name, reader in _READERS.items():
        for variable in (variable_of(name), ENVIRONMENT_PREFIX + name.upper()):
            if variable in environ:
                given[name] = reader(f"environment variable {variable}", environ[variable])
                break
    return Settings(**given)


_lock = threading.Lock()
_current: Settings | None = None
_on_change: list[Callable[[Settings], None]] = []


def settings() -> Settings:
    """Return the settings in force.

    Raises:
        SettingError, UnknownNameError: at the first call, when an environment variable holds a wrong value.
    """
    global _current  # noqa: PLW0603 - one process-wide value is what this module is for
    if _current is None:
        with _lock:
            if _current is None:
                _current = read_environment(os.environ)
    return _current


def on_change(callback: Callable[[Settings], None]) -> None:
    """Call ``callback`` with the new settings after every ``configure``."""
    _on_change.append(callback)


def configure(**changes: object) -> Settings:
    """Replace settings for the whole process and return the old ones.

    Args:
        **changes: any attributes of ``Settings``. To restore: ``configure(**vars(old))``.

    Returns:
        The settings before the change.

    Raises:
        UnknownNameError: for a setting, mode, accuracy, effort or log level that does not exist.
        SettingError: for a value outside its range.

    Note:
        Takes a lock and forgets every choice bound in memory; call it between steps. Stored records stay.
    """
    global _current  # noqa: PLW0603 - see settings()
    checked = {}
    for name, value in changes.items():
        if name not in _READERS:
            raise UnknownNameError.of("setting", name, _READERS)
        checked[name] = _READERS[name](name, value)
    old = settings()
    with _lock:
        _current = dataclasses.replace(old, **checked)
    for callback in _on_change:
        callback(_current)
    return old
