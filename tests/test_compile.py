"""Attention under ``torch.compile``: one graph, nothing measured, a choice that stays and never goes stale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import smartattn
from smartattn import SmartAttention, compiled, scaled_dot_product_attention
from smartattn.environment import environment_of, provenance_now
from smartattn.masks import Causal, CausalLowerRight, Window
from smartattn.record import Outcome, Record, Timed
from smartattn.selector import selector
from smartattn.signature import Call, Signature, read_signature
from smartattn.traced import PROBES, variants
from smartattn.wishes import all_bindings
from tests.fakes import FakeBackend, registered, tensors

SDPA = F.scaled_dot_product_attention
CPU = torch.device("cpu")
ROOT = Path(smartattn.__file__).parent.parent


class Graphs:
    """A backend that keeps the graphs it is given and runs them as AOTAutograd takes them apart."""

    def __init__(self) -> None:
        self.modules: list[torch.fx.GraphModule] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        """Keep the graph, then hand it on."""
        from torch._dynamo.backends.debugging import aot_eager

        self.modules.append(module)
        return aot_eager(module, inputs)

    def routes(self) -> list[str]:
        """Return what attention is in each graph: the route of our operator, or ``sdpa``."""
        nodes = [node for module in self.modules for node in module.graph.nodes if node.op == "call_function"]
        found = []
        for node in nodes:
            if "smartattn" in str(node.target):
                found.append(node.args[-1])
            elif "scaled_dot_product_attention" in str(node.target):
                found.append("sdpa")
        return found


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Start every test without compiled code."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> Graphs:
    """Return a backend that keeps its graphs."""
    return Graphs()


def timed(device_us: float, **changes: object) -> Timed:
    """Return the outcome of a route that takes so long."""
    values = {
        "device_us": device_us,
        "host_us": 1.0,
        "spread_us": 0.0,
        "n": 9,
        "error": 0.1,
        "version": torch.__version__,
    }
    return Timed(**{**values, **changes})


def put_record(inputs: tuple[torch.Tensor, ...], times: Mapping[str, float | Outcome], **options: object) -> Signature:
    """Make a record for a call known to this process."""
    signature = read_signature(Call(*inputs, **options))
    outcomes = {name: timed(time) if isinstance(time, int | float) else time for name, time in times.items()}
    record = Record(signature=signature, outcomes=outcomes, provenance=provenance_now("cpu"))
    selector.memory.add(environment_of(CPU), record, publish=False)
    return signature


def chosen() -> list[str]:
    """Return the routes that were chosen for graphs."""
    return [binding.route for binding in all_bindings() if binding.note == "in a compiled graph"]


def attend(query, key, value):
    """Attend without options."""
    return scaled_dot_product_attention(query, key, value)


def test_a_miss_is_stock_noted_and_never_measured(graphs):
    """An unknown call is PyTorch's own function in the graph, and pending."""
    inputs = tensors(2, 4, 8, 16)
    found = torch.compile(attend, fullgraph=True, backend=graphs)(*inputs)
    torch.testing.assert_close(found, SDPA(*inputs))
    assert graphs.routes() == ["sdpa"]
    stats = smartattn.stats()
    assert (stats.tunings, stats.misses, stats.pending) == (0, 1, 1)
    assert [signature for _, signature in selector.notes.pending()] == [read_signature(Call(*inputs))]


def test_a_record_decides(graphs):
    """A known call is the operator of the recorded winner, in forward and backward, with SDPA's numbers."""
    inputs = tuple(tensor.requires_grad_() for tensor in tensors(2, 4, 8, 16))
    put_record(inputs, {"stock": 9.0, "flash": 5.0})
    found = torch.compile(attend, fullgraph=True, backend=graphs)(*inputs)
    expected = SDPA(*inputs)
    torch.testing.assert_close(found, expected)
    for grads in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(*grads)
    assert graphs.routes() == ["flash"]
    assert not counters["graph_break"]


