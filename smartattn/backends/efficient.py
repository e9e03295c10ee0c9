"""``efficient``: PyTorch's memory-efficient CUDA operator, called behind every conversion that PyTorch makes.

It takes any mask, gives a gradient for it, and returns zeros for rows that see no key. Its output lies in BSHD memory
whatever the layout of query.
Source: ``_scaled_dot_product_efficient_attention`` as called by PyTorch's ``attention.cpp``.
"""

from __future__ import annotations

import torch

from smartattn import torch_rules, versions
from smartattn.backends.base import Backend, Capabilities, Runner
from smartattn.backends.masks_cuda import UNALIGNED, as_bias, bias_bytes
from smartattn.environment import Environment
from smartattn.signature import Signature


class Efficient(Backend):
    """The memory-efficient CUDA operator."""

    name = "efficient"
    capabilities = Capabilities(
        device_types=("cuda",),
        dtypes=("float16", "bfloat16", "float32"),
        ranks=(4,),
        supports_groups=versions.EFFICIENT_TAKES_GROUPS,
        supports_non_positive_scale=False,
        needs_unit_last_stride=True,
    )

    def extra_reasons(self, signature: Signature, environment: Environment) -> tuple[str, ...]:
        """Add the rules on architecture, head dims, row alignment and switches."""
        found = torch_rules.efficient_reasons(signature, environment)
        if not torch_rules.has_aligned_memory(signature):
            found += (UNALIGNED,)
        return found

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of the converted mask, the log-sum-exp and, in training, the gradients' partial sums."""
        rows = signature.N * signature.Hq * signature.L
        # Source: the backward keeps delta and a float32 copy of dQ; a mask gradient is as large as the scores.
        backward_bytes = rows * (8 + 4 * signature.E) if signature.wants_grad else 0
        grad_bytes = signature.num_scores * signature.itemsize_bytes if "m" in signature.grads else 0
        return bias_bytes(signature) + backward_bytes + grad_bytes

    def bind(self, signature: Signature) -> Runner:
        """Return the operator behind mask conversion."""
        del signature
        return run_efficient


def run_efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Run the memory-efficient operator."""
    del enable_gqa
    # The backward reads the log-sum-exp also when only the mask wants a gradient; PyTorch forgets that case and its
    # backward then reads freed memory (pytorch#148476).
    wants_grad = query.requires_grad or key.requires_grad or value.requires_grad
    bias = None
    if attn_mask is not None:
        S = key.size(-2)
        bias = as_bias(attn_mask, query.dtype, S, aligned=True).expand(*query.shape[:-1], S)
        wants_grad = wants_grad or attn_mask.requires_grad
    output: torch.Tensor = versions.efficient_attention(
        query, key, value, bias, wants_grad and torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    return output
