"""Many threads and processes at once: every call is answered, each signature is tuned once, and nobody waits for long."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

import smartattn
from smartattn import SmartAttention, attention, scaled_dot_product_attention, wishes
from smartattn import selector as selector_module
from smartattn.locks import tuning_lock
from smartattn.selector import selector
from smartattn.tuner import Tuning
from smartattn.wishes import MAX_BINDINGS, wish_of
from tests.fakes import FakeClock, tensors

SDPA = F.scaled_dot_product_attention
CPU = torch.device("cpu")
NUM_THREADS = 16
ROOT = Path(smartattn.__file__).parent.parent


@pytest.fixture(autouse=True)
def quick(fake_clock: FakeClock):
    """Let tunings pass in fake time."""
    selector.clock = lambda device: fake_clock


def in_threads(work: Callable[[int], object], num_threads: int = NUM_THREADS) -> list[object]:
    """Run ``work`` on many threads that start at once; return what each returned, or raise what one raised."""
    barrier = threading.Barrier(num_threads)

    def start(index: int) -> object:
        barrier.wait(timeout=60)
        return work(index)

    with ThreadPoolExecutor(num_threads) as pool:
        return [future.result(timeout=240) for future in [pool.submit(start, index) for index in range(num_threads)]]


@pytest.fixture
def tunings(monkeypatch):
    """Return the list of the signatures that tunings really ran for."""
    seen: list[str] = []
    run = Tuning.run

    def counted(self):
        seen.append(str(self.signature))
        return run(self)

    monkeypatch.setattr(Tuning, "run", counted)
    return seen


def test_one_signature_is_tuned_once(tunings):
    """Sixteen first sights of one call give sixteen right answers and one tuning."""
    inputs = tensors(2, 4, 8, 16)
    expected = SDPA(*inputs)
    for found in in_threads(lambda index: scaled_dot_product_attention(*inputs)):
        torch.testing.assert_close(found, expected)
    assert len(tunings) == 1


def test_first_sights_and_backwards_at_once(tunings):
    """Training steps of different lengths and checkpointed ones on sixteen threads all end, each signature tuned once."""
    from torch.utils.checkpoint import checkpoint

    def work(index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        for step in range(3):
            length = (8, 130, 200, 260)[(index + step) % 4]
            inputs = [torch.randn(1, 2, length, 8, generator=generator, requires_grad=True) for _ in range(3)]
            is_reentrant = bool(index % 2)
            output = checkpoint(scaled_dot_product_attention, *inputs, use_reentrant=is_reentrant)
            output.sum().backward()
            expected = torch.autograd.grad(SDPA(*inputs).sum(), inputs)
            torch.testing.assert_close([tensor.grad for tensor in inputs], list(expected))

    in_threads(work)
    assert tunings
    assert len(tunings) == len(set(tunings))


def test_nobody_waits_longer_than_told(monkeypatch):
    """While one thread tunes, the others take the safe default once their wait is over, and note the call."""
    monkeypatch.setattr(selector_module, "LOCK_WAIT_S", 0.05)
    inputs = tensors(2, 4, 8, 16)
    with tuning_lock(CPU, 5.0) as is_held:
        assert is_held
        found = in_threads(lambda index: scaled_dot_product_attention(*inputs), 4)
    for output in found:
        torch.testing.assert_close(output, SDPA(*inputs))
    stats = smartattn.stats()
    assert (stats.tunings, stats.safe_defaults, stats.pending) == (0, 4, 1)


def test_a_backward_does_not_wait_for_a_tuning(monkeypatch):
    """A training call first met in a backward pass never asks for the lock that a tuning holds."""
    from torch.utils.checkpoint import checkpoint

    asked: list[int] = []
    real = selector_module.tuning_lock

    def watched(device, timeout_s):
        asked.append(torch._C._current_graph_task_id())
        return real(device, timeout_s)

    monkeypatch.setattr(selector_module, "tuning_lock", watched)
    inputs = [tensor.requires_grad_() for tensor in tensors(2, 4, 8, 16)]
    checkpoint(scaled_dot_product_attention, *inputs, use_reentrant=True).sum().backward()
    assert asked == [-1]


def test_settings_change_while_others_call():
    """``configure`` and ``tune_pending`` while threads call: no call fails, and the last setting holds."""
    inputs = tensors(2, 4, 8, 16)
    expected = SDPA(*inputs)

    def work(index: int) -> None:
        for step in range(30):
            if index == 0:
                smartattn.configure(mode=("tune", "record", "frozen")[step % 3])
            elif index == 1 and step % 10 == 0:
                smartattn.tune_pending()
            torch.testing.assert_close(scaled_dot_product_attention(*inputs), expected)

    in_threads(work, 6)
    assert smartattn.settings().mode == "frozen"


def test_an_unwritable_cache_answers_all(tmp_path, tunings):
    """Sixteen threads on a cache folder that cannot be written are all answered from memory, and told once."""
    blocked = tmp_path / "a file"
    blocked.write_text("not a folder")
    smartattn.configure(cache_dir=blocked / "cache")
    inputs = [tensors(1, 2, length, 8) for length in (8, 130, 200, 260)]

    def work(index: int) -> None:
        query, key, value = inputs[index % 4]
        for _ in range(3):
            torch.testing.assert_close(scaled_dot_product_attention(query, key, value), SDPA(query, key, value))

    in_threads(work)
    assert len(tunings) == len(set(tunings)) == 4


def _attend_in_child(queue) -> None:
    inputs = tensors(2, 4, 8, 16)
    output = scaled_dot_product_attention(*inputs)
    queue.put(bool(torch.allclose(output, SDPA(*inputs), atol=1e-5)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_fork_while_the_parent_tunes():
    """A child forked while another thread of its parent tunes is not blocked by the lock that it inherits."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with tuning_lock(CPU, 5.0):
        child = context.Process(target=_attend_in_child, args=(queue,))
        child.start()
        child.join(timeout=120)
    assert child.exitcode == 0
    assert queue.get() is True


