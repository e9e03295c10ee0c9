"""``smartattn profile``: backends side by side, with their kernels and what the numbers mean."""

from __future__ import annotations

import argparse
import os
from typing import Any

from rich.console import Console

from smartattn.cli.command import Command, Data
from smartattn.cli.problem import HOW, add_device_arguments, add_shape_arguments, read_problem
from smartattn.cli.tables import print_table
from smartattn.formatting import format_bytes, format_ratio, format_us, shorten
from smartattn.profiling import NUM_SAMPLES
from smartattn.profiling import profile as profile_signature

CAVEAT = (
    "Occupancy is the share of threads that can be resident; low is not slow. 0 % as reported, as for cuDNN, is a gap of "
    "the measuring."
)
MAX_KERNELS = 8


def profile(
    *,
    problem: str | None = None,
    routes: str | None = None,
    samples: int = NUM_SAMPLES,
    trace: str | None = None,
    **words: Any,
) -> Data:
    """Compare routes on a problem; the Python twin is ``smartattn.profile``.

    Args:
        problem: what means a signature; ``None`` for shapes.
        routes: names with commas between.
        samples: timed calls per route.
        trace: file for Perfetto.
        words: as of ``explain``.
    """
    # The profiler's library writes its own log lines between ours; it reads this when it is used first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    names = None if routes is None else [name.strip() for name in routes.split(",")]
    found = profile_signature(read_problem(problem, **words), routes=names, num_samples=samples, trace_file=trace)
    return found.to_dict()


def is_good(data: Data) -> bool:
    """Return whether the route that calls run is right."""
    return not any(route["is_chosen"] and route["invalid"] for route in data["routes"])


def show(data: Data, console: Console) -> None:
    """Print times, then resources, then kernels, then what they mean."""
    ceilings = data["ceilings"]
    console.print(data["signature"], style="bold", soft_wrap=True)
    copy, product = f"{ceilings['copy_gb_s']:.4g} GB/s", f"{ceilings['matmul_tflop_s']:.3g} TFLOP/s"
    console.print(f"{data['device']}; measured ceilings: copy {copy}, product {product}\n", soft_wrap=True)
    ran = [route for route in data["routes"] if not route["skipped"]]
    stock_us = next((route["p50_us"] for route in ran if route["route"] == "stock"), None)
    header = ("", "route", "mean", "p50", "p95", "p99", "host", "calls/s", "vs stock", "plan", "error")
    print_table(console, header, [_times(route, stock_us) for route in ran])
    console.print()
    header = (
        "",
        "route",
        "TFLOP/s",
        "of ceiling",
        "GB/s",
        "of ceiling",
        data["unit"],
        "copies",
        "casts",
        "masks",
        "extra",
    )
    print_table(console, header, [_work(route, ceilings) for route in ran])
    for route in ran:
        number = round(route["num_kernels"])
        unit = data["unit"] if number != 1 else data["unit"].removesuffix("s")
        console.print(f"\n{route['route']}: {number} {unit} a call", style="bold")
        _show_kernels(route, console)
    for route in data["routes"]:
        if route["skipped"]:
            console.print(f"\n{route['route']}: skipped, {route['skipped']}", soft_wrap=True)
    console.print()
    for sentence in [*data["reading"], *[CAVEAT][: data["unit"] == "kernels"]]:
        console.print(f"- {sentence}", soft_wrap=not console.is_terminal)
    if data["trace"]:
        console.print(f"\nTrace in {data['trace']}: open it at https://ui.perfetto.dev", soft_wrap=True)


def _times(route: Data, stock_us: float | None) -> tuple[str, ...]:
    times = [format_us(route[name]) for name in ("mean_us", "p50_us", "p95_us", "p99_us", "host_us")]
    gain = format_ratio(stock_us / route["p50_us"] if stock_us and route["p50_us"] else None)
    error = "INVALID" if route["invalid"] else "-" if route["error"] is None else f"{route['error']:.2g}"
    plan = f"{route['plan_ms']:.3g} ms"
    return (
        "->" if route["is_chosen"] else "",
        route["route"],
        *times,
        f"{route['calls_per_s']:.3g}",
        gain,
        plan,
        error,
    )


def _work(route: Data, ceilings: Data) -> tuple[str, ...]:
    counts = {kind: sum(k["count"] for k in route["kernels"] if k["kind"] == kind) for kind in ("copy", "cast", "mask")}
    return (
        "->" if route["is_chosen"] else "", route["route"], f"{route['tflop_s']:.3g}",
        f"{route['tflop_s'] / ceilings['matmul_tflop_s']:.0%}", f"{route['gb_s']:.3g}",
        f"{route['gb_s'] / ceilings['copy_gb_s']:.0%}", f"{route['num_kernels']:.0f}",
        *(f"{counts[kind]:.0f}" for kind in ("copy", "cast", "mask")), format_bytes(route["peak_bytes"]),
    )  # fmt: skip


def _show_kernels(route: Data, console: Console) -> None:
    shown = route["kernels"][:MAX_KERNELS]
    is_gpu = any(kernel["registers"] is not None for kernel in shown)
    rows = []
    for kernel, computed in zip(shown, route["occupancies"], strict=False):
        what = kernel["kind"] + (f" {kernel['dtypes']}" if kernel["dtypes"] else "")
        cells = [f"  {kernel['count']:.0f}x", format_us(kernel["us"]), what]
        if is_gpu:
            reported = kernel["reported_occupancy"]
            cells += [
                "-" if kernel["registers"] is None else str(kernel["registers"]),
                format_bytes(kernel["shared_bytes"]),
                "x".join(map(str, kernel["block"])) or "-",
                "-" if reported is None else f"{reported:.0%}",
                "-" if computed is None else f"{computed['ratio']:.0%}",
            ]
        rows.append((*cells, _name(kernel)))
    gpu = ("regs", "shared", "block", "occ. reported", "computed") if is_gpu else ()
    print_table(console, ("  count", "time", "kind", *gpu, "name"), rows)
    left = route["kernels"][MAX_KERNELS:]
    if left:
        console.print(f"  and {len(left)} more, {format_us(sum(kernel['us'] for kernel in left))} together")


def _name(kernel: Data) -> str:
    """Return the operator with the kernel behind it, without the words that every kernel's name has."""
    name = kernel["name"].removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    source = kernel["operator"]
    return shorten(name if source in ("", name) else f"{source}: {name}", 160)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", nargs="?", metavar="SIGNATURE", help=HOW)
    add_shape_arguments(parser)
    add_device_arguments(parser)
    parser.add_argument(
        "--routes", metavar="NAMES", help="backends or routes, with commas between; default: the usual seven"
    )
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES, metavar="N", help="timed calls per route")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of all routes for Perfetto")


PROFILE = Command(
    name="profile",
    summary="Profile the backends side by side on one problem: times, kernels, memory, errors, and what they mean.",
    example="smartattn profile --query 1x4x256x64 --mask causal --device cpu",
    add_arguments=_add_arguments,
    run=profile,
    show=show,
    is_good=is_good,
)
