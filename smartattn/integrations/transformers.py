"""transformers: the attention function behind ``AttentionInterface``, and masks that need no tensor.

Two ways in. ``replace_attention`` rebinds the attention forwards of one model, whose configuration goes on to say
``sdpa``: configurations may be shared between models, and models ask them. Importing this module also registers
``smartattn`` with both interfaces, for ``model.set_attn_implementation("smartattn")`` and ``from_pretrained``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations import sdpa_attention

from smartattn import versions
from smartattn.attention import attend
from smartattn.integrations.base import (
    Integration,
    MethodChange,
    Plan,
    Wishes,
    foreign_method,
    plan_methods,
    slots_that_reach,
    smart_function,
)
from smartattn.integrations.rebinding import Rule, rebind, sdpa_rule
from smartattn.mask_facts import remember
from smartattn.masks import CausalLowerRight, Mask, Window
from smartattn.wishes import Site, wish_of

NAME = "smartattn"
_CLASSES = "smartattn_classes"
"""Name under which only a mask builder stands: the one that returns mask classes instead of tensors."""
_SITE = Site(wish_of())


def smart_attention(site: Site, module: Any, *tensors: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """Answer a call of transformers' attention interface.

    Args:
        site: place of the call.
        module: attention module; gives ``num_key_value_groups`` and ``is_causal``.
        tensors: query (N, Hq, L, E), key (N, H, S, E), value (N, H, S, Ev), attention_mask.
        options: what the interface's own ``sdpa`` function takes: dropout, scaling, is_causal, position_bias.

    Returns:
        (N, L, Hq, Ev), contiguous, and no weights.

    Raises:
        ValueError: for ``softcap`` and attention sinks, which SDPA cannot express.
    """
    query, key, value, mask = _tensors(tensors, options)
    is_grouped = query.size(1) != key.size(1)
    if (is_grouped and mask is not None) if torch.compiler.is_compiling() else versions.is_jit_tracing():
        # Where stock ends up in the graph, grouped heads with a mask are better off in the library's own hands.
        dense = _dense(mask, query, key)
        found: tuple[torch.Tensor, None] = _library.stock(module, query, key, value, dense, **options)
        return found
    _refuse(options)
    L, S = query.size(2), key.size(2)
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal = bool(is_causal and mask is None and L > 1)
    bias = options.get("position_bias")
    if is_causal and S > L:
        # A static cache before its first token: what lies beyond the queries is not filled yet.
        key, value = key[:, :, :L], value[:, :, :L]
        bias = None if bias is None else bias[..., :L]
    if bias is not None:
        # Only versions that pass a bias have this function.
        mask = _library.bias_mask(bias, _dense(mask, query, key), is_causal, query, key)
        is_causal = False
    output = attend(
        site, query, key, value, mask, options.get("dropout", 0.0), is_causal, options.get("scaling"), is_grouped
    )
    return output.transpose(1, 2).contiguous(), None


def _tensors(tensors: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    names = ("query", "key", "value", "attention_mask")[len(tensors) :]
    return (*tensors[:4], *(options.pop(name, None) for name in names))


def _refuse(options: dict[str, Any]) -> None:
    for name, what in (("softcap", "a softcap"), ("s_aux", "attention sinks")):
        if options.get(name) is not None:
            raise ValueError(f"smartattn computes SDPA, which cannot express {what}; use attn_implementation='eager'")


def _dense(mask: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    return mask.dense(query.size(2), key.size(2), query.device)[None, None] if isinstance(mask, Mask) else mask


def registered_attention(module: Any, *tensors: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """Answer as ``smart_attention`` with the process's settings; what ``smartattn`` is registered as."""
    return smart_attention(_SITE, module, *tensors, **options)


