"""The contract of a backend: one implementation of scaled dot-product attention.

A new backend is one file with a subclass of ``Backend`` and one line in ``registry``. It declares what it supports as
``Capabilities``; the base class turns those into reasons; ``extra_reasons`` adds what a declaration cannot say.
Eligibility is a pure function of signature and environment: it runs, logs and raises nothing.

``run`` gets PyTorch's arguments (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), positionally,
and returns the output alone. It must do every conversion that PyTorch does before this implementation, because
the operators below ``scaled_dot_product_attention`` check nothing: a wrong stride or a bool mask is read as garbage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from smartattn.environment import Environment
from smartattn.signature import Signature

Runner: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", float, bool, "float | None", bool], torch.Tensor
]
"""What a call runs: (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> output."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend declares about itself; ``None`` or an empty tuple means no limit.

    Attributes:
        device_types: device types it runs on.
        dtypes: of query, key and value.
        masks: mask classes it can be given (``none`` and ``causal`` included when they are).
        ranks: numbers of dimensions of query, key and value.
        max_head_dim: of query and value.
        head_dim_multiple: that head dims must be multiples of.
        supports_different_head_dims: Ev unlike E.
        supports_groups: fewer key heads than query heads.
        supports_training: gradients of query, key and value.
        supports_mask_grad: a gradient of the mask.
        supports_dropout: a dropout rate above 0.
        supports_non_positive_scale: a scale of 0 or below.
        supports_double_backward: second derivatives and forward-mode differentiation.
        needs_unit_last_stride: elements of the head dim side by side.
        needs_aligned_start: data that starts on 16 bytes.
        is_deterministic: same bits twice, also in backward, when deterministic algorithms are asked for.
    """

    device_types: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")
    masks: tuple[str, ...] = ("none", "causal", "bool", "additive", "causal+bool", "causal+additive")
    ranks: tuple[int, ...] = ()
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    supports_different_head_dims: bool = True
    supports_groups: bool = True
    supports_training: bool = True
    supports_mask_grad: bool = True
    supports_dropout: bool = True
    supports_non_positive_scale: bool = True
    supports_double_backward: bool = False
    needs_unit_last_stride: bool = False
    needs_aligned_start: bool = False
    is_deterministic: bool = True


class Backend(ABC):
    """One implementation.

    Attributes:
        name: as it stands in routes, records and ``backend=``.
        is_exact: whether it computes attention exactly; approximate ones serve only under ``accuracy="approximate"``.
        plans_per_shape: whether each new exact shape costs a plan or compilation.
        is_internal: whether only smartattn's own code may name it.
        capabilities: declared limits.
    """

    name: str
    is_exact: bool = True
    plans_per_shape: bool = False
    capabilities: Capabilities = Capabilities()

    def unavailable(self) -> str:
        """Return why this backend cannot run in this process at all, empty when it can."""
        return ""

    def version(self) -> str:
        """Return the version that an outcome is valid for; a change makes only this backend's outcomes stale."""
        return str(torch.__version__)

    def reasons(self, signature: Signature, environment: Environment) -> tuple[str, ...]:
        """Return all the reasons why this backend cannot serve the signature; empty when it is eligible."""
        unavailable = self.unavailable()
        if unavailable:
            return (unavailable,)
        declared = declared_reasons(self.capabilities, signature)
        return declared + tuple(self.extra_reasons(signature, environment))

    def extra_reasons(self, signature: Signature, environment: Environment) -> tuple[str, ...]:
        """Return reasons that ``capabilities`` cannot express."""
        del signature, environment
        return ()

    def workspace_bytes(self, signature: Signature) -> int:
        """Return an estimate of the bytes this backend allocates beyond its output."""
        del signature
        return 0

    @abstractmethod
    def bind(self, signature: Signature) -> Runner:
        """Return the callable that the hot path runs for calls of this signature."""


def declared_reasons(can: Capabilities, signature: Signature) -> tuple[str, ...]:
    """Turn declared capabilities into the reasons they give against a signature: limit, value seen, remedy.

    Note:
        Asked again for every new exact shape, so the texts are only made where they are needed.
    """
    s = signature
    widest, rest = max(s.E, s.Ev), s.E % can.head_dim_multiple or s.Ev % can.head_dim_multiple
    found: list[str] = []
    if can.device_types and s.device_type not in can.device_types:
        found.append(f"runs on {', '.join(can.device_types)}; the tensors are on {s.device_type}")
    if s.dtype not in can.dtypes:
        found.append(f"takes {', '.join(can.dtypes)}; dtype is {s.dtype}")
    if not takes_mask(can.masks, s):
        found.append(f"takes masks of class {', '.join(can.masks)}; this one is {s.mask}")
    if can.ranks and s.rank not in can.ranks:
        found.append(f"takes {' or '.join(map(str, can.ranks))} dimensions; there are {s.rank}")
    if can.max_head_dim is not None and widest > can.max_head_dim:
        found.append(f"takes head dims up to {can.max_head_dim}; this one is {widest}")
    if rest:
        found.append(f"takes head dims that are multiples of {can.head_dim_multiple}; E is {s.E}, Ev is {s.Ev}")
    if not can.supports_different_head_dims and s.E != s.Ev:
        found.append(f"needs E equal to Ev; they are {s.E} and {s.Ev}")
    if not can.supports_groups and s.Hq != s.H:
        found.append(f"needs equal heads; there are {s.Hq} query and {s.H} key heads")
    if not can.supports_training and s.wants_grad:
        found.append("has no backward; gradients are wanted")
    if not can.supports_mask_grad and "m" in s.grads:
        found.append("gives no gradient for the mask; one is wanted")
    if not can.supports_dropout and s.dropout != "none":
        found.append("has no dropout; dropout_p is above 0")
    if not can.supports_non_positive_scale and s.scale == "non_positive":
        found.append("needs a positive scale")
    if not can.is_deterministic and s.deterministic == "strict":
        found.append("is not deterministic; strict mode is on")
    return (*found, *_memory_reasons(can, s))


def _memory_reasons(can: Capabilities, signature: Signature) -> Iterator[str]:
    query, key, value = signature.layouts
    has_unit_strides = query.has_unit_last_stride and key.has_unit_last_stride and value.has_unit_last_stride
    if can.needs_unit_last_stride and not has_unit_strides:
        yield "needs the elements of the head dim side by side; make query, key and value contiguous"
    has_aligned_starts = query.has_aligned_start and key.has_aligned_start and value.has_aligned_start
    if can.needs_aligned_start and not has_aligned_starts:
        yield "needs query, key and value to start on a multiple of 16 bytes; a view starts between"


def takes_mask(allowed: tuple[str, ...], signature: Signature) -> bool:
    """Return whether these mask classes hold the signature's, or the form that its mask tensor has."""
    # Recognised classes carry parameters, such as window(1023,0); a declaration names the class alone.
    return signature.mask.partition("(")[0] in allowed or (
        signature.has_mask_tensor and signature.tensor_mask in allowed
    )
