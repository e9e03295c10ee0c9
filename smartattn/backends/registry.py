"""The one table of backends, in the fixed order that breaks ties."""

from __future__ import annotations

from smartattn.backends.base import Backend
from smartattn.backends.cudnn import Cudnn
from smartattn.backends.eager import Eager, EagerInplace
from smartattn.backends.efficient import Efficient
from smartattn.backends.flash import FlashCuda
from smartattn.backends.flash_cpu import FlashCpu
from smartattn.backends.flash_masked import FlashMasked
from smartattn.backends.math import Math
from smartattn.backends.stock import Stock

_BUILT_IN: tuple[Backend, ...] = (
    Stock(),
    Cudnn(),
    FlashCuda(),
    FlashCpu(),
    FlashMasked(),
    Efficient(),
    EagerInplace(),
    Eager(),
    Math(),
)
_plugins: list[Backend] = []


def all_backends() -> tuple[Backend, ...]:
    """Return every backend in the order that breaks ties: built-in ones, then registered ones."""
    return (*_BUILT_IN, *_plugins)


def backends_for(device_type: str) -> dict[str, Backend]:
    """Return the backends that may run on a device type, by name."""
    found: dict[str, Backend] = {}
    for backend in all_backends():
        types = backend.capabilities.device_types
        if not types or device_type in types:
            found.setdefault(backend.name, backend)
    return found


def backend_names() -> tuple[str, ...]:
    """Return every backend's name once, in tie order."""
    return tuple(dict.fromkeys(backend.name for backend in all_backends()))
