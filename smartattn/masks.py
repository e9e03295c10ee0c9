"""Masks by what they mean: say it with one of these classes, or let it be found out from a dense mask's values.

Either way a call ends up as PyTorch's own arguments, a dense mask tensor where one is needed, plus the name of a class
that goes into the signature. The name is a promise about the tensor's values, which say all of it by themselves, so
every backend that reads masks can serve every class, and a few can do better.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from smartattn import versions
from smartattn.mask_classes import Causal, CausalLowerRight, Documents, KeyPadding, Mask, Window
from smartattn.mask_facts import Facts, facts_of, remember
from smartattn.mask_recognition import recognize
from smartattn.signature import Call

__all__ = [
    "CLASS_NAMES",
    "Canonical",
    "Causal",
    "CausalLowerRight",
    "Documents",
    "KeyPadding",
    "Mask",
    "Window",
    "canonicalize",
    "example",
    "forget",
    "is_class",
]

CLASS_NAMES = (
    "causal_lower_right", "window", "documents", "causal+documents", "key_padding", "causal+key_padding",
)  # fmt: skip
"""Classes beyond those that PyTorch's own arguments name; parameters follow in parentheses."""


class Canonical(NamedTuple):
    """A call in PyTorch's own arguments and the class of its mask.

    Attributes:
        call: with a tensor or nothing as ``attn_mask``.
        mask: class that the signature's ``mask`` must be replaced by; empty when the signature's own is right.
        cost_ms: of a recognition that took place now; 0 otherwise.
    """

    call: Call
    mask: str = ""
    cost_ms: float = 0.0


def is_class(attn_mask: object) -> bool:
    """Return whether an argument is a mask class rather than a tensor."""
    return isinstance(attn_mask, Mask) or _of_bias(attn_mask) is not None


def canonicalize(call: Call, *, recognizes: bool = False) -> Canonical:
    """Bring a call's mask into PyTorch's own arguments and name its class.

    Args:
        call: ``attn_mask`` may be a tensor, one of the classes above, or PyTorch's ``CausalBias``.
        recognizes: whether the values of a dense mask may be read to find its class (never under capture or
            compilation). Without it, facts that are remembered are still used.

    Raises:
        ValueError: a class whose lengths do not fit the call.

    Cost: about 3 us for a remembered mask; for a mask at first sight see ``mask_recognition.recognize``.
    """
    given: object = call.attn_mask
    if given is None:
        return Canonical(call)
    said = given if isinstance(given, Mask) else _of_bias(given)
    if said is not None:
        return _said(call, said)
    if call.attn_mask is None or call.attn_mask.requires_grad:
        return Canonical(call)
    before = facts_of(call.attn_mask)
    facts = recognize(call) if recognizes else before
    if facts is None or not _fits(call, facts):
        return Canonical(call)
    cost_ms = facts.cost_ms if before is None else 0.0
    if facts.name == "none":
        return Canonical(call._replace(attn_mask=None), "", cost_ms)
    if facts.name == "causal":
        return Canonical(call._replace(attn_mask=None, is_causal=True), "", cost_ms)
    if not facts.is_known or call.is_causal:
        return Canonical(call, "", cost_ms)
    return Canonical(call, facts.name, cost_ms)


def _fits(call: Call, facts: Facts) -> bool:
    """Whether facts found for one call's mask hold for this call: a mask of one row may serve many queries."""
    mask, L, S = call.attn_mask, call.query.size(-2), call.key.size(-2)
    if mask is None or mask.dim() < 2 or mask.size(-1) != S or (mask.dim() > 2 and call.query.dim() != 4):
        return False
    if facts.name in ("none", "key_padding"):
        return mask.size(-2) in (1, L)
    return mask.size(-2) == L


def _of_bias(attn_mask: object) -> Mask | None:
    """Return the class that a ``CausalBias`` of PyTorch stands for; ``None`` for everything else."""
    # Its module loads the compiler, so it is not imported: whoever has made such an object did.
    module: Any = sys.modules.get("torch.nn.attention.bias")
    if module is None or not isinstance(attn_mask, module.CausalBias):
        return None
    return Causal() if attn_mask.variant == module.CausalVariant.UPPER_LEFT else CausalLowerRight()


def _said(call: Call, mask: Mask) -> Canonical:
    """Return the call of a class that the caller named; ``is_causal`` beside it applies too."""
    L, S, N = call.query.size(-2), call.key.size(-2), call.query.shape[:-3].numel()
    is_causal = call.is_causal
    if isinstance(mask, KeyPadding) and (call.query.dim() != 4 or len(mask.lengths) != N):
        raise ValueError(
            f"key padding has {len(mask.lengths)} lengths; the call has {N} batch elements in 4 dimensions"
        )
    if isinstance(mask, Documents):
        mask.check(L, S)
    if _is_triangle(mask, L, S, is_causal=is_causal):
        return Canonical(call._replace(attn_mask=None, is_causal=True))
    if _hides_nothing(mask, L, S):
        return Canonical(call._replace(attn_mask=None))
    if isinstance(mask, Window) and is_causal and L == S:
        mask, is_causal = Window(mask.left, 0), False
    if isinstance(mask, Window) and mask.left is None and mask.right == 0:
        mask = CausalLowerRight()
    carrier, name = _carrier(mask, L, S, call.query.device, is_causal)
    return Canonical(call._replace(attn_mask=carrier, is_causal=False), name)


