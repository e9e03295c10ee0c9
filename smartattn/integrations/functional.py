"""Modules of any package whose own code calls ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import torch

from smartattn.integrations.base import Integration, Plan, Wishes, make_with_sdpa, plan_methods, slots_with_sdpa


def plan(module: torch.nn.Module, wishes: Wishes) -> Plan | str | None:
    """Rebind every method that reaches the function by a global name, directly or by helpers of its package."""
    kind: Any = type(module)
    return plan_methods(module, slots_with_sdpa(kind), make_with_sdpa, wishes)


INTEGRATION = Integration("own code", plan)
