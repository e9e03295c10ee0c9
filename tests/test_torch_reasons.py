"""PyTorch's own reasons where there is no GPU; on one, see ``gpu/test_cuda_facts.py``."""

from __future__ import annotations

import warnings

import torch

from smartattn import torch_reasons
from smartattn.signature import Call


def test_there_is_nothing_to_ask_on_cpu() -> None:
    """PyTorch has no such text for CPU tensors."""
    assert torch_reasons.torch_reasons(Call(*(torch.randn(1, 2, 3, 4) for _ in range(3)))) == {}


def test_texts_lose_their_tail_and_silent_refusals_get_one() -> None:
    """Warnings given by the probe become its reasons; a refusal without any gets our own words."""

    def refuse(params: object, debug: object) -> bool:
        del params, debug
        warnings.warn("head_dim too large (Triggered internally at /x/y.cpp:12.)", stacklevel=1)
        return False

    assert torch_reasons._reasons_of(refuse, None) == ("head_dim too large",)
    assert torch_reasons._reasons_of(lambda params, debug: False, None) == (torch_reasons.WITHOUT_TEXT,)
    assert torch_reasons._reasons_of(lambda params, debug: True, None) == ()
