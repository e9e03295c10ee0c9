"""``smartattn demo``: stock attention against SmartAttention in a small transformer, then once more from disk."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from smartattn import cache
from smartattn.attention import SmartAttention
from smartattn.cli.command import Command, Data
from smartattn.cli.demo_model import NUM_LAYERS, WIDTH, Attention, DemoModel
from smartattn.events import reset_stats, stats
from smartattn.explain import Explanation, explain
from smartattn.formatting import format_ratio, format_us, shorten
from smartattn.record import Timed
from smartattn.settings import configure, variable_of

NUM_ROUNDS = 9
TOLERANCE = 1e-4
"""Largest difference of outputs that is rounding.

Source: the layer norms keep activations near 1, and float32 carries 1.2e-7 through about a hundred sums; measured
differences are near 1e-6.
"""


class Watcher:
    """Attention that keeps why the calls it passes on were answered so, once per record."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.explanations: dict[str, Explanation] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Answer the call, then keep why it was answered so."""
        output = self.attention(*args, **kwargs)
        found = explain(*args, **kwargs)
        # One bucket's record answers for all its lengths; its first call stands for them.
        self.explanations.setdefault(found.record_signature or found.signature, found)
        return output


def demo(*, device: str | None = None, second: bool = False) -> Data:
    """Run the demonstration.

    Args:
        device: where to run; default: the GPU if PyTorch sees one, else the CPU.
        second: do only what the second process does: run from the cache that the first one filled.

    Returns:
        Plain data: times in microseconds, largest difference, one entry per signature, and the second run's counters.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if second:
        outputs = DemoModel(SmartAttention(), where).work()
        return {"stats": stats().to_dict(), "digest": digest_of(outputs)}
    with tempfile.TemporaryDirectory() as spare:
        # A folder beside the user's own records, so that each demonstration starts from nothing and disturbs nothing.
        folder = (cache.path() or Path(spare)) / "demo"
        old = configure(cache_dir=folder, layers=(), mode="tune")
        try:
            cache.clear()
            data = _compare(where) | {"cache_dir": str(folder), "num_stored": len(cache.records())}
            return data | {"second": _run_again(where, folder)}
        finally:
            configure(**vars(old))


def _compare(where: torch.device) -> Data:
    stock = DemoModel(torch.nn.functional.scaled_dot_product_attention, where)
    watcher = Watcher(SmartAttention())
    smart = DemoModel(watcher, where)
    reset_stats()
    expected, found = stock.work(), smart.work()
    for layer in smart.blocks():
        layer.attention = watcher.attention
    stock_us, smart_us = _times_us(stock.work, smart.work)
    return {
        "device": environment_text(where),
        "max_difference": max(float((expected[k] - found[k]).abs().max()) for k in expected),
        "tolerance": TOLERANCE,
        "stock_us": stock_us,
        "smart_us": smart_us,
        "stats": stats().to_dict(),
        "signatures": [_row(explanation) for explanation in watcher.explanations.values()],
        "digest": digest_of(found),
    }


def _times_us(*works: Callable[[], object]) -> tuple[float, ...]:
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(NUM_ROUNDS):
        for work, taken in zip(works, samples, strict=True):
            start_s = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append((time.perf_counter() - start_s) * 1e6)
    return tuple(statistics.median(taken) for taken in samples)


def environment_text(where: torch.device) -> str:
    """Return device, threads and PyTorch in words."""
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"CPU with threads={torch.get_num_threads()}"
    return f"{name}, torch {torch.__version__}"


def digest_of(outputs: dict[str, torch.Tensor]) -> str:
    """Return a digest over the bits of all outputs."""
    digest = hashlib.sha256()
    for name in sorted(outputs):
        digest.update(bytes(outputs[name].cpu().contiguous().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]


def _row(found: Explanation) -> Data:
    chosen, stock = (found.outcomes.get(name) for name in (found.route, "stock"))
    is_timed = isinstance(chosen, Timed) and isinstance(stock, Timed)
    return {
        **found.to_dict(),
        "chosen_us": chosen.cost_us if isinstance(chosen, Timed) else None,
        "stock_us": stock.cost_us if isinstance(stock, Timed) else None,
        "gain": stock.cost_us / chosen.cost_us if is_timed else None,  # type: ignore[union-attr]  # is_timed says so
    }


def _run_again(where: torch.device, folder: Path) -> Data:
    command = [sys.executable, "-m", "smartattn", "demo", "--second", "--json", "--device", str(where)]
    environ = {**os.environ, variable_of("cache_dir"): str(folder), variable_of("mode"): "tune"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)  # noqa: S603 - ourselves
    if done.returncode:
        return {"error": done.stderr.strip() or f"exit code {done.returncode}"}
    data: Data = json.loads(done.stdout)
    return data


def is_good(data: Data) -> bool:
    """Return whether outputs agreed and the second run tuned nothing that had been stored."""
    if "second" not in data:
        return True
    tunings = data["second"].get("stats", {}).get("tunings")
    return bool(data["max_difference"] <= data["tolerance"]) and tunings is not None and tunings <= _num_unstored(data)


def _num_unstored(data: Data) -> int:
    num_unstored: int = data["stats"]["tunings"] - data["num_stored"]
    return max(0, num_unstored)


def show(data: Data, console: Console) -> None:
    """Print the demonstration's data."""
    if "second" not in data:
        console.print(f"tunings {data['stats']['tunings']}, choices from disk {data['stats']['disk_hits']}")
        return
    verdict = "equal to rounding" if data["max_difference"] <= data["tolerance"] else "DIFFERENT"
    console.print(f"A transformer of {NUM_LAYERS} layers, {WIDTH} wide, on {data['device']}:")
    console.print("it encodes padded texts, reads a prompt, and decodes after it.\n")
    console.print(f"  outputs         {verdict} (largest difference {data['max_difference']:.1e})")
    ratio = data["stock_us"] / data["smart_us"]
    console.print(f"  stock           {format_us(data['stock_us'])}")
    console.print(f"  SmartAttention  {format_us(data['smart_us'])} ({format_ratio(ratio)})")
    counters = data["stats"]
    console.print(f"  tuned           {counters['tunings']} signatures in {counters['tuning_s']:.2f} s\n")
    for row in data["signatures"]:
        _show_signature(row, console)
    console.print(f"Stored in {data['cache_dir']}", soft_wrap=True)
    if _num_unstored(data):
        console.print(f"{_num_unstored(data)} not stored: its order turned while it was measured; is the machine busy?")
    _show_second(data, console)


