"""``math``: PyTorch's reference implementation, the fallback that takes everything and can be differentiated twice."""

from __future__ import annotations

import torch

from smartattn import versions
from smartattn.backends.base import Backend, Capabilities, Runner
from smartattn.signature import Signature


class Math(Backend):
    """PyTorch's composite attention: two matrix products around a safe softmax, half inputs raised to float32."""

    name = "math"
    capabilities = Capabilities(supports_double_backward=True)

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of the score matrix and its float32 copies.

        Source: counted on torch 2.13: scores, safe softmax's result and its mask in the compute dtype; gradients keep
        two of them. Half inputs compute in float32.
        """
        itemsize = 8 if signature.dtype == "float64" else 4
        copies = 4 if signature.wants_grad else 2
        scores_bytes = signature.num_scores * (itemsize * copies + 1)
        keys = signature.N * signature.Hq * signature.S * (signature.E + signature.Ev) * itemsize
        return scores_bytes + (keys if signature.H != signature.Hq or signature.itemsize_bytes < itemsize else 0)

    def bind(self, signature: Signature) -> Runner:
        """Return the math operator behind mask conversion."""
        del signature
        return run_math


def run_math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Run Math; a mask together with ``is_causal`` is folded into one, since the operator takes only either."""
    if attn_mask is not None:
        if is_causal:
            attn_mask = fold_causal(attn_mask, query.size(-2), key.size(-2), query.dtype)
            is_causal = False
        elif attn_mask.dtype == torch.bool:
            # Called directly, the operator would add a bool mask as 0 and 1.
            attn_mask = additive(attn_mask, query.dtype)
    return versions.math_attention(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a bool mask as 0 where a key is visible and -inf where it is not.

    Note:
        One kernel: the two values are made once per dtype and device and kept (4 bytes each).
    """
    visible, hidden = _values(mask, dtype)
    return torch.where(mask, visible, hidden)


_kept_values: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}


def _values(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    found = _kept_values.get((dtype, mask.device)) if type(mask) is torch.Tensor else None
    if found is not None:
        return found
    made = (
        torch.zeros((), dtype=dtype, device=mask.device),
        torch.full((), float("-inf"), dtype=dtype, device=mask.device),
    )
    # What is made under inference mode, capture or tracing belongs to that scope and must not outlive it.
    is_lasting = type(mask) is torch.Tensor and type(made[0]) is torch.Tensor and not made[0].is_inference()
    if is_lasting and not versions.is_capturing(mask.device.type) and versions.functorch_level() is None:
        _kept_values[dtype, mask.device] = made
    return made


def fold_causal(mask: torch.Tensor, L: int, S: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask that applies ``mask`` and the top-left triangle both."""
    triangle = torch.ones((L, S), dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return additive(mask & triangle, dtype)
    return mask.masked_fill(~triangle, float("-inf"))