def test_the_operator_is_taken_apart():
    """What is left after lowering is PyTorch's operator, so that policies which name it still find it."""
    inputs = tensors(2, 4, 8, 16)
    graph = make_fx(
        lambda q, k, v: torch.ops.smartattn.attention(q, k, v, None, 0.0, False, None, False, "flash"),
        tracing_mode="symbolic",
    )(*inputs)
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in targets
    assert not [target for target in targets if "smartattn" in target]


def test_the_operator_passes_pytorchs_own_checks():
    """The operator keeps the rules that PyTorch sets for operators: schema, tracing, dynamic shapes."""
    inputs = tuple(tensor.requires_grad_() for tensor in tensors(2, 4, 8, 16))
    arguments = (*inputs, None, 0.0, True, None, False, "flash")
    torch.library.opcheck(torch.ops.smartattn.attention.default, arguments)


@pytest.mark.parametrize("name", ["no such route", "cudnn", "flash"])
def test_the_operator_runs_stock_where_a_route_cannot(name):
    """A graph may outlive what it was made for: an unknown route, or one that cannot serve, is stock."""
    query, key, value = tensors(2, 4, 8, 16, Ev=8)
    found = torch.ops.smartattn.attention(query, key, value, None, 0.0, False, None, False, name)
    torch.testing.assert_close(found, SDPA(query, key, value))


def test_math_and_eager_are_no_part_of_a_graph_by_time(graphs):
    """A compiler rewrites what Math and eager consist of, so their times count for nothing there."""
    inputs = tensors(2, 4, 8, 16)
    put_record(inputs, {"stock": 9.0, "flash": 5.0, "math": 1.0, "eager": 1.0, "eager_inplace": 1.0})
    torch.compile(attend, fullgraph=True, backend=graphs)(*inputs)
    assert graphs.routes() == ["flash"]


def test_host_time_is_no_part_of_a_graphs_cost(graphs):
    """The choice in a graph is by device time alone; outside of one host time in excess counts."""
    inputs = tensors(2, 4, 8, 16)
    put_record(inputs, {"stock": 9.0, "flash": timed(5.0, host_us=500.0)})
    torch.compile(attend, fullgraph=True, backend=graphs)(*inputs)
    assert graphs.routes() == ["flash"]


def test_backends_outside_of_pytorch_are_no_part_of_a_graph(graphs):
    """A plug-in hands real memory to its package, so it never stands in a graph."""
    inputs = tensors(2, 4, 8, 16)
    fake = FakeBackend()
    with registered(fake):
        put_record(inputs, {"stock": 9.0, "fake": timed(1.0, version="1")})
        torch.compile(attend, fullgraph=True, backend=graphs)(*inputs)
        assert graphs.routes() == ["sdpa"]
        with pytest.raises(Exception, match="no part of a compiled graph"):
            torch.compile(lambda *a: scaled_dot_product_attention(*a, backend="fake"), fullgraph=True, backend=graphs)(
                *inputs
            )
    assert fake.calls == 0


@pytest.mark.parametrize(("is_dynamic", "expected"), [(None, "flash"), (True, "sdpa")])
def test_plans_are_paid_once_for_fixed_lengths(graphs, is_dynamic, expected):
    """A plan is worth its price in a graph of fixed lengths, unless lengths were declared to change."""
    inputs = tensors(2, 4, 8, 16)
    put_record(inputs, {"stock": 9.0, "flash": timed(5.0, plan_ms=50.0)})
    smartattn.configure(dynamic=is_dynamic)
    put_record(inputs, {"stock": 9.0, "flash": timed(5.0, plan_ms=50.0)})
    torch.compile(attend, fullgraph=True, backend=graphs)(*inputs)
    assert graphs.routes() == [expected]


def test_plans_are_not_paid_for_varying_lengths(graphs):
    """A graph of varying lengths holds no route that plans for each of them."""
    inputs = tensors(2, 4, 8, 16)
    put_record(inputs, {"stock": 9.0, "flash": timed(5.0, plan_ms=50.0)})
    torch.compile(attend, fullgraph=True, backend=graphs, dynamic=True)(*inputs)
    assert graphs.routes() == ["sdpa"]


