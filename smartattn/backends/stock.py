"""``stock``: PyTorch's own function with its own dispatch. It races as a route of its own."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from smartattn import versions
from smartattn.backends.base import Backend, Capabilities, Runner
from smartattn.backends.output_layout import steady_gradient
from smartattn.environment import Environment
from smartattn.signature import Call, Signature

_NAMES = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
    SDPBackend.OVERRIDEABLE.value: "overrideable",
}


class Stock(Backend):
    """PyTorch's ``scaled_dot_product_attention`` as the program would call it without smartattn."""

    name = "stock"
    capabilities = Capabilities(masks=("none", "causal", "bool", "additive"), supports_double_backward=False)
    plans_per_shape = True

    def extra_reasons(self, signature: Signature, environment: Environment) -> tuple[str, ...]:
        """Reject what PyTorch's function refuses although attention is defined for it."""
        del environment
        if "m" in signature.disabled and len(signature.disabled) == 4:
            return ("every backend of scaled_dot_product_attention is switched off in this process",)
        return ()

    def bind(self, signature: Signature) -> Runner:
        """Return PyTorch's function behind positional arguments."""
        is_cuda_training = signature.wants_grad and signature.device_type == "cuda"
        return run_steady_stock if is_cuda_training else run_stock


def run_stock(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Call PyTorch's function as it was when smartattn was imported."""
    return versions.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def run_steady_stock(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Call PyTorch's function and bring gradients into one order, since it may run cuDNN (see ``steady_gradient``)."""
    output = run_stock(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return steady_gradient(output) if output.dim() == 4 else output


def resolved_backend(call: Call) -> str:
    """Return the name of the backend that PyTorch would run for this call now, without running it.

    Note:
        Costs about 1 us on CPU; on CUDA it runs the real filters on the host. Uses the caller's gradient mode.
    """
    choice = versions.fused_choice(
        call.query, call.key, call.value, call.attn_mask, call.dropout_p, call.is_causal,
        scale=call.scale, enable_gqa=call.enable_gqa,
    )  # fmt: skip
    return _NAMES.get(int(choice), "unknown")