def mask_class_of(function: Any, is_causal_skipped: bool, is_all_skipped: bool) -> Mask | None:
    """Return the class that a mask function of transformers describes by itself; ``None`` for any other function."""
    library = _library
    if function is library.causal and is_causal_skipped:
        return CausalLowerRight()
    inner = _closure(function, library.joined)
    if inner is None or len(inner) != 2:
        return None
    reach = _closure(inner[0], library.sliding)
    if reach is not None and inner[1] is library.causal and is_causal_skipped:
        return Window(reach - 1, 0) if reach > 0 else None
    reach = _closure(inner[0], library.sliding_both)
    if reach is not None and inner[1] is library.everything and is_all_skipped:
        return Window(reach, reach)
    return None


def _closure(function: Any, code: Any) -> Any:
    """Return the one value that a function closes over, if its code is this one."""
    cells: Any = getattr(function, "__closure__", None) or ()
    if code is None or getattr(function, "__code__", None) is not code or len(cells) != 1:
        return None
    return cells[0].cell_contents


def class_mask(*args: Any, **kwargs: Any) -> Any:
    """Build a mask: ``None`` where causal attention suffices, a mask class where one says all, else a bool tensor."""
    if not args:
        found = _class_or_none(**kwargs)
        if found is not NotImplemented:
            return found
    return _library.stock_mask(*args, **kwargs)


def registered_mask(*args: Any, **kwargs: Any) -> Any:
    """Build a mask as transformers does for SDPA, noting its class where one says all.

    A tensor always, since models are free to cut what they were given.
    """
    found = class_mask(*args, **kwargs)
    if not isinstance(found, Mask):
        return found
    L, S, device = kwargs["q_length"], kwargs["kv_length"], kwargs.get("device", "cpu")
    dense = found.dense(L, S, device)[None, None].expand(kwargs["batch_size"], -1, -1, -1)
    if not dense.is_inference():
        remember(dense, found.facts(L, S, device))
    return dense


def _class_or_none(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **rest: Any,
) -> Any:
    """Return ``None`` or a mask class, or ``NotImplemented`` for masks that only a tensor can hold."""
    del rest
    if torch.compiler.is_compiling() or versions.is_jit_tracing() or q_length == 1:
        return NotImplemented
    if not (isinstance(q_offset, int) and isinstance(kv_offset, int)) or q_offset + q_length != kv_offset + kv_length:
        return NotImplemented
    found = mask_class_of(mask_function, allow_is_causal_skip, allow_is_bidirectional_skip)
    if found is None or not _sees_all(attention_mask, kv_offset, kv_length):
        return NotImplemented
    if isinstance(found, Window) and found.left is not None and found.left >= kv_length - 1 and found.right == 0:
        found = CausalLowerRight()
    return None if isinstance(found, CausalLowerRight) and q_length == kv_length else found


def _sees_all(padding: torch.Tensor | None, start: int, length: int) -> bool:
    """Return whether a padding mask hides none of these keys; waits for the device, as transformers does."""
    if padding is None:
        return True
    return padding.size(-1) >= start + length and bool(padding[:, start : start + length].all())


class _Library:
    """The names of transformers that are needed, some of which older versions lack."""

    def __init__(self) -> None:
        self.model = PreTrainedModel
        self.interface, self.masks = AttentionInterface, AttentionMaskInterface
        self.masking = masking_utils
        self.stock = sdpa_attention.sdpa_attention_forward
        self.stock_mask = masking_utils.sdpa_mask
        self.bias_mask: Any = getattr(sdpa_attention, "create_position_bias_mask", None)
        self.causal = masking_utils.causal_mask_function
        self.everything = getattr(masking_utils, "bidirectional_mask_function", None)
        self.joined = masking_utils.and_masks(self.causal).__code__
        self.sliding = masking_utils.sliding_window_overlay(1).__code__
        both = getattr(masking_utils, "sliding_window_bidirectional_overlay", None)
        self.sliding_both = None if both is None else both(1).__code__


_library = _Library()