@pytest.mark.parametrize("wants_grad", [False, True])
@pytest.mark.parametrize("route", ["flash", "stock"])
def test_varying_lengths_take_two_graphs(graphs, wants_grad, route):
    """Lengths 8, 9, 16, 33 are one static and one dynamic graph, whatever is tuned in between."""
    function = torch.compile(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), fullgraph=True, backend=graphs
    )
    for length in (8, 8, 9, 16, 33):
        inputs = tuple(tensor.requires_grad_(wants_grad) for tensor in tensors(2, 4, length, 16))
        put_record(inputs, {"stock": 9.0, route: 5.0}, is_causal=True)
        found, expected = function(*inputs), SDPA(*inputs, is_causal=True)
        torch.testing.assert_close(found, expected)
        if wants_grad:
            grads = [torch.autograd.grad(out.square().sum(), inputs) for out in (found, expected)]
            torch.testing.assert_close(*grads)
    assert graphs.routes() == ["sdpa" if route == "stock" else route] * 2
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_tuning_later_recompiles_nothing(graphs):
    """A compiled graph keeps its choice when its call is tuned afterwards; the next trace takes the new one."""
    inputs = tensors(2, 4, 8, 16)
    function = torch.compile(attend, fullgraph=True, backend=graphs)
    function(*inputs)
    smartattn.tune_pending()
    assert smartattn.stats().tunings == 1
    put_record(inputs, {"stock": 9.0, "flash": 5.0})
    function(*inputs)
    assert graphs.routes() == ["sdpa"]
    torch._dynamo.reset()
    function(*inputs)
    assert graphs.routes() == ["sdpa", "flash"]


def test_the_first_trace_fixes_the_choice(graphs):
    """Every later trace of the same call in this process takes the choice of the first, as a recompute must."""
    inputs = tensors(2, 4, 8, 16)
    put_record(inputs, {"stock": 9.0, "flash": 5.0})
    torch.compile(attend, fullgraph=True, backend=graphs)(*inputs)
    put_record(inputs, {"stock": 5.0, "flash": 9.0})
    torch._dynamo.reset()
    torch.compile(attend, fullgraph=True, backend=graphs)(*inputs)
    assert graphs.routes() == ["flash", "flash"]


