"""One route's profile, and what the profiles of several routes mean in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from smartattn.formatting import format_bytes, format_us
from smartattn.kernels import Kernel
from smartattn.occupancy import Occupancy

LOW_OCCUPANCY = 0.25
REPORTED_SHARED_BYTES = 48 * 1024
"""Shared memory of a block above which the profiler reports an occupancy of 0 %.

Source: seen on an H200 with torch 2.11: every kernel of 48 KiB or less (Flash forward has exactly that) had a value,
every one of 64 KiB or more (cuDNN, Flash backward, matrix products) had 0; launches beyond 48 KiB need an opt-in.
"""


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches at best, measured now.

    Attributes:
        copy_gb_s: bytes read and written by a large copy, in 10^9 a second.
        matmul_tflop_s: of a large square product in 10^12 operations a second: in the signature's dtype, on CPU in
            float32 for half precision too.
    """

    copy_gb_s: float
    matmul_tflop_s: float


@dataclass(frozen=True)
class Profiled:
    """One route.

    Attributes:
        route: name.
        skipped: why it was not run; the rest is empty then.
        is_chosen: whether calls run it now.
        mean_us, p50_us, p95_us, p99_us: device time of a call, with its backward when training.
        host_us: median time until the call returned to Python.
        num_samples: behind these.
        calls_per_s: calls one after the other, at the mean.
        tflop_s, gb_s: arithmetic and traffic that the problem needs, over the median time.
        plan_ms: what the first call at this exact shape cost the program beyond the second; lazily loaded kernels too.
        peak_bytes: allocated beyond inputs and output; measured on CUDA, estimated elsewhere.
        error: largest error over what is allowed; ``None`` when it raised.
        invalid: what is wrong with its values; empty when they are right.
        kernels: of one call, the longest first; operators on CPU.
        occupancies: computed for each of ``kernels``; ``None`` where nothing is known.
    """

    route: str
    skipped: str = ""
    is_chosen: bool = False
    mean_us: float = 0.0
    p50_us: float = 0.0
    p95_us: float = 0.0
    p99_us: float = 0.0
    host_us: float = 0.0
    num_samples: int = 0
    calls_per_s: float = 0.0
    tflop_s: float = 0.0
    gb_s: float = 0.0
    plan_ms: float = 0.0
    peak_bytes: int = 0
    error: float | None = None
    invalid: str = ""
    kernels: tuple[Kernel, ...] = ()
    occupancies: tuple[Occupancy | None, ...] = ()

    @property
    def num_kernels(self) -> float:
        """Kernels (operators on CPU) per call."""
        return sum(kernel.count for kernel in self.kernels)

    def of_kind(self, *kinds: str) -> tuple[Kernel, ...]:
        """Return the kernels of these kinds."""
        return tuple(kernel for kernel in self.kernels if kernel.kind in kinds)


def read(routes: Sequence[Profiled], unit: str, ceilings: Ceilings) -> tuple[str, ...]:
    """Say in sentences what the numbers of the routes mean."""
    ran = [each for each in routes if not each.skipped]
    found = list(itertools.chain.from_iterable(_read_route(each, unit) for each in ran))
    valid = [each for each in ran if not each.invalid and each.p50_us]
    if valid:
        best = min(valid, key=lambda each: each.p50_us)
        share = max(best.tflop_s / ceilings.matmul_tflop_s, best.gb_s / ceilings.copy_gb_s)
        bound = "arithmetic" if best.tflop_s / ceilings.matmul_tflop_s >= best.gb_s / ceilings.copy_gb_s else "memory"
        found.append(
            f"Fastest here is {best.route} at {format_us(best.p50_us)}: {share:.0%} of this device's measured {bound} "
            f"ceiling."
        )
        chosen = next((each for each in valid if each.is_chosen), None)
        if chosen is not None and chosen is not best:
            found.append(
                f"Calls run {chosen.route} now ({format_us(chosen.p50_us)}): a plan to pay, a near-tie, or no record yet; "
                f"smartattn explain says which."
            )
    by_name = {each.route: each for each in ran}
    eager, inplace = by_name.get("eager"), by_name.get("eager_inplace")
    if eager and inplace and len(eager.kernels) and eager.num_kernels > inplace.num_kernels:
        saved = eager.num_kernels - inplace.num_kernels
        found.append(
            f"Writing the mask in place saves eager_inplace {saved:.0f} of eager's {eager.num_kernels:.0f} {unit}."
        )
    return tuple(found)


def _read_route(found: Profiled, unit: str) -> Iterable[str]:
    casts = found.of_kind("cast")
    masks = found.of_kind("mask")
    parts = []
    if casts:
        names = ", ".join(sorted({kernel.dtypes for kernel in casts}))
        parts.append(f"converted dtypes ({names}) in {_count(casts, unit)}")
    if masks:
        names = ", ".join(sorted({kernel.operator for kernel in masks}))
        parts.append(f"built or applied masks in {_count(masks, unit)} ({names})")
    copies = found.of_kind("copy")
    if copies:
        parts.append(f"copied in {_count(copies, unit)}")
    if parts:
        spent = sum(kernel.us for kernel in (*casts, *masks, *copies)) / max(1e-9, sum(k.us for k in found.kernels))
        yield f"{found.route} {', '.join(parts)}: {spent:.0%} of the time of its {found.num_kernels:.0f} {unit}."
    if found.invalid:
        yield f"{found.route} is WRONG here: {found.invalid}"
    if found.kernels and found.occupancies and found.occupancies[0] is not None:
        longest, computed = found.kernels[0], found.occupancies[0]
        reported = longest.reported_occupancy
        if reported == 0:
            shared = longest.shared_bytes or 0
            why = (
                f"it knows no blocks with more than {format_bytes(REPORTED_SHARED_BYTES)} of shared memory, and this one "
                f"has {format_bytes(shared)}"
                if shared > REPORTED_SHARED_BYTES
                else "it cannot attribute this kind of launch"
            )
            yield (
                f"{found.route}: 0 % occupancy as reported is a gap of the profiler's estimate ({why}); the kernel's "
                f"resources allow {computed.ratio:.0%} (limited by {computed.limit})."
            )
        elif computed.ratio < LOW_OCCUPANCY:
            yield (
                f"{found.route}: {computed.ratio:.0%} occupancy is by design ({longest.num_threads} threads of "
                f"{longest.registers} registers a block, limited by {computed.limit}); it does not make it slow."
            )


def _count(kernels: Sequence[Kernel], unit: str) -> str:
    number = round(sum(kernel.count for kernel in kernels))
    return f"{number} {unit if number != 1 else unit.removesuffix('s')}"
