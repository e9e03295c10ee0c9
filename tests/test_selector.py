"""From a first sight to a choice, with fake backends and a fake clock: no real time is asserted."""

from __future__ import annotations

import math

import pytest
import torch

import smartattn
from smartattn.buckets import bucket_of
from smartattn.choice import NEGLIGIBLE_PLAN_MS
from smartattn.environment import environment_of
from smartattn.selector import EXACT_TUNING_RATIO, selector
from smartattn.signature import Call, read_signature
from smartattn.wishes import all_bindings
from tests.fakes import FakeBackend, FakeClock, registered

CPU = torch.device("cpu")


@pytest.fixture
def world():
    """Give a fast backend that plans 5 ms per shape, a plan-free one half as fast, and a clock of their own."""
    clock = FakeClock(default_us=400.0)
    planned = FakeBackend("planned", clock=clock, cost_us=50, plan_ms=5)
    free = FakeBackend("free", clock=clock, cost_us=100)
    selector.clock = lambda device: clock
    with registered(planned, free):
        yield clock, planned, free


def call_at(S, *, grad=False, N=1, E=4):
    query, key, value = (torch.randn(N, 1, S, E, requires_grad=grad) for _ in "qkv")
    return query, key, value


def bound_route(arguments):
    signature = read_signature(Call(*arguments))
    return [binding.route for binding in all_bindings() if binding.signature == signature and binding.route][-1]


def run(arguments, times=1, **wish):
    module = smartattn.SmartAttention(**wish)
    for _ in range(times):
        module(*arguments)
    return bound_route(arguments)


def test_one_fixed_shape_ends_on_the_best_steady_route(world):
    """The shape that was tuned has its plan already, so the fastest route runs at once, without being told."""
    assert run(call_at(150)) == "planned"


def test_a_new_length_of_a_known_bucket_rents_and_is_not_tuned(world):
    """A second length of the bucket runs the plan-free route, and costs no tuning."""
    run(call_at(150))
    assert run(call_at(151)) == "free"
    assert smartattn.stats().tunings == 1


def test_renting_ends_when_the_plan_is_paid(world):
    """After plan / saving calls at one length, the next call buys the plan, and from then on it is the choice."""
    _, planned, _ = world
    run(call_at(150))
    arguments = call_at(151)
    before = planned.calls
    assert run(arguments, times=100) == "free"
    assert planned.calls == before
    assert run(arguments) == "planned"
    assert planned.calls == before + 1


def test_renting_costs_at_most_twice_the_best_in_hindsight(world):
    """Whatever number of calls one length gets, the total is at most twice the better of always one route."""
    clock, planned, free = world
    run(call_at(150))
    start_us = clock.now_s() * 1e6
    arguments = call_at(152)
    module = smartattn.SmartAttention()
    for calls in range(1, 301):
        module(*arguments)
        if calls in (1, 10, 99, 100, 101, 300):
            spent_us = clock.now_s() * 1e6 - start_us
            best_us = min(calls * free.cost_us, planned.plan_ms * 1e3 + calls * planned.cost_us)
            assert spent_us <= 2 * best_us + 1


def test_declared_intent_skips_the_waiting(world):
    """dynamic=False buys at once; dynamic=True never does, not even for the shape that was tuned."""
    run(call_at(150))
    assert run(call_at(153), dynamic=False) == "planned"
    assert run(call_at(150), dynamic=True) == "free"


def test_a_decode_loop_pays_no_plan_per_step_and_few_tunings(world):
    """4,096 keys, one more each step: at most 14 tunings, and plans only where a tuning made them."""
    _, planned, _ = world
    query = torch.randn(1, 1, 1, 4)
    keys = torch.randn(1, 1, 64 + 4096, 4)
    module = smartattn.SmartAttention()
    with torch.no_grad():
        for length in range(64, 64 + 4096):
            module(query, keys[:, :, :length], keys[:, :, :length])
    assert smartattn.stats().tunings <= 14
    assert len(planned._planned) <= 3 * smartattn.stats().tunings


@pytest.mark.parametrize(
    "lengths", [[1, 2**17 + 1, 5, 2**17 + 2], [3, 999, 4, 998, 7, 1001] * 3], ids=["far", "jumping"]
)
def test_wild_lengths_cost_bounded_tunings(world, lengths):
    """Tiny, huge and jumping lengths cost at most one tuning per bucket."""
    module = smartattn.SmartAttention()
    key = torch.randn(1, 1, 2**17 + 2, 4)
    buckets = set()
    with torch.no_grad():
        for length in lengths:
            arguments = torch.randn(1, 1, 1, 4), key[:, :, :length], key[:, :, :length]
            module(*arguments)
            buckets.add(bucket_of(read_signature(Call(*arguments))).digest)
    assert smartattn.stats().tunings <= len(buckets)


def test_training_is_final_at_first_sight(world):
    """A training choice does not change however often it is called, because recompute must meet the same one."""
    run(call_at(150, grad=True))
    arguments = call_at(155, grad=True)
    first = run(arguments)
    assert run(arguments, times=300) == first


