"""Routes that fail after they were chosen: who answers, what is raised, what is remembered, and what lifts it."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import smartattn
from smartattn import versions
from smartattn.first_sight import recover
from smartattn.selector import selector
from smartattn.wishes import wish_of
from tests.fakes import FakeBackend, FakeClock, registered, tensors

attend = smartattn.scaled_dot_product_attention


@pytest.fixture
def backend(fake_clock: FakeClock):
    """Register a backend that wins every tuning, and let tunings take no real time."""
    selector.clock = lambda device: fake_clock
    backend = FakeBackend(clock=fake_clock, cost_us=1.0)
    with registered(backend):
        yield backend


def bound(backend: FakeBackend, *, times: int = 4, grads: bool = False) -> list[torch.Tensor]:
    """Return inputs whose choice is the fake: at first sight, by key and by memo, as often as ``times``."""
    given = [tensor.requires_grad_(grads) for tensor in tensors(2, 2, 6, 8)]
    for _ in range(times):
        attend(*given)
    assert smartattn.explain(*given).route == "fake"
    return given


def right(given: list[torch.Tensor]) -> torch.Tensor:
    """Return PyTorch's own answer."""
    return torch.nn.functional.scaled_dot_product_attention(*given)


@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("error", [RuntimeError("no engine"), ValueError("bad plan"), NotImplementedError("no kernel")])
def test_a_synchronous_error_is_answered_by_the_safe_default(backend: FakeBackend, times: int, error: Exception):
    """The call that meets the error gets the right answer, and the route is not run again for this signature."""
    given = bound(backend, times=times)
    backend.raises = error
    torch.testing.assert_close(attend(*given), right(given))
    calls = backend.calls
    for _ in range(4):
        torch.testing.assert_close(attend(*given), right(given))
    assert backend.calls == calls
    assert smartattn.stats().fallbacks == smartattn.stats().quarantines == 1


def test_a_route_that_fails_at_its_first_real_call(backend: FakeBackend, fake_clock: FakeClock):
    """R55: a route that only ever worked in its trials is replaced at the first real call."""
    given = tensors(2, 2, 6, 8)
    smartattn.explain(*given, tune=True)
    backend.raises = RuntimeError("compiler not found")
    torch.testing.assert_close(attend(*given), right(given))
    assert smartattn.stats().fallbacks == 1


def test_a_route_that_fails_in_its_trials_is_never_run(backend: FakeBackend):
    """R43: an error of any kind in a trial makes a failed outcome with its text, and the call succeeds."""
    backend.raises = OSError("libnvrtc not found")
    given = tensors(2, 2, 6, 8)
    torch.testing.assert_close(attend(*given), right(given))
    outcome = smartattn.explain(*given).outcomes["fake"]
    assert outcome.is_ == "failed"
    assert "libnvrtc not found" in outcome.reason
    assert smartattn.stats().quarantines == 0


def test_quarantine_is_written_with_reason_environment_and_date(backend: FakeBackend):
    """What was put away says which route, why, where and when."""
    given = bound(backend)
    backend.raises = RuntimeError("no engine")
    attend(*given)
    (entry,) = selector.memory.store.quarantine_entries()
    assert entry.route_name == "fake"
    assert entry.reason == "failed at run time: RuntimeError: no engine"
    assert entry.date.startswith("20")
    assert entry.environment_digest == smartattn.cache.records()[0].environment_digest
    assert "in quarantine: failed at run time" in smartattn.explain(*given).outcomes["fake"].reasons[0]


def test_a_new_process_keeps_the_quarantine(backend: FakeBackend):
    """Choices read from disk, and a new tuning, keep away from a route that failed before."""
    given = bound(backend)
    backend.raises = RuntimeError("no engine")
    attend(*given)
    backend.raises = None
    selector.reset()
    smartattn.configure()
    calls = backend.calls
    attend(*given)
    assert backend.calls == calls
    assert smartattn.explain(*given).route != "fake"


def test_forget_lifts_it(backend: FakeBackend):
    """``forget`` removes record and quarantine, so the next call tunes and may take the route again."""
    given = bound(backend)
    backend.raises = RuntimeError("no engine")
    attend(*given)
    backend.raises = None
    smartattn.cache.forget(smartattn.explain(*given).signature)
    attend(*given)
    assert smartattn.explain(*given).route == "fake"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("can't allocate memory")]
)
def test_out_of_memory_costs_this_call_only(backend: FakeBackend, error: Exception):
    """Memory that ran out is answered by the safe default, without quarantine; the next call runs the route again."""
    given = bound(backend)
    backend.raises = error
    torch.testing.assert_close(attend(*given), right(given))
    backend.raises = None
    calls = backend.calls
    attend(*given)
    assert backend.calls == calls + 1
    assert smartattn.stats().quarantines == 0
    assert list(selector.memory.store.quarantine_entries()) == []


def test_out_of_memory_in_a_trial_rejects_and_goes_on(backend: FakeBackend):
    """R121: a route that runs out of memory in its trial is rejected, and the tuning ends with a choice."""
    backend.raises = torch.OutOfMemoryError("CUDA out of memory")
    given = tensors(2, 2, 6, 8)
    torch.testing.assert_close(attend(*given), right(given))
    outcome = smartattn.explain(*given).outcomes["fake"]
    assert outcome.is_ == "rejected"
    assert "ran out of memory" in outcome.reasons[0]


