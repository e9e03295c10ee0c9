"""Reported faults of kind D that need neither compile nor transforms: threads, flags, dropout, memory order, autocast."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import smartattn
from smartattn import versions
from smartattn.backends.math import run_math
from smartattn.signature import Call
from tests import oracle
from tests.backends.contract import LAYOUTS, laid_out
from tests.cases.common import answers, call_of, everywhere_right

stock = torch.nn.functional.scaled_dot_product_attention


def flags() -> tuple[bool, ...]:
    """Return the process's switches of backends."""
    return versions.flash_enabled(), versions.efficient_enabled(), versions.cudnn_enabled(), versions.math_enabled()


def test_a_call_never_touches_the_switches_of_the_process():
    """R70: no switch moves during a call, as another thread sees it, nor after."""
    before, seen, stop = flags(), set(), threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.add(flags())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for S in (3, 130, 300):
            for name, _ in answers(call_of(2, 2, 8, 16, S=S, attn_mask=torch.rand(8, S) < 0.7)):
                assert name
    finally:
        stop.set()
        watcher.join()
    assert seen == {before}


def test_what_another_thread_switched_off_is_respected_and_no_error():
    """R70: while another thread holds a backend context, calls follow it and are right; afterwards all is as before."""
    call = call_of(2, 2, 8, 16)
    smartattn.scaled_dot_product_attention(*call)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with sdpa_kernel([SDPBackend.MATH]):
            inside.set()
            leave.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(30)
    try:
        assert "flash" not in everywhere_right(call)
        everywhere_right(Call(*(torch.randn(2, 8, 16) for _ in range(3))))
    finally:
        leave.set()
        holder.join()
    assert "flash" in everywhere_right(call)


@pytest.mark.parametrize("pinned", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("shape", [(2, 2, 8, 16), (2, 8, 16)])
def test_a_pinned_backend_is_honoured_or_refused_as_by_pytorch(pinned: SDPBackend, shape: tuple[int, ...]):
    """R70, N3: under ``sdpa_kernel`` only what the process left on answers; what PyTorch refuses there may still work."""
    call = call_of(*shape) if len(shape) == 4 else Call(*(torch.randn(shape) for _ in range(3)))
    with sdpa_kernel([pinned]):
        try:
            expected = stock(*call[:3])
        except RuntimeError:
            expected = run_math(*call)
        for _ in range(3):
            torch.testing.assert_close(smartattn.scaled_dot_product_attention(*call), expected)
        if pinned is SDPBackend.MATH:
            assert smartattn.explain(*call).route.split("+")[-1] != "flash"


def test_module_has_no_dropout_of_its_own():
    """R88: dropout happens only when ``dropout_p`` says so; with 0 two calls agree, and rates are choices of their own."""
    module = smartattn.SmartAttention().eval()
    call = call_of(2, 2, 8, 16)
    assert torch.equal(module(*call[:3]), module(*call[:3]))
    dropped = module(*call[:3], dropout_p=0.5)
    assert not torch.equal(dropped, module(*call[:3], dropout_p=0.5))
    assert torch.equal(module(*call[:3]), module(*call[:3]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rest", ["plain", "grouped", "masked", "three", "five", "grads"])
def test_the_memory_order_is_that_of_pytorch(layout: str, rest: str):
    """R91: whatever route answers, the output lies in memory as PyTorch's own answer to this call would."""
    shape = {"three": (4, 5, 8), "five": (2, 2, 4, 5, 8)}.get(rest, (2, 4, 5, 8))
    keys = (*shape[:-3], 2, *shape[-2:]) if rest == "grouped" else shape
    made = [laid_out(size, layout, torch.float32) for size in (shape, keys, keys)]
    if rest == "grads":
        made = [tensor.detach().requires_grad_() for tensor in made]
    mask = torch.rand(5, 5) < 0.7 if rest == "masked" else None
    call = Call(*made, mask, enable_gqa=rest == "grouped")
    expected = stock(*call[:3], attn_mask=mask, enable_gqa=call.enable_gqa)
    for name, output in answers(call):
        assert output.stride() == expected.stride(), name


def test_heads_merge_without_a_copy_where_pytorchs_do():
    """R91: length-before-heads inputs give an output whose heads merge as a view, by every route."""
    call = Call(*(torch.randn(2, 5, 4, 8).transpose(1, 2) for _ in range(3)))
    for name, output in answers(call):
        assert output.transpose(1, 2).view(2, 5, 32).shape == (2, 5, 32), name


@pytest.mark.parametrize("mode", ["off", "warn", "strict"])
@pytest.mark.parametrize("form", ["plain", "causal", "mask"])
def test_strict_mode_repeats_bit_for_bit(mode: str, form: str):
    """R86: in strict mode output and gradients repeat bit for bit; each mode has choices of its own."""
    rest = {"plain": {}, "causal": {"is_causal": True}, "mask": {"attn_mask": torch.rand(33, 33) < 0.7}}[form]
    call = call_of(2, 4, 33, 16, H=2, enable_gqa=True, grads="qkv", **rest)
    smartattn.scaled_dot_product_attention(*call)
    torch.use_deterministic_algorithms(mode != "off", warn_only=mode == "warn")
    try:
        found = []
        for _ in range(4):
            output = smartattn.scaled_dot_product_attention(*call)
            found.append((output, *torch.autograd.grad(output.sum(), call[:3])))
        tunings = smartattn.stats().tunings
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert tunings == (1 if mode == "off" else 2)
    if mode == "strict":
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", ["math", "eager"])
@pytest.mark.parametrize("rest", [{}, {"is_causal": True}, {"attn_mask": torch.randn(5, 5)}])
def test_second_derivatives(name: str, rest: dict[str, object]):
    """R83: with ``double_backward=True`` second derivatives are those of the definition, by either backend."""
    call = call_of(1, 2, 5, 4, dtype=torch.float64, grads="qkv", **rest)
    if call.attn_mask is not None:
        call = call._replace(attn_mask=call.attn_mask.double())
    module = smartattn.SmartAttention(backend=name, double_backward=True)
    attention = lambda *made: module(*made, *call[3:6])  # noqa: E731 - one line, used twice
    assert torch.autograd.gradcheck(attention, call[:3])
    assert torch.autograd.gradgradcheck(attention, call[:3])


def test_second_derivatives_by_default_say_what_to_do():
    """R83: without the flag, a second derivative works or raises PyTorch's error; with it the default choice works."""
    call = call_of(2, 2, 8, 16, grads="qkv")
    module = smartattn.SmartAttention(double_backward=True)
    for _ in range(3):
        (gradient,) = torch.autograd.grad(module(*call[:3]).square().sum(), call.query, create_graph=True)
        gradient.square().sum().backward()
    assert torch.isfinite(call.query.grad).all()
    right = oracle.answer(call, torch.ones(2, 2, 8, 16))
    oracle.check(call, module(*call[:3]), right)


def test_mask_objects_of_pytorch_are_taken():
    """R28: PyTorch's lower-right bias equals its dense mask."""
    from torch.nn.attention.bias import causal_lower_right

    call = call_of(2, 2, 4, 16, S=9)
    found = smartattn.scaled_dot_product_attention(*call[:3], causal_lower_right(4, 9))
    dense = torch.ones(4, 9, dtype=torch.bool).tril(5)
    oracle.check(call, found, oracle.answer(call._replace(attn_mask=dense)))
