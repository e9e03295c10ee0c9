"""What one place in a program asked for, and the choices bound there.

A ``Wish`` is interned: the same arguments give the same object everywhere, so that modules share choices, hold no
state of their own, and survive ``deepcopy``, ``pickle`` and ``spawn`` without carrying a table along.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from smartattn.backends.base import Runner
from smartattn.buckets import length_range, octave_range
from smartattn.choice import Choice
from smartattn.environment import Environment
from smartattn.routes import Route, check_route_name
from smartattn.settings import ACCURACIES, MODES, Settings, check_choice, settings
from smartattn.signature import Signature

MAX_BINDINGS = 16_384
"""Most choices bound per wish; the oldest quarter leaves when it is full.

Source: a key with its binding takes about 2 KB, so this bounds a table at about 32 MB.
"""


@dataclass(frozen=True, slots=True)
class Binding:
    """A choice bound to one hot key.

    Attributes:
        run: what the hot path calls.
        route: name of the route behind it.
        origin: ``memory``, ``disk``, ``layer <path>``, ``tuned``, ``safe default``, ``nearest bucket`` or ``explicit``.
        signature: of the call.
        environment: where it runs.
        choice: derivation from a record; ``None`` for safe defaults and explicit routes.
        note: why it is provisional, empty when it is not.
    """

    run: Runner
    route: str
    origin: str
    signature: Signature
    environment: Environment
    choice: Choice | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """What the last length of a bucket was given, for the next one.

    Attributes:
        version: of the selector's knowledge; another one makes this stale.
        environment: where it runs.
        route: that was chosen.
        choice: behind it.
        origin: of the record.
        limit: calls after which a length asks again; ``None`` for never.
        in_question: whether calls are counted.
        is_final: whether the choice was made from the calls to expect, once and for all.
        is_declared: whether it was declared if lengths keep changing.
    """

    version: int
    environment: Environment
    route: Route
    choice: Choice
    origin: str
    limit: int | None
    in_question: bool
    is_final: bool
    is_declared: bool


def known_key(signature: Signature) -> Hashable:
    """Return what the lengths of one bucket share."""
    N, L, S = octave_range(max(1, signature.N)), length_range(signature.L, 2), length_range(signature.S)
    return signature.family_key, N, L, S


class Wish:
    """Arguments of one place, and its table of bound choices.

    Attributes:
        table: hot key to runner; read without a lock.
        bindings: hot key to the whole binding, for failures and inspection.
        known: what the last length of each bucket was given.
        former: the bindings before the last change; a backward that the change interrupted still meets them.
    """

    __slots__ = (
        "_settings", "accuracy", "backend", "bindings", "double_backward", "dynamic", "former", "known", "mode",
        "recognizes", "table",
    )  # fmt: skip

    def __init__(
        self,
        backend: str | None,
        mode: str | None,
        accuracy: str | None,
        dynamic: bool | None,
        double_backward: bool,
        recognizes: bool = True,
    ) -> None:
        self.backend = backend
        self.mode = mode
        self.accuracy = accuracy
        self.dynamic = dynamic
        self.double_backward = double_backward
        self.recognizes = recognizes
        self.table: dict[Hashable, Runner] = {}
        self.bindings: dict[Hashable, Binding] = {}
        self.former: dict[Hashable, Binding] = {}
        self.known: dict[Hashable, Known] = {}
        self._settings: tuple[Settings, Settings] | None = None

    @property
    def arguments(self) -> tuple[str | None, str | None, str | None, bool | None, bool]:
        """What a place asks for, as ``SmartAttention`` takes it."""
        return self.backend, self.mode, self.accuracy, self.dynamic, self.double_backward

    def __reduce__(self) -> tuple[Callable[..., Wish], tuple[Any, ...]]:
        return wish_of, (*self.arguments, self.recognizes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Wish:
        return self

    def settings(self) -> Settings:
        """Return the process's settings with this wish's own on top."""
        now = settings()
        if self._settings is None or self._settings[0] is not now:
            changes = {"mode": self.mode, "accuracy": self.accuracy, "dynamic": self.dynamic}
            own = dataclasses.replace(now, **{k: v for k, v in changes.items() if v is not None})  # type: ignore[arg-type]  # each value was checked for its field
            self._settings = now, own
        return self._settings[1]

    def bind(self, hot_key: Hashable, binding: Binding) -> None:
        """Keep a choice for ``hot_key``; takes the lock."""
        with _lock:
            if len(self.table) >= MAX_BINDINGS:
                for old in list(self.table)[: MAX_BINDINGS // 4]:
                    self.table.pop(old, None)
                    self.bindings.pop(old, None)
            self.bindings[hot_key] = binding
            self.table[hot_key] = binding.run

    def unbind(self, hot_key: Hashable) -> None:
        """Forget the choice for ``hot_key``, so that the next call is a first sight."""
        with _lock:
            # A new table tells every site's memo that it is out of date.
            table = dict(self.table)
            table.pop(hot_key, None)
            self.table = table
            self.bindings.pop(hot_key, None)


class Memo(NamedTuple):
    """The last choice of a place, and what a call must share with the one that it was made for.

    Attributes:
        table: the wish's table at the time; another one means that choices were made anew.
        scalars: dropout_p, is_causal, scale, enable_gqa.
        grad: gradient mode.
        function: what stood at ``F.scaled_dot_product_attention``.
        flags: PyTorch's switches for its backends; ``None`` where they do not matter.
        guard: test of query, key and value; never true for a memo of a call with a mask.
        mask_guard: test of query, key, value and mask; never true for a memo of a call without one.
        is_cpu: whether starts of data do not matter.
        run: the runner; ``None`` for PyTorch's own function.
    """

    table: dict[Hashable, Runner]
    scalars: tuple[Any, ...]
    grad: bool
    function: Any
    flags: tuple[bool, bool, bool, bool] | None
    guard: Callable[..., bool]
    mask_guard: Callable[..., bool]
    is_cpu: bool
    run: Runner | None


def never(*tensors: Any) -> bool:
    """Return false: the guard of what a memo cannot answer."""
    del tensors
    return False


NO_MEMO = Memo({}, (), False, None, None, never, never, True, None)
"""Stands where there is no memo; its table is nobody's."""


