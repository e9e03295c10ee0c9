"""Every way in which PyTorch can call attention that is not a plain call: what happens is what SDPA would do."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - what programs call it
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import smartattn
from smartattn import SmartAttention, scaled_dot_product_attention, versions
from tests.fakes import tensors

SDPA = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def frozen():
    """Measure nothing unless a test asks for it: what composes is under test, not what is fastest."""
    smartattn.configure(mode="frozen")


def same_as_sdpa(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
    """Check one call against SDPA, and return its output."""
    found, expected = scaled_dot_product_attention(*inputs, **options), SDPA(*inputs, **options)
    torch.testing.assert_close(found, expected)
    assert type(found) is type(expected)
    return found


def dense(found: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a nested tensor side by side."""
    return torch.cat([part.reshape(-1) for part in found.unbind()])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes(context):
    """Gradient modes give the output that they give to SDPA, inference tensors included."""
    query, key, value = (tensor.requires_grad_() for tensor in tensors(2, 4, 8, 16))
    with context():
        for _ in range(3):
            found, expected = scaled_dot_product_attention(query, key, value), SDPA(query, key, value)
            assert (found.requires_grad, found.is_inference()) == (expected.requires_grad, expected.is_inference())
            torch.testing.assert_close(found, expected)


def test_inputs_from_inference_mode():
    """Inference tensors used outside of inference mode work as with SDPA."""
    with torch.inference_mode():
        inputs = tensors(2, 4, 8, 16)
    for _ in range(3):
        same_as_sdpa(*inputs)


def test_double_backward_by_default_is_that_of_sdpa():
    """Without a wish second derivatives exist exactly where SDPA has them: not on its fused path."""
    inputs = [tensor.requires_grad_() for tensor in tensors(1, 2, 4, 8)]
    for function in (SDPA, scaled_dot_product_attention):
        (grad,) = torch.autograd.grad(function(*inputs).sum(), inputs[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="not implemented"):
            torch.autograd.grad(grad.square().sum(), inputs)


def test_double_backward_when_asked_for():
    """``double_backward=True`` gives right second derivatives, in autograd and under transforms."""
    module = SmartAttention(double_backward=True)
    inputs = [tensor.requires_grad_() for tensor in tensors(1, 2, 3, 4, dtype=torch.float64)]
    assert torch.autograd.gradgradcheck(lambda *args: module(*args, is_causal=True), inputs)
    query, key, value = (tensor.detach() for tensor in inputs)
    hessian = torch.func.jacrev(torch.func.jacrev(lambda x: module(x, key, value).sum()))(query)
    expected = torch.autograd.functional.hessian(lambda x: module(x, key, value).sum(), query)
    torch.testing.assert_close(hessian, expected)


def test_forward_mode_runs_where_sdpa_refuses():
    """Forward-mode derivatives (dual numbers, jvp, jacfwd, jacrev of jacfwd) come from Math and are right."""
    query, key, value = tensors(1, 2, 4, 8, dtype=torch.float64)
    tangent = torch.randn_like(query)

    def ours(x):
        return scaled_dot_product_attention(x, key, value, is_causal=True)

    def manual(x):
        scores = x @ key.mT / 8**0.5
        return scores.masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf")).softmax(-1) @ value

    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda x: SDPA(x, key, value), (query,), (tangent,))
    for _ in range(2):
        torch.testing.assert_close(ours(query), manual(query))
        torch.testing.assert_close(
            torch.func.jvp(ours, (query,), (tangent,)), torch.func.jvp(manual, (query,), (tangent,))
        )
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(ours(forward_ad.make_dual(query, tangent)))
        torch.testing.assert_close(dual.tangent, torch.func.jvp(manual, (query,), (tangent,))[1])
    torch.testing.assert_close(torch.func.jacfwd(ours)(query), torch.func.jacfwd(manual)(query))
    twice = [torch.func.jacrev(torch.func.jacfwd(lambda x, f=f: f(x).sum()))(query) for f in (ours, manual)]
    torch.testing.assert_close(*twice)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("is_causal", [False, True])
def test_vmap_and_grad_transforms(is_causal):
    """``vmap``, ``grad``, ``vjp`` and per-sample gradients equal those of SDPA, also after the same call was bound."""
    query, key, value = tensors(3, 2, 4, 8, 16)
    for _ in range(2):
        same_as_sdpa(query[0], key[0], value[0], is_causal=is_causal)
        found, expected = (
            torch.vmap(lambda q, k, v, f=f: f(q, k, v, is_causal=is_causal))(query, key, value)
            for f in (scaled_dot_product_attention, SDPA)
        )
        torch.testing.assert_close(found, expected)
        found, expected = (
            torch.vmap(torch.func.grad(lambda q, k, v, f=f: f(q, k, v, is_causal=is_causal).square().sum(), (0, 1, 2)))(
                query, key, value
            )
            for f in (scaled_dot_product_attention, SDPA)
        )
        torch.testing.assert_close(found, expected)
    assert smartattn.stats().tunings == 0


