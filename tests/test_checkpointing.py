"""Checkpointing runs a forward twice: the recompute meets the choice of the forward, whatever happened in between."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.utils.checkpoint import checkpoint

import smartattn
from smartattn import SmartAttention, scaled_dot_product_attention
from smartattn.environment import environment_of
from smartattn.selector import selector
from smartattn.wishes import all_bindings, unbind_all
from tests.fakes import FakeBackend, FakeClock, registered, tensors

SDPA = F.scaled_dot_product_attention
CPU = torch.device("cpu")


@pytest.fixture
def clock(fake_clock: FakeClock):
    """Let every tuning use a fake clock, under which built-in routes cost 100 us."""
    selector.clock = lambda device: fake_clock
    return fake_clock


def leaves(*shape: int) -> list[torch.Tensor]:
    """Return query, key and value that want gradients."""
    return [tensor.requires_grad_() for tensor in tensors(*shape)]


def run(inputs, *, use_reentrant: bool, between=None, attention=scaled_dot_product_attention, **options):
    """Checkpoint one attention, do something between forward and backward, and return output and gradients."""
    output = checkpoint(lambda *args: attention(*args, **options).sin(), *inputs, use_reentrant=use_reentrant)
    if between is not None:
        between()
    return output, torch.autograd.grad(output.sum(), inputs) if not use_reentrant else _grads(output, inputs)


def _grads(output, inputs):
    # Reentrant checkpoints know only ``backward``.
    for tensor in inputs:
        tensor.grad = None
    output.sum().backward()
    return tuple(tensor.grad for tensor in inputs)


def expected(inputs, **options):
    """Return the output and gradients without checkpointing."""
    output = SDPA(*inputs, **options).sin()
    return output, torch.autograd.grad(output.sum(), inputs)


def routes() -> dict[str, str]:
    """Return the routes bound in this process by pass."""
    return {binding.signature.pass_name: binding.route for binding in all_bindings()}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mode", ["tune", "record", "frozen"])
def test_gradients_are_right(use_reentrant, mode):
    """Output and gradients equal those without checkpointing, in every mode, at first sight and later."""
    smartattn.configure(mode=mode)
    inputs = leaves(2, 4, 8, 16)
    for _ in range(3):
        torch.testing.assert_close(run(inputs, use_reentrant=use_reentrant), expected(inputs))


def test_nothing_is_tuned_in_a_backward():
    """A training key that only a reentrant recompute meets is not tuned there, but noted."""
    inputs = leaves(2, 4, 8, 16)
    run(inputs, use_reentrant=True)
    assert smartattn.stats().tunings == 1
    assert [signature.pass_name for _, signature in selector.notes.pending()] == ["train"]


def test_a_recompute_takes_the_inference_route(clock):
    """A training key first met in a reentrant recompute takes the route of its forward when that can train."""
    fake = FakeBackend(clock=clock, cost_us=1.0)
    with registered(fake):
        inputs = leaves(2, 4, 8, 16)
        torch.testing.assert_close(run(inputs, use_reentrant=True), expected(inputs))
        assert routes() == {"infer": "fake", "train": "fake"}


def test_a_recompute_leaves_a_route_that_cannot_train(clock):
    """An inference route without a backward is no choice for the recompute; that takes the safe default."""
    from smartattn.backends.base import Capabilities

    fake = FakeBackend(clock=clock, cost_us=1.0, capabilities=Capabilities(supports_training=False))
    with registered(fake):
        inputs = leaves(2, 4, 8, 16)
        torch.testing.assert_close(run(inputs, use_reentrant=True), expected(inputs))
        assert routes() == {"infer": "fake", "train": "stock"}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_has_one_choice(clock, use_reentrant):
    """With dropout, forward and recompute draw the same numbers because both passes share one choice."""
    fake = FakeBackend(clock=clock, cost_us=1.0)
    with registered(fake):
        inputs = leaves(2, 4, 8, 16)
        for _ in range(2):
            torch.manual_seed(3)
            output, grads = run(inputs, use_reentrant=use_reentrant, dropout_p=0.5)
            route = next(iter(set(routes().values())))
            assert set(routes().values()) == {route}
            torch.manual_seed(3)
            same = SmartAttention(backend=route)(*inputs, dropout_p=0.5).sin()
            torch.testing.assert_close(output, same)
            torch.testing.assert_close(grads, torch.autograd.grad(same.sum(), inputs))


class OnePass(FakeBackend):
    """A backend that is fast in one pass and slow in the other."""

    def __init__(self, clock: FakeClock, *, is_fast_in_training: bool) -> None:
        super().__init__("one_pass", clock=clock, cost_us=1.0)
        self.is_fast_in_training = is_fast_in_training

    def _run(self, query, key, value, *rest) -> torch.Tensor:
        self.cost_us = 1.0 if (query.requires_grad and torch.is_grad_enabled()) == self.is_fast_in_training else 900.0
        return super()._run(query, key, value, *rest)


@pytest.mark.parametrize("training_first", [False, True])
@pytest.mark.parametrize("is_fast_in_training", [False, True])
def test_the_first_pass_decides_for_both_with_dropout(clock, training_first, is_fast_in_training):
    """A call with dropout has the route of whichever pass was met first, although the other would choose another."""
    with registered(OnePass(clock, is_fast_in_training=is_fast_in_training)):
        inputs = tensors(2, 4, 8, 16)
        for wants_grad in (training_first, not training_first):
            scaled_dot_product_attention(*(t.requires_grad_(wants_grad) for t in inputs), dropout_p=0.5)
        found = routes()
        assert found["infer"] == found["train"] == ("one_pass" if training_first == is_fast_in_training else "stock")
        for wants_grad in (False, True):
            scaled_dot_product_attention(*(t.requires_grad_(wants_grad) for t in inputs))
        assert len({b.route for b in all_bindings() if b.signature.dropout == "none"}) == 2


def test_an_inference_call_with_dropout_takes_what_can_train(clock):
    """With dropout a route without a backward serves no inference either, unless it is asked for by name."""
    from smartattn.backends.base import Capabilities

    fake = FakeBackend(clock=clock, cost_us=1.0, capabilities=Capabilities(supports_training=False))
    with registered(fake):
        inputs = tensors(2, 4, 8, 16)
        scaled_dot_product_attention(*inputs, dropout_p=0.5)
        assert routes() == {"infer": "stock"}
        calls = fake.calls
        scaled_dot_product_attention(*inputs, dropout_p=0.5, backend="fake")
        assert fake.calls == calls + 1


def test_another_tuning_between_forward_and_backward_changes_nothing(clock):
    """What becomes known between forward and recompute (another process's record, say) does not rebind training."""
    smartattn.configure(mode="record")
    inputs = leaves(2, 4, 8, 16)
    fake = FakeBackend(clock=clock, cost_us=1.0)
    with registered(fake):

        def tune_elsewhere():
            from smartattn.pending import tune_signatures

            records = tune_signatures([(CPU, signature) for _, signature in selector.notes.pending()])
            assert records

        found = run(inputs, use_reentrant=False, between=tune_elsewhere)
        torch.testing.assert_close(found, expected(inputs))
        assert routes() == {"train": "stock"}
        unbind_all()
        run(inputs, use_reentrant=False)
        assert routes() == {"train": "fake"}


def test_tune_pending_between_steps_takes_effect():
    """``tune_pending`` between steps lets the next step take a new choice, forward and recompute alike."""
    smartattn.configure(mode="record")
    inputs = leaves(2, 4, 8, 16)
    run(inputs, use_reentrant=False)
    assert [record.signature.pass_name for record in smartattn.tune_pending()] == ["train"]
    torch.testing.assert_close(run(inputs, use_reentrant=False), expected(inputs))
    assert smartattn.stats().tunings == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("change", ["tune_pending", "configure", "both"])
def test_a_change_between_forward_and_backward(clock, change, use_reentrant):
    """A change within a step is met by the next forward: the recompute still takes the route of its own forward."""
    smartattn.configure(mode="record")
    inputs = leaves(2, 4, 8, 16)
    fake = FakeBackend(clock=clock, cost_us=1.0)
    with registered(fake):
        seen = []

        def interrupt():
            if change != "configure":
                assert smartattn.tune_pending()
            if change != "tune_pending":
                smartattn.configure(mode="frozen")
            seen.append(fake.calls)

        found = run(inputs, use_reentrant=use_reentrant, between=interrupt)
        torch.testing.assert_close(found, expected(inputs))
        if not use_reentrant:
            assert fake.calls == seen[0]
            torch.testing.assert_close(run(inputs, use_reentrant=use_reentrant), expected(inputs))
            assert (fake.calls > seen[0]) == (change != "configure")


def test_quarantine_between_forward_and_recompute(clock):
    """A route put into quarantine within a step still serves the recompute of the forward that it served."""
    fake = FakeBackend(clock=clock, cost_us=1.0)
    with registered(fake):
        inputs = leaves(2, 4, 8, 16)
        run(inputs, use_reentrant=False)
        assert routes() == {"train": "fake"}
        (binding,) = all_bindings()

        def put_in_quarantine():
            selector.notes.quarantine(binding, "failed elsewhere")

        torch.testing.assert_close(run(inputs, use_reentrant=False, between=put_in_quarantine), expected(inputs))
        unbind_all()
        torch.testing.assert_close(run(inputs, use_reentrant=False), expected(inputs))
        assert routes() == {"train": "stock"}


def test_trials_are_not_seen_by_a_surrounding_checkpoint():
    """A tuning inside a checkpointed block saves nothing there: the recompute, which does not tune, still matches."""
    inputs = leaves(2, 4, 8, 16)
    torch.testing.assert_close(run(inputs, use_reentrant=False), expected(inputs))
    assert smartattn.stats().tunings == 1
    assert selector.memory.find(environment_of(CPU), all_bindings()[0].signature) is not None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_under_autocast(use_reentrant):
    """Autocast around a checkpointed block gives the gradients that SDPA gives."""
    inputs = leaves(2, 4, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(inputs, use_reentrant=use_reentrant, is_causal=True)
        wanted = expected(inputs, is_causal=True)
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
