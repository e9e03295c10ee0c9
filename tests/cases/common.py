"""What the cases share: one call, answered by every way that this library has, each compared with the definition."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import smartattn
from smartattn.environment import environment_of
from smartattn.routes import routes_for
from smartattn.signature import Call, read_signature
from tests import oracle

PUBLIC = "public"


def eligible_routes(call: Call) -> list[str]:
    """Return the names of the routes that say they can serve a call; none for a call that is PyTorch's to answer."""
    signature = read_signature(call)
    if signature is None:
        return []
    environment = environment_of(call.query.device)
    return [route.name for route in routes_for(signature) if not route.reasons(signature, environment)]


def answers(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and output of the public call, made three times, and of every eligible route asked for by name."""
    for _ in range(3):
        yield PUBLIC, smartattn.scaled_dot_product_attention(*call)
    for name in eligible_routes(call):
        yield name, smartattn.scaled_dot_product_attention(*call, backend=name)


def everywhere_right(call: Call, *, grad_outs: tuple[torch.Tensor, ...] = ()) -> list[str]:
    """Assert that every way answers a call by the definition, gradients included; return the names of the ways.

    Gradients are compared for each of ``grad_outs``; by default for a random one and for the expanded one of ``sum()``.
    """
    wants_grad = any(tensor.requires_grad for tensor in call.tensors)
    if wants_grad and not grad_outs:
        shape = (*call.query.shape[:-1], call.value.size(-1))
        like = torch.randn(shape, device=call.query.device).to(call.query.dtype)
        grad_outs = like, torch.ones_like(like[(0,) * like.dim()]).expand(like.shape)
    rights = [oracle.answer(call, grad_out) for grad_out in grad_outs] if wants_grad else [oracle.answer(call)]
    names = []
    for name, output in answers(call):
        try:
            for number, right in enumerate(rights):
                gradients = None
                if wants_grad:
                    again = (
                        output
                        if number == 0
                        else smartattn.scaled_dot_product_attention(*call, backend=None if name == PUBLIC else name)
                    )
                    gradients = oracle.differentiate(call, again, grad_outs[number])
                oracle.check(call, output, right, gradients)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        names.append(name)
    return names


def call_of(
    *shape: int,
    S: int | None = None,
    H: int | None = None,
    Ev: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    grads: str = "",
    **rest: object,
) -> Call:
    """Return a call on random dense tensors; ``shape`` is (N, Hq, L, E) of the query."""
    *batch, Hq, L, E = shape
    keys = (*batch, H or Hq, S or L)
    made = [torch.randn(*size, device=device).to(dtype) for size in (shape, (*keys, E), (*keys, Ev or E))]
    for letter, tensor in zip("qkv", made, strict=True):
        tensor.requires_grad_(letter in grads)
    call = Call(*made, **rest)
    if call.attn_mask is not None and "m" in grads:
        call.attn_mask.requires_grad_()
    return call


def lower(L: int, S: int, device: str = "cpu") -> torch.Tensor:
    """Return the bool top-left triangle."""
    return torch.ones(L, S, dtype=torch.bool, device=device).tril()


def hiding(visible: torch.Tensor, value: float = float("-inf"), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the additive form of a bool mask."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, value)
