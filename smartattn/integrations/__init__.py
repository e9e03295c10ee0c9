"""SmartAttention in the models people have: one call puts it into a model's attention modules, one takes it out."""

from __future__ import annotations

from smartattn.integrations.replacing import replace_attention, restore_attention
from smartattn.integrations.report import Place, Report

__all__ = ["Place", "Report", "replace_attention", "restore_attention"]
