"""GPU cases release their memory before the next one."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def free_memory():
    """Hand memory back: some cases take tens of GiB."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