def register() -> None:
    """Register ``smartattn`` with transformers' attention and mask interfaces.

    Raises:
        ImportError: transformers is missing, or too old to have both interfaces.
    """
    library = _library
    library.interface.register(NAME, registered_attention)
    library.masks.register(NAME, registered_mask)
    library.masks.register(_CLASSES, class_mask)


class _Interface:
    """transformers' attention interface with another function for ``sdpa``; everything else is asked of the real one."""

    def __init__(self, real: Any, site: Site) -> None:
        self._real = real
        self._smart = functools.partial(smart_attention, site)

    def _swap(self, found: Any) -> Any:
        return self._smart if found is _library.stock else found

    def get_interface(self, *args: Any, **kwargs: Any) -> Any:
        return self._swap(self._real.get_interface(*args, **kwargs))

    def get(self, *args: Any) -> Any:
        return self._swap(self._real.get(*args))

    def __getitem__(self, name: str) -> Any:
        return self._swap(self._real[name])

    def __contains__(self, name: str) -> bool:
        return name in self._real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def interface_rule(site: Site) -> Rule:
    """Return the rule for the global through which attention forwards choose their function."""

    def rule(value: object, names: frozenset[str]) -> object:
        del names
        return _Interface(value, site) if isinstance(value, _library.interface) else None

    return rule


def mask_rule(value: object, names: frozenset[str]) -> object:
    """Replace the functions that create masks by ones that return classes where they can."""
    del names
    name = getattr(value, "__name__", "")
    is_builder = getattr(value, "__module__", "") == "transformers.masking_utils"
    if not (is_builder and callable(value) and name.startswith("create_") and name.endswith("_mask")):
        return None
    return _class_builder(value)


def _class_builder(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_mask(config: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or config._attn_implementation != "sdpa":
            return create(config, *args, **kwargs)
        view = copy.copy(config)
        view._attn_implementation_internal = _CLASSES
        return create(view, *args, **kwargs)

    return create_mask


def make_attention(kind: type[torch.nn.Module], slot: str, wishes: Wishes) -> Callable[..., Any]:
    """Return an attention module's method with smartattn behind the name ``sdpa``."""
    method = getattr(kind, slot)
    site = Site(wish_of(*wishes))
    return rebind(method, [interface_rule(site), sdpa_rule(smart_function(site))]) or method


def make_masks(kind: type[torch.nn.Module], slot: str, wishes: Wishes) -> Callable[..., Any]:
    """Return a model's forward that creates mask classes."""
    del wishes
    method = getattr(kind, slot)
    return rebind(method, [mask_rule], depth=0) or method


@functools.lru_cache(maxsize=4096)
def _slots(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, _library.model):
        # Whole models ask the interface too, about what it knows.
        return ()
    return slots_that_reach(kind, (interface_rule(_SITE),))


@functools.lru_cache(maxsize=4096)
def _builds_masks(kind: Any) -> bool:
    return rebind(kind.forward, [mask_rule], depth=0) is not None


def plan(module: torch.nn.Module, wishes: Wishes) -> Plan | str | None:
    """Rebind attention forwards that ask the interface for ``sdpa``, and the mask builders of models that allow it."""
    kind: Any = type(module)
    slots = _slots(kind)
    if slots:
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
        if implementation == NAME:
            return "its attn_implementation is 'smartattn' already"
        if implementation != "sdpa":
            return (
                f"its attn_implementation is {implementation!r}, an explicit choice or the only one that it supports; "
                f"call model.set_attn_implementation('sdpa') first if it may change"
            )
        return plan_methods(module, slots, make_attention, wishes)
    if getattr(module, "_supports_flex_attn", False) and _builds_masks(kind) and not foreign_method(module, "forward"):
        # Such models pass on masks that are not tensors (flex attention's) untouched.
        return Plan((MethodChange("forward", make_masks, wishes),), is_attention=False, needs_all=True)
    return None


INTEGRATION = Integration("transformers", plan)

register()
