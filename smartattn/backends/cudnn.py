"""``cudnn``: cuDNN's fused attention through PyTorch's operator, behind masks of our own making.

cuDNN builds an execution plan for every new exact problem, per thread. PyTorch up to 2.11 gives it bool masks filled
with -65504, so that rows which see no key come out as garbage; filled with -inf they come out as zeros.
Source: ``_scaled_dot_product_cudnn_attention`` as called by PyTorch's ``attention.cpp``; pytorch#177868.
"""

from __future__ import annotations

import torch

from smartattn import torch_rules, versions
from smartattn.backends.base import Backend, Capabilities, Runner
from smartattn.backends.masks_cuda import UNALIGNED, as_bias, bias_bytes
from smartattn.backends.output_layout import steady_gradient
from smartattn.environment import Environment
from smartattn.signature import Signature


class Cudnn(Backend):
    """cuDNN's fused attention."""

    name = "cudnn"
    plans_per_shape = True
    capabilities = Capabilities(
        device_types=("cuda",),
        dtypes=("float16", "bfloat16"),
        ranks=(4,),
        head_dim_multiple=8,
        supports_mask_grad=False,
        supports_non_positive_scale=False,
        needs_unit_last_stride=True,
        is_deterministic=False,
    )

    def version(self) -> str:
        """Return the run-time version of cuDNN beside that of PyTorch."""
        return f"{torch.__version__} cudnn {torch.backends.cudnn.version() or 0}"

    def extra_reasons(self, signature: Signature, environment: Environment) -> tuple[str, ...]:
        """Add the rules on architecture, versions, head dims, lengths, dropout and switches."""
        found = torch_rules.cudnn_reasons(signature, environment)
        if not torch_rules.has_aligned_memory(signature):
            found += (UNALIGNED,)
        return found

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of the converted mask and, in training, of the float32 gradient of query."""
        rows = signature.N * signature.Hq * signature.L
        return bias_bytes(signature) + (rows * (8 + 4 * signature.E) if signature.wants_grad else 0)

    def bind(self, signature: Signature) -> Runner:
        """Return the operator behind mask conversion."""
        del signature
        return run_cudnn


def run_cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Run cuDNN's fused attention; grouped keys are read as they are."""
    del enable_gqa
    wants_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    # The operator expands the batch, head and query axes of a 4-D bias itself.
    bias = None if attn_mask is None else as_bias(attn_mask, query.dtype, key.size(-2), aligned=False)
    output: torch.Tensor = versions.cudnn_attention(
        query, key, value, bias, wants_grad, dropout_p, is_causal, False, scale=scale
    )[0]
    return steady_gradient(output) if wants_grad else output
