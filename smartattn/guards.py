"""Closed-form limits and known faults: what a route may not be given, whatever it says about itself.

Two kinds. *Closed forms* are arithmetic on sizes that a kernel's indexing or launch grid cannot hold. The *deny-list*
(``denylist``) names combinations that were seen wrong or fatal, as data with a public reference. Both are checked per
exact shape on every binding, and both decide whether PyTorch's own choice is safe for a call.
"""

from __future__ import annotations

import functools

from smartattn import torch_rules
from smartattn.denylist import FAULTS, KnownFault
from smartattn.environment import Environment
from smartattn.signature import Signature
from smartattn.versions import MAX_GRID

MAX_INDEX_32 = 1 << 32
"""Offsets that an unsigned 32-bit index can tell apart."""
MAX_SIGNED_32 = 1 << 31
_OPERATORS = {"cudnn": "cudnn", "flash": "flash", "flash_masked": "flash", "efficient": "efficient"}
"""Backend to the fused operator that it launches."""


def reasons(backend_name: str, signature: Signature, environment: Environment) -> tuple[str, ...]:
    """Return all the reasons why ``backend_name`` must not be run on this signature here; empty when it may.

    For ``stock`` they are those of what PyTorch would run: asking tells whether PyTorch's own choice is safe here.
    """
    if signature.device_type == "cpu" and backend_name == "stock":
        return _faults("stock:flash_for_cpu", signature, environment)
    if signature.device_type != "cuda":
        return ()
    if backend_name == "stock":
        resolved = torch_rules.stock_resolution(signature, environment)
        found = _reasons(resolved, signature, environment) + _faults("stock:" + resolved, signature, environment)
        return tuple(f"PyTorch would run {resolved}, which {text}" for text in found)
    return _reasons(backend_name, signature, environment)


def _reasons(backend_name: str, signature: Signature, environment: Environment) -> tuple[str, ...]:
    operator = _OPERATORS.get(backend_name)
    if operator is None:
        return ()
    return closed_forms(operator, signature) + _faults(operator, signature, environment)


def _faults(path: str, signature: Signature, environment: Environment) -> tuple[str, ...]:
    faults = _faults_of(path, environment)
    return tuple(f"{fault.text} ({fault.reference})" for fault in faults if fault.applies(signature))


@functools.lru_cache(maxsize=256)
def _faults_of(path: str, environment: Environment) -> tuple[KnownFault, ...]:
    return tuple(fault for fault in FAULTS if path in fault.paths and fault.concerns(environment))


def closed_forms(operator: str, signature: Signature) -> tuple[str, ...]:
    """Return which limits of a fused operator's launch grid and index arithmetic the sizes break.

    Source: seen on an H200 with torch 2.11.0: at 65536, flash fails for batches and heads, Efficient for heads, cuDNN
    for both in training and with a mask (pytorch#146704, #177985, #181235); Efficient reads masks from a wrapped
    offset beyond 2^32 elements of L x S, and is right at exactly 2^32 (pytorch#187227).
    """
    s = signature
    found = []
    if s.Hq > MAX_GRID:
        found.append(f"launches at most {MAX_GRID} heads; there are {s.Hq}")
    if s.N > MAX_GRID and operator != "efficient":
        found.append(f"launches at most {MAX_GRID} batches; there are {s.N}; split the batch")
    if operator == "efficient":
        found += _efficient_index_reasons(s)
    if operator == "flash" and s.wants_grad:
        elements = torch_rules.flash_backward_elements(s)
        if elements > MAX_SIGNED_32:
            # Reported for other builds (TabPFN#1184); 1.001 times the limit ran right on an H200 with torch 2.11.0.
            found.append(f"indexes at most 2^31 elements of its backward's buffer; there are {elements}")
    return tuple(found)


def _efficient_index_reasons(s: Signature) -> list[str]:
    found = []
    # Rows are padded to eight elements, as PyTorch does and as the backend here does.
    mask_elements = s.L * (-(-s.S // 8) * 8)
    if "l" in s.mask_axes and mask_elements > MAX_INDEX_32:
        found.append(f"indexes masks of at most 2^32 elements of L x S; there are {mask_elements}")
    if s.dropout != "none" and s.L * s.S > MAX_INDEX_32:
        found.append(f"draws dropout for at most 2^32 elements of L x S; there are {s.L * s.S}")
    return found
