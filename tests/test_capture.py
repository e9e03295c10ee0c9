"""CUDA graph capture: a bound choice is captured and replayed; an unknown call gets the safe default and is noted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

import smartattn
from smartattn import SmartAttention, scaled_dot_product_attention
from smartattn.selector import selector
from smartattn.wishes import all_bindings

SDPA = F.scaled_dot_product_attention
SHAPE = (2, 4, 256, 64)


def inputs_on_gpu(*, wants_grad: bool = False) -> list[torch.Tensor]:
    """Return query, key and value in half precision."""
    return [torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16, requires_grad=wants_grad) for _ in range(3)]


def captured(function):
    """Capture one call of ``function``; return the graph and what the call returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()
    return graph, output


def refill(tensors: list[torch.Tensor]) -> None:
    """Put new numbers into the memory that a graph reads."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, device="cuda"))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare in half precision."""
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_hit_is_captured_and_replayed(is_causal):
    """A call tuned before is captured on its choice; replays read new numbers."""
    inputs, module = inputs_on_gpu(), SmartAttention()
    for _ in range(3):
        module(*inputs, is_causal=is_causal)
    hits, tunings = smartattn.stats().hits, smartattn.stats().tunings
    graph, output = captured(lambda: module(*inputs, is_causal=is_causal))
    assert (smartattn.stats().hits, smartattn.stats().tunings) == (hits + 1, tunings)
    for _ in range(2):
        refill(inputs)
        graph.replay()
        torch.cuda.synchronize()
        close(output, SDPA(*inputs, is_causal=is_causal))


@pytest.mark.gpu
def test_a_miss_runs_the_safe_default_and_is_noted():
    """A call first met in a capture neither synchronises nor tunes: the capture succeeds, and the call is pending."""
    inputs = inputs_on_gpu()
    # Kernels load lazily, which is PyTorch's own reason to warm up before a capture.
    SDPA(*inputs)
    graph, output = captured(lambda: scaled_dot_product_attention(*inputs))
    stats = smartattn.stats()
    assert (stats.tunings, stats.safe_defaults, stats.pending) == (0, 1, 1)
    refill(inputs)
    graph.replay()
    torch.cuda.synchronize()
    close(output, SDPA(*inputs))
    assert all_bindings() == []


@pytest.mark.gpu
def test_after_a_capture_the_call_is_tuned():
    """The safe default of a capture is not kept: outside of it the call is tuned like any other."""
    inputs = inputs_on_gpu()
    SDPA(*inputs)
    captured(lambda: scaled_dot_product_attention(*inputs))
    close(scaled_dot_product_attention(*inputs), SDPA(*inputs))
    assert smartattn.stats().tunings == 1
    assert selector.notes.pending() == ()


@pytest.mark.gpu
def test_a_miss_of_another_thread_does_not_break_a_capture():
    """A first sight in another thread while a graph is captured leaves the capture whole (``thread_local`` mode)."""
    import threading

    inputs = inputs_on_gpu()
    SDPA(*inputs)
    others = [torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    torch.cuda.synchronize()
    answers: list[torch.Tensor] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        thread = threading.Thread(target=lambda: answers.append(scaled_dot_product_attention(*others)))
        thread.start()
        thread.join(timeout=120)
        output = scaled_dot_product_attention(*inputs)
    graph.replay()
    torch.cuda.synchronize()
    close(output, SDPA(*inputs))
    close(answers[0], SDPA(*others))


@pytest.mark.gpu
def test_masks_are_not_recognised_in_a_capture():
    """A dense mask first met in a capture is not read: reading it would synchronise."""
    inputs = inputs_on_gpu()
    mask = torch.ones(256, 256, dtype=torch.bool, device="cuda").tril()
    SDPA(*inputs, mask)
    graph, output = captured(lambda: scaled_dot_product_attention(*inputs, mask))
    graph.replay()
    torch.cuda.synchronize()
    close(output, SDPA(*inputs, mask))
    mask.copy_(torch.ones_like(mask))
    graph.replay()
    torch.cuda.synchronize()
    close(output, SDPA(*inputs))


@pytest.mark.gpu
def test_a_whole_training_step_is_captured():
    """Forward and backward of a tuned call are captured together."""
    inputs = inputs_on_gpu(wants_grad=True)
    grad = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(scaled_dot_product_attention(*inputs, is_causal=True), inputs, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph, found = captured(step)
    refill(inputs)
    graph.replay()
    torch.cuda.synchronize()
    expected = torch.autograd.grad(SDPA(*inputs, is_causal=True), inputs, grad)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=5e-2, rtol=5e-2)


@pytest.mark.gpu
def test_make_graphed_callables():
    """PyTorch's own wrapper around capture takes a model that holds the module, after its warm-up."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = torch.nn.Linear(64, 192, device="cuda", dtype=torch.bfloat16)
            self.attention = SmartAttention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.projection(x).chunk(3, -1)
            return self.attention(query, key, value, is_causal=True)

    block = Block()
    x = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = block(x)
    graphed = torch.cuda.make_graphed_callables(block, (torch.randn_like(x).requires_grad_(),))
    output = graphed(x)
    close(output, expected)
    output.sum().backward()
    assert x.grad is not None


@pytest.mark.gpu
@pytest.mark.slow
def test_reduce_overhead():
    """``torch.compile`` in mode ``reduce-overhead`` captures what the graph chose."""
    inputs = inputs_on_gpu()
    function = torch.compile(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), fullgraph=True, mode="reduce-overhead"
    )
    for _ in range(4):
        close(function(*inputs).clone(), SDPA(*inputs, is_causal=True))
    assert smartattn.stats().tunings == 0
