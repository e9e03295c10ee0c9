"""Pre-warming: what is collected, spread, tuned and left; nothing twice, nothing lost, everything put back as found."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

import smartattn
from smartattn import cache
from smartattn.environment import environment_of
from smartattn.errors import SettingError, UnknownNameError
from smartattn.plain import own_patches
from smartattn.prewarm import prewarm, prewarm_pending, prewarm_signatures, recording
from smartattn.progress import Progress
from smartattn.record import Rejected, Timed
from smartattn.selector import Selector, selector
from smartattn.signature import Signature
from smartattn.signature_text import parse_signature
from tests.fakes import FakeBackend, FakeClock, registered

CPU = torch.device("cpu")
SDPA = torch.nn.functional.scaled_dot_product_attention
TEXT = "sdpa infer cpu float32 N2 Hq2 H2 L{L} S{S} E8 Ev8 layout=bhsd mask=none scale=positive"


class Block(nn.Module):
    """Attention by PyTorch's function, as models call it, behind a norm with buffers."""

    def __init__(self, attention: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.project = nn.Linear(16, 48)
        self.attention = attention
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.modes.append((self.training, torch.is_grad_enabled()))
        normed = self.norm(states.transpose(1, 2)).transpose(1, 2)
        query, key, value = self.project(normed).view(*states.shape[:2], 6, 8).transpose(1, 2).chunk(3, 1)
        attend = self.attention or torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, mask, 0.25 if self.training else 0.0)


@pytest.fixture(autouse=True)
def fake_time(monkeypatch: pytest.MonkeyPatch, quiet_machine: None) -> FakeClock:
    """Measure with a clock that only fakes move, so that nothing here depends on the machine."""
    clock = FakeClock()
    monkeypatch.setattr(selector, "clock", lambda device: clock)
    return clock


def problem(L: int, S: int | None = None) -> Signature:
    return parse_signature(TEXT.format(L=L, S=S or L))


def stored() -> set[str]:
    return {str(entry.record.signature) for entry in cache.records()}


def test_a_model_that_calls_sdpa_is_collected_and_tuned():
    """Attention inside a model is tuned for what it asks, and then found without another tuning."""
    model, states = Block().eval(), torch.randn(2, 30, 16)
    summary = prewarm(model, (states,))
    (entry,) = summary.entries
    assert entry.status == "tuned"
    assert " L30 S30 " in entry.signature
    assert summary.is_complete
    before = smartattn.stats().tunings
    with torch.no_grad():
        query, key, value = model.project(states).view(2, 30, 6, 8).transpose(1, 2).chunk(3, 1)
        assert smartattn.explain(query, key, value).origin in ("memory", "tuned", "disk")
    assert smartattn.stats().tunings == before


def test_own_modules_are_collected_too():
    """A module that holds ``SmartAttention`` asks the same, and its choices bound before do not hide it."""
    model, states = Block(smartattn.SmartAttention(mode="frozen")), torch.randn(2, 30, 16)
    for _ in range(3):
        with torch.no_grad():
            model.eval()(states)
    (entry,) = prewarm(model, (states,)).entries
    assert entry.status == "tuned"


def test_pytorchs_function_itself_may_be_the_model():
    """``F.scaled_dot_product_attention`` and a method of a model are models like others."""
    (entry,) = prewarm(SDPA, tuple(torch.randn(3, 1, 2, 30, 8).unbind())).entries
    assert entry.status == "tuned"
    (entry,) = prewarm(Block().forward, (torch.randn(2, 200, 16),)).entries
    assert " L200 " in entry.signature


def test_an_explicit_backend_asks_nothing():
    """A place whose backend is fixed has nothing to choose."""
    model = Block(smartattn.SmartAttention(backend="math"))
    assert prewarm(model, (torch.randn(2, 30, 16),)).entries == ()


def test_both_passes_and_everything_as_found():
    """Each pass runs in its mode; modes, buffers, gradients, random state and PyTorch's function are as before."""
    model, states = Block(), torch.randn(2, 30, 16)
    model.norm.eval()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    random = torch.get_rng_state()
    summary = prewarm(model, (states,), passes=("infer", "train"))
    texts = [entry.signature for entry in summary.entries]
    assert [text.split()[1] for text in texts] == ["infer", "train"]
    assert "dropout=sixteenths" in texts[1]
    assert model.modes == [(False, False), (True, True)]
    assert model.training
    assert not model.norm.training
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.nn.functional.scaled_dot_product_attention is SDPA
    assert not own_patches
    assert selector.recorder is None


def test_a_model_that_raises_leaves_all_as_found():
    """The model's own error comes out, and nothing stays changed."""
    model = Block()
    settings = smartattn.settings()
    with pytest.raises(AttributeError):
        prewarm(model, (None,))
    assert torch.nn.functional.scaled_dot_product_attention is SDPA
    assert selector.recorder is None
    assert model.training
    assert smartattn.settings() == settings


