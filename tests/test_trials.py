"""What happens inside a trial stays invisible outside."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from smartattn import versions
from smartattn.signature import Call
from smartattn.trials import leaf_copies, untraced

CPU = torch.device("cpu")


def _call(*, requires_grad: bool = True) -> Call:
    return Call(*(torch.randn(1, 2, 4, 8, requires_grad=requires_grad) for _ in range(3)))


def _train(call: Call) -> None:
    """Do what a trial of a training route does, dropout included."""
    with untraced(CPU, grad=True):
        own = leaf_copies(call)
        output = versions.sdpa(own.query, own.key, own.value, None, 0.5)
        torch.autograd.grad(output, own[:3], torch.ones_like(output))


def test_random_state_is_as_found() -> None:
    """Drawing inside does not move the program's generator."""
    before = torch.get_rng_state()
    _train(_call())
    state = torch.get_rng_state()
    torch.set_rng_state(before)
    _ = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    assert torch.equal(state, torch.get_rng_state())


def test_gradients_of_the_caller_stay_untouched() -> None:
    """A trial's backward reaches neither ``.grad`` nor hooks of the caller's tensors."""
    call, seen = _call(), []
    call.query.register_hook(seen.append)
    _train(call)
    assert call.query.grad is None
    assert seen == []


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(use_reentrant: bool) -> None:
    """A checkpoint whose first pass holds a trial and whose recompute does not still gives right gradients."""
    done = []

    def block(query: torch.Tensor) -> torch.Tensor:
        if not done:
            done.append(1)
            _train(_call())
        return (query * query).sin()

    query = torch.randn(5, requires_grad=True)
    checkpoint(block, query, use_reentrant=use_reentrant).sum().backward()
    expected = 2 * query * (query * query).cos()
    torch.testing.assert_close(query.grad, expected.detach())


def test_saved_tensors_hooks_of_the_program_see_nothing() -> None:
    """Offloading hooks are not called for a trial's tensors."""
    packed = []
    call = _call()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        _train(call)
    assert packed == []


def test_disabled_saved_tensors_hooks_are_no_obstacle() -> None:
    """Where hooks may not be installed, a trial still runs."""
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        _train(_call())
    assert versions.accepts_saved_tensors_hooks()


@pytest.mark.parametrize("grad", [False, True])
def test_modes_inside_and_after(grad: bool) -> None:
    """Inside, the modes are the trial's own; after an error too, they are the program's again."""
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.autograd.set_detect_anomaly(True):
        with pytest.raises(KeyError), untraced(CPU, grad=grad):  # noqa: PT012 - the error comes after what it ends
            assert torch.is_grad_enabled() == grad
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_anomaly_enabled()
            raise KeyError
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_anomaly_enabled()
    assert torch.is_grad_enabled()


def test_another_default_device_is_bypassed() -> None:
    """Factories inside do not follow the program's default device."""
    with torch.device("meta"):
        with untraced(CPU, grad=False):
            assert torch.ones(1).device.type == "cpu"
        assert torch.ones(1).device.type == "meta"


def test_function_modes_see_nothing() -> None:
    """A ``TorchFunctionMode`` of the program does not observe a trial."""

    class Recorder(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    call = _call()
    with Recorder() as recorder:
        with untraced(CPU, grad=True):
            own = leaf_copies(call)
            versions.sdpa(own.query, own.key, own.value)
        seen = recorder.seen
        torch.ones(1)
        assert recorder.seen > seen
    assert seen == 0


def test_leaf_copies_share_memory() -> None:
    """Copies are views on the same memory that want what the originals want."""
    call = _call()._replace(attn_mask=torch.zeros(4, 4))
    call = call._replace(key=call.key.detach(), query=call.query * 1)
    own = leaf_copies(call)
    assert [t.data_ptr() for t in own.tensors] == [t.data_ptr() for t in call.tensors]
    assert [t.requires_grad for t in own.tensors] == [True, False, True, False]
    assert all(t.is_leaf for t in own.tensors)


@pytest.mark.gpu
def test_cuda_state_is_as_found() -> None:
    """The device's generator, the current device and memory peaks are as found on a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", 0)
    state, stream = torch.cuda.get_rng_state(device), torch.cuda.current_stream(device)
    with untraced(device, grad=False):
        torch.rand(3, device=device)
        assert torch.cuda.current_stream(device) == stream
    assert torch.equal(torch.cuda.get_rng_state(device), state)
