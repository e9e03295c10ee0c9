"""PyTorch's own words for why a fused operator refuses a call, as text; nothing is printed.

PyTorch gives its reasons as C++ warnings. Asked directly they go to the process's standard error; asked from within
a C++ function that turns such warnings into Python's, they can be caught.
Source: tried on torch 2.11.0 and 2.13.0, on CPU and on an H200; pytorch's checks stop at the first reason.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable

import torch

from smartattn import versions
from smartattn.signature import Call

_PROBES: dict[str, Callable[..., bool]] = {
    "cudnn": versions.can_use_cudnn,
    "flash": versions.can_use_flash,
    "efficient": versions.can_use_efficient,
}
_TAIL = re.compile(r"\s*\(Triggered internally at .*\)\s*$", re.DOTALL)
# Catching warnings changes the state of a module that all threads share.
_lock = threading.Lock()
WITHOUT_TEXT = "refused without a text (a mask's shape or gradient, or a reason that PyTorch gives once per process)"


def torch_reasons(call: Call) -> dict[str, tuple[str, ...]]:
    """Return for ``cudnn``, ``flash`` and ``efficient`` the reasons that PyTorch itself gives; empty when it accepts.

    Args:
        call: asked under the caller's gradient mode.

    Returns:
        An empty mapping where the tensors are not on a CUDA device, since PyTorch has no such text there.

    Note:
        Takes a lock and changes Python's warning filters for its time; for diagnosis, not for the hot path.
    """
    if call.query.device.type != "cuda":
        return {}
    params = versions.SDPAParams(
        call.query, call.key, call.value, call.attn_mask, call.dropout_p, call.is_causal, call.enable_gqa
    )
    with _lock:
        return {name: _reasons_of(probe, params) for name, probe in _PROBES.items()}


def _reasons_of(probe: Callable[..., bool], params: object) -> tuple[str, ...]:
    accepted = []

    def ask(number: float) -> float:
        accepted.append(probe(params, True))
        return number

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.zeros(1, device="cpu").apply_(ask)
    texts = tuple(_TAIL.sub("", str(warning.message)) for warning in caught)
    if accepted[0]:
        return ()
    return texts or (WITHOUT_TEXT,)