def test_a_route_that_wants_too_much_memory_is_not_tried(backend: FakeBackend):
    """R121: a workspace beyond the share of free memory rejects a route before anything is allocated."""
    backend._workspace_bytes = 1 << 60
    attend(*tensors(2, 2, 6, 8))
    assert backend.calls == 0


@pytest.mark.parametrize(
    "text", ["CUDA error: an illegal memory access was encountered", "CUDA error: misaligned address"]
)
@pytest.mark.parametrize("times", [1, 4])
def test_a_sticky_error_is_raised_again(backend: FakeBackend, text: str, times: int):
    """An accelerator error that outlives its call is the program's to see: no fallback, no quarantine."""
    given = bound(backend, times=times)
    backend.raises = RuntimeError(text)
    with pytest.raises(RuntimeError, match=text):
        attend(*given)
    assert smartattn.stats().fallbacks == smartattn.stats().quarantines == 0


def test_a_sticky_error_in_a_trial_ends_all_tuning(backend: FakeBackend):
    """After such an error nothing more is tried in this process, and the error is raised."""
    backend.raises = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        attend(*tensors(2, 2, 6, 8))
    backend.raises = None
    given = tensors(2, 2, 300, 8)
    torch.testing.assert_close(attend(*given), right(given))
    assert smartattn.stats().tunings == 0


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("backward failed")


def test_an_error_in_backward_propagates(backend: FakeBackend):
    """What a backward raises later reaches the program, and nothing is quarantined behind its back."""
    given = bound(backend, grads=True)
    whole = backend._run
    backend._run = lambda query, *rest: whole(_Broken.apply(query), *rest)
    smartattn.configure()
    output = attend(*given)
    with pytest.raises(RuntimeError, match="backward failed"):
        output.sum().backward()
    assert smartattn.stats().quarantines == 0


def test_a_route_whose_backward_fails_is_not_chosen(backend: FakeBackend):
    """A backward that raises in its trial makes the route a failed one for training."""
    whole = backend._run
    backend._run = lambda query, *rest: whole(_Broken.apply(query), *rest)
    given = [tensor.requires_grad_() for tensor in tensors(2, 2, 6, 8)]
    attend(*given).sum().backward()
    assert smartattn.explain(*given).outcomes["fake"].is_ == "failed"


def test_when_pytorch_fails_too_its_error_is_raised(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch):
    """When the safe default fails on the same inputs, its error is raised, caused by the first, and the route stays."""
    given = bound(backend)
    backend.raises = RuntimeError("no engine")

    def fails(*arguments: object, **rest: object) -> torch.Tensor:
        raise RuntimeError("bad inputs")

    monkeypatch.setattr(versions, "sdpa", fails)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
    run = selector_binding(given)
    with pytest.raises(RuntimeError, match="bad inputs") as caught:
        recover(*run, backend.raises)
    assert str(caught.value.__cause__) == "no engine"
    assert smartattn.stats().quarantines == 0


def selector_binding(given: list[torch.Tensor]) -> tuple[object, ...]:
    """Return wish, key and arguments of the one bound call."""
    wish = wish_of()
    (hot_key,) = wish.bindings
    return wish, hot_key, (*given, None, 0.0, False, None, False)


def test_the_fault_is_told_once(backend: FakeBackend, caplog: pytest.LogCaptureFixture):
    """One warning names route, signature, error and the way out, however many calls follow."""
    given = bound(backend)
    backend.raises = RuntimeError("no engine")
    with caplog.at_level(logging.WARNING, "smartattn"):
        for _ in range(3):
            attend(*given)
    messages = [record.getMessage() for record in caplog.records if "quarantine" in record.getMessage()]
    assert len(messages) == 1
    for part in ("'fake'", "no engine", "sdpa infer cpu", "smartattn.cache.forget()"):
        assert part in messages[0]


def test_listeners_hear_of_fallback_and_quarantine(backend: FakeBackend):
    """Both events carry signature, route and reason as plain data."""
    given = bound(backend)
    heard: list[dict[str, object]] = []
    smartattn.add_listener(lambda event: heard.append(dict(event)))
    backend.raises = RuntimeError("no engine")
    attend(*given)
    assert [event["event"] for event in heard] == ["fallback", "quarantine"]
    assert all(event["route"] == "fake" and "no engine" in str(event["reason"]) for event in heard)


def test_an_explicit_route_falls_back_too(backend: FakeBackend):
    """A named backend that fails at run time has no other route of its kind: its own error is raised."""
    given = tensors(2, 2, 6, 8)
    attend(*given, backend="fake")
    backend.raises = RuntimeError("no engine")
    try:
        output = attend(*given, backend="fake")
    except RuntimeError as error:
        assert "no engine" in str(error)  # noqa: PT017 - either end is right, silence about the error is not
    else:
        torch.testing.assert_close(output, right(given))
        assert smartattn.stats().fallbacks == 1


def test_threads_that_meet_the_error_together(backend: FakeBackend):
    """Eight threads on one broken choice all get the right answer, and one quarantine is kept."""
    given = bound(backend)
    backend.raises = RuntimeError("no engine")
    expected, found = right(given), []
    threads = [threading.Thread(target=lambda: found.append(attend(*given))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for output in found:
        torch.testing.assert_close(output, expected)
    assert len(list(selector.memory.store.quarantine_entries())) == 1


def test_an_interrupt_is_not_swallowed(backend: FakeBackend):
    """Ctrl-C in the middle of a route is raised, and blames nobody."""
    given = bound(backend)
    backend.raises = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        attend(*given)
    assert smartattn.stats().quarantines == 0
