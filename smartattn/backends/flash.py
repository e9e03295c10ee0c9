"""``flash`` on CUDA: PyTorch's flash-attention operator, called behind every check and conversion that PyTorch makes.

Called raw with L unlike S, the operator aligns its causal triangle at the lower right, so only squares are declared.
Source: ``_scaled_dot_product_flash_attention`` as called by PyTorch's ``attention.cpp``.
"""

from __future__ import annotations

import math

import torch

from smartattn import torch_rules, versions
from smartattn.backends.base import Backend, Capabilities, Runner
from smartattn.backends.masks_cuda import UNALIGNED
from smartattn.environment import Environment
from smartattn.signature import Signature

HEAD_DIM_MULTIPLE = 8
"""Head dims are padded to a multiple of this. Source: ``pad_last_dim<8>`` of PyTorch's ``attention.cpp``."""


class FlashCuda(Backend):
    """The flash-attention CUDA operator."""

    name = "flash"
    capabilities = Capabilities(
        device_types=("cuda",),
        dtypes=("float16", "bfloat16"),
        masks=("none", "causal"),
        ranks=(4,),
        max_head_dim=torch_rules.FLASH_MAX_HEAD_DIM,
        supports_different_head_dims=False,
        supports_mask_grad=False,
        supports_non_positive_scale=False,
        needs_unit_last_stride=True,
    )

    def version(self) -> str:
        """Return the version of PyTorch and of the flash implementation that it runs."""
        implementation = versions.active_flash_implementation()
        return str(torch.__version__) + ("" if implementation == "FA2" else f" {implementation}")

    def extra_reasons(self, signature: Signature, environment: Environment) -> tuple[str, ...]:
        """Add the rules on architecture, causal shapes, training and switches."""
        found = torch_rules.flash_reasons(signature, environment)
        # Head-dim padding copies, and a copy is aligned; read unaligned, the operator loses the CUDA context.
        if signature.E % HEAD_DIM_MULTIPLE == 0 and not torch_rules.has_aligned_memory(signature):
            found += (UNALIGNED,)
        implementation = versions.active_flash_implementation()
        if implementation != "FA2" and signature.dropout != "none":
            found += (f"the active flash implementation {implementation} has no dropout",)
        return found

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of padded copies and, in training, of the float32 gradient of query."""
        s = signature
        rows = s.N * (s.Hq * s.L * 2 + s.H * s.S * 2)
        padded = -(-s.E // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
        pad_bytes = rows * padded * s.itemsize_bytes if s.E % HEAD_DIM_MULTIPLE else 0
        # Source: dq_accum of the flash backward, lengths rounded up to 128, head dims to 32; seen on torch 2.11.
        backward_bytes = torch_rules.flash_backward_elements(s) * 4 if s.wants_grad else 0
        return pad_bytes + backward_bytes

    def bind(self, signature: Signature) -> Runner:
        """Return the operator, behind head-dim padding where the head dim needs it."""
        return run_padded_flash if signature.E % HEAD_DIM_MULTIPLE else run_flash


def run_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Run the flash operator; grouped keys are read as they are."""
    del attn_mask, enable_gqa
    output: torch.Tensor = versions.flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return output


def run_padded_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Run the flash operator on head dims padded with zeros; the scale is that of the true head dim."""
    E = query.size(-1)
    pad = (0, -E % HEAD_DIM_MULTIPLE)
    query, key, value = (torch.nn.functional.pad(t, pad) for t in (query, key, value))
    scale = 1.0 / math.sqrt(E) if scale is None else scale
    return run_flash(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)[..., :E]
