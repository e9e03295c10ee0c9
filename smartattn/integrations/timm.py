"""timm: attention modules that call ``F.scaled_dot_product_attention`` while ``fused_attn`` is set."""

from __future__ import annotations

from typing import Any

import torch

from smartattn.integrations import functional
from smartattn.integrations.base import Integration, Plan, Wishes, slots_with_sdpa


def plan(module: torch.nn.Module, wishes: Wishes) -> Plan | str | None:
    """Rebind timm's forwards; modules told to compute attention by hand stay."""
    kind: Any = type(module)
    if kind.__module__.partition(".")[0] != "timm" or not slots_with_sdpa(kind):
        return None
    if getattr(module, "fused_attn", True) is False:
        return "fused_attn is off, so it computes attention by hand; set fused_attn = True on the module"
    return functional.plan(module, wishes)


INTEGRATION = Integration("timm", plan)
