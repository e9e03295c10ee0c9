"""Backends side by side for one signature: times, kernels, memory, plans and errors, and what they mean in words."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smartattn import versions
from smartattn.backends.stock import resolved_backend
from smartattn.choice import STOCK
from smartattn.clocks import Clock
from smartattn.environment import environment_of
from smartattn.errors import SettingError, UnknownNameError
from smartattn.formatting import format_bytes, format_ratio, format_table, format_us
from smartattn.inputs import synthesize
from smartattn.kernels import Kernel, kernels_of, labelled, trace
from smartattn.measurement import Sample
from smartattn.occupancy import MAX_BLOCKS, Multiprocessor, Occupancy, occupancy
from smartattn.pending import devices_here
from smartattn.profiled import Ceilings, Profiled, read
from smartattn.routes import Route, check_route_name, parse_route
from smartattn.selector import selector
from smartattn.settings import settings
from smartattn.signature import DTYPES, Call, Signature
from smartattn.signature_text import parse_signature
from smartattn.trials import leaf_copies, trial_of, untraced
from smartattn.tuner import one_line
from smartattn.validation import Validator
from smartattn.wishes import wish_of

ROUTES = ("stock", "eager", "eager_inplace", "math", "efficient", "flash", "cudnn")
"""Compared by default, beside the route that would be chosen."""
NUM_SAMPLES = 100
MIN_SAMPLES = 10
ROUTE_SECONDS = 2.0
"""Time after which a route is sampled no further, once it has ``MIN_SAMPLES``."""
BACKWARD_RATIO = 2.5
"""Arithmetic of a backward over that of its forward. Source: FlashAttention, arXiv:2205.14135, five products for two."""
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class Profile:
    """Routes side by side; ``str()`` is a table with its reading, ``to_dict()`` plain data.

    Attributes:
        signature: text.
        device: model.
        unit: ``kernels`` or, on CPU, ``operators``.
        flops: arithmetic of one call.
        traffic_bytes: that one call must read and write at least.
        ceilings: of this device.
        routes: in the order asked for, the chosen one last if it was not among them.
        reading: what the numbers mean, in sentences.
        trace: file for Perfetto, if one was asked for.
    """

    signature: str
    device: str
    unit: str
    flops: int
    traffic_bytes: int
    ceilings: Ceilings
    routes: tuple[Profiled, ...]
    reading: tuple[str, ...]
    trace: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        data = dataclasses.asdict(self)
        for route, found in zip(data["routes"], self.routes, strict=True):
            route["num_kernels"] = found.num_kernels
        return data

    def __str__(self) -> str:
        header = ("", "route", "p50", "p95", "host", "TFLOP/s", "GB/s", self.unit, "extra", "vs stock", "error")
        stock = next((r.p50_us for r in self.routes if r.route == "stock" and not r.skipped), None)
        rows = [
            (
                "->" if r.is_chosen else "", r.route, format_us(r.p50_us), format_us(r.p95_us), format_us(r.host_us),
                f"{r.tflop_s:.3g}", f"{r.gb_s:.3g}", f"{r.num_kernels:.0f}", format_bytes(r.peak_bytes),
                format_ratio(stock / r.p50_us if stock and r.p50_us else None), _error_text(r),
            )
            for r in self.routes if not r.skipped
        ]  # fmt: skip
        skipped = [f"{r.route}: skipped, {r.skipped}" for r in self.routes if r.skipped]
        return "\n".join([self.signature, format_table(header, rows), *skipped, "", *self.reading])


def _error_text(found: Profiled) -> str:
    if found.invalid:
        return "INVALID"
    return "-" if found.error is None else f"{found.error:.2g}"


def profile(
    signature: Signature | str,
    *,
    routes: Iterable[str] | None = None,
    num_samples: int = NUM_SAMPLES,
    trace_file: str | Path | None = None,
) -> Profile:
    """Run a signature by several routes and compare them.

    Args:
        signature: a signature or its text.
        routes: names of backends or routes; default: ``stock``, both eager ones, ``math``, ``efficient``, ``flash``,
            ``cudnn``. The route that would be chosen now is always among them.
        num_samples: timed calls per route; fewer when they take long.
        trace_file: where to write a trace of all routes for Perfetto.

    Raises:
        UnknownNameError: for a text or route that makes no sense.
        SettingError: when this machine lacks the device, or memory for the inputs, or the trace cannot be written.

    Note:
        Makes up inputs; stores nothing. Uses PyTorch's profiler, of which a process can have one. On CUDA it resets the
        peak memory statistics. Takes up to about 3 s per route.
    """
    parsed = parse_signature(signature) if isinstance(signature, str) else signature
    names = tuple(ROUTES if routes is None else map(check_route_name, routes))
    device = next((each for each in devices_here() if each.type == parsed.device_type), None)
    if device is None:
        raise SettingError(f"the signature is of device type {parsed.device_type!r}, and PyTorch sees none here.")
    if num_samples < 1:
        raise SettingError(f"num_samples is {num_samples!r}; it must be a whole number from 1 on.")
    if trace_file is not None:
        try:
            Path(trace_file).write_bytes(b"")  # now, since the profiler itself says nothing of a failed write
        except OSError as error:
            raise SettingError(f"cannot write the trace {trace_file}: {error}") from error
    try:
        call = synthesize(parsed, device)
    except (RuntimeError, MemoryError, ValueError) as error:
        raise SettingError(f"no inputs can be made up for {parsed}: {one_line(error)}") from error
    chosen = chosen_route(parsed, device)
    job = _Job(parsed, device, call, chosen, num_samples)
    with untraced(device, grad=parsed.wants_grad):
        ceilings = measure_ceilings(device, parsed.dtype, job.clock)
        found = job.with_shared_plan(tuple(map(job.profile, dict.fromkeys((*names, chosen)))))
        if trace_file is not None:
            job.write_trace([each.route for each in found if not each.skipped], Path(trace_file))
    unit = "kernels" if device.type == "cuda" else "operators"
    return Profile(
        signature=str(parsed),
        device=environment_of(device).device_name,
        unit=unit,
        flops=job.flops,
        traffic_bytes=job.traffic_bytes,
        ceilings=ceilings,
        routes=found,
        reading=read(found, unit, ceilings),
        trace="" if trace_file is None else str(trace_file),
    )


def chosen_route(signature: Signature, device: torch.device) -> str:
    """Return the name of the route that a call of this signature would run if nothing were measured now."""
    view = selector.view(device, signature, wish_of())
    found = selector.find(view)
    choice = None if found is None else selector.consider(view, found[0])
    return view.safe_route({}).name if choice is None else choice.route


class _Job:
    """The work on one signature."""

    def __init__(self, signature: Signature, device: torch.device, call: Call, chosen: str, num_samples: int) -> None:
        self.signature = signature
        self.device = device
        self.chosen = chosen
        self.num_samples = num_samples
        self.clock: Clock = selector.clock(device)
        self.call = leaf_copies(call)
        self.environment = environment_of(device)
        self.view = selector.view(device, signature, wish_of())
        self.validator = Validator(self.call, signature, accuracy=settings().accuracy)
        self.flops = flops_of(signature)
        self.traffic_bytes = traffic_bytes_of(signature)

    def profile(self, name: str) -> Profiled:
        """Return one route's numbers, or why it was skipped."""
        try:
            route = parse_route(name, self.signature.device_type)
        except UnknownNameError:
            return Profiled(name, skipped=f"does not exist on {self.signature.device_type}")
        reasons = self.view.reasons(route)
        if reasons:
            return Profiled(name, skipped="; ".join(reasons))
        try:
            return self._run(route)
        except Exception as error:
            if versions.is_sticky_error(error):
                raise
            return Profiled(name, skipped=f"failed: {one_line(error)}")

    def with_shared_plan(self, found: tuple[Profiled, ...]) -> tuple[Profiled, ...]:
        """Give stock and the backend that it runs the plan which the first of them paid for both."""
        sharing = (STOCK, resolved_backend(self.call))
        plan_ms = max((each.plan_ms for each in found if each.route in sharing), default=0.0)
        return tuple(
            dataclasses.replace(each, plan_ms=plan_ms) if each.route in sharing and not each.skipped else each
            for each in found
        )

    def _run(self, route: Route) -> Profiled:
        run = route.bind(self.signature, self.environment)
        trial = trial_of(run, self.call, self.signature)
        first_us = self.clock.once_us(trial)
        second_us = self.clock.once_us(trial)
        self.clock.sample(trial, 1)
        start_s = self.clock.now_s()
        samples: list[Sample] = []
        while len(samples) < self.num_samples:
            if len(samples) >= MIN_SAMPLES and self.clock.now_s() - start_s > ROUTE_SECONDS:
                break
            samples.append(self.clock.sample(trial, 1))
        times = sorted(sample.device_us for sample in samples)
        p50_us = statistics.median(times)
        verdict = self.validator.check(run)
        kernels = kernels_of(trial, self.device)
        return Profiled(
            route=route.name,
            is_chosen=route.name == self.chosen,
            mean_us=statistics.fmean(times),
            p50_us=p50_us,
            p95_us=_percentile(times, 0.95),
            p99_us=_percentile(times, 0.99),
            host_us=statistics.median(sample.host_us for sample in samples),
            num_samples=len(samples),
            calls_per_s=1e6 / max(statistics.fmean(sample.cost_us for sample in samples), 1e-3),
            tflop_s=self.flops / p50_us / 1e6 if p50_us else 0.0,
            gb_s=self.traffic_bytes / p50_us / 1e3 if p50_us else 0.0,
            plan_ms=max(0.0, first_us - second_us) / 1e3,
            peak_bytes=self._peak_bytes(route, trial),
            error=verdict.error_ratio if verdict.error_ratio < float("inf") else None,
            invalid="" if verdict.is_valid else verdict.reason,
            kernels=kernels,
            occupancies=tuple(occupancy_of(kernel, self.device) for kernel in kernels),
        )

    def _peak_bytes(self, route: Route, trial: Any) -> int:
        if self.device.type != "cuda":
            return route.workspace_bytes(self.signature)
        s = self.signature
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        trial()
        torch.cuda.synchronize(self.device)
        output = s.N * s.Hq * s.L * s.Ev * s.itemsize_bytes
        return max(0, torch.cuda.max_memory_allocated(self.device) - before - output)

    def write_trace(self, names: Sequence[str], path: Path) -> None:
        """Write a trace in which each route runs under its name."""
        trials = {
            name: trial_of(
                parse_route(name, self.signature.device_type).bind(self.signature, self.environment),
                self.call, self.signature,
            )
            for name in names
        }  # fmt: skip
        for trial in trials.values():
            trial()

        def work() -> None:
            for name, trial in trials.items():
                labelled(f"smartattn {name}", trial, 3)

        trace(work, self.device, path)


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def flops_of(signature: Signature) -> int:
    """Return the arithmetic of one call: two products over the visible scores, and the backward's when training."""
    s = signature
    per_score = 2 * (s.E + s.Ev)
    num_scores = s.num_scores
    if s.is_causal:
        # Row i of L sees min(i + 1, S) keys.
        short = min(s.L, s.S)
        num_scores = s.N * s.Hq * (short * (short + 1) // 2 + (s.L - short) * s.S)
    return int(num_scores * per_score * (1 + BACKWARD_RATIO * s.wants_grad))


def traffic_bytes_of(signature: Signature) -> int:
    """Return the bytes that one call must read and write at least: each input and output once."""
    s = signature
    query, output = s.N * s.Hq * s.L * s.E, s.N * s.Hq * s.L * s.Ev
    keys = s.N * s.H * s.S * (s.E + s.Ev)
    mask_bytes = 0
    if s.has_mask_tensor:
        full = (*s.batch, s.Hq, s.L, s.S)[-len(s.mask_axes) :]
        sizes = (1 if letter == "1" else size for letter, size in zip(s.mask_axes, full, strict=True))
        mask_bytes = math.prod(sizes) * (1 if s.mask_dtype == "bool" else DTYPES[s.mask_dtype].itemsize)
    forward = (query + keys + output) * s.itemsize_bytes + mask_bytes
    # The backward reads all of it and the output's gradient again, and writes three gradients.
    return forward + (forward + (query + keys + output) * s.itemsize_bytes) * s.wants_grad


def measure_ceilings(device: torch.device, dtype: str, clock: Clock) -> Ceilings:
    """Measure what a large copy and a large product reach on this device."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    source = torch.ones(COPY_BYTES[kind] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_us = _best_us(clock, functools.partial(target.copy_, source))
    num_bytes = 2 * COPY_BYTES[kind]
    # Processors without instructions for half precision multiply it in slow ways that are no ceiling of anything.
    dtype = dtype if kind == "cuda" or dtype == "float64" else "float32"
    size = MATRIX_SIZE[kind]
    matrix = torch.ones(size, size, dtype=DTYPES[dtype], device=device)
    product_us = _best_us(clock, functools.partial(torch.matmul, matrix, matrix))
    return Ceilings(copy_gb_s=num_bytes / copy_us / 1e3, matmul_tflop_s=2 * size**3 / product_us / 1e6)


def _best_us(clock: Clock, run: Any) -> float:
    clock.sample(run, 1)
    return min(clock.sample(run, 2).device_us for _ in range(5))


def multiprocessor_of(device: torch.device) -> Multiprocessor | None:
    """Return what a multiprocessor of a CUDA device has; ``None`` elsewhere."""
    if device.type != "cuda" or torch.version.hip:
        return None
    found = torch.cuda.get_device_properties(device)
    return Multiprocessor(
        max_threads=found.max_threads_per_multi_processor,
        num_registers=getattr(found, "regs_per_multiprocessor", 65536),
        shared_bytes=found.shared_memory_per_multiprocessor,
        max_blocks=MAX_BLOCKS.get(found.major * 10 + found.minor, 32),
        warp_size=found.warp_size,
        reserved_bytes=1024 if found.major >= 8 else 0,
    )


def occupancy_of(kernel: Kernel, device: torch.device) -> Occupancy | None:
    """Return the occupancy that a kernel's resources allow; ``None`` where they are not known."""
    on = multiprocessor_of(device)
    if on is None or not kernel.num_threads or not kernel.registers:
        return None
    return occupancy(kernel.num_threads, kernel.registers, kernel.shared_bytes or 0, on)
