"""Trials that leave no trace: what validation and measuring run is invisible to the program around them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from smartattn import versions
from smartattn.backends.base import Runner
from smartattn.signature import Call, Signature


@contextlib.contextmanager
def untraced(device: torch.device, *, grad: bool) -> Iterator[None]:
    """Run a block so that nothing around it can tell afterwards, or changes what the block does.

    Inside, gradient mode is as given, inference mode, autocast and anomaly mode are off, function modes (a default
    device is one) are bypassed, saved tensors stay out of the hooks of a surrounding checkpoint or offloading, and
    ``device`` is the current one. On leaving, by an error too, all of that and the random number generators are as
    found. The current stream and every switch of a backend stay untouched; no memory statistic is reset.

    Cost: about 30 us.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(versions.without_torch_function())
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.set_grad_enabled(grad))
        if grad and versions.accepts_saved_tensors_hooks():
            # A surrounding non-reentrant checkpoint counts every saved tensor; identity hooks on top keep ours from it.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_identity, _identity))
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(mode=False))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(_without_autocast(device.type))
        stack.enter_context(_same_random_state(device))
        yield


def leaf_copies(call: Call) -> Call:
    """Return the call on views that share memory with it but are leaves of their own, wanting the same gradients.

    Cost: about 5 us; no memory.
    """
    mask = None if call.attn_mask is None else _leaf(call.attn_mask)
    return call._replace(query=_leaf(call.query), key=_leaf(call.key), value=_leaf(call.value), attn_mask=mask)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the default generators that work on ``device`` may draw from: the CPU's and the device's own."""
    found = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    return found


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if tensor.requires_grad else leaf


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    # The context manager of PyTorch would count as a nesting level and could drop the program's cache of casts.
    found = [name for name in {device_type, "cpu"} if versions.is_any_autocast() and torch.is_autocast_enabled(name)]
    for name in found:
        torch.set_autocast_enabled(name, False)
    try:
        yield
    finally:
        for name in found:
            torch.set_autocast_enabled(name, True)


@contextlib.contextmanager
def _same_random_state(device: torch.device) -> Iterator[None]:
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)


@functools.cache
def load_libraries(device: torch.device) -> None:
    """Make one throw-away plan per process and device, so that loading cuDNN (up to 0.9 s) is no route's plan cost."""
    if device.type != "cuda":
        return
    tensors = [torch.ones((1, 1, 8, 64), dtype=torch.float16, device=device, requires_grad=True) for _ in "qkv"]
    with torch.enable_grad():
        versions.sdpa(*tensors).sum().backward()


def shortened(call: Call, by: int) -> Call | None:
    """Return the call on views that are ``by`` keys (and queries, unless there is one) shorter; ``None`` if too short."""
    L, S = call.query.size(-2), call.key.size(-2)
    if 2 * by >= S or (L > 1 and 2 * by >= L):
        return None
    query = call.query if L == 1 else call.query[..., : L - by, :]
    mask = call.attn_mask
    if mask is not None:
        mask = mask[..., : S - by] if mask.size(-1) > 1 else mask
        mask = mask[..., : L - by, :] if mask.size(-2) == L and L > 1 else mask
    return call._replace(
        query=query, key=call.key[..., : S - by, :], value=call.value[..., : S - by, :], attn_mask=mask
    )


def trial_of(run: Runner, call: Call, signature: Signature) -> Callable[[], object]:
    """Return one call of ``run`` on ``call``, with the backward of everything that wants a gradient."""
    if not signature.wants_grad:
        return lambda: run(*call)
    wanted = [tensor for tensor in call.tensors if tensor.requires_grad]
    grad_outputs: list[torch.Tensor] = []

    def train() -> None:
        output = run(*call)
        if not grad_outputs:
            # In the memory order of the output, as the next layer's backward gives it.
            grad_outputs.append(torch.ones_like(output))
        torch.autograd.grad(output, wanted, grad_outputs[0])

    return train
