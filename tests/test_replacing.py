"""``replace_attention`` without other libraries: PyTorch's modules, code of one's own, reports, and ``compare``."""

from __future__ import annotations

import copy
import dataclasses
import io

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that libraries use
from torch import nn

import smartattn
from smartattn import compare, replace_attention, restore_attention
from smartattn.comparison import tensors_in


def num_calls() -> int:
    counters = smartattn.stats()
    return counters.hits + counters.misses + counters.memory_hits + counters.disk_hits


def attend_by_helper(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


class ByModule(nn.Module):
    """Attention through a module's global name, in a method of its own."""

    def attend(self, x):
        return F.scaled_dot_product_attention(x, x, x)

    def forward(self, x):
        return self.attend(x)


class ByLongName(nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class ByHelper(nn.Module):
    def forward(self, x):
        return attend_by_helper(x, x, x)


class SelfAttentionByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Identity()

    def forward(self, x):
        return self.out((x @ x.mT).softmax(-1) @ x)


class Changed(nn.MultiheadAttention):
    def forward(self, query, key, value, **options):
        return query, None


class Renamed(nn.MultiheadAttention):
    """A subclass without a forward of its own."""


@pytest.mark.parametrize("kind", [ByModule, ByLongName, ByHelper])
def test_own_code(kind):
    """Code of one's own that names the function is reached, in methods and helpers, for that instance alone."""
    model, other = nn.Sequential(kind()), nn.Sequential(kind())
    x = torch.randn(1, 2, 5, 8)
    expected = model(x)
    report = replace_attention(model)
    assert [(place.name, place.kind, place.integration) for place in report.replaced] == [
        ("0", kind.__name__, "own code")
    ]
    torch.testing.assert_close(model(x), expected)
    assert num_calls() == 1
    other(x)
    assert num_calls() == 1
    restore_attention(model)
    model(x)
    assert num_calls() == 1


def test_transformer_in_evaluation():
    """``nn.Transformer`` in evaluation, whose fast path never calls its parts, is reached and equals stock."""
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True).eval()
    source, target = torch.randn(2, 7, 16), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    keys = list(model.state_dict())
    with torch.no_grad():
        expected = model(source, target, src_key_padding_mask=padding)
        report = replace_attention(model)
        assert len(report.replaced) == 6
        torch.testing.assert_close(model(source, target, src_key_padding_mask=padding), expected, atol=1e-5, rtol=1e-5)
        assert num_calls() >= 6
        assert list(model.state_dict()) == keys
        restore_attention(model)
        before = num_calls()
        assert torch.equal(model(source, target, src_key_padding_mask=padding), expected)
    assert num_calls() == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_subclasses():
    """A subclass with its own forward is left with the reason; one without is replaced; ours is left as it is."""
    model = nn.ModuleList([Changed(8, 2), Renamed(8, 2), smartattn.SmartMultiheadAttention(8, 2)])
    report = replace_attention(model)
    assert [place.name for place in report.replaced] == ["1"]
    assert [(place.name, place.reason.split(";")[0]) for place in report.left] == [
        ("0", "Changed has a forward of its own"),
        ("2", "it is a SmartMultiheadAttention already"),
    ]


def test_no_attention():
    """A model without attention gets a report that says so; one with attention by hand is named with a reason."""
    assert str(replace_attention(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))) == "No attention was found in this model."
    report = replace_attention(nn.Sequential(SelfAttentionByHand()))
    assert report.replaced == ()
    assert report.left[0].kind == "SelfAttentionByHand"
    assert "patch_sdpa()" in report.left[0].reason
    with pytest.raises(TypeError, match="model is Tensor"):
        replace_attention(torch.ones(1))
    with pytest.raises(smartattn.UnknownNameError):
        replace_attention(nn.Linear(2, 2), backend="no such")


