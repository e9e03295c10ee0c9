"""Known faults of fused attention, as data: where each was seen, which calls it touches, and who reported it.

A row names *paths*: ``cudnn``, ``flash`` and ``efficient`` stand for an operator however it is reached;
``stock:cudnn`` and the like for PyTorch's own function when it resolves to that operator, because the fault lies in
what PyTorch does before it. Rows hold until a fixed version is known. Each condition is arithmetic on the signature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from smartattn import torch_rules, versions
from smartattn.environment import Environment
from smartattn.signature import Signature

Range = tuple[int, int]
ANY: Range = (0, 1 << 30)


@dataclass(frozen=True, slots=True)
class KnownFault:
    """One combination that was seen wrong or fatal.

    Attributes:
        name: for tests and messages.
        paths: what it touches.
        applies: whether a signature meets it.
        text: what happens and what to do, read after "cudnn: " or "PyTorch would run cudnn, which".
        reference: where it was reported or seen.
        before_torch: first version of PyTorch without it; empty while none is known.
        sm: architectures from the first up to and without the second.
        cudnn: run-time versions of cuDNN, likewise.
    """

    name: str
    paths: tuple[str, ...]
    applies: Callable[[Signature], bool]
    text: str
    reference: str
    before_torch: tuple[int, ...] = ()
    sm: Range = ANY
    cudnn: Range = ANY

    def concerns(self, environment: Environment) -> bool:
        """Return whether this environment has the fault."""
        if self.before_torch and versions.parse(environment.torch) >= self.before_torch:
            return False
        return self.sm[0] <= environment.sm < self.sm[1] and self.cudnn[0] <= environment.cudnn < self.cudnn[1]


def _has_float32_mask_beside_halves(s: Signature) -> bool:
    return s.mask_dtype == "float32" and s.dtype in torch_rules.HALVES


def _is_unaligned(s: Signature) -> bool:
    return not torch_rules.has_aligned_memory(s)


def _has_unaligned_mask(s: Signature) -> bool:
    return s.mask_layout is not None and s.mask_dtype != "bool" and not s.mask_layout.has_aligned_start


def _has_nan_gradient_length(s: Signature) -> bool:
    return s.wants_grad and s.S % 128 == 64 and s.mask != "causal"


def _has_expanded_keys(s: Signature) -> bool:
    is_expanded = bool(s.layouts[1].expanded or s.layouts[2].expanded)
    return is_expanded and s.has_mask_tensor and s.S % 32 == 1


FAULTS: tuple[KnownFault, ...] = (
    KnownFault(
        "cudnn_fills_bool_masks_with_a_finite_value",
        ("stock:cudnn",),
        lambda s: s.mask_dtype == "bool",
        "gives rows that see no key garbage and their gradients NaN",
        "pytorch#177842; seen on H200, torch 2.11.0, cuDNN 9.19",
        before_torch=(2, 12),
    ),
    KnownFault(
        "cudnn_misreads_float32_masks",
        ("stock:cudnn",),
        _has_float32_mask_beside_halves,
        "reads a float32 mask as halves; cast the mask to the dtype of query",
        "pytorch#191612; seen on H200, torch 2.11.0",
        before_torch=(2, 14),
    ),
    KnownFault(
        "efficient_raises_over_float32_masks",
        ("stock:efficient",),
        _has_float32_mask_beside_halves,
        "raises over a float32 mask beside half inputs; cast the mask to the dtype of query",
        "pytorch#191612",
    ),
    KnownFault(
        "cudnn_misreads_unaligned_memory",
        ("stock:cudnn",),
        lambda s: _is_unaligned(s) or _has_unaligned_mask(s),
        "is wrong or loses the CUDA context over memory that does not start on 16 bytes; make the tensors contiguous",
        "seen on H200, torch 2.11.0, cuDNN 9.19: starts of 2, 4 and 8 bytes and rows of 65 halves, errors of 1.5",
    ),
    KnownFault(
        "flash_reads_unaligned_memory",
        ("flash",),
        lambda s: s.E % 8 == 0 and _is_unaligned(s),
        "loses the CUDA context over memory that does not start on 16 bytes; make the tensors contiguous",
        "seen on H200, torch 2.11.0",
    ),
    KnownFault(
        "efficient_reads_unaligned_starts",
        ("stock:efficient",),
        lambda s: not all(layout.has_aligned_start for layout in s.layouts),
        "loses the CUDA context over data that does not start on 16 bytes; make the tensors contiguous",
        "pytorch#183484; seen on H200, torch 2.11.0",
        before_torch=(2, 13),
    ),
    KnownFault(
        "efficient_raises_over_unaligned_rows",
        ("stock:efficient",),
        lambda s: not all(layout.has_aligned_rows for layout in s.layouts),
        "raises over rows that do not start on 16 bytes; make the tensors contiguous",
        "seen on H200, torch 2.11.0",
    ),
    KnownFault(
        "efficient_raises_over_masks_of_one_key_column",
        ("stock:efficient",),
        lambda s: s.has_mask_tensor and s.mask_axes[-1] == "1" and s.S > 1,
        "raises over a mask that broadcasts over keys; expand it over S in memory",
        "seen on H200, torch 2.11.0",
    ),
    KnownFault(
        "efficient_forgets_mask_only_gradients",
        ("stock:efficient",),
        lambda s: s.grads == "m",
        "loses the CUDA context in backward when only the mask wants a gradient",
        "pytorch#148476; seen on H200, torch 2.11.0",
    ),
    KnownFault(
        "efficient_misreads_expanded_keys",
        ("efficient", "stock:efficient"),
        _has_expanded_keys,
        "is wrong for expanded keys under a mask when S is 1 modulo 32; make key and value contiguous",
        "pytorch#191937; seen on H200, torch 2.11.0: errors of 0.5 to 4.6",
    ),
    KnownFault(
        "cudnn_backward_is_nan_at_key_lengths_64_modulo_128",
        ("cudnn", "stock:cudnn"),
        _has_nan_gradient_length,
        "gives NaN gradients of query for very negative logits when S is 64 modulo 128",
        "pytorch#196678; seen on H200, torch 2.11.0, cuDNN 9.19: with and without a mask, clean when causal",
        sm=(90, 100),
    ),
    KnownFault(
        "cudnn_backward_is_nan_at_one_query",
        ("cudnn", "stock:cudnn"),
        lambda s: s.wants_grad and s.L == 1,
        "gives NaN gradients of key and value for very negative logits when L is 1",
        "cudnn-frontend#1072; seen on H200, torch 2.11.0, cuDNN 9.19, at key lengths that are multiples of 64",
        sm=(90, 100),
    ),
    KnownFault(
        "cudnn_decode_is_wrong_with_few_key_heads",
        ("cudnn", "stock:cudnn"),
        lambda s: s.L == 1 and s.H < 8 and s.group > 1,
        "damages long generations with fewer than 8 key heads on this architecture",
        "pytorch#193893: sm100, torch 2.11 to 2.13, cuDNN 9.19 and 9.20",
        before_torch=(2, 14),
        sm=(100, 110),
    ),
    KnownFault(
        "fused_operators_need_a_positive_scale",
        ("stock:cudnn", "stock:flash"),
        lambda s: s.scale == "non_positive",
        "gives NaN for a scale of 0 or below",
        "seen on H200, torch 2.11.0, cuDNN 9.19",
    ),
    KnownFault(
        "flash_for_cpu_misreads_float32_masks",
        ("stock:flash_for_cpu",),
        lambda s: s.dtype == "float64" and s.mask_dtype == "float32",
        "reads a float32 mask as float64 on CPU; cast the mask to float64",
        "seen on torch 2.13.0",
    ),
    KnownFault(
        "flash_for_cpu_needs_a_positive_scale",
        ("stock:flash_for_cpu",),
        lambda s: s.scale == "non_positive" and s.is_causal,
        "gives NaN on CPU for is_causal with a scale of 0 or below: keys are hidden by -inf before scaling",
        "seen on torch 2.13.0",
    ),
    KnownFault(
        "flash_for_cpu_gradients_of_rows_of_nothing_but_large_negative_values",
        ("stock:flash_for_cpu",),
        lambda s: s.wants_grad and s.mask_dtype not in ("", "bool") and torch_rules.cpu_flash_takes(s),
        "gives wrong gradients on CPU where an additive mask holds a row of nothing but -1e9 or finfo.min",
        "seen on torch 2.13.0: off by 9.5 at 8 keys",
    ),
)
