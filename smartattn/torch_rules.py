"""PyTorch's own rules for its fused CUDA operators, as pure arithmetic on signature and environment.

Two readers: the backends, for what a declaration cannot say, and ``stock_resolution``, which predicts what PyTorch's
function would run. Nothing here touches a device.
Source: ``sdp_utils.cpp`` and ``sdp_utils_cpp.h`` of PyTorch 2.11 to 2.14; the prediction was compared with
``torch._fused_sdp_choice`` on an H200 with torch 2.11.0 and cuDNN 9.19.
"""

from __future__ import annotations

from smartattn import versions
from smartattn.environment import Environment
from smartattn.signature import Signature

FLASH_MAX_HEAD_DIM = 256
HALVES = ("float16", "bfloat16")
_LATEST_SM = 121
"""Newest architecture that the fused operators of PyTorch 2.14 are built for."""


def flash_reasons(signature: Signature, environment: Environment) -> tuple[str, ...]:
    """Return why PyTorch's flash operator refuses, beyond dtype, mask, rank, head dim and strides."""
    s = signature
    found = []
    if not 80 <= environment.sm <= _LATEST_SM:
        found.append(f"needs an architecture from sm80 to sm{_LATEST_SM}; this is {environment.capability}")
    if s.is_causal and s.L != s.S:
        found.append(f"has its causal triangle at the lower right; L is {s.L}, S is {s.S}")
    if s.wants_grad and environment.sm in (86, 89, 120, 121) and _flash_cannot_train(s):
        found.append(f"has no backward for head dim {s.E} on {environment.capability}; pad to 256 without dropout")
    if "f" in s.disabled:
        found.append("is switched off in this process (enable_flash_sdp or sdpa_kernel)")
    return tuple(found)


def _flash_cannot_train(signature: Signature) -> bool:
    return 192 < signature.E <= 224 or (signature.E > 224 and signature.dropout != "none")


def flash_backward_elements(signature: Signature) -> int:
    """Return the elements of the flash backward's float32 buffer for the gradient of query.

    Source: N * Hq * roundup(L, 128) * roundup(max(E, 32), 32), the allocation of PyTorch's flash backward.
    """
    return signature.N * signature.Hq * _round_up(signature.L, 128) * _round_up(max(signature.E, 32), 32)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def efficient_multiple(dtype: str, sm: int) -> int:
    """Return what Efficient's head dims must be multiples of.

    Source: ``minimum_gemm_alignment`` of PyTorch's ``sdp_utils.cpp``: 16 bytes wherever tensor cores are used.
    """
    if dtype in HALVES:
        return 8 if sm >= 70 else 1
    return 4 if sm >= 80 else 1


def efficient_reasons(signature: Signature, environment: Environment) -> tuple[str, ...]:
    """Return why PyTorch's Efficient operator refuses, beyond dtype, rank, heads and last strides."""
    s, sm = signature, environment.sm
    found = []
    if not 50 <= sm <= _LATEST_SM:
        found.append(f"needs an architecture from sm50 to sm{_LATEST_SM}; this is {environment.capability}")
    if s.dtype == "bfloat16" and sm < 80:
        found.append(f"takes bfloat16 from sm80 on; this is {environment.capability}")
    multiple = efficient_multiple(s.dtype, sm)
    if s.E % multiple or s.Ev % multiple:
        found.append(f"takes head dims that are multiples of {multiple}; E is {s.E}, Ev is {s.Ev}")
    if s.dropout != "none" and s.N > versions.MAX_GRID:
        found.append(f"has no dropout for more than {versions.MAX_GRID} batches; there are {s.N}")
    if "e" in s.disabled:
        found.append("is switched off in this process (enable_mem_efficient_sdp or sdpa_kernel)")
    return tuple(found)