def test_report_is_a_value():
    """A report compares, hashes and prints one line per class and reason."""
    model = nn.Transformer(16, 2, 2, 2, 32)
    report = replace_attention(model)
    assert report == replace_attention(model)
    assert hash(report)
    lines = str(report).splitlines()
    assert len(lines) == 3
    assert lines[2].split()[:3] == ["replaced", "6", "encoder.layers.0.self_attn"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.left = ()


def test_second_call_takes_the_new_wishes():
    """Replacing again changes nothing but the wishes."""
    from smartattn.wishes import all_bindings

    model = nn.Sequential(ByModule())
    x = torch.randn(1, 2, 5, 8)
    replace_attention(model)
    replace_attention(model, backend="math")
    model(x)
    assert [binding.route for binding in all_bindings()] == ["math"]
    assert len(restore_attention(model).replaced) == 1
    assert restore_attention(model).replaced == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moved_copied_and_saved(dtype: torch.dtype):
    """``to``, ``deepcopy`` and saving whole models keep the replacement, and copies are independent of the original."""
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval()
    replace_attention(model)
    model = model.to(dtype)
    x = torch.randn(2, 5, 16, dtype=dtype)
    with torch.no_grad():
        expected = model(x)
        assert num_calls() == 1
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            before = num_calls()
            assert torch.equal(other(x), expected)
            assert num_calls() == before + 1
            restore_attention(other)
            before = num_calls()
            other(x)
            model(x)
            assert num_calls() == before + 1


def test_state_dict_goes_both_ways():
    """Weights load strictly between replaced and stock models."""
    stock, smart = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
    replace_attention(smart)
    smart.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(smart.state_dict(), strict=True)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(smart.eval()(x), stock.eval()(x), atol=1e-5, rtol=1e-5)


def test_compiled():
    """A compiled model with replaced code gives the eager answer in one graph."""
    torch.compiler.reset()
    model = nn.Sequential(ByModule(), ByHelper(), ByLongName())
    x = torch.randn(1, 2, 5, 8)
    expected = model(x)
    replace_attention(model)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)


def test_compare_tells_disagreement():
    """``compare`` reports outputs that differ, and nothing to compare where there is none."""

    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x + self.calls

    result = compare(Wrong(), (torch.ones(2),), repeats=1, warmup=0)
    assert not result.agrees
    assert "DIFFER" in str(result)
    empty = compare(nn.Sequential(), ("no tensor",), repeats=1, warmup=0)
    assert empty.max_error is None
    assert not empty.agrees
    with pytest.raises(ValueError, match="repeats is 0"):
        compare(nn.Identity(), (torch.ones(1),), repeats=0)


def test_compare_keeps_a_replaced_model_replaced():
    """A model that was replaced before stays so, and both ways are run."""
    model = nn.Sequential(ByModule())
    x = torch.randn(1, 2, 5, 8)
    replace_attention(model)
    result = compare(model, (x,), repeats=2, warmup=1)
    assert result.agrees
    assert num_calls() == 3
    model(x)
    assert num_calls() == 4
    assert set(result.to_dict()) >= {"stock_ms", "replaced_ms", "ratio", "agrees", "num_replaced"}


def test_tensors_in_nested_data():
    """Tensors are found in order in tuples, mappings and dataclasses."""
    a, b, c = (torch.ones(1) * i for i in range(3))

    @dataclasses.dataclass
    class Output:
        first: torch.Tensor
        rest: tuple

    assert [int(t) for t in tensors_in({"x": Output(a, (b, [c])), "y": 3})] == [0, 1, 2]


@pytest.fixture
def process_group(tmp_path):
    """Start a process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("wrapper", ["DDP", "fully_shard"])
def test_distributed_wrappers(wrapper: str, is_before: bool, process_group):
    """Replaced before or after DDP and FSDP wrap a model, gradients equal stock's and places are reached."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
    x = torch.randn(2, 5, 16)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    if is_before:
        replace_attention(model)
    wrapped = DistributedDataParallel(model) if wrapper == "DDP" else fully_shard(model)
    if not is_before:
        assert len(replace_attention(wrapped).replaced) == 2
    wrapped(x).square().sum().backward()
    assert num_calls() == 2
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        found = parameter.grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(found, gradient, atol=1e-5, rtol=1e-5)
