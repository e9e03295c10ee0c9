"""diffusers: attention lives in processors, plain objects that an attention module calls.

The processor of a module is replaced by a copy whose ``__call__`` reaches smartattn; whoever sets another processor
later gets that one. Newer processors call ``dispatch_attention_fn``: smartattn answers when the backend is ``native``
and attention is not spread over devices, and the library's own function everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from smartattn.integrations import functional
from smartattn.integrations.base import Integration, Plan, Wishes, smart_function
from smartattn.integrations.rebinding import Rule, rebind, sdpa_rule
from smartattn.wishes import Site, wish_of

_ORIGINAL = "_smartattn_original"


@dataclass(frozen=True)
class ProcessorChange:
    """The processor of a module is a copy of itself that reaches smartattn.

    Attributes:
        wishes: what the place asks for.
    """

    wishes: Wishes

    def apply(self, module: torch.nn.Module) -> None:
        """Put the copy in the place of the processor."""
        vars(module)["processor"] = smart_processor(vars(module)["processor"], self.wishes)

    def undo(self, module: torch.nn.Module) -> None:
        """Put the processor back, unless someone has set another one since."""
        found = vars(module).get("processor")
        if hasattr(type(found), _ORIGINAL):
            vars(module)["processor"] = _stock_processor(found)

    def switch(self, module: torch.nn.Module, *, is_on: bool) -> None:
        """Let the copy call what it was copied from, or smartattn again."""
        found = vars(module).get("processor")
        if hasattr(type(found), _ORIGINAL):
            kind: Any = type(found)  # each copy has a class of its own
            kind._is_on = is_on


def smart_processor(processor: Any, wishes: Wishes) -> Any:
    """Return a processor that shares the state of ``processor`` and whose attention is smartattn's."""
    kind = type(processor)
    site = Site(wish_of(*wishes))
    original = kind.__call__
    function: Any = rebind(original, _rules(site)) or original

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (function if type(self)._is_on else original)(self, *args, **kwargs)

    def reduce(self: Any, protocol: int = 4) -> tuple[Any, ...]:
        del protocol
        return smart_processor, (_stock_processor(self), wishes)

    members = {
        "__call__": call,
        "__reduce_ex__": reduce,
        _ORIGINAL: kind,
        "_is_on": True,
        "__module__": kind.__module__,
    }
    copy: Any = object.__new__(type(kind.__name__, (kind,), members))
    if hasattr(processor, "__dict__"):
        # One state for both, since settings such as the attention backend are set on the processor.
        copy.__dict__ = processor.__dict__
    return copy


def _stock_processor(processor: Any) -> Any:
    kind = getattr(type(processor), _ORIGINAL)
    stock = object.__new__(kind)
    if hasattr(processor, "__dict__"):
        stock.__dict__ = processor.__dict__
    return stock


def _rules(site: Site) -> list[Rule]:
    smart = smart_function(site)
    return [_dispatch_rule(smart), sdpa_rule(smart)]


def _dispatch_rule(smart: Callable[..., torch.Tensor]) -> Rule:
    def rule(value: object, names: frozenset[str]) -> object:
        del names
        is_dispatch = getattr(value, "__name__", "") == "dispatch_attention_fn"
        return _smart_dispatch(value, smart) if is_dispatch and callable(value) else None

    return rule


def _smart_dispatch(dispatch: Any, smart: Callable[..., torch.Tensor]) -> Any:
    known = dispatch.__globals__
    registry, native = known.get("_AttentionBackendRegistry"), known.get("_native_attention")
    smart_native: Any = rebind(native, [sdpa_rule(smart)], depth=0)
    if registry is None or smart_native is None:
        return dispatch

    @functools.wraps(dispatch)
    def dispatch_attention_fn(*args: Any, backend: Any = None, parallel_config: Any = None, **kwargs: Any) -> Any:
        name = registry.get_active_backend()[0] if backend is None else backend
        is_native = str(getattr(name, "value", name)) == "native"
        if not is_native or parallel_config is not None or kwargs.get("attention_kwargs") or len(args) > _MAX_ARGS:
            return dispatch(*args, backend=backend, parallel_config=parallel_config, **kwargs)
        kwargs.pop("attention_kwargs", None)
        return smart_native(*args, **kwargs)

    return dispatch_attention_fn


_MAX_ARGS = 8
"""Arguments up to ``enable_gqa``, which both functions take in the same order."""


@functools.lru_cache(maxsize=4096)
def _is_reached(kind: Any) -> bool:
    return rebind(kind.__call__, _rules(Site(wish_of()))) is not None


def plan(module: torch.nn.Module, wishes: Wishes) -> Plan | str | None:
    """Replace processors; modules without one whose own code calls SDPA are rebound as any other."""
    if type(module).__module__.partition(".")[0] != "diffusers":
        return None
    processor = vars(module).get("processor")
    if processor is None:
        if isinstance(vars(module).get("_modules", {}).get("processor"), torch.nn.Module):
            return "its processor is a module with parameters of its own; patch_sdpa() reaches it"
        return functional.plan(module, wishes)
    kind: Any = type(processor)
    if _is_reached(kind):
        return Plan((ProcessorChange(wishes),))
    return f"its processor {kind.__name__} does not call scaled_dot_product_attention"


INTEGRATION = Integration("diffusers", plan)