def test_training_takes_the_churn_of_its_family_as_prior(world):
    """After lengths that came once each, a new one is not planned for; after a length that came often, it is."""
    for length in (150, 151, 152):
        run(call_at(length, grad=True))
    assert run(call_at(153, grad=True)) == "free"
    smartattn.tune_pending()  # between steps: choices may change
    run(call_at(150, grad=True), times=600)
    assert run(call_at(160, grad=True)) == "planned"


def test_deterministic_programs_keep_one_route(world):
    """In deterministic mode a choice is final like in training."""
    torch.use_deterministic_algorithms(True)
    try:
        run(call_at(150))
        first = run(call_at(154))
        assert run(call_at(154), times=150) == first
    finally:
        torch.use_deterministic_algorithms(False)


def test_frozen_never_switches_and_writes_nothing(world, cache_dir):
    """Mode frozen runs what is stored, keeps it, and leaves the folder alone."""
    run(call_at(150))
    files = sorted(path for path in cache_dir.rglob("*"))
    arguments = call_at(151)
    first = run(arguments, mode="frozen")
    assert run(arguments, times=150, mode="frozen") == first
    run(call_at(4), mode="frozen")
    assert sorted(path for path in cache_dir.rglob("*")) == files
    assert smartattn.stats().tunings == 1


def test_record_mode_notes_and_runs_the_safe_default(world):
    """Mode record measures nothing; tune_pending later tunes what it noted and lets it be chosen."""
    arguments = call_at(150)
    assert run(arguments, mode="record") == "stock"
    assert smartattn.stats().tunings == 0
    assert [str(signature) for _, signature in selector.notes.pending()] == [str(read_signature(Call(*arguments)))]
    records = smartattn.tune_pending()
    assert len(records) == 1
    assert run(arguments) == "planned"
    assert not selector.notes.pending()


def test_error_mode_raises_on_a_miss_and_runs_on_a_hit(world):
    """Mode error names the signature and what to do, and answers what is stored."""
    arguments = call_at(150)
    with pytest.raises(smartattn.MissingRecordError, match=r"L150.*mode is 'error'"):
        smartattn.SmartAttention(mode="error")(*arguments)
    run(arguments)
    assert run(arguments, mode="error") == "planned"


def test_off_mode_is_stock_and_remembers_nothing(world):
    """Mode off hands every call to PyTorch."""
    smartattn.SmartAttention(mode="off")(*call_at(150))
    assert (smartattn.stats().misses, smartattn.stats().tunings, all_bindings()) == (0, 0, [])


def test_a_spent_process_budget_takes_the_nearest_choice_and_warns_once(world, caplog):
    """With no budget left a known family's nearest record serves, else the safe default; both are noted pending."""
    run(call_at(150))
    smartattn.configure(process_budget_s=0)
    assert run(call_at(2000)) == "free"
    assert run(call_at(7, N=3)) == "free"
    assert run(call_at(150, E=8)) == "stock"
    assert smartattn.stats().tunings == 1
    assert len(selector.notes.pending()) == 3
    assert [r.message for r in caplog.records if "tune_pending" in r.message] != []
    assert sum("of tuning in this process" in r.message for r in caplog.records) == 1


def test_tune_after_waits_for_repetition(world):
    """With tune_after=3 the first two first sights run the safe default; the third tunes."""
    smartattn.configure(tune_after=3)
    arguments = call_at(150)
    module = smartattn.SmartAttention()
    routes = []
    for _ in range(4):
        module(*arguments)
        routes.append((smartattn.stats().tunings, bound_route(arguments)))
    assert routes[0] == (0, "stock")
    assert routes[-1] == (1, "planned")


def test_a_length_that_takes_much_time_is_measured_itself(world):
    """Once a bucket's choice has cost twenty tunings at one length, that length gets its own record."""
    _, planned, _ = world
    smartattn.configure(signature_budget_ms=1.0)
    run(call_at(150))
    arguments = call_at(170)
    limit = math.ceil(EXACT_TUNING_RATIO * 1.0 * 1e3 / planned.cost_us)
    run(arguments, times=limit - 10)
    assert smartattn.stats().tunings == 1
    run(arguments, times=20)
    assert smartattn.stats().tunings == 2
    record, _ = selector.memory.find(environment_of(CPU), read_signature(Call(*arguments)))
    assert record.bucket is None
    assert "L170" in str(record.signature)


def test_nothing_is_tuned_in_a_backward_pass(world):
    """A first sight inside a backward runs the safe default and is noted."""
    inner = call_at(150)

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            smartattn.scaled_dot_product_attention(*inner)
            return grad

    x = torch.ones(1, requires_grad=True)
    Recompute.apply(x).sum().backward()
    assert smartattn.stats().tunings == 0
    assert len(selector.notes.pending()) == 1


def test_a_changed_thread_count_makes_a_record_stale_in_tune_mode_only(world):
    """Timings of another thread count are measured again in mode tune, and used as they are in mode frozen."""
    run(call_at(150))
    torch.set_num_threads(2)
    try:
        smartattn.first_sight.unbind_all()
        assert run(call_at(150), mode="frozen") == "planned"
        assert smartattn.stats().tunings == 1
        run(call_at(150))
        assert smartattn.stats().tunings == 2
    finally:
        torch.set_num_threads(1)


