"""Which calls smartattn answers itself: plain eager calls. All others belong to PyTorch and are handed over untouched.

What hides behind a subclass, a mode, a transform or a replaced ``scaled_dot_product_attention`` (context parallelism)
is not what its shapes say; a direct operator call would attend to a local shard, a padded view or a traced symbol.
"""

from __future__ import annotations

import torch

from smartattn import versions
from smartattn.signature import Call

MEASURED_DEVICE_TYPES = ("cpu", "cuda")
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
own_patches: set[object] = set()
"""Functions that smartattn itself put in the place of PyTorch's; calls through them are not foreign."""


def is_foreign() -> bool:
    """Return whether something else than PyTorch or smartattn stands at ``F.scaled_dot_product_attention``."""
    found = torch.nn.functional.scaled_dot_product_attention
    return found is not versions.sdpa and found not in own_patches


def passthrough_reason(call: Call) -> str:
    """Return why this call is PyTorch's to answer, empty when it is a plain eager call."""
    for tensor in call.tensors:
        if type(tensor) not in _PLAIN_TYPES:
            return f"a tensor of type {type(tensor).__name__}"
        if tensor.is_nested or tensor.layout != torch.strided:
            return "a nested or sparse tensor"
    if call.query.device.type not in MEASURED_DEVICE_TYPES:
        return f"device type {call.query.device.type}"
    if versions.len_dispatch_modes() > 0:
        return "an active dispatch mode"
    if any(type(mode) is not versions.DeviceContext for mode in versions.function_modes()):
        return "an active function mode"
    if versions.functorch_level() is not None:
        return "a function transform"
    if versions.is_jit_tracing():
        return "jit tracing"
    if is_foreign():
        return "a replaced scaled_dot_product_attention"
    return ""


def belongs_to_math(call: Call, *, double_backward: bool) -> bool:
    """Return whether only Math can answer this call, for a reason that no signature tells.

    Forward-mode differentiation (``torch.func.jvp``, ``jacfwd``, dual numbers) is visible when the call runs; that a
    transform differentiates twice in reverse is not, so that is asked for by ``double_backward``. Before it returned
    zeros for empty inputs, PyTorch's function ended the process over zero heads (seen on torch 2.11.0 on CPU).
    """
    is_nested_derivative = double_backward and versions.functorch_level() is not None
    may_crash = not versions.RETURNS_ZEROS_FOR_EMPTY
    if versions.forward_ad_level() < 0 and not is_nested_derivative and not may_crash:
        return False
    is_plain = all(type(t) in _PLAIN_TYPES and not t.is_nested and t.layout == torch.strided for t in call.tensors)
    if not is_plain or is_foreign() or versions.is_jit_tracing():
        return False
    return versions.forward_ad_level() >= 0 or is_nested_derivative or any(0 in t.shape for t in call.tensors[:3])


def has_unequal_lengths(call: Call) -> bool:
    """Return whether key and value differ in length, which PyTorch's fused CPU operator does not check.

    It reads past the end of value instead (torch 2.13.0), where every other backend raises.
    """
    key, value = call.key, call.value
    return 2 < key.dim() == value.dim() and key.size(-2) != value.size(-2)


def wrong_call_text(call: Call) -> str:
    """Return what is wrong with the arguments of a call that PyTorch refused: argument, given, allowed; maybe empty."""
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            return f"{name} is {type(tensor).__name__}; it must be a tensor."
    found = []
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    if any(len(shape) < 2 for shape in shapes.values()):
        return f"Given {given}; each needs at least 2 dimensions: (N, Hq, L, E), (N, H, S, E), (N, H, S, Ev)."
    for what in ("dtype", "device"):
        seen = {name: getattr(tensor, what) for name, tensor in tensors.items()}
        if len(set(seen.values())) > 1:
            text = ", ".join(f"{name} {value}" for name, value in seen.items())
            found.append(f"{what}s differ ({text}); query, key and value must share one.")
    if shapes["query"][-1] != shapes["key"][-1]:
        found.append(f"head dims differ ({given}); query and key must share the last size E.")
    if shapes["key"][-2] != shapes["value"][-2]:
        found.append(f"key lengths differ ({given}); key and value must share the size S.")
    if len(shapes["query"]) > 2 and len(shapes["key"]) > 2:
        Hq, H = shapes["query"][-3], shapes["key"][-3]
        if H not in (1, Hq) and not call.enable_gqa:
            found.append(f"query has {Hq} heads and key {H}; pass enable_gqa=True when each key head serves a group.")
        elif H and Hq % H:
            found.append(f"query has {Hq} heads and key {H}; query heads must be a multiple of key heads.")
    if mask is not None:
        found += _wrong_mask(mask, (*shapes["query"][:-1], shapes["key"][-2]), query)
    if not 0.0 <= call.dropout_p < 1.0:
        found.append(f"dropout_p is {call.dropout_p}; it must be at least 0 and below 1.")
    return " ".join(found)


def _wrong_mask(mask: object, full: tuple[int, ...], query: torch.Tensor) -> list[str]:
    if not isinstance(mask, torch.Tensor):
        return [f"attn_mask is {type(mask).__name__}; it must be a tensor or None."]
    found = []
    shape = tuple(mask.shape)
    if len(shape) < 2:
        found.append(f"attn_mask has shape {shape}; it needs at least the dimensions (L, S) = {full[-2:]}.")
    elif len(shape) > len(full) or any(a not in (1, b) for a, b in zip(shape[::-1], full[::-1], strict=False)):
        found.append(f"attn_mask has shape {shape}; it must broadcast to {full}.")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        found.append(f"attn_mask has dtype {mask.dtype}; it must be torch.bool or {query.dtype}.")
    if mask.device != query.device:
        found.append(f"attn_mask is on {mask.device}, query on {query.device}; they must share one device.")
    return found
