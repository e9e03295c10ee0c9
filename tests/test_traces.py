"""Tuning leaves no trace: what surrounds a first sight cannot tell that anything ran besides its own call."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import smartattn
from smartattn.selector import selector
from tests.fakes import FakeClock, tensors

attend = smartattn.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def no_real_time():
    """Let tunings take no real time, so that every one of them is whole."""
    selector.clock = lambda device: FakeClock(default_us=50.0)


def state() -> dict[str, object]:
    """Return everything about PyTorch's own state that a call must leave alone."""
    return {
        "rng": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast_dtype": torch.get_autocast_dtype("cpu"),
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "anomaly_nan": torch.is_anomaly_check_nan_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "reduced": torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        "precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


def stock(*arguments: object, **rest: object) -> torch.Tensor:
    """Call PyTorch's own function."""
    return torch.nn.functional.scaled_dot_product_attention(*arguments, **rest)


SURROUNDINGS = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast_without_cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "anomaly": torch.autograd.detect_anomaly,
    "meta_device": lambda: torch.device("meta"),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "deterministic_fill": lambda: _deterministic(),  # noqa: PLW0108 - defined below
    "float64": lambda: _default_dtype(),  # noqa: PLW0108 - as above
}


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


@contextlib.contextmanager
def _default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("wants_grad", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
def test_state_is_as_found(surrounding: str, wants_grad: bool, with_mask: bool):
    """A first sight that tunes inside any surrounding gives stock's answer and leaves every switch as it was."""
    given = tensors(2, 2, 12, 16)
    for tensor in given:
        tensor.requires_grad_(wants_grad)
    rest = {"attn_mask": torch.rand(12, 12) < 0.7} if with_mask else {"is_causal": True}
    with SURROUNDINGS[surrounding]():
        expected = stock(*given, **rest)
        before = state()
        found = attend(*given, **rest)
        assert state() == before
        assert smartattn.stats().tunings == 1
        again = attend(*given, **rest)
        assert state() == before
    for output in (found, again):
        assert (output.device.type, output.dtype) == ("cpu", expected.dtype)
        assert output.requires_grad == expected.requires_grad
        assert output.is_inference() == expected.is_inference()
        torch.testing.assert_close(output, expected, atol=2e-2 if output.dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    assert all(tensor.grad is None for tensor in given)
    if found.requires_grad:
        found.float().sum().backward()
        assert all(torch.isfinite(tensor.grad).all() for tensor in given)


def test_a_tuning_moves_no_random_numbers():
    """A first sight with dropout drops what stock would drop there, and leaves the generator where stock would."""
    given = tensors(2, 2, 12, 16)
    torch.manual_seed(3)
    expected = stock(*given, dropout_p=0.5), torch.rand(4)
    torch.manual_seed(3)
    found = attend(*given, dropout_p=0.5), torch.rand(4)
    assert smartattn.stats().tunings == 1
    assert smartattn.explain(*given, dropout_p=0.5).route == "stock"
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


class Layer(torch.nn.Module):
    """Two projections around an attention, so that a checkpoint has something to recompute."""

    def __init__(self, function) -> None:
        super().__init__()
        self.into = torch.nn.Linear(16, 48)
        self.out = torch.nn.Linear(16, 16)
        self.function = function
        self.num_calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Attend within (N, L, 16)."""
        self.num_calls += 1
        heads = self.into(tokens).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.out(self.function(*heads, is_causal=True).transpose(1, 2).flatten(2))


def gradients_of(layer: Layer, tokens: torch.Tensor, run) -> list[torch.Tensor]:
    """Return the gradients of one step."""
    layer.zero_grad()
    run(tokens).square().sum().backward()
    return [parameter.grad.clone() for parameter in layer.parameters()]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_tuning_inside_a_checkpoint(use_reentrant: bool, layers: int):
    """A first sight inside either kind of checkpoint leaves its counting of saved tensors and its gradients alone."""
    torch.manual_seed(1)
    layer = Layer(attend)
    tokens = torch.randn(2, 10, 16, requires_grad=True)

    def deep(tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            tokens = checkpoint(layer, tokens, use_reentrant=use_reentrant)
        return tokens

    found = [gradients_of(layer, tokens, deep) for _ in range(4)]
    assert layer.num_calls == 4 * 2 * layers

    def plain(tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            tokens = layer(tokens)
        return tokens

    layer.function = stock
    expected = gradients_of(layer, tokens, plain)
    for step in found:
        for one, other in zip(step, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert 1 <= smartattn.stats().tunings <= 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_no_tuning_in_a_backward_pass(use_reentrant: bool):
    """What a recompute meets first is answered at once, and tuned never before the backward pass is over."""
    layer = Layer(attend)
    tokens = torch.randn(2, 10, 16, requires_grad=True)
    first = checkpoint(layer, tokens, use_reentrant=use_reentrant)
    tunings = smartattn.stats().tunings
    smartattn.cache.clear()
    first.square().sum().backward()
    assert smartattn.stats().tunings == tunings
    assert torch.isfinite(tokens.grad).all()


def test_saved_tensors_of_a_surrounding_hook_are_those_of_one_call():
    """Hooks around a first sight see as many tensors, of the same sizes, as around a later call."""
    given = [tensor.requires_grad_() for tensor in tensors(2, 2, 12, 16)]
    seen: list[list[torch.Size]] = []
    for _ in range(3):
        sizes: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.shape) or t, lambda t: t):
            attend(*given)
        seen.append(sizes)
    assert smartattn.stats().tunings == 1
    assert seen[0] == seen[1] == seen[2] != []


def test_gradients_that_accumulate_are_not_touched():
    """``.grad`` of leaves, and hooks on them, see nothing of the trials' backward passes."""
    given = [tensor.requires_grad_() for tensor in tensors(2, 2, 12, 16)]
    calls: list[str] = []
    for tensor in given:
        tensor.grad = torch.full_like(tensor, 7.0)
        tensor.register_hook(lambda gradient: calls.append("hook"))
        tensor.register_post_accumulate_grad_hook(lambda tensor: calls.append("accumulated"))
    output = attend(*given)
    assert calls == []
    assert all(bool((tensor.grad == 7.0).all()) for tensor in given)
    output.sum().backward()
    assert sorted(calls) == ["accumulated"] * 3 + ["hook"] * 3


def test_inputs_are_not_changed():
    """Values and version counters of the caller's tensors stay, also of a mask."""
    given = (*tensors(2, 2, 12, 16), torch.randn(12, 12))
    copies = [tensor.clone() for tensor in given]
    versions = [tensor._version for tensor in given]
    attend(*given)
    assert [tensor._version for tensor in given] == versions
    assert all(torch.equal(one, other) for one, other in zip(given, copies, strict=True))


def test_the_graph_of_a_first_sight_is_that_of_a_later_call():
    """What a first sight returns depends on the caller's tensors as any later answer does."""
    given = [tensor.requires_grad_() for tensor in tensors(2, 2, 12, 16)]
    first, later = attend(*given), attend(*given)
    assert type(first.grad_fn) is type(later.grad_fn)
    for one, other in zip(*(torch.autograd.grad(o.sum(), given) for o in (first, later)), strict=True):
        assert torch.equal(one, other)


def test_a_tuned_answer_can_be_used_in_later_autograd():
    """N5: nothing tuned outside of inference mode is an inference tensor, also when inference came first."""
    given = tensors(2, 2, 12, 16)
    with torch.inference_mode():
        attend(*given)
    output = attend(*given)
    assert not output.is_inference()
    weight = torch.ones(16, requires_grad=True)
    (output * weight).sum().backward()
    assert torch.isfinite(weight.grad).all()


def test_nothing_stays_alive():
    """After a tuning no tensor of the trials is left."""
    given = [tensor.requires_grad_() for tensor in tensors(2, 2, 12, 16)]
    warm = [tensor.requires_grad_() for tensor in tensors(2, 2, 200, 16)]
    attend(*warm).sum().backward()

    def count() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    before = count()
    attend(*given)
    assert count() == before


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_an_anomaly_mode_backward_names_the_callers_fault():
    """Anomaly mode around a first sight still finds the NaN that the program made itself, and nothing of ours."""
    given = [tensor.requires_grad_() for tensor in tensors(2, 2, 12, 16)]
    with torch.autograd.detect_anomaly():
        output = attend(*given)
        with pytest.raises(RuntimeError, match="returned nan values"):
            (output * 0).sqrt().sum().backward()


def test_an_interrupt_in_a_tuning_leaves_no_trace(monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C while a tuning runs is raised, state is as found, and the next call tunes as if nothing had been."""
    given = [tensor.requires_grad_() for tensor in tensors(2, 2, 12, 16)]

    class Interrupted(FakeClock):
        def sample(self, run, num_calls):
            super().sample(run, num_calls)
            raise KeyboardInterrupt

    selector.clock = lambda device: Interrupted()
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.save_on_cpu():
        before = state()
        with pytest.raises(KeyboardInterrupt):
            attend(*given)
        assert state() == before
    selector.clock = lambda device: FakeClock(default_us=50.0)
    attend(*given)
    assert smartattn.stats().tunings == 1