def test_an_upgraded_backend_is_not_run_on_its_old_outcome(world):
    """An outcome of another version of a backend is no reason to run it."""
    _, planned, _ = world
    run(call_at(150))
    planned._version = "2"
    smartattn.first_sight.unbind_all()
    assert run(call_at(150), mode="frozen") == "free"


def test_an_uninstalled_backend_leaves_the_next_best(world):
    """When the best route's backend is gone, the next stored one is the choice, without tuning."""
    _, planned, _ = world
    run(call_at(150))
    planned.reason = "is not installed"
    smartattn.first_sight.unbind_all()
    assert run(call_at(150)) == "free"
    assert smartattn.stats().tunings == 1


def test_a_second_process_starts_from_disk(world):
    """What one process tuned, another finds on disk: no tuning, and the origin says so."""
    arguments = call_at(150)
    run(arguments)
    smartattn.first_sight.forget_everything()
    clock, *_ = world
    selector.clock = lambda device: clock
    explanation = smartattn.explain(*arguments)
    assert (explanation.route, explanation.origin) == ("free", "disk")
    assert explanation.faster == "planned"
    run(arguments)
    assert (smartattn.stats().tunings, smartattn.stats().disk_hits + smartattn.stats().memory_hits) == (0, 1)


def test_explain_shows_what_is_rented_and_when_it_would_be_bought(world):
    """Calls seen at this length, what the faster route costs in plans and when it pays are all told."""
    run(call_at(150))
    arguments = call_at(151)
    run(arguments, times=10)
    explanation = smartattn.explain(*arguments)
    assert (explanation.faster, explanation.num_calls) == ("planned", 10)
    assert explanation.break_even_calls == 100
    assert "N1-1 L129-181 S129-181" in str(explanation)
    assert "(10 seen)" in str(explanation)
    assert "5 ms" in str(explanation)


def test_interrupting_a_tuning_leaves_nothing_half_done(world, cache_dir):
    """Ctrl-C in a tuning reaches the user, nothing is stored, and the next call tunes and works."""
    _, planned, _ = world
    planned.raises = KeyboardInterrupt()
    arguments = call_at(150)
    with pytest.raises(KeyboardInterrupt):
        smartattn.scaled_dot_product_attention(*arguments)
    assert not list(cache_dir.rglob("records/*"))
    planned.raises = None
    assert run(arguments) == "planned"
    assert smartattn.stats().tunings == 1


def test_listeners_hear_of_tunings_once_and_never_of_hits(world):
    """One tuning, one event with plain data; hits are silent; a listener that raises harms nobody."""
    heard = []
    smartattn.add_listener(heard.append)
    smartattn.add_listener(lambda event: 1 / 0)
    run(call_at(150), times=5)
    assert [event["event"] for event in heard] == ["tuning"]
    assert heard[0]["record"]["outcomes"]["planned"]["is"] == "timed"


def test_an_explicit_backend_runs_or_raises_with_all_reasons(world):
    """backend= runs what it names; what cannot serve raises with every reason; a wrong name lists the near ones."""
    assert run(call_at(150), backend="math") == "math"
    with pytest.raises(smartattn.RouteUnavailableError, match="has no dropout") as error:
        smartattn.SmartAttention(backend="flash")(*call_at(8), None, 0.5)
    assert "flash" in error.value.reasons
    with pytest.raises(smartattn.UnknownNameError, match="Did you mean 'flash'"):
        smartattn.SmartAttention(backend="flsh")


def test_a_plan_cost_worth_counting_is_far_above_a_first_call():
    """The bound between plans and warm-up lies between what was seen of both."""
    assert 0.34 < NEGLIGIBLE_PLAN_MS < 50


def test_training_with_lengths_declared_to_change_never_plans(world):
    """dynamic=True in training: every new length takes the plan-free route, the first one included."""
    for length in (150, 151, 152, 153):
        assert run(call_at(length, grad=True), dynamic=True) == "free"
    assert smartattn.stats().tunings == 1


def test_a_backend_of_another_device_is_unavailable_here():
    """A backend that exists, but not on this device, raises like any other that cannot serve."""
    with pytest.raises(smartattn.RouteUnavailableError, match="does not run on cpu") as error:
        smartattn.scaled_dot_product_attention(*call_at(8), backend="cudnn")
    assert error.value.reasons == {"cudnn": ("does not run on cpu",)}


def test_explain_heeds_the_mode():
    """Mode off is told, and so is what mode error would do; what was not measured is not called rejected."""
    smartattn.configure(mode="off")
    assert smartattn.explain(*call_at(8)).origin == "off"
    smartattn.configure(mode="error")
    explanation = smartattn.explain(*call_at(8))
    assert "MissingRecordError" in explanation.note
    assert "not measured yet" in str(explanation)
    assert "rejected: not measured" not in str(explanation)