def test_transforms_see_no_bound_runner():
    """A shape bound by a plain call is looked up anew inside a transform, and counted as handed over."""
    inputs = tensors(2, 4, 8, 16)
    for _ in range(3):
        scaled_dot_product_attention(*inputs)
    before = smartattn.stats()
    torch.func.grad(lambda q: scaled_dot_product_attention(q, *inputs[1:]).sum())(inputs[0])
    after = smartattn.stats()
    assert (after.passthroughs - before.passthroughs, after.hits - before.hits) == (1, 0)


class Model(torch.nn.Module):
    """A small model that holds the module."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(16, 48)
        self.attention = SmartAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend causally over the second to last dimension."""
        query, key, value = self.projection(x).chunk(3, -1)
        return self.attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_export_holds_sdpa(strict, is_dynamic):
    """An exported model holds PyTorch's own operator, so that it loads where smartattn is not installed."""
    model, x = Model().eval(), torch.randn(2, 4, 8, 16)
    for _ in range(3):
        expected = model(x)
    shapes = {"x": {2: torch.export.Dim("length", min=2, max=64)}} if is_dynamic else None
    program = torch.export.export(model, (x,), strict=strict, dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes]
    assert "aten.scaled_dot_product_attention.default" in targets
    assert not [target for target in targets if "smartattn" in target]
    torch.testing.assert_close(program.module()(x), expected)
    if is_dynamic:
        longer = torch.randn(2, 4, 13, 16)
        torch.testing.assert_close(program.module()(longer), model(longer))


def test_jit_trace_holds_sdpa():
    """A traced model holds PyTorch's own operator, also for a shape that was bound before."""
    model, x = Model().eval(), torch.randn(2, 4, 8, 16)
    for _ in range(3):
        expected = model(x)
    traced = torch.jit.trace(model, (x,))
    assert "aten::scaled_dot_product_attention" in str(traced.inlined_graph)
    assert "flash" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), expected)


def test_jit_script_holds_sdpa(tmp_path):
    """A model that holds the module can be scripted, saved and loaded; the model itself keeps what it had."""
    model, x = Model().eval(), torch.randn(2, 4, 8, 16)
    expected, text = model(x), repr(model)
    scripted = torch.jit.script(model)
    assert "aten::scaled_dot_product_attention" in str(scripted.inlined_graph)
    torch.testing.assert_close(scripted(x), expected)
    torch.jit.save(scripted, tmp_path / "model.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "model.pt")(x), expected)
    assert isinstance(model.attention, SmartAttention)
    assert repr(model) == text
    before = smartattn.stats().hits
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x), expected)
        torch.testing.assert_close(twin(x), expected)
    assert smartattn.stats().hits > before


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_gives_the_graph_of_sdpa(mode):
    """``make_fx`` records the same operators as for SDPA, also for a shape that was bound before."""
    inputs = tensors(2, 4, 8, 16)
    for _ in range(3):
        scaled_dot_product_attention(*inputs)
    ours, theirs = (
        make_fx(functools.partial(f, is_causal=True), tracing_mode=mode)(*inputs)
        for f in (scaled_dot_product_attention, SDPA)
    )
    assert ours.code == theirs.code
    torch.testing.assert_close(ours(*inputs), SDPA(*inputs, is_causal=True))


def test_nested_strided():
    """Strided nested tensors are handed over."""
    parts = [torch.randn(4, length, 16) for length in (3, 5)]
    nested = torch.nested.nested_tensor(parts)
    found, expected = scaled_dot_product_attention(nested, nested, nested), SDPA(nested, nested, nested)
    assert found.is_nested
    torch.testing.assert_close(dense(found), dense(expected))


@pytest.mark.parametrize("lengths", [(3, 5), (1,)])
def test_nested_jagged(lengths):
    """Jagged nested tensors are handed over, ragged sizes, gradients and all."""
    parts = [torch.randn(length, 4, 16) for length in lengths]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    heads_first = nested.transpose(1, 2)
    found = scaled_dot_product_attention(heads_first, heads_first, heads_first)
    expected = SDPA(heads_first, heads_first, heads_first)
    assert found.layout == torch.jagged
    assert found.shape == expected.shape
    torch.testing.assert_close(found.values(), expected.values())
    grads = [torch.autograd.grad(out.values().sum(), nested)[0].values() for out in (found, expected)]
    torch.testing.assert_close(*grads)