class Stack(torch.nn.Module):
    """A stack of attention layers."""

    def __init__(self, num_layers: int, **options: object) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 96) for _ in range(num_layers))
        self.attention = torch.nn.ModuleList(SmartAttention(**options) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers."""
        for layer, attention in zip(self.layers, self.attention, strict=True):
            query, key, value = layer(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind()
            x = x + attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize(("lengths", "num_graphs"), [((8, 8, 8), 1), ((8, 12, 20, 33, 8), 2)])
def test_twelve_layers(graphs, lengths, num_graphs):
    """A compiled model of twelve layers traces once for fixed lengths and twice for changing ones, without a break."""
    model = Stack(12)
    function = torch.compile(model, fullgraph=True, backend=graphs)
    for length in lengths:
        x = torch.randn(2, length, 32)
        found = function(x)
        found.sum().backward()
        torch.testing.assert_close(found, model(x))
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert not counters["graph_break"]


def test_layers_compiled_one_by_one_share_their_graph(graphs):
    """Modules with equal arguments share one graph; other arguments get their own."""
    modules = [SmartAttention() for _ in range(12)] + [SmartAttention(backend="math") for _ in range(12)]
    inputs = tensors(2, 4, 8, 16)
    for module in modules:
        module.compile(fullgraph=True, backend=graphs)
        torch.testing.assert_close(module(*inputs), SDPA(*inputs))
    assert graphs.routes() == ["sdpa", "math"]


@pytest.mark.parametrize("name", ["math", "eager", "flash", "stock"])
def test_an_explicit_backend_stands_in_the_graph(graphs, name):
    """``backend=`` is obeyed, by the function and by the module, also with varying lengths."""
    module = SmartAttention(backend=name)
    functions = (lambda *args: scaled_dot_product_attention(*args, backend=name), module)
    for function in functions:
        torch._dynamo.reset()
        compiled_function = torch.compile(function, fullgraph=True, backend=graphs)
        for length in (8, 12, 20):
            inputs = tensors(2, 4, length, 16)
            torch.testing.assert_close(compiled_function(*inputs), SDPA(*inputs))
    assert graphs.routes() == ["sdpa" if name == "stock" else name] * 4


def test_an_explicit_backend_that_cannot_serve_raises(graphs):
    """The error carries its own name and all reasons through Dynamo's."""
    query, key, value = tensors(2, 4, 8, 16, Ev=8)
    with pytest.raises(Exception, match=r"RouteUnavailableError.*'flash' cannot serve.*(?s:.*)E equal to Ev"):
        torch.compile(lambda *a: scaled_dot_product_attention(*a, backend="flash"), fullgraph=True, backend=graphs)(
            query, key, value
        )
    with pytest.raises(Exception, match=r"UnknownNameError.*flsh.*Did you mean 'flash'"):
        torch.compile(lambda *a: scaled_dot_product_attention(*a, backend="flsh"), fullgraph=True, backend=graphs)(
            query, key, value
        )


def test_mode_error_raises_on_a_miss(graphs):
    """Mode ``error`` holds while compiling too; mode ``off`` is PyTorch's own function."""
    inputs = tensors(2, 4, 8, 16)
    smartattn.configure(mode="error")
    with pytest.raises(Exception, match=r"MissingRecordError.*nothing is stored"):
        torch.compile(attend, fullgraph=True, backend=graphs)(*inputs)
    smartattn.configure(mode="off")
    torch._dynamo.reset()
    torch.compile(attend, fullgraph=True, backend=graphs)(*inputs)
    assert graphs.routes() == ["sdpa"]
    assert smartattn.stats().pending == 0


def test_is_causal_from_a_symbolic_length(graphs):
    """``is_causal=length > 1`` compiles with dynamic shapes, where PyTorch's own function does not."""

    def decode(query, key, value):
        return scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1)

    function = torch.compile(decode, fullgraph=True, backend=graphs, dynamic=True)
    counts = []
    for length in (8, 12, 20):
        inputs = tensors(2, 4, length, 16)
        torch.testing.assert_close(function(*inputs), SDPA(*inputs, is_causal=True))
        counts.append(len(graphs.modules))
    assert len(set(counts)) == 1


