"""What an integration is: a way to put smartattn into the attention modules of one library, and to take it out again.

Each file of this folder offers one ``Integration``; the table in ``table.py`` lists them. A new one writes ``plan``:
given a module, say nothing (``None``: not an attention module of this library), say why it must stay as it is (a
text), or name the changes. Libraries are looked up in ``sys.modules`` and imported only when a model came from them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from smartattn.attention import attend
from smartattn.integrations.rebinding import Rebound, Rule, methods_of, rebind, sdpa_rule
from smartattn.wishes import Site, wish_of

ATTRIBUTE = "_smartattn_changes"
"""Where a module instance keeps its changes; plain instance data, so not in ``state_dict``."""
Wishes = tuple[Any, ...]
"""Arguments of ``wish_of``: backend, mode, accuracy, dynamic."""


class Change(Protocol):
    """One reversible change of one module instance; picklable, since copies of the module carry it along."""

    def apply(self, module: torch.nn.Module) -> None:
        """Make the change."""

    def undo(self, module: torch.nn.Module) -> None:
        """Take it back; a no-op where someone else has replaced what was changed."""

    def switch(self, module: torch.nn.Module, *, is_on: bool) -> None:
        """Let stock run for a while without taking the change back, or smartattn again."""


@dataclass(frozen=True)
class Plan:
    """What to do with one module.

    Attributes:
        changes: to apply.
        is_attention: whether the module computes attention, or only prepares it (and stays out of the report).
        needs_all: apply only when every other attention module of the model was reached.
    """

    changes: tuple[Change, ...]
    is_attention: bool = True
    needs_all: bool = False


@dataclass(frozen=True)
class Integration:
    """One entry of the table of integrations.

    Attributes:
        name: as reports show it.
        plan: takes a module and the wishes; returns a plan, a reason to leave it, or ``None``.
    """

    name: str
    plan: Callable[[torch.nn.Module, Wishes], Plan | str | None]


def smart_function(site: Site) -> Callable[..., torch.Tensor]:
    """Return a function with PyTorch's signature that answers at ``site``."""

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        return attend(site, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return scaled_dot_product_attention


@dataclass(frozen=True)
class MethodChange:
    """A method of the instance is run with other globals, or is another function altogether.

    Attributes:
        slot: name of the method.
        make: takes the module's class, the slot and the wishes; returns the function.
        wishes: what the place asks for.
    """

    slot: str
    make: Callable[..., Callable[..., Any]]
    wishes: Wishes

    def apply(self, module: torch.nn.Module) -> None:
        """Put a ``Rebound`` over the class's method."""
        vars(module)[_key(module, self.slot)] = Rebound(module, self.slot, self.make, self.wishes)

    def undo(self, module: torch.nn.Module) -> None:
        """Uncover the class's method; where another wrapper holds ours, switch ours off instead."""
        key = _key(module, self.slot)
        found = vars(module).get(key)
        if not isinstance(found, Rebound):
            self.switch(module, is_on=False)
        elif key == self.slot:
            del vars(module)[key]
        else:
            vars(module)[key] = getattr(type(module), self.slot).__get__(module)

    def switch(self, module: torch.nn.Module, *, is_on: bool) -> None:
        """Let the class's own method run, or the other."""
        found = vars(module).get(_key(module, self.slot))
        # Wrappers made with functools.wraps keep what they wrap under this name.
        while found is not None and not isinstance(found, Rebound):
            found = vars(found).get("__wrapped__") if hasattr(found, "__dict__") else None
        if isinstance(found, Rebound):
            found.is_on = is_on


_HOOKED = "_old_forward"
"""Where accelerate's hooks keep the forward that they call."""


def _key(module: torch.nn.Module, slot: str) -> str:
    return _HOOKED if slot == "forward" and _HOOKED in vars(module) else slot


def foreign_method(module: torch.nn.Module, slot: str) -> str:
    """Return why a method cannot be changed: something else stands in its place on the instance; empty if it can."""
    found = vars(module).get(_key(module, slot))
    if found is None or isinstance(found, Rebound):
        return ""
    if isinstance(found, types.MethodType) and found.__func__ is getattr(type(module), slot):
        return ""
    return f"its {slot} was already replaced on this instance; call replace_attention first, or use patch_sdpa()"


def make_with_sdpa(kind: type[torch.nn.Module], slot: str, wishes: Wishes) -> Callable[..., Any]:
    """Return a class's method with smartattn in the place of PyTorch's function; the method itself if it reaches none."""
    method = getattr(kind, slot)
    return rebind(method, [sdpa_rule(smart_function(Site(wish_of(*wishes))))]) or method


@functools.lru_cache(maxsize=4096)
def slots_with_sdpa(kind: Any) -> tuple[str, ...]:
    """Return the methods of a class that reach PyTorch's function through global names."""
    return slots_that_reach(kind, (sdpa_rule(_nothing),))


def slots_that_reach(kind: type[torch.nn.Module], rules: tuple[Rule, ...]) -> tuple[str, ...]:
    """Return the methods of a class for which one of the rules applies."""
    seen: dict[Any, Any] = {}
    return tuple(name for name, method in methods_of(kind) if rebind(method, rules, seen=seen) is not None)


def _nothing(*args: object) -> torch.Tensor:
    raise NotImplementedError(args)  # only ever looked for, never called


def plan_methods(
    module: torch.nn.Module, slots: tuple[str, ...], make: Callable[..., Callable[..., Any]], wishes: Wishes
) -> Plan | str | None:
    """Return the plan that changes these methods."""
    if not slots:
        return None
    for slot in slots:
        reason = foreign_method(module, slot)
        if reason:
            return reason
    return Plan(tuple(MethodChange(slot, make, wishes) for slot in slots))