def _is_triangle(mask: Mask, L: int, S: int, *, is_causal: bool) -> bool:
    if isinstance(mask, Causal):
        return True
    if isinstance(mask, CausalLowerRight):
        # Where keys outnumber queries the triangle at the upper left lies within the other.
        return L == S or (is_causal and L < S)
    if isinstance(mask, Window) and L == S:
        return (mask.left is None or mask.left >= L - 1) and (mask.right == 0 or is_causal)
    return is_causal and _hides_nothing(mask, L, S)


def _hides_nothing(mask: Mask, L: int, S: int) -> bool:
    if isinstance(mask, KeyPadding):
        return min(mask.lengths) == S
    if isinstance(mask, Documents):
        return len(mask.lengths) == 1
    if isinstance(mask, Window):
        left, right = (max(L, S) if side is None else side for side in (mask.left, mask.right))
        return left >= S - 1 and right >= L - 1
    return False


_CARRIERS = 32
"""Most dense masks that are kept for classes; each is as large as the class needs, at most L x S or N x L x S bytes."""
_carriers: OrderedDict[tuple[object, ...], tuple[torch.Tensor, Facts]] = OrderedDict()
_captured: dict[tuple[object, ...], tuple[torch.Tensor, Facts]] = {}
"""Dense masks that graphs read; kept for good, since a graph may be replayed at any time."""


def _carrier(mask: Mask, L: int, S: int, device: torch.device, is_causal: bool) -> tuple[torch.Tensor, str]:
    """Return the dense tensor of a class, with what is known about it remembered, and its name in signatures."""
    key = mask, L, S, device, is_causal
    # What is made under a mode or a transform is no plain tensor; under capture it gets its values only in a replay.
    is_plain = versions.len_dispatch_modes() == 0 and versions.functorch_level() is None
    is_captured = versions.is_capturing(device.type)
    found = _carriers.get(key) if is_plain else None
    # Other facts, or none, mean that somebody wrote to the dense mask.
    if found is not None and facts_of(found[0]) is found[1]:
        if is_captured:
            _captured[key] = found
        return found[0], found[1].name if found[1].is_known else ""
    with torch.inference_mode(mode=False), torch.no_grad():
        dense, facts = mask.dense(L, S, device), mask.facts(L, S, device)
        if is_causal:
            dense = dense & Causal().dense(L, S, device)
            facts = dataclasses.replace(facts, name=_causal_name(mask, L, S))
    if not is_plain or is_captured:
        return dense, ""
    remember(dense, facts)
    _carriers[key] = dense, facts
    while len(_carriers) > _CARRIERS:
        _carriers.popitem(last=False)
    return dense, facts.name if facts.is_known else ""


def _causal_name(mask: Mask, L: int, S: int) -> str:
    if isinstance(mask, Documents):
        return "causal+documents"
    if isinstance(mask, KeyPadding) and L == S:
        return f"causal+key_padding({mask.side})"
    return "bool"


def forget() -> None:
    """Forget the dense masks that were made for classes."""
    _carriers.clear()


@functools.cache
def _parse(name: str) -> tuple[str, tuple[str, ...]]:
    word, _, rest = name.partition("(")
    return word, tuple(rest.rstrip(")").split(",")) if rest else ()


def example(name: str, N: int, L: int, S: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a made-up bool mask of a class, known to ``facts_of``, for inputs that stand in for a caller's.

    Documents are four of unequal length; padding hides up to a third of the keys.

    Raises:
        ValueError: no such class, or one that L and S rule out.
    """
    word, parameters = _parse(name)
    mask: Mask
    if word == "causal_lower_right":
        mask = CausalLowerRight()
    elif word == "window":
        left, right = (None if int(p) < 0 else int(p) for p in parameters)
        mask = Window(left, right)
    elif word.endswith("documents"):
        quarter = max(1, S // 4)
        lengths = [n for n in (quarter, quarter // 2, quarter) if n and S > 3 * quarter]
        mask = Documents([*lengths, S - sum(lengths)])
    elif word.endswith("key_padding"):
        side = "left" if "left" in parameters else "right"
        mask = KeyPadding([max(1, S - (S * i) // (3 * max(1, N - 1) or 1)) for i in range(N)], side)
    else:
        raise ValueError(f"{name!r} is no mask class that a tensor can be made for")
    return _carrier(mask, L, S, torch.device(device), word.startswith("causal+"))[0]
