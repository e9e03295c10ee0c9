"""Multi-head attention of nested tensors, by way of a padded tensor and a padding mask."""

from __future__ import annotations

from collections.abc import Callable

import torch


def nested_forward(
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    is_batch_first: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    need_weights: bool,
    is_causal: bool,
) -> tuple[torch.Tensor, None]:
    """Return the output as a nested tensor of the layout and lengths of ``query``.

    Args:
        forward: of the module, for padded inputs.
        is_batch_first: ``True``.
        query, key, value: nested, one and the same tensor; each element (length, E).
        key_padding_mask, attn_mask: ``None``, since the lengths are the mask.
        need_weights: ``False``.
        is_causal: as for padded inputs.

    Raises:
        ValueError: anything else, with what to do instead.
    """
    if query is not key or key is not value:
        raise ValueError("nested tensors are taken for self-attention only (query is key is value); pad them instead")
    if not is_batch_first or key_padding_mask is not None or attn_mask is not None or need_weights:
        raise ValueError("nested tensors need batch_first=True, no masks and need_weights=False; pad them instead")
    lengths = [part.size(0) for part in query.unbind()]
    padded = torch.nested.to_padded_tensor(query, 0.0)
    sizes = torch.tensor(lengths, device=padded.device)
    hidden = torch.arange(padded.size(1), device=padded.device) >= sizes[:, None]
    output, _ = forward(padded, padded, padded, key_padding_mask=hidden, need_weights=False, is_causal=is_causal)
    if query.layout == torch.jagged:
        # The very offsets of the input, since only tensors that share them can be added.
        return torch.nested.nested_tensor_from_jagged(output[~hidden], offsets=query.offsets()), None  # type: ignore[attr-defined]  # jagged tensors have them
    parts = [output[i, :length] for i, length in enumerate(lengths)]
    return torch.nested.as_nested_tensor(parts), None
