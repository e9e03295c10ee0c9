"""``nn.MultiheadAttention`` with attention answered by smartattn: the same constructor, weights, arguments and results.

Where PyTorch's own module is wrong, this one is right:

- A query that sees no key gives 0 and a gradient of 0, whatever ``need_weights`` says (there: NaN with weights).
- ``is_causal=True`` means causal in every combination, with or without a mask (there: a hint that needs a mask, and
  that is believed even when it is untrue). The columns of ``bias_k`` and ``add_zero_attn`` stay visible.
- ``out_proj`` is called as a module, so that hooks, adapters and quantisation of it take effect.
- A batch-first output is contiguous in training and in evaluation.
- Nested tensors are taken in training too.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn import functional

from smartattn import versions
from smartattn.attention import attend
from smartattn.multihead_masks import combined_mask
from smartattn.multihead_nested import nested_forward
from smartattn.wishes import Site, wish_of


class SmartMultiheadAttention(torch.nn.MultiheadAttention):
    """Multi-head attention as ``nn.MultiheadAttention``, with the fastest valid route for each call.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as
            PyTorch's module takes them; parameters, their names and their start values are the same.
        backend, mode, accuracy, dynamic: wishes for this place, as ``SmartAttention`` takes them.

    Raises:
        UnknownNameError: for a backend, route, mode or accuracy that does not exist.

    Note:
        ``need_weights=True`` (the default, as in PyTorch) computes the weights themselves: L x S floats per head, and
        no choice to be made. Ask for ``need_weights=False`` to profit. ``torch.jit.script`` turns the module into
        PyTorch's own with the same parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
        mode: str | None = None,
        accuracy: str | None = None,
        dynamic: bool | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self._site = Site(wish_of(backend, mode, accuracy, dynamic))
        self.register_forward_pre_hook(keep_called)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention of projected inputs.

        Args:
            query: (L, N, E), (N, L, E) when ``batch_first``, or (L, E).
            key: (S, N, kdim), (N, S, kdim) or (S, kdim).
            value: (S, N, vdim), (N, S, vdim) or (S, vdim).
            key_padding_mask: (N, S) or (S,); bool (True is hidden) or added to the scores.
            need_weights: return the weights too; see the class.
            attn_mask: (L, S), (N * num_heads, L, S) or (N, num_heads, L, S); bool (True is hidden) or added.
            average_attn_weights: return the mean of the weights over heads.
            is_causal: apply the top-left triangle, beside whatever masks are given.

        Returns:
            Output of the shape of ``query``, and weights (N, L, S), (N, num_heads, L, S) when not averaged, without N
            for inputs without it, or ``None``. With dropout in training the weights are those after dropout.

        Raises:
            ValueError: shapes that do not fit, with the argument, the shape given and the shapes allowed.
        """
        return multihead_forward(
            self, self._site, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights,
            is_causal,
        )  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # PyTorch's own
        self.__dict__.setdefault("_site", Site(wish_of()))

    def __prepare_scriptable__(self) -> torch.nn.MultiheadAttention:
        """Return PyTorch's module with these very parameters, for ``torch.jit.script``."""
        stock = torch.nn.MultiheadAttention.__new__(torch.nn.MultiheadAttention)
        stock.__dict__ = {name: value for name, value in self.__dict__.items() if name != "_site"}
        stock.__dict__["_forward_pre_hooks"] = type(self._forward_pre_hooks)()
        return stock