def test_meta_and_fake_tensors():
    """Tensors without data give shapes alone, as from SDPA, and measure nothing."""
    smartattn.configure(mode="tune")
    meta = [tensor.to("meta") for tensor in tensors(2, 4, 8, 16)]
    assert scaled_dot_product_attention(*meta).shape == (2, 4, 8, 16)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = [torch.empty(2, 4, 8, 16) for _ in range(3)]
        inside = scaled_dot_product_attention(*fake)
    outside = scaled_dot_product_attention(*fake)
    for found in (inside, outside):
        assert type(found) is type(fake[0])
        assert (found.shape, found.stride(), found.fake_mode) == ((2, 4, 8, 16), fake[0].stride(), mode)
    assert smartattn.stats().tunings == 0


class Named(torch.Tensor):
    """A subclass that PyTorch's functions pass through."""


class Logged(torch.Tensor):
    """A subclass that sees which functions are called on it."""

    seen: tuple[str, ...] = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Note the name and go on."""
        Logged.seen += (func.__name__,)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses():
    """A subclass keeps its type and sees the function that it would see from SDPA."""
    inputs = tensors(2, 4, 8, 16)
    for _ in range(2):
        assert type(same_as_sdpa(*(tensor.as_subclass(Named) for tensor in inputs))) is Named
    logged = [tensor.as_subclass(Logged) for tensor in inputs]
    Logged.seen = ()
    scaled_dot_product_attention(*logged)
    assert "scaled_dot_product_attention" in Logged.seen


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("L", "S"), [(8, 8), (4, 8)])
def test_causal_bias(make, L, S):
    """PyTorch's ``CausalBias`` masks mean what they mean to SDPA."""
    query, key, value = tensors(2, 4, L, 16, S=S)
    for _ in range(3):
        found = scaled_dot_product_attention(query, key, value, make(L, S))
        torch.testing.assert_close(found, SDPA(query, key, value, make(L, S)))
        assert type(found) is torch.Tensor


def test_dtensor(tmp_path):
    """A distributed tensor stays one: its global shape is not the shape that is computed here."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        inputs = tensors(2, 4, 8, 16)
        shared = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in inputs]
        if versions.TORCH < (2, 12):
            # No sharding rule for the fused CPU operator yet: theirs is ours.
            for function in (SDPA, scaled_dot_product_attention):
                with pytest.raises(NotImplementedError, match="sharding"):
                    function(*shared)
            return
        for _ in range(3):
            found = scaled_dot_product_attention(*shared)
            assert isinstance(found, DTensor)
            torch.testing.assert_close(found.full_tensor(), SDPA(*inputs))
    finally:
        dist.destroy_process_group()


class FunctionLog(TorchFunctionMode):
    """A mode that notes the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Note the name and go on."""
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class DispatchLog(TorchDispatchMode):
    """A mode that notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Note the name and go on."""
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_function_modes_see_sdpa():
    """A ``TorchFunctionMode`` sees PyTorch's function, also for a shape that was bound before."""
    inputs = tensors(2, 4, 8, 16)
    for _ in range(3):
        scaled_dot_product_attention(*inputs)
    with FunctionLog() as log:
        scaled_dot_product_attention(*inputs)
    assert log.names.count("scaled_dot_product_attention") == 1
    assert not [name for name in log.names if name.startswith("_scaled_dot_product")]


def test_device_context_is_no_reason_to_hand_over():
    """A default device is a function mode too, but one that leaves attention alone: choices are bound under it."""
    inputs = tensors(2, 4, 8, 16)
    with torch.device("cpu"):
        for _ in range(3):
            same_as_sdpa(*inputs)
    assert smartattn.stats().passthroughs == 0
    assert smartattn.stats().hits == 2


def test_dispatch_modes_see_the_operators_of_sdpa():
    """A ``TorchDispatchMode`` sees the operators that it sees under SDPA."""
    inputs = tensors(2, 4, 8, 16)
    for _ in range(3):
        scaled_dot_product_attention(*inputs)
    logs = []
    for function in (scaled_dot_product_attention, SDPA):
        with DispatchLog() as log:
            function(*inputs)
        logs.append(log.names)
    assert logs[0] == logs[1] != []


@pytest.mark.parametrize("mask", [None, torch.ones(3, 8, 8, dtype=torch.bool)])
def test_flop_counter(mask):
    """``FlopCounterMode`` counts what it counts under SDPA."""
    inputs = tensors(2, 3, 8, 16)
    for _ in range(3):
        scaled_dot_product_attention(*inputs, mask)
    counts = []
    for function in (scaled_dot_product_attention, SDPA):
        with FlopCounterMode(display=False) as counter:
            function(*inputs, mask)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
    assert mask is None or counts[0] > 0


