"""The cases ask whether answers are right, not which is fastest: on CPU no real time is measured."""

from __future__ import annotations

import pytest
import torch

from smartattn.clocks import clock_for
from smartattn.selector import selector
from tests.fakes import FakeClock


@pytest.fixture(autouse=True)
def no_real_time(cache_dir):
    """Let tunings on CPU take no real time."""

    def clock(device: torch.device) -> object:
        return FakeClock(default_us=50.0) if device.type == "cpu" else clock_for(device)

    selector.clock = clock
