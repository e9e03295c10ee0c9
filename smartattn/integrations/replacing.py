"""``replace_attention`` and ``restore_attention``: apply the plans of the integrations to every module of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from smartattn.integrations.base import ATTRIBUTE, Change, Integration, Plan, Wishes
from smartattn.integrations.report import Place, Report
from smartattn.integrations.table import loaded_integrations
from smartattn.wishes import wish_of


def replace_attention(
    model: torch.nn.Module,
    *,
    backend: str | None = None,
    dynamic: bool | None = None,
    mode: str | None = None,
    accuracy: str | None = None,
) -> Report:
    """Let smartattn answer the attention of this model, and of no other.

    Args:
        model: any module. Its modules keep their classes, parameters and ``state_dict``.
        backend, dynamic, mode, accuracy: wishes for all its places, as ``SmartAttention`` takes them.

    Returns:
        What was replaced, and what was left with the reason. What cannot be reached per instance may be within reach
        of ``patch_sdpa()``; the reason says so.

    Raises:
        UnknownNameError: for a backend, route, mode or accuracy that does not exist.
        TypeError: ``model`` is not a module.

    Note:
        A second call is idempotent, and takes the new wishes. Before or after ``.to()``, ``get_peft_model``, DDP and
        FSDP alike; ``deepcopy`` and ``pickle`` carry the replacement along. Under ``torch.compile`` attention is
        PyTorch's own. Cost: about 1 us per call of an attention module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}; it must be a torch.nn.Module")
    wish_of(backend, mode, accuracy, dynamic)
    wishes: Wishes = (backend, mode, accuracy, dynamic)
    integrations, too_old = loaded_integrations()
    replaced, left, later = [], [], []
    for name, module in list(model.named_modules()):
        _take_back(module)
        kind = type(module).__name__
        outdated = too_old.get(type(module).__module__.partition(".")[0], "")
        if outdated:
            if _looks_like_attention(module):
                left.append(Place(name, kind, reason=outdated))
            continue
        found = _plan(module, wishes, integrations)
        if found is None:
            continue
        if isinstance(found, str):
            left.append(Place(name, kind, reason=found))
        elif found[1].needs_all:
            later.append((module, found[1]))
        else:
            _put_in(module, found[1])
            if found[1].is_attention:
                replaced.append(Place(name, kind, found[0].name))
    if not left:
        for module, plan in later:
            _put_in(module, plan)
    left += _unreached(model, {place.name for place in (*replaced, *left)})
    return Report(tuple(replaced), tuple(left))


def restore_attention(model: torch.nn.Module) -> Report:
    """Give a model its own attention back.

    Args:
        model: any module; one without replacements stays as it is.

    Returns:
        The places that were given back, as ``replaced``.
    """
    found = []
    for name, module in model.named_modules():
        if ATTRIBUTE in vars(module):
            _take_back(module)
            found.append(Place(name, type(module).__name__, "restored"))
    return Report(tuple(found))


@contextmanager
def stock_attention(model: torch.nn.Module) -> Iterator[None]:
    """Let a replaced model run its own attention inside the block, without forgetting any choice."""
    _switch(model, is_on=False)
    try:
        yield
    finally:
        _switch(model, is_on=True)


def is_replaced(model: torch.nn.Module) -> bool:
    """Return whether any module of the model holds a replacement."""
    return any(ATTRIBUTE in vars(module) for module in model.modules())


def _switch(model: torch.nn.Module, *, is_on: bool) -> None:
    for module in model.modules():
        for change in changes_of(module):
            change.switch(module, is_on=is_on)


def changes_of(module: torch.nn.Module) -> tuple[Change, ...]:
    """Return the changes that a module holds."""
    found: tuple[Change, ...] = vars(module).get(ATTRIBUTE, ())
    return found


def _plan(
    module: torch.nn.Module, wishes: Wishes, integrations: list[Integration]
) -> tuple[Integration, Plan] | str | None:
    for integration in integrations:
        found = integration.plan(module, wishes)
        if isinstance(found, str):
            return found
        if found is not None:
            return integration, found
    return None


def _put_in(module: torch.nn.Module, plan: Plan) -> None:
    for change in plan.changes:
        change.apply(module)
    vars(module)[ATTRIBUTE] = plan.changes


def _take_back(module: torch.nn.Module) -> None:
    for change in vars(module).pop(ATTRIBUTE, ()):
        change.undo(module)


def _looks_like_attention(module: torch.nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() or "attn" in type(module).__name__.lower()


def _unreached(model: torch.nn.Module, seen: set[str]) -> list[Place]:
    """Return modules that are called attention, are not reached, and neither hold nor lie in a place that was seen."""
    found = []
    for name, module in model.named_modules():
        if not _looks_like_attention(module) or not any(True for _ in module.children()):
            continue
        is_related = any(
            other == name or not name or not other or other.startswith(name + ".") or name.startswith(other + ".")
            for other in seen
        )
        if not is_related:
            reason = "its forward does not name scaled_dot_product_attention; patch_sdpa() reaches it if it is called deeper down"
            found.append(Place(name, type(module).__name__, reason=reason))
    return found
