"""torchvision: ViT uses ``nn.MultiheadAttention`` (see ``torch_modules``); its other attention is computed by hand."""

from __future__ import annotations

import torch

from smartattn.integrations.base import Integration, Plan, Wishes

_BY_HAND = ("ShiftedWindowAttention", "ShiftedWindowAttentionV2", "RelativePositionalMultiHeadAttention")
"""Source: torchvision 0.29.1, models/swin_transformer.py and models/maxvit.py: products and a softmax of their own."""


def plan(module: torch.nn.Module, wishes: Wishes) -> Plan | str | None:
    """Name the modules that no replacement of SDPA can reach."""
    del wishes
    kind = type(module)
    if kind.__module__.partition(".")[0] == "torchvision" and kind.__name__ in _BY_HAND:
        return "it computes attention by hand (products and a softmax), which is out of patch_sdpa()'s reach too"
    return None


INTEGRATION = Integration("torchvision", plan)