def cudnn_max_head_dims(environment: Environment, *, is_different: bool) -> tuple[int, int]:
    """Return the largest (E, Ev) that PyTorch gives to cuDNN.

    Source: ``check_cudnn_head_dim`` of PyTorch 2.11 (disassembled) and 2.14 (source).
    """
    is_new = versions.parse(environment.torch) >= (2, 14)
    sm, cudnn = environment.sm, environment.cudnn
    is_blackwell = 100 <= sm < 110
    if is_different and cudnn >= 91100 and (is_blackwell or (is_new and sm == 90)):
        return 192, 128
    wide = cudnn > 92200 if is_new else cudnn >= 91000
    return (256, 256) if sm == 90 and wide else (128, 128)


def cudnn_reasons(signature: Signature, environment: Environment, *, takes_any_rate: bool = False) -> tuple[str, ...]:
    """Return why PyTorch does not give this problem to cuDNN, beyond dtype, mask, rank and strides.

    ``takes_any_rate`` leaves the dropout rate out, which PyTorch looks at from 2.12 on.
    """
    s, sm, cudnn = signature, environment.sm, environment.cudnn
    version = versions.parse(environment.torch)
    if not cudnn:
        return ("needs cuDNN; this build of PyTorch has none",)
    found = []
    if not 80 <= sm <= _LATEST_SM:
        found.append(f"needs an architecture from sm80 to sm{_LATEST_SM}; this is {environment.capability}")
    found += _cudnn_head_dim_reasons(s, environment)
    if s.S == 1:
        found.append("refuses a single key; S is 1")
    if s.L == 1 and s.dropout != "none":
        found.append("refuses dropout with a single query; L is 1")
    if s.L == 1 and version >= (2, 14) and 100 <= sm < 120 and 91900 <= cudnn <= 92500:
        found.append(f"refuses a single query on {environment.capability} with cuDNN 9.19 to 9.25")
    if s.dropout == "other" and not takes_any_rate:
        found.append("takes dropout rates in sixteenths; dropout_p is none")
    if s.dropout != "none" and 91100 <= cudnn < 91400:
        found.append("has faulty dropout in cuDNN 9.11 to 9.13")
    if "c" in s.disabled:
        found.append("is switched off in this process (enable_cudnn_sdp or sdpa_kernel)")
    return tuple(found)


def _cudnn_head_dim_reasons(signature: Signature, environment: Environment) -> list[str]:
    s = signature
    if s.E == s.Ev <= 128:
        return []
    found = []
    wide_E, wide_Ev = cudnn_max_head_dims(environment, is_different=s.E != s.Ev)
    if s.E > wide_E or s.Ev > wide_Ev:
        found.append(f"takes head dims up to {wide_E} and {wide_Ev} here; E is {s.E}, Ev is {s.Ev}")
    elif (
        # PyTorch checks this from 2.14 on; on an H200 with 2.11 and cuDNN 9.19 every such head dim trained right.
        s.wants_grad
        and versions.parse(environment.torch) >= (2, 14)
        and max(s.E, s.Ev) > 128
        and (s.E, s.Ev) not in ((192, 128), (256, 256))
    ):
        found.append(f"trains head dims above 128 only at (192, 128) and (256, 256); E is {s.E}, Ev is {s.Ev}")
    return found


def prefers_cudnn(environment: Environment) -> bool:
    """Return whether PyTorch tries cuDNN first here.

    Source: read out of the 2.10 to 2.14 binaries: run-time cuDNN above 9.15.0 on compute major 9 or 10, unless the
    environment variable TORCH_CUDNN_SDPA_DEPRIORITIZED is set.
    """
    version, sm = versions.parse(environment.torch), environment.sm
    return version >= (2, 10) and environment.cudnn > 91500 and 90 <= sm < 110 and not versions.CUDNN_IS_LAST


