"""Functions run with other values for some of their global names, and such functions put into one module instance.

The attention forwards of other libraries reach ``scaled_dot_product_attention`` through global names. A copy of such
a function, with the same code and other globals, is the same forward with another attention: nothing is patched for
anyone else, and whatever the library does around attention stays its own.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from smartattn import versions

Rule = Callable[[object, frozenset[str]], object]
"""Takes the value of a global name and all names that the function uses; returns a replacement, or ``None``."""
SDPA = "scaled_dot_product_attention"
DEPTH = 2
"""How many calls deep helper functions of the same library are followed."""


def names_in(code: types.CodeType) -> frozenset[str]:
    """Return every global and attribute name that code uses, in the functions within it too."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in(constant)
    return frozenset(found)


def rebind(
    function: object, rules: Sequence[Rule], depth: int = DEPTH, seen: dict[Any, Any] | None = None
) -> types.FunctionType | None:
    """Return a copy of ``function`` whose globals are replaced as the rules say; ``None`` when no rule applies.

    Args:
        function: a plain function; decorators that keep the inner function in their closure are looked through.
        rules: asked in order for each global name; the first replacement is taken.
        depth: how many helper functions of the same package are followed.
        seen: what was found out about functions met before; for calls of its own and for several calls with the same
            rules.

    Note:
        The copy holds the globals of now; later changes to the module's globals do not reach it.
    """
    if not isinstance(function, types.FunctionType):
        return None
    seen = {} if seen is None else seen
    if (function, depth) not in seen:
        # Functions may refer to themselves.
        seen[function, depth] = None
        seen[function, depth] = _rebind(function, rules, depth, seen)
    found: types.FunctionType | None = seen[function, depth]
    return found


def _rebind(
    function: types.FunctionType, rules: Sequence[Rule], depth: int, seen: dict[Any, Any]
) -> types.FunctionType | None:
    names = names_in(function.__code__)
    known = function.__globals__
    changes = {}
    for name in names & known.keys():
        replacement = _replacement(function, known[name], names, rules, depth, seen)
        if replacement is not None:
            changes[name] = replacement
    cells = tuple(_cell(cell, rules, depth, seen) for cell in function.__closure__ or ())
    if not changes and all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
        return None
    mine = {**known, **changes} if changes else known
    if changes:
        # The compiler looks globals up in the module of this name, where the originals are.
        mine.pop("__name__", None)
    copy = types.FunctionType(_own_code(function.__code__), mine, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__qualname__, copy.__module__, copy.__doc__ = function.__qualname__, function.__module__, function.__doc__
    copy.__annotations__ = function.__annotations__
    return copy


def _own_code(code: types.CodeType) -> types.CodeType:
    """Return equal code that is an object of its own: the compiler keeps results by code object, for one set of globals."""
    constants = tuple(_own_code(each) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=constants)


def _replacement(
    function: types.FunctionType,
    value: object,
    names: frozenset[str],
    rules: Sequence[Rule],
    depth: int,
    seen: dict[Any, Any],
) -> object:
    for rule in rules:
        found = rule(value, names)
        if found is not None:
            return found
    is_helper = isinstance(value, types.FunctionType) and depth > 0 and value is not function
    if is_helper and _package(value) == _package(function) != "torch":
        return rebind(value, rules, depth - 1, seen)
    return None


def _package(function: Any) -> str:
    return (function.__module__ or "").partition(".")[0]


def _cell(cell: types.CellType, rules: Sequence[Rule], depth: int, seen: dict[Any, Any]) -> types.CellType:
    try:
        inner = cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return cell
    found = rebind(inner, rules, depth, seen)
    return cell if found is None else types.CellType(found)


def sdpa_rule(smart: Callable[..., torch.Tensor]) -> Rule:
    """Return the rule that puts ``smart`` where PyTorch's own function is named, directly or through its modules."""

    def rule(value: object, names: frozenset[str]) -> object:
        if value is versions.sdpa:
            return smart
        if SDPA not in names or not isinstance(value, types.ModuleType):
            return None
        functional = torch.nn.functional
        if value is functional:
            return _module_with(functional, {SDPA: smart})
        if value is torch.nn and "functional" in names:
            return _module_with(torch.nn, {"functional": _module_with(functional, {SDPA: smart})})
        if value is torch and {"nn", "functional"} <= names:
            inner = _module_with(torch.nn, {"functional": _module_with(functional, {SDPA: smart})})
            return _module_with(torch, {"nn": inner})
        return None

    return rule


def _module_with(module: types.ModuleType, changes: dict[str, object]) -> types.ModuleType:
    copy = types.ModuleType(module.__name__, module.__doc__)
    copy.__dict__.update(module.__dict__)
    copy.__dict__.update(changes)
    return copy


def methods_of(kind: type[torch.nn.Module]) -> Iterator[tuple[str, types.FunctionType]]:
    """Return the methods that a module class and its bases define, without those of ``nn.Module`` itself."""
    for name in dir(kind):
        found = getattr(kind, name, None)
        if isinstance(found, types.FunctionType) and getattr(torch.nn.Module, name, None) is not found:
            yield name, found


class Rebound:
    """A method of one module instance that runs another function in its place.

    It refers to the module weakly, since a circle would keep the weights alive after the model is gone. A copy or a
    pickle of the module carries it along: the function is made again for the new instance.

    Attributes:
        slot: name of the method.
        make: makes the function from the module's class, the slot and ``wishes``; a function of a module.
        wishes: arguments for ``wish_of``.
        is_on: whether the replacement runs; off, the method is the class's own.
    """

    def __init__(
        self, module: torch.nn.Module, slot: str, make: Callable[..., Callable[..., Any]], wishes: tuple[Any, ...]
    ) -> None:
        self._module = weakref.ref(module)
        self.slot = slot
        self.make = make
        self.wishes = wishes
        self.is_on = True
        self._original = getattr(type(module), slot)
        self._function = make(type(module), slot, wishes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement, or the class's own method when off."""
        return (self._function if self.is_on else self._original)(self._module(), *args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """The class's own method, for whoever asks for its signature."""
        return self._original.__get__(self._module())

    def __reduce__(self) -> tuple[type[Rebound], tuple[Any, ...]]:
        return type(self), (self._module(), self.slot, self.make, self.wishes)
