"""``flash`` on CPU: PyTorch's fused operator, called directly behind every check that PyTorch makes before it.

Called raw, the operator returns wrong numbers without a word for a last-dim stride other than 1 and for keys of
batch 1, so all of PyTorch's conditions are declared here.
Source: ``check_*`` of PyTorch's ``sdp_utils_cpp.h`` as tried out on torch 2.13.0 on CPU.
"""

from __future__ import annotations

import math

import torch

from smartattn import versions
from smartattn.backends.base import Backend, Capabilities, Runner
from smartattn.backends.math import additive, fold_causal, run_math
from smartattn.environment import Environment
from smartattn.signature import Signature

LOWEST_TOP = -1e3
"""Largest value of a mask's row below which the logarithm of the number of keys loses digits that count.

Source: float32 keeps steps of 6e-5 at 1e3, which is how far off a probability may then be.
"""


class FlashCpu(Backend):
    """The fused CPU operator."""

    name = "flash"
    capabilities = Capabilities(
        device_types=("cpu",),
        ranks=(4,),
        supports_different_head_dims=False,
        supports_mask_grad=False,
        supports_dropout=False,
        supports_non_positive_scale=False,
        needs_unit_last_stride=True,
    )

    def extra_reasons(self, signature: Signature, environment: Environment) -> tuple[str, ...]:
        """Add the rules on masks and switches."""
        del environment
        found = []
        if signature.has_mask_tensor and len(signature.mask_axes) not in (2, 4):
            found.append(f"takes masks of 2 or 4 dimensions; this one has {len(signature.mask_axes)}")
        if "f" in signature.disabled:
            found.append("is switched off in this process (enable_flash_sdp or sdpa_kernel)")
        return tuple(found)

    def bind(self, signature: Signature) -> Runner:
        """Return the operator behind mask conversion."""
        is_additive = signature.has_mask_tensor and signature.mask_dtype != "bool"
        return run_steady_flash_cpu if signature.wants_grad and is_additive else run_flash_cpu


def run_flash_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Run the fused CPU operator."""
    del enable_gqa  # the operator reads grouped keys as they are
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = additive(attn_mask, query.dtype)
    elif attn_mask is not None and query.dtype == torch.float64:
        # The operator takes a float32 mask's memory for float64 (torch 2.13.0); for halves it reads it right.
        attn_mask = attn_mask.to(torch.float64)
    return versions.flash_for_cpu(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def run_steady_flash_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Run the fused CPU operator, or Math where an additive mask holds a row of nothing but large negative values.

    The operator's backward takes probabilities from ``exp(score - logsumexp)``, and beside a row of nothing but -1e9
    or ``finfo.min`` the logarithm of their number is rounded away: each probability comes back as 1.
    Source: gradients off by 9.5 at 8 keys, torch 2.13.0.

    Note:
        Reads the mask once. What is traced cannot be read, and runs the operator, as PyTorch would.
    """
    if attn_mask is None or type(attn_mask) not in (torch.Tensor, torch.nn.Parameter):
        return run_flash_cpu(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if is_causal:
        attn_mask, is_causal = fold_causal(attn_mask, query.size(-2), key.size(-2), query.dtype), False
    top = attn_mask.detach().amax(-1)
    run = run_math if bool(((top < LOWEST_TOP) & (top > -math.inf)).any()) else run_flash_cpu
    return run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa or query.size(1) != key.size(1))
