"""The memory order of results: every route gives what PyTorch's own function would give for the same call.

A program that merges heads by a view works or fails by the order of the output, so the choice of a route must not
change it. The copy that this may need belongs to the route, and to its time.
"""

from __future__ import annotations

import torch

from smartattn import torch_rules
from smartattn.backends.base import Runner
from smartattn.backends.output_layout import in_order
from smartattn.environment import Environment
from smartattn.signature import Signature

QUERY, BSHD, BHSD = "query", "bshd", "bhsd"
_GIVES = {"stock": "", "efficient": BSHD, "math": BHSD, "eager": BHSD, "eager_inplace": BHSD}
"""Memory order that a backend gives by itself; those not listed follow query, ``stock`` needs no change.

Source: strides seen on torch 2.13 on CPU and on torch 2.11 on an H200.
"""


def stock_order(signature: Signature, environment: Environment) -> str:
    """Return the memory order of PyTorch's output for a signature: that of ``query``, ``bshd`` or ``bhsd``."""
    if signature.device_type == "cuda":
        return torch_rules.stock_output_order(signature, environment)
    # Math takes what the fused operator refuses, and always gives contiguous results.
    return QUERY if torch_rules.cpu_flash_takes(signature) else BHSD


def in_stock_order(
    backend_name: str, signature: Signature, environment: Environment, run: Runner, *, is_rewritten: bool
) -> Runner:
    """Return ``run`` with its output in PyTorch's memory order; ``run`` itself where it gives that already.

    Args:
        backend_name: of the route's backend.
        signature: of the whole call.
        environment: where it runs.
        run: the bound route.
        is_rewritten: whether rewrites stand around the backend, so that its own order says little.
    """
    gives = _GIVES.get(backend_name, QUERY)
    order = stock_order(signature, environment)
    if not gives or (not is_rewritten and _axes(gives, signature) == _axes(order, signature)):
        return run
    if signature.rank != 4 and order != QUERY:
        order = BHSD

    def ordered(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        output = run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return in_order(output, query, order)

    return ordered


def _axes(order: str, signature: Signature) -> str:
    """Return the axes from outermost to innermost that an order means for a signature, axes of size 1 left out."""
    axes = signature.layouts[0].order if order == QUERY else order
    if signature.rank != 4:
        return axes if order == QUERY else BHSD
    sizes = {"b": signature.batch[0], "h": signature.Hq, "s": signature.L}
    return "".join(axis for axis in axes if sizes.get(axis, 2) > 1)