def keep_called(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """Do nothing, as a forward pre-hook.

    ``nn.TransformerEncoderLayer`` computes attention itself, without calling its ``self_attn``, in evaluation without
    gradients; a module inside it that has a hook keeps it from doing so.
    """
    del module, args


def multihead_forward(
    module: torch.nn.MultiheadAttention,
    site: Site,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the forward of any ``nn.MultiheadAttention``; see ``SmartMultiheadAttention.forward``."""
    if query.is_nested or key.is_nested or value.is_nested:
        forward = functools.partial(multihead_forward, module, site)
        is_batch_first = module.batch_first
        return nested_forward(
            forward, is_batch_first, query, key, value, key_padding_mask, attn_mask, need_weights, is_causal
        )
    is_batched, shapes = _check_shapes(module, query, key, value)
    N, L, S = shapes
    q, k, v = _project(module, query, key, value)
    is_batch_first = module.batch_first or not is_batched
    q, k, v = (_split_heads(x, module.num_heads, is_batched, is_batch_first) for x in (q, k, v))
    num_extra = 0
    if module.bias_k is not None and module.bias_v is not None:
        k, v, num_extra = _append(k, module.bias_k), _append(v, module.bias_v), 1
    if module.add_zero_attn:
        k, v, num_extra = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1)), num_extra + 1
    mask, is_causal = combined_mask(
        attn_mask, key_padding_mask, bool(is_causal), (N, module.num_heads, L, S), num_extra, q,
        is_batched=is_batched, is_dense=need_weights,
    )  # fmt: skip
    dropout_p = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        output, weights = _attend_with_weights(q, k, v, mask, dropout_p)
        weights = weights.mean(dim=1) if average_attn_weights else weights
        weights = weights if is_batched else weights.squeeze(0)
    else:
        output = attend(site, q, k, v, mask, dropout_p, is_causal, None, False)
    output = output.permute(0, 2, 1, 3) if is_batch_first else output.permute(2, 0, 1, 3)
    output = module.out_proj(output.flatten(-2).contiguous())
    return output if is_batched else output.squeeze(0), weights


def _check_shapes(
    module: torch.nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[bool, tuple[int, int, int]]:
    """Return whether the inputs have a batch dimension, and N, L and S."""
    rank = query.dim()
    length, batch = (0, None) if rank == 2 else (1, 0) if module.batch_first else (0, 1)
    if rank not in (2, 3) or key.dim() != rank or value.dim() != rank:
        raise ValueError(
            f"got {_given(query, key, value)}; all three must have 3 dimensions, or all three 2 for input without a batch"
        )
    shape = (1 if batch is None else query.size(batch), query.size(length), key.size(length))
    if not torch.compiler.is_compiling() and versions.is_jit_tracing():
        # Sizes are tensors then; comparing them would put the sizes of now into the trace.
        return rank == 3, shape
    tensors, sizes = {"query": query, "key": key, "value": value}, (module.embed_dim, module.kdim, module.vdim)
    for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
        if tensor.size(-1) != size:
            given = _given(query, key, value)
            raise ValueError(f"{name} has {tensor.size(-1)} features ({given}); this module takes {size}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"got {_given(query, key, value)}; key and value must have the same length and batch size")
    if batch is not None and query.size(batch) != key.size(batch):
        raise ValueError(f"got {_given(query, key, value)}; query and key must have the same batch size")
    return rank == 3, shape


def _given(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _project(
    module: torch.nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return query, key and value after their projections, in as few products as their identity allows."""
    bias, packed, E = module.in_proj_bias, module.in_proj_weight, module.embed_dim
    if packed is None:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        inputs = (query, key, value)
        return tuple(functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
    if query is key and key is value:
        return functional.linear(query, packed, bias).chunk(3, dim=-1)
    q_bias, kv_bias = (None, None) if bias is None else bias.split([E, 2 * E])
    q_weight, kv_weight = packed.split([E, 2 * E])
    q = functional.linear(query, q_weight, q_bias)
    if key is value:
        return (q, *functional.linear(key, kv_weight, kv_bias).chunk(2, dim=-1))
    k_weight, v_weight = kv_weight.chunk(2)
    k_bias, v_bias = (None, None) if kv_bias is None else kv_bias.chunk(2)
    return q, functional.linear(key, k_weight, k_bias), functional.linear(value, v_weight, v_bias)


def _split_heads(x: torch.Tensor, num_heads: int, is_batched: bool, is_batch_first: bool) -> torch.Tensor:
    """Return (N, num_heads, length, head dim) as a view."""
    x = x.unflatten(-1, (num_heads, -1))
    if not is_batched:
        x = x.unsqueeze(0)
    return x.transpose(1, 2) if is_batch_first else x.permute(1, 2, 0, 3)


def _append(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Append one learnt position (1, 1, E) to (N, num_heads, S, head dim)."""
    N, num_heads, _, head_dim = x.shape
    # Under autocast the projection has the lower dtype and the parameter has not.
    return torch.cat([x, bias.to(x.dtype).view(1, num_heads, 1, head_dim).expand(N, -1, -1, -1)], dim=2)


def _attend_with_weights(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the weights, both 0 for a query that sees no key."""
    scores = (query * (1.0 / math.sqrt(query.size(-1)))) @ key.transpose(-2, -1)
    if mask is None:
        weights = scores.softmax(-1)
    else:
        scores = scores.masked_fill(mask.logical_not(), float("-inf")) if mask.dtype == torch.bool else scores + mask
        weights = versions.safe_softmax(scores, -1)
    if dropout_p > 0.0:
        weights = functional.dropout(weights, dropout_p)
    return weights @ value, weights
