"""Occupancy: known kernels on known multiprocessors, and each limit in turn."""

from __future__ import annotations

import pytest

from smartattn.occupancy import Multiprocessor, Occupancy, occupancy

HOPPER = Multiprocessor(max_threads=2048, num_registers=65536, shared_bytes=233472)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        # FlashAttention-2 forward as published profiles show it: 128 threads of 255 registers.
        ((128, 255, 49152), Occupancy(256 / 2048, 2, "registers")),
        ((256, 32, 0), Occupancy(1.0, 8, "threads")),
        ((32, 16, 0), Occupancy(32 * 32 / 2048, 32, "blocks")),
        ((384, 168, 200_000), Occupancy(384 / 2048, 1, "registers")),
        ((128, 32, 100_000), Occupancy(256 / 2048, 2, "shared memory")),
        ((33, 32, 0), Occupancy(1.0, 32, "threads")),
        ((128, 0, 0), Occupancy(1.0, 16, "threads")),
        ((1024, 255, 0), Occupancy(0.0, 0, "registers")),
    ],
)
def test_limits(resources: tuple[int, int, int], expected: Occupancy):
    """The scarcest resource decides, in whole blocks and whole warps."""
    assert occupancy(*resources, HOPPER) == expected


@pytest.mark.parametrize("resources", [(0, 1, 1), (32, -1, 0), (32, 1, -1)])
def test_impossible_resources_have_none(resources: tuple[int, int, int]):
    """What no launch can have has no occupancy."""
    assert occupancy(*resources, HOPPER) is None


def test_older_devices_reserve_no_shared_memory():
    """The system's own share of shared memory counts where it exists."""
    turing = Multiprocessor(max_threads=1024, num_registers=65536, shared_bytes=65536, max_blocks=16, reserved_bytes=0)
    assert occupancy(128, 16, 32768, turing) == Occupancy(0.25, 2, "shared memory")