def stock_resolution(signature: Signature, environment: Environment) -> str:
    """Return which implementation PyTorch's own function would run on CUDA: cudnn, flash, efficient or math.

    Where the rules of a version are not known exactly, the implementation with more known faults is named.
    """
    s = signature
    if s.rank != 4 and not (s.rank == 3 and versions.parse(environment.torch) >= (2, 14)):
        return "math"
    is_cudnn_first = prefers_cudnn(environment)
    if is_cudnn_first and _cudnn_takes(s, environment):
        return "cudnn"
    if _flash_takes(s, environment):
        return "flash"
    if _efficient_takes(s, environment):
        return "efficient"
    # Behind Math in the other order, cuDNN is only reached when Math is switched off.
    return "cudnn" if "m" in s.disabled and not is_cudnn_first and _cudnn_takes(s, environment) else "math"


def stock_output_order(signature: Signature, environment: Environment) -> str:
    """Return the memory order of the output that PyTorch's own function would give on CUDA.

    ``query``: that of query; ``bshd`` and ``bhsd``: that order whatever query's is.
    Source: strides seen on an H200 with torch 2.11.0; the head dim padded for flash makes query contiguous first.
    """
    resolved = stock_resolution(signature, environment)
    if resolved == "flash" and signature.E % 8:
        return "bhsd"
    return {"efficient": "bshd", "math": "bhsd"}.get(resolved, "query")


def cpu_flash_takes(signature: Signature) -> bool:
    """Return whether PyTorch's own function would run its fused operator on CPU.

    Source: 28 calls traced on torch 2.13.0; everything else runs Math. One key head without ``enable_gqa`` is refused
    up to torch 2.13.
    """
    s = signature
    return (
        s.rank == 4
        and s.E == s.Ev
        and s.dropout == "none"
        and "m" not in s.grads
        and "f" not in s.disabled
        and len(s.mask_axes) in (0, 2, 4)
        and (s.gqa != "implicit" or versions.TORCH >= (2, 14))
        and all(layout.has_unit_last_stride for layout in s.layouts)
    )


def has_aligned_memory(signature: Signature) -> bool:
    """Return whether query, key and value start, and every row of them starts, on 16 bytes."""
    query, key, value = signature.layouts
    return (
        query.has_aligned_start
        and key.has_aligned_start
        and value.has_aligned_start
        and query.has_aligned_rows
        and key.has_aligned_rows
        and value.has_aligned_rows
    )


def _has_plain_heads(signature: Signature, environment: Environment) -> bool:
    return signature.gqa != "implicit" or versions.parse(environment.torch) >= (2, 14)


def _has_unit_strides(signature: Signature) -> bool:
    query, key, value = signature.layouts
    mask = signature.mask_layout
    return (
        query.has_unit_last_stride
        and key.has_unit_last_stride
        and value.has_unit_last_stride
        and (mask is None or mask.has_unit_last_stride)
    )


def _flash_takes(s: Signature, environment: Environment) -> bool:
    return (
        s.dtype in HALVES
        and not s.has_mask_tensor
        and s.E == s.Ev <= FLASH_MAX_HEAD_DIM
        and _has_unit_strides(s)
        and _has_plain_heads(s, environment)
        and not flash_reasons(s, environment)
    )


def _efficient_takes(s: Signature, environment: Environment) -> bool:
    version, sm = versions.parse(environment.torch), environment.sm
    multiple = efficient_multiple(s.dtype, sm)
    return (
        s.dtype in (*HALVES, "float32")
        and not (s.dtype == "bfloat16" and sm < 80)
        and 50 <= sm <= _LATEST_SM
        and s.E % multiple == 0 == s.Ev % multiple
        and _has_unit_strides(s)
        and (s.Hq == s.H or version >= (2, 14))
        and (version < (2, 13) or all(layout.has_aligned_start for layout in s.layouts))
        and "e" not in s.disabled
    )


def _cudnn_takes(s: Signature, environment: Environment) -> bool:
    return (
        s.dtype in HALVES
        and s.E % 8 == 0 == s.Ev % 8
        and len(s.mask_axes) in (0, 2, 4)
        and "m" not in s.grads
        and s.deterministic != "strict"
        and _has_unit_strides(s)
        and _has_plain_heads(s, environment)
        and not cudnn_reasons(s, environment, takes_any_rate=versions.parse(environment.torch) < (2, 12))
    )
