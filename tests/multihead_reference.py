"""Multi-head attention written out in float64, as its documentation defines it."""

from __future__ import annotations

import torch


def reference(module, query, key, value, hidden=None, padding=None):
    """Return output and weights per head of a batch-first module.

    Args:
        hidden: bool, (L, S) or (N, heads, L, S), True is hidden; or floats that are added.
        padding: (N, S), bool.
    """
    state = {name: tensor.detach().double() for name, tensor in module.state_dict().items()}
    H, E = module.num_heads, module.embed_dim
    if "in_proj_weight" in state:
        weights = state["in_proj_weight"].chunk(3)
    else:
        weights = [state[f"{name}_proj_weight"] for name in "qkv"]
    biases = state["in_proj_bias"].chunk(3) if "in_proj_bias" in state else [torch.zeros(E).double()] * 3
    q, k, v = (
        x.detach().double() @ w.T + b for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )  # fmt: skip
    N, S = k.shape[:2]
    seen = torch.zeros(N, 1, q.size(1), S, dtype=torch.double)
    if hidden is not None:
        added = (
            torch.zeros_like(hidden, dtype=torch.double).masked_fill(hidden, float("-inf"))
            if hidden.dtype == torch.bool
            else hidden.double()
        )
        seen = seen + added
    if padding is not None:
        seen = seen.masked_fill(padding[:, None, None, :], float("-inf"))
    if "bias_k" in state:
        k = torch.cat([k, state["bias_k"].expand(N, 1, E)], 1)
        v = torch.cat([v, state["bias_v"].expand(N, 1, E)], 1)
    if module.add_zero_attn:
        k, v = (torch.cat([x, torch.zeros(N, 1, E).double()], 1) for x in (k, v))
    seen = torch.nn.functional.pad(seen, (0, k.size(1) - S))
    q, k, v = (x.unflatten(-1, (H, -1)).transpose(1, 2) for x in (q, k, v))
    probabilities = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5 + seen).softmax(-1).nan_to_num(0.0)
    output = (probabilities @ v).transpose(1, 2).flatten(-2)
    bias = state.get("out_proj.bias", torch.zeros(E).double())
    output = output @ state["out_proj.weight"].T + bias
    return output.to(query.dtype), probabilities.to(query.dtype)
