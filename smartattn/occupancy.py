"""Occupancy of a kernel, computed from what a block takes and what a multiprocessor has.

It counts resident threads, no more: a kernel that keeps its data in registers and waits for no memory is fast at a low
occupancy, and the fastest attention kernels are of that kind.
"""

from __future__ import annotations

from dataclasses import dataclass

REGISTER_UNIT = 256
"""Registers are handed out per warp in this unit. Source: CUDA C++ programming guide, occupancy calculator, 3.0 to 12.x."""
SHARED_UNIT_BYTES = 128
"""Shared memory is handed out in this unit. Source: CUDA occupancy calculator, capability 8.0 and later (256 before)."""
RESERVED_SHARED_BYTES = 1024
"""What the system takes of each block's shared memory. Source: CUDA C++ tuning guides for Ampere and Hopper, 1.4.1.2."""
MAX_BLOCKS = {75: 16, 80: 32, 86: 16, 87: 16, 89: 24, 90: 32, 100: 32, 103: 32, 110: 24, 120: 24, 121: 24}
"""Resident blocks of a multiprocessor by compute capability. Source: CUDA C++ programming guide, technical specifications."""


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one multiprocessor has.

    Attributes:
        max_threads: resident threads.
        num_registers: 32-bit registers.
        shared_bytes: shared memory.
        max_blocks: resident blocks.
        warp_size: threads of a warp.
        reserved_bytes: of shared memory, per block.
    """

    max_threads: int
    num_registers: int
    shared_bytes: int
    max_blocks: int = 32
    warp_size: int = 32
    reserved_bytes: int = RESERVED_SHARED_BYTES


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many threads can be resident.

    Attributes:
        ratio: resident threads over the most that a multiprocessor holds, 0 to 1.
        num_blocks: resident blocks.
        limit: what allows no more: ``threads``, ``registers``, ``shared memory`` or ``blocks``.
    """

    ratio: float
    num_blocks: int
    limit: str


def occupancy(num_threads: int, registers: int, shared_bytes: int, on: Multiprocessor) -> Occupancy | None:
    """Return the occupancy that a block's resources allow; ``None`` for resources that no launch can have.

    Args:
        num_threads: of a block.
        registers: per thread.
        shared_bytes: of a block, static and dynamic.
        on: where it runs.
    """
    if num_threads <= 0 or registers < 0 or shared_bytes < 0:
        return None
    num_warps = -(-num_threads // on.warp_size)
    warp_registers = -(-registers * on.warp_size // REGISTER_UNIT) * REGISTER_UNIT
    block_shared = -(-(shared_bytes + on.reserved_bytes) // SHARED_UNIT_BYTES) * SHARED_UNIT_BYTES
    limits = {
        "threads": on.max_threads // (num_warps * on.warp_size),
        "registers": on.num_registers // warp_registers // num_warps if registers else on.max_blocks,
        "shared memory": on.shared_bytes // block_shared if block_shared else on.max_blocks,
        "blocks": on.max_blocks,
    }
    limit = min(limits, key=lambda name: limits[name])
    num_blocks = limits[limit]
    return Occupancy(num_blocks * num_warps * on.warp_size / on.max_threads, num_blocks, limit)
