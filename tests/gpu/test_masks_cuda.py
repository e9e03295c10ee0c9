"""Mask classes and recognised masks on a GPU: the right answer, also when a mask is written to behind a graph."""

from __future__ import annotations

import pytest
import torch

import smartattn
from smartattn import masks
from smartattn.mask_recognition import recognize
from smartattn.mask_runner import MaskRunner
from smartattn.settings import configure
from smartattn.signature import Call
from smartattn.wishes import all_bindings

pytestmark = pytest.mark.gpu
L = 512


def inputs(N: int = 2, *, is_bshd: bool = False, grad: bool = False):
    """Return query, key and value."""
    made = []
    for heads in (8, 2, 2):
        tensor = torch.randn(N, L, heads, 64, device="cuda", dtype=torch.bfloat16)
        tensor = tensor.transpose(1, 2) if is_bshd else tensor.transpose(1, 2).contiguous()
        made.append(tensor.requires_grad_(grad))
    return made


def reference(query, key, value, mask):
    """Return attention in float32 with a dense mask; rows that see nothing are zero."""
    key, value = (t.float().repeat_interleave(4, 1) for t in (key, value))
    scores = (query.float() @ key.transpose(-2, -1) / 8).masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1).nan_to_num(0.0) @ value


def attend(query, key, value, mask, **options):
    """Call smartattn."""
    return smartattn.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True, **options)


def close(found, right):
    """Compare with the tolerance of bfloat16."""
    torch.testing.assert_close(found.float(), right.float(), atol=3e-2, rtol=2e-2)


CLASSES = (
    masks.Causal(),
    masks.Window(99, 0),
    masks.Window(50, 30),
    masks.Documents([100, 300, 112]),
    masks.KeyPadding([400, 512]),
    masks.KeyPadding([33, 512], "left"),
)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_bshd", [False, True])
@pytest.mark.parametrize("mask", CLASSES, ids=str)
def test_every_eligible_route_of_a_class_is_right(mask, is_bshd, is_causal):
    """Named by the caller or found in a dense mask, a class gives what its dense mask gives."""
    configure(signature_budget_ms=20)
    query, key, value = inputs(is_bshd=is_bshd)
    dense = mask.dense(L, L, "cuda")
    if is_causal:
        dense = dense & masks.Causal().dense(L, L, "cuda")
    right = reference(query, key, value, dense)
    for given, flag in ((mask, is_causal), (dense.clone(), False)):
        for _ in range(2):
            close(attend(query, key, value, given, is_causal=flag), right)


def test_flash_masked_answers_documents():
    """The operator with cumulative lengths is eligible for documents and agrees, gradients too."""
    query, key, value = inputs(grad=True)
    mask = masks.Documents([100, 300, 112])
    dense = mask.dense(L, L, "cuda")
    call = Call(query, key, value, dense, enable_gqa=True)
    assert recognize(call).name == "documents"
    output = attend(query, key, value, mask, backend="flash_masked")
    close(output, reference(query, key, value, dense))
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, (query, key, value), grad)
    right = torch.autograd.grad(reference(query, key, value, dense), (query, key, value), grad.float())
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.float(), b.float(), atol=6e-2, rtol=5e-2)


def test_mask_refilled_between_replays():
    """A captured call reads the dense mask, so that what is written to it counts in the next replay."""
    query, key, value = inputs()
    mask = masks.Causal().dense(L, L, "cuda").clone()
    for _ in range(3):
        attend(query, key, value, mask)
    (runner,) = [b.run for b in all_bindings() if isinstance(b.run, MaskRunner)]
    assert runner._last.name == "causal"
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = attend(query, key, value, mask)
    for other in (masks.Window(9, 0), masks.Documents([256, 256]), masks.Causal()):
        mask.copy_(other.dense(L, L, "cuda"))
        graph.replay()
        close(output, reference(query, key, value, mask))
        close(attend(query, key, value, mask), reference(query, key, value, mask))


def test_class_in_a_graph():
    """A class that was met before may be captured; its device tensors outlive every table."""
    query, key, value = inputs()
    mask = masks.Documents([200, 312])
    for _ in range(3):
        attend(query, key, value, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(query, key, value, mask)
    masks.forget()
    junk = [torch.full((L, L), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    graph.replay()
    close(output, reference(query, key, value, mask.dense(L, L, "cuda")))
    del junk


def test_mask_on_another_device():
    """A mask on the CPU raises PyTorch's error, saying which devices."""
    query, key, value = inputs()
    with pytest.raises(RuntimeError, match="attn_mask is on cpu, query on cuda:0"):
        attend(query, key, value, masks.Causal().dense(L, L))


def test_mask_changed_between_calls():
    """Writing to a recognised mask shows in the next call, without a wait in between."""
    query, key, value = inputs()
    mask = masks.Causal().dense(L, L, "cuda").clone()
    for _ in range(3):
        close(attend(query, key, value, mask), reference(query, key, value, mask))
    mask[10, 400] = True
    for _ in range(3):
        close(attend(query, key, value, mask), reference(query, key, value, mask))