class Site:
    """One place that calls attention: a wish, and a memo of the place's last choice.

    Attributes:
        wish: what the place asks for.
        memo: of the choice that answered twice in a row.
        last_run: runner that answered last, to see repetition.
    """

    __slots__ = ("last_run", "memo", "wish")

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.memo = NO_MEMO
        self.last_run: Runner | None = None

    def __reduce__(self) -> tuple[type[Site], tuple[Wish]]:
        return Site, (self.wish,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        return Site(self.wish)


_lock = threading.RLock()
_wishes: dict[tuple[Any, ...], Wish] = {}


def wish_of(
    backend: str | None = None,
    mode: str | None = None,
    accuracy: str | None = None,
    dynamic: bool | None = None,
    double_backward: bool = False,
    recognizes: bool = True,
) -> Wish:
    """Return the one wish with these arguments; ``recognizes``: dense masks may be read to find their class.

    Raises:
        UnknownNameError: for a backend, route, mode or accuracy that does not exist.
    """
    arguments = (backend, mode, accuracy, dynamic, bool(double_backward), bool(recognizes))
    found = _wishes.get(arguments)
    if found is not None:
        return found
    if backend is not None:
        check_route_name(backend)
    if mode is not None:
        check_choice("mode", mode, MODES)
    if accuracy is not None:
        check_choice("accuracy", accuracy, ACCURACIES)
    with _lock:
        return _wishes.setdefault(arguments, Wish(*arguments))


def unbind_all() -> None:
    """Forget every bound choice of every wish; records stay."""
    with _lock:
        for wish in _wishes.values():
            wish.table, wish.known = {}, {}
            wish.former, wish.bindings = wish.bindings or wish.former, {}


def forget_former() -> None:
    """Forget what was bound before the last change too."""
    with _lock:
        for wish in _wishes.values():
            wish.former = {}


def all_bindings() -> list[Binding]:
    """Return every binding of every wish."""
    with _lock:
        return [binding for wish in _wishes.values() for binding in wish.bindings.values()]
