"""What every test gets: a cache folder of its own, one thread, and no choice left over from the test before."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

from smartattn import events
from smartattn.backends import registry
from smartattn.first_sight import forget_everything
from smartattn.settings import Settings, configure
from tests.fakes import FakeClock

# Real attention takes what it takes, so no example has a deadline; the same examples in every run.
hypothesis.settings.register_profile("smartattn", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("smartattn")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Give the test and its child processes a private cache folder, then restore all that lives in this process."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SMARTATTN_CACHE_DIR", str(folder))
    # The lock of a tuning lies there: tests that run beside these must not make them wait.
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    plugins, listeners = list(registry._plugins), list(events._listeners)
    configure(**dataclasses.asdict(Settings(cache_dir=folder)))
    forget_everything()
    yield folder
    registry._plugins[:], events._listeners[:] = plugins, listeners
    forget_everything()


@pytest.fixture(autouse=True)
def one_thread():
    """Keep PyTorch on one thread: the machine may be shared, and more make small tests slower."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    """Make random inputs the same in every run."""
    torch.manual_seed(0)


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch):
    """Let no record count as noisy, since noisy ones are not stored and the machine that runs the tests may be busy."""
    monkeypatch.setattr("smartattn.tuner.is_unsettled", lambda measured: False)


@pytest.fixture
def fake_clock() -> FakeClock:
    """Return a clock that passes only when a fake says so."""
    return FakeClock()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run draw more random calls than usual."""
    group = parser.getgroup("smartattn")
    group.addoption("--differential", type=int, default=200, help="random calls of tests/test_differential.py")
    group.addoption("--differential-seed", type=int, default=0, help="seed of the first batch of random calls")
    group.addoption("--differential-seconds", type=float, default=0, help="go on drawing for so many seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, saying so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; PyTorch sees none on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
