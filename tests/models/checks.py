"""What must hold for any model: outputs, losses and gradients as stock's, nothing left behind, and truly reached."""

from __future__ import annotations

import copy

import torch

import smartattn
from smartattn.comparison import tensors_in
from smartattn.integrations import Report, replace_attention, restore_attention

TOLERANCE = 2e-5
"""Source: float32 through a handful of layers of size 32; the worst seen was 3e-6."""


def run(model, batch, *, training: bool):
    """Return outputs and gradients of one pass."""
    model.zero_grad()
    torch.manual_seed(7)
    with torch.set_grad_enabled(training):
        output = model(**batch)
        floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        assert floats
        if training:
            sum(tensor.square().mean() for tensor in floats if tensor.requires_grad).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [tensor.detach() for tensor in floats], gradients


def num_calls() -> int:
    """Return how many calls smartattn has answered itself."""
    counters = smartattn.stats()
    return counters.hits + counters.memory_hits + counters.disk_hits + counters.misses


def check_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], atol=TOLERANCE, rtol=TOLERANCE)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], atol=TOLERANCE, rtol=TOLERANCE, msg=name)


def check_model(model, batch) -> Report:
    """Hold all of it for one model; return the report."""
    model.eval()
    modules = {name: type(module) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    expected = {training: run(model, batch, training=training) for training in (False, True)}
    report = replace_attention(model)
    assert report.replaced
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert list(model.state_dict()) == keys
    for training in (False, True):
        before = num_calls()
        check_same(run(model, batch, training=training), expected[training])
        assert num_calls() - before >= len(report.replaced), "each place was reached"
        assert smartattn.stats().passthroughs == 0
    assert len(replace_attention(model).replaced) == len(report.replaced), "a second call replaces the same places"
    before = num_calls()
    check_same(run(copy.deepcopy(model), batch, training=False), expected[False])
    assert num_calls() > before, "a deep copy is replaced too"
    assert len(restore_attention(model).replaced) >= len(report.replaced)
    before = num_calls()
    torch.testing.assert_close(run(model, batch, training=False)[0], expected[False][0], atol=0, rtol=0)
    assert num_calls() == before, "a restored model does not reach smartattn"
    assert not [name for module in model.modules() for name in vars(module) if "smartattn" in name]
    return report
