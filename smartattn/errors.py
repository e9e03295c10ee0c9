"""Every error that smartattn raises of its own.

::

    SmartAttnError
    ├── SettingError            a setting or environment variable has a value outside its range (ValueError)
    ├── UnknownNameError        a backend, route, mode or signature text that does not exist (ValueError)
    ├── MissingRecordError      mode "error" met a signature without a record (LookupError)
    └── RouteUnavailableError   an explicitly named backend or route cannot serve this call (RuntimeError)

A wrong call (shapes, dtypes, devices) raises the type of error that PyTorch's own function raises for it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SmartAttnError(Exception):
    """Base of all errors that are smartattn's own."""


class SettingError(SmartAttnError, ValueError):
    """A setting was given a value that it cannot take."""


class UnknownNameError(SmartAttnError, ValueError):
    """A name was given that is not in the table it should come from."""

    @classmethod
    def of(cls, what: str, given: object, allowed: Iterable[str]) -> UnknownNameError:
        """Build the error that names the argument, the value given, the valid names and the nearest of them."""
        names = sorted(allowed)
        nearest = difflib.get_close_matches(str(given), names, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(repr(name) for name in nearest)}?" if nearest else ""
        return cls(f"{what} is {given!r}; it must be one of {', '.join(map(repr, names))}.{hint}")


class MissingRecordError(SmartAttnError, LookupError):
    """Mode ``error`` met a signature for which nothing is stored."""


class RouteUnavailableError(SmartAttnError, RuntimeError):
    """An explicitly named backend or route cannot serve this call.

    Attributes:
        reasons: route name to all the reasons why it was rejected.
    """

    def __init__(self, message: str, reasons: dict[str, tuple[str, ...]]) -> None:
        super().__init__(message)
        self.reasons = reasons

    def __reduce__(self) -> tuple[type[RouteUnavailableError], tuple[str, dict[str, tuple[str, ...]]]]:
        return type(self), (str(self), self.reasons)