def _show_signature(row: Data, console: Console) -> None:
    console.print(row["signature"] or row["note"], style="bold", soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    header = ("", "route", "per call", "vs stock", "why")
    rows = [_cells(name, outcome, row) for name, outcome in row["outcomes"].items()]
    # Everything but the reasons is shown whole; those are cut to what is left of the line.
    left = console.width - sum(max(map(len, column)) + 2 for column in list(zip(header, *rows, strict=True))[:-1])
    for name in header:
        table.add_column(name, no_wrap=True)
    for *cells, why in rows:
        table.add_row(*cells, shorten(why, left), style="green" if cells[0] else None)
    console.print(table)
    console.print()


def _cells(name: str, outcome: Data, row: Data) -> tuple[str, ...]:
    mark = "->" if name == row["route"] else ""
    if outcome["is"] != "timed":
        why = "; ".join(outcome.get("reasons", [outcome.get("reason", "")]))
        return mark, name, "-", "-", f"{outcome['is']}: {why}"
    cost_us = max(outcome["device_us"], outcome["host_us"])
    gain = row["stock_us"] / cost_us if row["stock_us"] else None
    why = f"runs {outcome['resolved']}" if outcome.get("resolved") else ""
    return mark, name, format_us(cost_us), format_ratio(gain), why


def _show_second(data: Data, console: Console) -> None:
    second = data["second"]
    if "error" in second:
        console.print(f"Second process FAILED: {second['error']}")
        return
    counters = second["stats"]
    bits = "the same bits" if second["digest"] == data["digest"] else "outputs that differ in bits"
    console.print(
        f"Second process: {counters['tunings']} tunings, {counters['disk_hits']} choices read from disk, {bits}."
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ...; default: a GPU if there is one")
    parser.add_argument("--second", action="store_true", help="only what the second process does: run from disk")


DEMO = Command(
    name="demo",
    summary="Compare stock attention with SmartAttention in a small transformer, then run it again from disk.",
    example="smartattn demo --device cpu",
    add_arguments=_add_arguments,
    run=demo,
    show=show,
    is_good=is_good,
)
