"""Attention that measures, remembers and runs the fastest correct way to compute PyTorch's SDPA.

``SmartAttention`` is the module, ``scaled_dot_product_attention`` the function; both take what
``torch.nn.functional.scaled_dot_product_attention`` takes. ``explain`` says what was chosen and why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smartattn import cache
from smartattn.attention import SmartAttention, scaled_dot_product_attention

# Not lazily, as explain and prewarm below: a module loaded later would take the place of its function.
from smartattn.doctor import Diagnosis, doctor
from smartattn.errors import (
    MissingRecordError,
    RouteUnavailableError,
    SettingError,
    SmartAttnError,
    UnknownNameError,
)
from smartattn.events import Stats, add_listener, stats
from smartattn.explain import Explanation, explain
from smartattn.pending import tune_pending
from smartattn.prewarm import Summary, prewarm, prewarm_pending, prewarm_signatures
from smartattn.settings import Settings, configure, settings
from smartattn.verify import Verification, verify
from smartattn.versions import SMARTATTN

if TYPE_CHECKING:
    from smartattn.comparison import Comparison, compare
    from smartattn.integrations import Report, replace_attention, restore_attention
    from smartattn.multihead import SmartMultiheadAttention
    from smartattn.patching import patch_sdpa
    from smartattn.profiling import Profile, profile

__version__ = SMARTATTN

_LATER = {
    "Comparison": "comparison",
    "Profile": "profiling",
    "Report": "integrations",
    "SmartMultiheadAttention": "multihead",
    "compare": "comparison",
    "patch_sdpa": "patching",
    "profile": "profiling",
    "replace_attention": "integrations",
    "restore_attention": "integrations",
}
"""Names that are imported when they are first asked for, to their module."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - only the first use of a name comes here

    found = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = found
    return found


__all__ = [
    "Comparison",
    "Diagnosis",
    "Explanation",
    "MissingRecordError",
    "Profile",
    "Report",
    "RouteUnavailableError",
    "SettingError",
    "Settings",
    "SmartAttention",
    "SmartAttnError",
    "SmartMultiheadAttention",
    "Stats",
    "Summary",
    "UnknownNameError",
    "Verification",
    "__version__",
    "add_listener",
    "cache",
    "compare",
    "configure",
    "doctor",
    "explain",
    "patch_sdpa",
    "prewarm",
    "prewarm_pending",
    "prewarm_signatures",
    "profile",
    "replace_attention",
    "restore_attention",
    "scaled_dot_product_attention",
    "settings",
    "stats",
    "tune_pending",
    "verify",
]
