"""Is the choice the best one? Tune each workload from nothing, then measure every valid route again at length.

    python benchmarks/choice.py [--device cuda] [--only NAME ...] [--json FILE] [--agree]

Columns: stock, chosen and best route (device time), regret = chosen / best, gain = stock / chosen, tuning time. Rows in
which stock itself was found wrong are listed apart. ``--agree`` tunes everything once more in a fresh process and
compares the choices. On CPU one thread is used and the workloads are cut to batch 1 and lengths that fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import smartattn
from smartattn.choice import STOCK
from smartattn.environment import environment_of, provenance_now
from smartattn.formatting import format_table, format_us
from smartattn.inputs import synthesize
from smartattn.record import Record, Timed
from smartattn.routes import parse_route
from smartattn.selector import selector
from smartattn.signature import Call, Signature
from smartattn.trials import leaf_copies, trial_of, untraced
from smartattn.view import View
from smartattn.wishes import wish_of
from smartattn.workloads import WORKLOADS

CPU_LIMITS = {"N": 1, "Hq": 64, "L": 512, "S": 2048}
MIN_REGRET = 1.05


def problems(device: torch.device, only: list[str]) -> Iterator[tuple[str, Signature]]:
    """Yield name and signature of every row."""
    is_cpu = device.type == "cpu"
    rows = 0
    for workload in WORKLOADS:
        if is_cpu and workload.Hq > CPU_LIMITS["Hq"]:
            continue
        if is_cpu:
            N = min(workload.N, 8 if "window" in workload.tags else CPU_LIMITS["N"])
            is_square = workload.L == workload.S
            S = min(workload.S, CPU_LIMITS["L"] if workload.L > 1 and is_square else CPU_LIMITS["S"])
            workload = dataclasses.replace(workload, N=N, L=min(workload.L, CPU_LIMITS["L"]), S=S)  # noqa: PLW2901
        for pass_name in ("infer", "train"):
            if pass_name == "train" and (not workload.trains or (is_cpu and rows % 3)):
                continue
            rows += 1
            signature = workload.signature(pass_name, device.type, "float32" if is_cpu else "bfloat16")
            if not only or any(text in f"{workload.name} {pass_name}" for text in only):
                yield f"{workload.name} {pass_name}", signature


def tune(call: Call, signature: Signature) -> tuple[Record, str, float, int]:
    """Return the record, the route of a fixed shape, the milliseconds and the peak extra bytes of one tuning."""
    device = call.query.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    record = selector.tune_now(call, signature, wish_of())
    taken_ms = (time.perf_counter() - start_s) * 1e3
    if record is None:
        raise SystemExit(f"could not tune {signature}")
    peak_bytes = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    view = selector.view(device, signature, wish_of(dynamic=False))
    return record, chosen_route(view, record), taken_ms, peak_bytes


def chosen_route(view: View, record: Record) -> str:
    """Return what a program with this one shape ends on."""
    choice = selector.consider(view, record)
    return view.safe_route(record.outcomes).name if choice is None else choice.route


def trials_of(names: list[str], call: Call, signature: Signature) -> dict[str, Callable[[], object]]:
    """Return the bound trial of each route."""
    routes = {name: parse_route(name, signature.device_type) for name in names}
    return {
        name: trial_of(route.bind(signature, environment_of(call.query.device)), call, signature)
        for name, route in routes.items()
    }


def remeasure_cpu(trials: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the median of the faster half of many interleaved blocks, per route."""
    calls = {}
    for name, trial in trials.items():
        start_s = time.perf_counter()
        trial()
        calls[name] = max(1, min(200, round(1e-3 / max(time.perf_counter() - start_s, 1e-6))))
    taken: dict[str, list[float]] = {name: [] for name in trials}
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(next(iter(taken.values()))) < 9:
        for name, trial in trials.items():
            start_s = time.perf_counter()
            for _ in range(calls[name]):
                trial()
            taken[name].append((time.perf_counter() - start_s) * 1e6 / calls[name])
    return {name: statistics.median(sorted(us)[: (len(us) + 1) // 2]) for name, us in taken.items()}


def remeasure_cuda(trials: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the median device time of interleaved CUDA graph replays, per route."""
    graphs, calls = {}, {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for name, trial in trials.items():
        with torch.cuda.stream(stream):
            for _ in range(3):
                trial()
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            trial()
            torch.cuda.synchronize()
            us = (time.perf_counter() - start_s) * 1e6
        calls[name] = max(2, min(20, round(2000 / us)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls[name]):
                trial()
        graphs[name] = graph
    taken: dict[str, list[float]] = {name: [] for name in trials}
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(next(iter(taken.values()))) < 15:
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken[name].append(start.elapsed_time(end) * 1e3 / calls[name])
    return {name: statistics.median(us) for name, us in taken.items()}


def measure_row(name: str, signature: Signature, device: torch.device, seconds: float) -> dict[str, Any]:
    """Tune one row from nothing and measure its routes again."""
    with torch.set_grad_enabled(signature.wants_grad):
        call = synthesize(signature, device)
        record, chosen, tuning_ms, peak_bytes = tune(call, signature)
        valid = {n: o for n, o in record.outcomes.items() if isinstance(o, Timed)}
        near = sorted(valid, key=lambda n: valid[n].device_us)[:6]
        names = list(dict.fromkeys([*near, chosen, *([STOCK] if STOCK in valid else [])]))
        with untraced(device, grad=signature.wants_grad):
            trials = trials_of(names, leaf_copies(call), signature)
            again = (remeasure_cuda if device.type == "cuda" else remeasure_cpu)(trials, seconds)
    best = min(again, key=again.__getitem__)
    stock = record.outcomes.get(STOCK)
    return {
        "name": name,
        "signature": str(signature),
        "chosen": chosen,
        "best": best,
        "chosen_us": again[chosen],
        "best_us": again[best],
        "stock_us": again.get(STOCK),
        "stock": "timed" if isinstance(stock, Timed) else str(getattr(stock, "reason", getattr(stock, "reasons", ""))),
        "stock_runs": stock.resolved if isinstance(stock, Timed) else "",
        "regret_ratio": again[chosen] / again[best],
        "gain_ratio": again[STOCK] / again[chosen] if STOCK in again else None,
        "tuning_ms": tuning_ms,
        "peak_bytes": peak_bytes,
        "free_bytes": torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0,
        "again_us": again,
        "outcomes": record.to_dict()["outcomes"],
    }


def show(rows: list[dict[str, Any]]) -> str:
    """Return the table and its summary."""
    header = ("workload", "stock", "stock runs", "chosen", "best", "regret", "gain", "tuning", "route")
    table = []
    for row in sorted(rows, key=lambda r: r["stock_us"] is None):
        gain = f"{row['gain_ratio']:.2f}x" if row["gain_ratio"] else "stock out"
        times = format_us(row["stock_us"]), row["stock_runs"], format_us(row["chosen_us"]), format_us(row["best_us"])
        route = row["chosen"] if row["chosen"] == row["best"] else f"{row['chosen']} (best {row['best']})"
        table.append((row["name"], *times, f"{row['regret_ratio']:.3f}", gain, f"{row['tuning_ms']:.0f} ms", route))
    lines = [format_table(header, table, width=150)]
    gains = [row["gain_ratio"] for row in rows if row["gain_ratio"]]
    for pass_name in ("infer", "train"):
        tunings = [row["tuning_ms"] for row in rows if f" {pass_name} " in row["signature"]]
        if tunings:
            lines.append(f"median tuning, {pass_name}: {statistics.median(tunings):.0f} ms over {len(tunings)}")
    short = [row["tuning_ms"] for row in rows if (row["stock_us"] or row["chosen_us"]) < 1e3]
    if short:
        lines.append(f"median tuning of calls under a millisecond: {statistics.median(short):.0f} ms over {len(short)}")
    lines.append(
        f"{len(rows)} rows; worst regret {max(row['regret_ratio'] for row in rows):.3f}, "
        f"regret above {MIN_REGRET}: {sum(row['regret_ratio'] > MIN_REGRET for row in rows)}; "
        f"gain geomean {statistics.geometric_mean(gains):.2f}, worst {min(gains):.3f}; "
        f"peak extra memory of a tuning {max(row['peak_bytes'] / max(1, row['free_bytes']) for row in rows):.1%} of free"
    )
    return "\n".join(lines)


def agreement(rows: list[dict[str, Any]], device: str, only: list[str]) -> dict[str, Any]:
    """Tune once more in a fresh process and compare the choices."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "second.json"
        command = [sys.executable, __file__, "--device", device, "--json", str(file), "--seconds", "0", "--quiet"]
        subprocess.run([*command, *(["--only", *only] if only else [])], check=True)
        second = {row["name"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}
    apart = {}
    for row in rows:
        other = second[row["name"]]["chosen"]
        times = row["again_us"]
        if other != row["chosen"] and abs(times.get(other, float("inf")) / times[row["chosen"]] - 1) > 0.03:
            apart[row["name"]] = {"first": row["chosen"], "second": other, "ratio": times.get(other)}
    same = sum(second[row["name"]]["chosen"] == row["chosen"] for row in rows)
    return {"rows": len(rows), "same": same, "apart_by_more_than_3_percent": apart}


def main() -> None:
    """Run the rows, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", default=[], help="parts of row names")
    parser.add_argument("--seconds", type=float, default=1.0, help="re-measuring time per row")
    parser.add_argument("--agree", action="store_true", help="tune again in a fresh process and compare")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        smartattn.configure(cache_dir=folder, process_budget_s=1e6)
        for name, signature in problems(device, options.only):
            row = measure_row(name, signature, device, options.seconds)
            rows.append(row)
            if not options.quiet:
                sys.stderr.write(f"{name}: {row['chosen']} regret {row['regret_ratio']:.3f}\n")
    data: dict[str, Any] = {
        "environment": environment_of(device).to_dict(),
        "provenance": provenance_now(device.type).to_dict(),
        "rows": rows,
    }
    if options.agree:
        data["agreement"] = agreement(rows, options.device, options.only)
    if not options.quiet:
        sys.stdout.write(show(rows) + "\n")
        if options.agree:
            sys.stdout.write(f"agreement: {data['agreement']}\n")
    if options.json:
        Path(options.json).write_text(json.dumps(data, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