@pytest.mark.parametrize("shape", [(8, 16), (4, 8, 16), (2, 3, 4, 8, 16), (2, 2, 3, 4, 8, 16)])
@pytest.mark.parametrize("mode", ["frozen", "tune"])
def test_other_ranks(shape, mode):
    """Two, three, five and six dimensions give what SDPA gives, gradients included."""
    smartattn.configure(mode=mode)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    for _ in range(2):
        found = same_as_sdpa(query, key, value, is_causal=True)
        grads = [
            torch.autograd.grad(out.square().sum(), (query, key, value))
            for out in (found, SDPA(query, key, value, is_causal=True))
        ]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("shape", [(0, 4, 8, 16), (2, 4, 0, 16), (2, 0, 8, 16)])
def test_empty_inputs(shape):
    """Sizes of zero are not ours to measure: PyTorch answers, by Math where its own function would end the process."""
    query, key, value = (torch.randn(shape) for _ in range(3))
    if versions.RETURNS_ZEROS_FOR_EMPTY:
        same_as_sdpa(query, key, value)
    assert scaled_dot_product_attention(query, key, value).shape == shape
    assert smartattn.stats().misses == smartattn.stats().tunings == 0


def test_grad_scaler_under_autocast():
    """A step with autocast and ``GradScaler`` gives the gradients that it gives with SDPA."""
    found = []
    for attention in (scaled_dot_product_attention, SDPA):
        torch.manual_seed(0)
        layer = torch.nn.Linear(16, 48)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                query, key, value = layer(torch.ones(2, 4, 8, 16)).chunk(3, -1)
                loss = attention(query.float(), key, value, is_causal=True).square().mean()
            assert loss.dtype in (torch.float32, torch.bfloat16)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append(layer.weight.detach().clone())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_mode(warn_only):
    """Deterministic algorithms give the same bits twice, and are a circumstance of their own."""
    inputs = [tensor.requires_grad_() for tensor in tensors(2, 4, 8, 16)]
    scaled_dot_product_attention(*inputs)
    torch.use_deterministic_algorithms(mode=True, warn_only=warn_only)
    try:
        misses = smartattn.stats().misses
        runs = [torch.autograd.grad(scaled_dot_product_attention(*inputs).sum(), inputs) for _ in range(3)]
        assert smartattn.stats().misses == misses + 1
    finally:
        torch.use_deterministic_algorithms(mode=False)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@contextlib.contextmanager
def replaced(function):
    """Put another function in the place of PyTorch's for a while."""
    F.scaled_dot_product_attention = function
    try:
        yield
    finally:
        F.scaled_dot_product_attention = SDPA


def test_foreign_replacement_is_called():
    """What another library put in the place of SDPA (context parallelism) gets the call, bound or not."""
    inputs = tensors(2, 4, 8, 16)
    for _ in range(3):
        scaled_dot_product_attention(*inputs)
    calls = []

    def foreign(*args, **kwargs):
        calls.append((len(args), sorted(kwargs)))
        return SDPA(*args, **kwargs) + 1

    with replaced(foreign):
        for _ in range(3):
            torch.testing.assert_close(scaled_dot_product_attention(*inputs), SDPA(*inputs) + 1)
    assert len(calls) == 3
    torch.testing.assert_close(scaled_dot_product_attention(*inputs), SDPA(*inputs))


def test_own_replacement_does_not_call_itself():
    """A function of ours in the place of SDPA is no foreign one: calls through it end in PyTorch's operators."""
    from smartattn.plain import own_patches

    def ours(*args, **kwargs):
        return scaled_dot_product_attention(*args, **kwargs)

    inputs = tensors(2, 4, 8, 16)
    own_patches.add(ours)
    try:
        with replaced(ours):
            torch.testing.assert_close(F.scaled_dot_product_attention(*inputs), SDPA(*inputs))
            empty = torch.randn(0, 4, 8, 16)
            assert F.scaled_dot_product_attention(empty, empty, empty).shape == empty.shape
    finally:
        own_patches.discard(ours)


def test_wrong_arguments_raise_what_sdpa_raises():
    """Whatever SDPA refuses is refused with the same type of error."""
    query, key, value = tensors(2, 4, 8, 16)
    wrong = [
        (query, key[..., :8], value),
        (query, key.double(), value),
        (query, key, None),
        (query[0, 0, 0], key, value),
        (query, key, value, torch.ones(3, 3)),
        (query, key, value, [1, 2]),
    ]
    for arguments in wrong:
        with pytest.raises(Exception) as theirs:
            SDPA(*arguments)
        with pytest.raises(type(theirs.value)):
            scaled_dot_product_attention(*arguments)


def test_unhashable_arguments_are_handed_over():
    """Key parts that cannot be hashed are no error of ours."""
    query, key, value = tensors(2, 4, 8, 16)
    same_as_sdpa(query, key, value, scale=torch.tensor(0.5))
