"""Attention that measures, remembers and runs the fastest correct way to compute PyTorch's SDPA.

``SmartAttention`` is the module, ``scaled_dot_product_attention`` the function; both take what
``torch.nn.functional.scaled_dot_product_attention`` takes. ``explain`` says what was chosen and why.
"""

from __future__ import annotations

from smartattn import cache
from smartattn.attention import SmartAttention, scaled_dot_product_attention
from smartattn.errors import (
    MissingRecordError,
    RouteUnavailableError,
    SettingError,
    SmartAttnError,
    UnknownNameError,
)
from smartattn.events import Stats, add_listener, stats

# Not lazily: loading the module later would put it in the place of the function of the same name.
from smartattn.explain import Explanation, explain
from smartattn.pending import tune_pending
from smartattn.settings import Settings, configure, settings
from smartattn.verify import Verification, verify
from smartattn.versions import SMARTATTN

__version__ = SMARTATTN

__all__ = [
    "Explanation",
    "MissingRecordError",
    "RouteUnavailableError",
    "SettingError",
    "Settings",
    "SmartAttention",
    "SmartAttnError",
    "Stats",
    "UnknownNameError",
    "Verification",
    "__version__",
    "add_listener",
    "cache",
    "configure",
    "explain",
    "scaled_dot_product_attention",
    "settings",
    "stats",
    "tune_pending",
    "verify",
]
