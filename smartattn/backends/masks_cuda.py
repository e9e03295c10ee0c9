"""What PyTorch does to a mask before its fused CUDA operators, done here because the operators themselves do not.

A bool mask given to the raw operators is read as numbers, and a float32 mask beside half inputs as halves, so every
mask becomes additive in the dtype of query first.
"""

from __future__ import annotations

import math

import torch

from smartattn.backends.math import additive
from smartattn.signature import Signature

ALIGNED_ELEMENTS = 8
"""Elements that every outer stride of a mask must be a multiple of for the Efficient operator.

Source: ``pad_bias`` of PyTorch's ``attention.cpp``; rows of 43 and 498 elements seen right with it on an H200.
"""

UNALIGNED = "needs data and rows that start on 16 bytes; make query, key and value contiguous"
"""Reason of all three fused operators.

Source: seen on an H200 with torch 2.11.0: Efficient raises or loses the CUDA context, flash loses it, and cuDNN 9.19
answers without a word with errors of 1.5.
"""


def bias_bytes(signature: Signature) -> int:
    """Return the bytes of the additive copy of the mask, broadcast axes kept at size 1."""
    if not signature.has_mask_tensor:
        return 0
    sizes = {"b": signature.N, "h": signature.Hq, "l": signature.L}
    return signature.itemsize_bytes * signature.S * math.prod(sizes.get(axis, 1) for axis in signature.mask_axes[:-1])


def additive_in(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask as additive values in ``dtype``; finite values stay finite, -inf stays -inf."""
    if mask.dtype == torch.bool:
        return additive(mask, dtype)
    if mask.dtype == dtype:
        return mask
    # float32's lowest value rounds to -inf in half precision, and the operators multiply by log2(e), which would carry
    # half precision's own lowest value there too: "very unlikely" would become "never".
    narrowed = mask.clamp(min=torch.finfo(dtype).min / 2).to(dtype)
    return narrowed.masked_fill(mask == float("-inf"), float("-inf"))


def spread_keys(mask: torch.Tensor, S: int) -> torch.Tensor:
    """Return the mask with a key axis of full length, since the operators need its elements side by side."""
    if mask.size(-1) == S:
        return mask
    return mask.expand(*mask.shape[:-1], S).contiguous()


def align_rows(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask with rows that start on 16 bytes: itself, or a view of a padded copy."""
    is_aligned = mask.stride(-1) == 1 and all(stride % ALIGNED_ELEMENTS == 0 for stride in mask.stride()[:-1])
    if is_aligned and mask.storage_offset() % ALIGNED_ELEMENTS == 0:
        return mask
    S = mask.size(-1)
    return torch.nn.functional.pad(mask, (0, -S % ALIGNED_ELEMENTS or ALIGNED_ELEMENTS))[..., :S]


def as_bias(mask: torch.Tensor, dtype: torch.dtype, S: int, *, aligned: bool) -> torch.Tensor:
    """Return the 4-D additive bias of ``mask``; broadcast axes other than the key axis stay of size 1.

    Args:
        mask: bool or float, two to four dimensions.
        dtype: of query.
        S: key length.
        aligned: whether rows must start on 16 bytes.
    """
    mask = spread_keys(mask, S)
    if aligned and mask.dtype == torch.bool and S % ALIGNED_ELEMENTS:
        # Padding one-byte elements before the conversion moves fewer bytes than padding the result.
        padded = torch.nn.functional.pad(mask, (0, -S % ALIGNED_ELEMENTS))
        bias = additive(padded, dtype)[..., :S]
    else:
        bias = additive_in(mask, dtype)
    if aligned:
        bias = align_rows(bias)
    elif bias.storage_offset() % ALIGNED_ELEMENTS:
        # cuDNN loses the CUDA context over a mask that starts 2 bytes into its buffer (H200, cuDNN 9.19).
        bias = bias.clone()
    return bias[(None,) * (4 - bias.dim())] if bias.dim() < 4 else bias