def test_nothing_is_noted_or_tuned_while_the_model_runs():
    """Collecting answers with the safe default, writes nothing and tunes nothing."""
    with recording() as found:
        torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 8).unbind())
    assert [str(s).split()[5] for _, s in found] == ["Hq2"]
    assert smartattn.stats().tunings == smartattn.stats().pending == 0
    assert selector.memory.store.pending(environment_of(CPU)) == ()


def test_a_foreign_replacement_stays(monkeypatch: pytest.MonkeyPatch):
    """What another program put in the place of PyTorch's function is left alone."""
    calls = []

    def foreign(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(args)
        return SDPA(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", foreign)
    assert prewarm(Block(), (torch.randn(2, 30, 16),)).entries == ()
    assert len(calls) == 1
    assert torch.nn.functional.scaled_dot_product_attention is foreign


def test_lengths_are_tuned_by_bucket_for_lengths_that_change():
    """A range gives one dynamic record per bucket; a length in between is then answered without a tuning."""
    summary = prewarm_signatures([problem(30), problem(1, 30)], lengths={"key": (1, 256)})
    assert stored() == {str(problem(n)) for n in (128, 181, 256)} | {str(problem(1, n)) for n in (128, 181, 256)}
    assert all(entry.record.dynamic for entry in cache.records())
    assert len(summary.entries) == 6
    query, key, value = torch.randn(3, 2, 2, 200, 8).unbind()
    before = smartattn.stats().tunings
    smartattn.scaled_dot_product_attention(query, key, value)
    smartattn.scaled_dot_product_attention(query[:, :, :1].contiguous(), key, value)
    assert smartattn.stats().tunings == before


def test_a_range_never_pays_a_plan_per_length(fake_time: FakeClock):
    """A route that plans per length loses its place in a record for changing lengths, however fast it is."""
    backend = FakeBackend("planner", clock=fake_time, cost_us=1.0, plan_ms=50.0)
    with registered(backend):
        once = prewarm_signatures([problem(300)])
        ranged = prewarm_signatures([problem(30)], lengths={"key": (1, 128)})
    assert once.entries[0].route == "planner"
    assert once.entries[0].saved_plan_ms == 0
    assert ranged.entries[0].route != "planner"


def test_one_bucket_is_tuned_once_at_its_largest_member():
    """Steps of decoding that share a bucket are one tuning."""
    summary = prewarm_signatures([problem(1, n) for n in (20, 25, 22)])
    assert [entry.signature for entry in summary.entries] == [str(problem(1, 25))]


def test_what_is_stored_and_current_is_not_tuned_again():
    """A second pre-warm measures nothing; declaring a range over it only marks the record."""
    prewarm_signatures([problem(128)])
    before = smartattn.stats().tunings
    again = prewarm_signatures([problem(128), problem(100)])
    assert [entry.status for entry in again.entries] == ["stored"]
    ranged = prewarm_signatures([problem(40)], lengths={"key": (1, 128)})
    assert [entry.status for entry in ranged.entries] == ["stored"]
    assert smartattn.stats().tunings == before
    assert [entry.record.dynamic for entry in cache.records()] == [True]


def test_only_what_a_new_backend_adds_is_measured(fake_time: FakeClock):
    """A backend that appears, or whose version changes, is measured against stock and the choice; the rest stays."""
    prewarm_signatures([problem(30)])
    (old,) = (entry.record for entry in cache.records())
    backend = FakeBackend("fresh", clock=fake_time, cost_us=1.0)
    with registered(backend):
        renewed = prewarm_signatures([problem(30)])
        (new,) = (entry.record for entry in cache.records())
        assert [(e.status, e.route) for e in renewed.entries] == [("renewed", "fresh")]
        kept = set(old.outcomes) - {"stock", "fresh"}
        assert all(new.outcomes[name] == old.outcomes[name] for name in kept if name != renewed.entries[0].route)
        assert isinstance(new.outcomes["fresh"], Timed)
        assert [e.status for e in prewarm_signatures([problem(30)]).entries] == ["stored"]
        backend._version = "2"
        assert [e.status for e in prewarm_signatures([problem(30)]).entries] == ["renewed"]
        (newest,) = (entry.record for entry in cache.records())
        assert newest.outcomes["fresh"].version == "2"


def test_what_a_tuning_found_too_slow_is_not_tried_again(fake_time: FakeClock):
    """A route that was rejected for what its run showed counts as measured."""
    with registered(FakeBackend("slow", clock=fake_time, cost_us=1e6)):
        prewarm_signatures([problem(30)])
        (record,) = (entry.record for entry in cache.records())
        assert isinstance(record.outcomes["slow"], Rejected)
        assert [e.status for e in prewarm_signatures([problem(30)]).entries] == ["stored"]


def test_interrupting_keeps_what_was_tuned():
    """Ctrl-C comes out, what was tuned is stored whole, settings are as before, and a second run does the rest."""
    settings = smartattn.settings()
    told: list[Progress] = []

    def stop(step: Progress) -> None:
        told.append(step)
        if step.num_done == 2:
            raise KeyboardInterrupt

    problems = [problem(n) for n in (100, 150, 200, 300)]
    with pytest.raises(KeyboardInterrupt):
        prewarm_signatures(problems, progress=stop)
    assert stored() == {str(problem(100)), str(problem(150))}
    assert smartattn.settings() == settings
    statuses = [entry.status for entry in prewarm_signatures(problems, progress=told.append).entries]
    assert statuses == ["stored", "stored", "tuned", "tuned"]
    assert [step.num_done for step in told] == [1, 2, 1, 2, 3, 4]


def test_a_spent_budget_leaves_the_rest(monkeypatch: pytest.MonkeyPatch):
    """When the seconds are spent, what is left is named and nothing else is tuned."""
    now = iter([0.0, *[5.0] * 100])
    module = sys.modules["smartattn.prewarm"]
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    summary = prewarm_signatures([problem(30)], budget_s=1.0)
    assert [entry.status for entry in summary.entries] == ["left"]
    assert not summary.is_complete
    assert stored() == set()


@pytest.mark.parametrize(("effort", "budget_ms"), [("quick", 100.0), ("standard", 400.0), ("max", 1600.0)])
def test_effort_scales_the_budget(effort: str, budget_ms: float, monkeypatch: pytest.MonkeyPatch):
    """Each tuning sees a quarter, all or four times the budget; afterwards it is what it was."""
    seen = []
    tune = Selector._tune

    def spy(self, call, view, **rest):
        seen.append(view.settings.tuning_budget_ms)
        return tune(self, call, view, **rest)

    monkeypatch.setattr(Selector, "_tune", spy)
    prewarm_signatures([problem(30)], effort=effort)
    assert seen == [budget_ms]
    assert smartattn.settings().signature_budget_ms == 400.0


def test_pending_signatures_are_tuned_and_dropped():
    """What mode ``record`` noted is tuned, and no longer pending."""
    smartattn.configure(mode="record")
    smartattn.scaled_dot_product_attention(*torch.randn(3, 2, 2, 30, 8).unbind())
    smartattn.configure(mode="tune")
    summary = prewarm_pending()
    assert [entry.signature for entry in summary.entries] == [str(problem(30))]
    assert prewarm_pending().entries == ()
    assert "nothing to tune" in str(prewarm_pending())


def test_noisy_records_get_a_second_try(monkeypatch: pytest.MonkeyPatch):
    """A record that was noisy is measured once more; noisy again, it stays in memory and is told."""
    verdicts = iter([True, False])
    tune = Selector._tune

    def noisy(self, call, view, **rest):
        record = tune(self, call, view, **rest)
        noise = next(verdicts, True)
        record = dataclasses.replace(record, provenance=dataclasses.replace(record.provenance, noisy=noise))
        self.memory.forget(view.environment, record.signature)
        self.keep(view.environment, record, view.settings)
        return record

    monkeypatch.setattr(Selector, "_tune", noisy)
    assert [entry.status for entry in prewarm_signatures([problem(30)]).entries] == ["tuned"]
    assert [entry.status for entry in prewarm_signatures([problem(150)]).entries] == ["noisy"]


def test_devices_that_are_not_here_are_told():
    """A signature of another device type is reported, the others are tuned."""
    other = dataclasses.replace(problem(30), device_type="xpu")
    summary = prewarm_signatures([other, problem(30)])
    assert [entry.status for entry in summary.entries] == ["failed", "tuned"]
    assert "no xpu device" in summary.entries[0].note
    assert not summary.is_complete


def test_summary_says_what_it_saves(fake_time: FakeClock):
    """The table has route, times and gain, and the data is plain."""
    with registered(FakeBackend("fast", clock=fake_time, cost_us=10.0)):
        summary = prewarm_signatures([problem(30)])
    text = str(summary)
    assert "fast" in text
    assert "10.00x" in text
    assert "1 beat stock" in text
    assert summary.to_dict()["entries"][0]["gain"] == pytest.approx(10.0)
    assert summary.to_dict()["counts"] == {"tuned": 1}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"effort": "hard"}, UnknownNameError),
        ({"passes": ("trian",)}, UnknownNameError),
        ({"lengths": {"keys": (1, 2)}}, UnknownNameError),
        ({"lengths": {"key": (2, 1)}}, SettingError),
        ({"budget_s": -1}, SettingError),
    ],
)
def test_wrong_arguments_are_refused(change, error):
    """Wrong words are named; the model has not run for most of them."""
    with pytest.raises(error):
        prewarm(Block(), (torch.randn(2, 30, 16),), **change)