@pytest.mark.parametrize("mask", [Causal(), CausalLowerRight(), Window(3, 0)])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_mask_classes(graphs, mask, is_dynamic):
    """A mask named by its class means under compile what it means outside."""
    function = torch.compile(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), fullgraph=True, backend=graphs, dynamic=is_dynamic
    )
    query, key, value = tensors(2, 4, 8, 16)
    torch.testing.assert_close(function(query, key, value), SDPA(query, key, value, mask.dense(8, 8)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_masks_as_tensors(graphs, dtype, is_dynamic):
    """Mask tensors work on a chosen route, without their values being looked at."""
    query, key, value = tensors(2, 4, 8, 16)
    mask = torch.rand(2, 1, 8, 8) > 0.3 if dtype == torch.bool else torch.randn(2, 1, 8, 8)
    put_record((query, key, value, mask), {"stock": 9.0, "flash": 5.0})
    function = torch.compile(scaled_dot_product_attention, fullgraph=True, backend=graphs, dynamic=is_dynamic)
    torch.testing.assert_close(function(query, key, value, mask), SDPA(query, key, value, mask))
    assert graphs.routes() == ["flash"]


def test_autocast_and_gradient_modes_inside_a_graph(graphs):
    """What a block switches inside a graph counts for the choice there: dtype and pass."""
    query, key, value = (tensor.requires_grad_() for tensor in tensors(2, 4, 8, 16))
    halves = tuple(tensor.detach().bfloat16() for tensor in (query, key, value))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        put_record(halves, {"stock": 9.0, "flash": 5.0})

    def step(query, key, value, *others):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            first = scaled_dot_product_attention(query, key, value)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = scaled_dot_product_attention(*others)
        return first, second

    # Other tensors for the second call: autocast would hand it the casts that the first made without gradients.
    others = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    found = torch.compile(step, fullgraph=True, backend=graphs)(query, key, value, *others)
    assert graphs.routes() == ["flash", "sdpa"]
    assert [tensor.dtype for tensor in found] == [torch.bfloat16] * 2
    assert [tensor.requires_grad for tensor in found] == [False, True]
    torch.testing.assert_close(found[0], SDPA(*halves))


def test_numbers_that_vary(graphs):
    """Scales and dropout rates that Dynamo lets vary are no obstacle, and a negative scale keeps to what takes it."""

    class Scaled(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale, self.dropout = scale, 0.0

        def forward(self, query, key, value):
            return scaled_dot_product_attention(query, key, value, scale=self.scale, dropout_p=self.dropout)

    inputs = tensors(2, 4, 8, 16)
    put_record(inputs, {"stock": 9.0, "flash": 5.0})
    module = Scaled(0.5)
    function = torch.compile(module, fullgraph=True, backend=graphs, dynamic=True)
    for scale in (0.5, 0.25, 2.0, -1.0):
        module.scale = scale
        torch.testing.assert_close(function(*inputs), SDPA(*inputs, scale=scale))
    module.dropout = 0.3
    assert function(*inputs).shape == inputs[0].shape
    assert set(graphs.routes()) == {"flash", "sdpa"}


def test_rewritten_routes_stand_in_static_graphs_only(graphs):
    """A route whose rewrite looks at lengths serves a static graph; a dynamic one is left to stock."""
    query, key, value = tensors(2, 8, 16, 16, H=2)
    put_record((query, key, value), {"stock": 9.0, "fold_gqa+flash": 5.0}, enable_gqa=True)
    expected = SDPA(query, key, value, enable_gqa=True)
    for is_dynamic in (False, True):
        torch._dynamo.reset()
        function = torch.compile(
            lambda *a: scaled_dot_product_attention(*a, enable_gqa=True),
            fullgraph=True, backend=graphs, dynamic=is_dynamic,
        )  # fmt: skip
        torch.testing.assert_close(function(query, key, value), expected)
    assert graphs.routes() == ["fold_gqa+flash", "sdpa"]


def test_one_query_against_growing_keys(graphs):
    """Folding the query group looks at the query alone, so it serves while only keys grow."""
    for length in (8, 9, 10, 33):
        query, key, value = tensors(2, 8, 1, 16, H=2, S=length)
        if length == 8:
            function = torch.compile(
                lambda *a: scaled_dot_product_attention(*a, enable_gqa=True), fullgraph=True, backend=graphs
            )
        put_record((query, key, value), {"stock": 9.0, "fold_gqa+flash": 5.0}, enable_gqa=True)
        torch.testing.assert_close(function(query, key, value), SDPA(query, key, value, enable_gqa=True))
    assert graphs.routes() == ["fold_gqa+flash"] * 2
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("has_one_length", [False, True])
def test_variants_stand_for_all_lengths(graphs, monkeypatch, has_one_length):
    """A dynamic graph is judged by equal and unequal lengths, small and huge ones; key and value agree in each."""
    seen: list[Signature] = []

    def spy(call):
        found = list(variants(call))
        seen.extend(found)
        return found

    monkeypatch.setattr(compiled, "variants", spy)

    def attend_to_self(x, y):
        return scaled_dot_product_attention(x, x, x) if has_one_length else scaled_dot_product_attention(x, y, y)

    inputs = tensors(2, 4, 8, 16)[:2]
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 2)
    torch.compile(attend_to_self, fullgraph=True, backend=graphs)(*inputs)
    assert None not in seen
    assert {signature.L for signature in seen} == {signature.S for signature in seen} == set(PROBES)
    assert {signature.L == signature.S for signature in seen} == ({True} if has_one_length else {True, False})


def test_a_causal_route_for_squares_needs_one_length(graphs, monkeypatch):
    """A route that takes causal squares only serves a dynamic graph whose L and S are one symbol, no other."""
    from smartattn.backends.flash_cpu import FlashCpu

    monkeypatch.setattr(
        FlashCpu, "extra_reasons", lambda self, s, environment: ("squares only",) if s.is_causal and s.L != s.S else ()
    )
    inputs = tensors(2, 4, 8, 16)[:2]
    put_record((inputs[0], *inputs), {"stock": 9.0, "flash": 5.0}, is_causal=True)
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 2)
    for function in (
        lambda x, y: scaled_dot_product_attention(x, x, x, is_causal=True) + y[:, :, :1],
        lambda x, y: scaled_dot_product_attention(x, y, y, is_causal=True),
    ):
        torch._dynamo.reset()
        torch.compile(function, fullgraph=True, backend=graphs)(*inputs)
    assert graphs.routes() == ["flash", "sdpa"]


def test_foreign_replacement_inside_a_graph(graphs):
    """What another library put in the place of SDPA is what the graph calls."""
    inputs = tensors(2, 4, 8, 16)
    put_record(inputs, {"stock": 9.0, "flash": 5.0})

    def foreign(*args, **kwargs):
        return SDPA(*args, **kwargs) + 1

    F.scaled_dot_product_attention = foreign
    try:
        found = torch.compile(attend, fullgraph=True, backend=graphs)(*inputs)
    finally:
        F.scaled_dot_product_attention = SDPA
    torch.testing.assert_close(found, SDPA(*inputs) + 1)


CHILD = """
import json, sys, torch, smartattn
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch.manual_seed(0)
from tests.test_compile import Stack, put_record
from tests.fakes import tensors
smartattn.configure(mode="frozen")
route = sys.argv[1]
if route != "none":
    put_record(tuple(t.requires_grad_() for t in tensors(2, 4, 8, 16)), {"stock": 9.0, route: 5.0})
inputs = tuple(t.requires_grad_() for t in tensors(2, 4, 8, 16))
function = torch.compile(lambda q, k, v: smartattn.scaled_dot_product_attention(q, k, v), fullgraph=True)
function(*inputs).sum().backward()
from smartattn.wishes import all_bindings
found = {key: counters["aot_autograd"][key] for key in
         ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")}
print(json.dumps({**found, "routes": [b.route for b in all_bindings()], "breaks": len(counters["graph_break"])}))
"""


@pytest.mark.slow
def test_compile_caches_of_other_processes(tmp_path):
    """A second process hits AOTAutograd's cache while the choice is the same, and misses it when the choice changed."""
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "PYTHONPATH": str(ROOT)}
    results = []
    for route in ("flash", "flash", "none", "none", "flash"):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, route], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    assert [result["routes"] for result in results] == [[r] for r in ("flash", "flash", "stock", "stock", "flash")]
    assert [result["autograd_cache_hit"] for result in results] == [0, 1, 0, 1, 1]
    assert {result["autograd_cache_bypass"] for result in results} == {0}
    assert {result["breaks"] for result in results} == {0}


@pytest.mark.slow
def test_inductor_trains_a_model():
    """Compiled by Inductor, a model gives the outputs and gradients that it gives outside, at several lengths."""
    model = Stack(2)
    function = torch.compile(model, fullgraph=True)
    for length in (8, 12, 20):
        x = torch.randn(2, length, 32)
        grads = []
        for run in (function, model):
            model.zero_grad()
            run(x).square().mean().backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(*grads)
    assert counters["stats"]["unique_graphs"] == 2
