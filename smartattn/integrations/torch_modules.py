"""PyTorch's own modules: ``nn.MultiheadAttention``, alone or within ``nn.Transformer`` and its layers.

The forward of the instance becomes smartattn's; class, parameters and ``state_dict`` stay. An encoder layer in
evaluation computes attention itself, unless a hook tells it that its parts must be called: ``keep_called``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from smartattn.integrations.base import Integration, MethodChange, Plan, Wishes, foreign_method
from smartattn.multihead import SmartMultiheadAttention, keep_called, multihead_forward
from smartattn.wishes import Site, wish_of


@dataclass(frozen=True)
class CalledChange:
    """Keep the enclosing ``nn.TransformerEncoderLayer`` from computing attention itself."""

    def apply(self, module: torch.nn.Module) -> None:
        """Register a hook that does nothing."""
        module.register_forward_pre_hook(keep_called)

    def undo(self, module: torch.nn.Module) -> None:
        """Remove the hook."""
        hooks = module._forward_pre_hooks
        for number in [number for number, hook in hooks.items() if hook is keep_called]:
            del hooks[number]

    def switch(self, module: torch.nn.Module, *, is_on: bool) -> None:
        """Remove the hook, or register it again."""
        self.undo(module)
        if is_on:
            self.apply(module)


def make_multihead(kind: type[torch.nn.Module], slot: str, wishes: Wishes) -> Callable[..., Any]:
    """Return smartattn's forward for an ``nn.MultiheadAttention``."""
    del kind, slot
    site = Site(wish_of(*wishes))

    def forward(module: torch.nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        return multihead_forward(module, site, *args, **kwargs)

    return forward


def plan(module: torch.nn.Module, wishes: Wishes) -> Plan | str | None:
    """Replace the behaviour of ``nn.MultiheadAttention``; subclasses with a forward of their own stay."""
    if not isinstance(module, torch.nn.MultiheadAttention):
        return None
    if isinstance(module, SmartMultiheadAttention):
        return "it is a SmartMultiheadAttention already"
    if type(module).forward is not torch.nn.MultiheadAttention.forward:
        return f"{type(module).__name__} has a forward of its own; use patch_sdpa() if it calls PyTorch's function"
    reason = foreign_method(module, "forward")
    if reason:
        return reason
    return Plan((MethodChange("forward", make_multihead, wishes), CalledChange()))


INTEGRATION = Integration("nn.MultiheadAttention", plan)