def test_spawn_takes_a_module_along():
    """A module pickled into a spawned process answers there, from the records on disk."""
    smartattn.configure(mode="tune")
    inputs = tensors(2, 4, 8, 16)
    module = SmartAttention(dynamic=True)
    module(*inputs)
    code = (
        "import pickle, sys, torch, json, smartattn\n"
        "torch.set_num_threads(1)\n"
        "module, inputs = pickle.load(sys.stdin.buffer)\n"
        "module(*inputs)\n"
        "print(json.dumps([repr(module), smartattn.stats().disk_hits, smartattn.stats().tunings]))\n"
    )
    import pickle

    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps((module, inputs)), cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == ["SmartAttention(dynamic=True)", 1, 0]


def test_tables_are_bounded(monkeypatch):
    """More keys than a table holds push the oldest out; every call is still answered."""
    smartattn.configure(mode="frozen")
    monkeypatch.setattr(wishes, "MAX_BINDINGS", 64)
    inputs = [torch.randn(3, 1, 1, length, 8).unbind() for length in range(1, 201)]
    for query, key, value in inputs * 2:
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value), SDPA(query, key, value))
    wish = wish_of()
    assert 0 < len(wish.table) <= 64
    assert set(wish.table) == set(wish.bindings)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_a_million_hits_in_bounded_memory():
    """A million hits over ten thousand alternating keys add no memory beyond that of the keys."""
    smartattn.configure(mode="frozen")
    backing = torch.randn(3, 1, 1, 10_001, 1)
    keys = [tuple(part[:, :, :length] for part in backing.unbind()) for length in range(1, 10_001)]
    # Short scores keep the arithmetic small: one query against the keys.
    keys = [(query[:, :, :1], key, value) for query, key, value in keys]
    for query, key, value in keys * 2:
        scaled_dot_product_attention(query, key, value)
    before, hits = _resident_bytes(), smartattn.stats().hits
    start_s = time.monotonic()
    for _ in range(100):
        for query, key, value in keys:
            scaled_dot_product_attention(query, key, value)
        if time.monotonic() - start_s > 200:
            pytest.skip("this machine is too slow for a million calls within the test's time")
    assert smartattn.stats().hits - hits == 1_000_000
    assert len(wish_of().table) == 10_000 <= MAX_BINDINGS
    assert _resident_bytes() - before < 32 << 20


def test_memos_of_many_threads_do_not_mix():
    """One module called with two shapes by two kinds of threads at once never runs the choice of the other."""
    smartattn.configure(mode="frozen")
    module = SmartAttention()
    inputs = [tensors(1, 2, 8, 16), tensors(1, 2, 4, 16, Ev=8), tensors(1, 4, 8, 16, H=2)]

    def work(index: int) -> None:
        query, key, value = inputs[index % 3]
        expected = SDPA(query, key, value, enable_gqa=index % 3 == 2)
        for _ in range(300):
            torch.testing.assert_close(module(query, key, value, enable_gqa=index % 3 == 2), expected)

    in_threads(work, 6)
    assert isinstance(attention._SITE, wishes.Site)
