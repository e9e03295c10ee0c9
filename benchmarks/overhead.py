"""Host time per hit: our function and module against PyTorch's own, in one process, on tiny inputs.

    python benchmarks/overhead.py [--device cuda] [--rounds 200] [--json FILE]

Every variant is timed in turn, round after round, without waiting for the device; medians over the rounds. The stock
module is what a user would write: an ``nn.Module`` whose forward calls ``scaled_dot_product_attention``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import smartattn
from smartattn.environment import environment_of, provenance_now
from smartattn.formatting import format_table

sdpa = torch.nn.functional.scaled_dot_product_attention


class StockModule(torch.nn.Module):
    """What a user writes around PyTorch's function."""

    def forward(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def under_kernel(*arguments: Any) -> torch.Tensor:
    """Call PyTorch's function inside its context manager, as code that prefers a backend does."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        return sdpa(*arguments)


def cases(device: str) -> dict[str, tuple[Any, ...]]:
    """Return tiny inputs: host time is all that shows."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    make = lambda grad=False: torch.randn(1, 2, 16, 64, device=device, dtype=dtype, requires_grad=grad)  # noqa: E731
    mask = torch.ones(16, 16, dtype=torch.bool, device=device).tril()
    return {
        "plain": (make(), make(), make()),
        "causal": (make(), make(), make(), None, 0.0, True),
        "bool mask": (make(), make(), make(), mask),
        "train": (make(True), make(True), make(True)),
    }


def block_us(run: Callable[..., Any], arguments: tuple[Any, ...], num_calls: int, device: str) -> float:
    """Return host microseconds per call of one block."""
    if device == "cuda":
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(num_calls):
        run(*arguments)
    return (time.perf_counter() - start_s) * 1e6 / num_calls


def measure(device: str, rounds: int, num_calls: int) -> list[dict[str, Any]]:
    """Return one row per case and variant."""
    variants = {
        "SDPA": sdpa,
        "stock module": StockModule(),
        "sdpa_kernel + SDPA": under_kernel,
        "smartattn function": smartattn.scaled_dot_product_attention,
        "smartattn module": smartattn.SmartAttention(),
    }
    rows = []
    for case, arguments in cases(device).items():
        for run in variants.values():
            for _ in range(20):
                run(*arguments)
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, run in variants.items():
                taken[name].append(block_us(run, arguments, num_calls, device))
        chosen = smartattn.explain(*arguments).route
        for name, samples in taken.items():
            base = "stock module" if "module" in name else "SDPA"
            # Paired: both halves of a difference come from the same round, so drift cancels.
            extra = statistics.median(a - b for a, b in zip(samples, taken[base], strict=True))
            rows.append(
                {
                    "case": case,
                    "variant": name,
                    "host_us": round(statistics.median(samples), 2),
                    "extra_us": round(extra, 2),
                    "against": base,
                    "route": chosen,
                }
            )
    return rows


def main() -> None:
    """Measure, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=100, help="calls per block")
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        smartattn.configure(cache_dir=folder)
        rows = measure(options.device, options.rounds, options.calls)
    header = ("case", "variant", "host", "over its base", "base", "route")
    table = [
        (r["case"], r["variant"], f"{r['host_us']:.2f} us", f"{r['extra_us']:+.2f} us", r["against"], r["route"])
        for r in rows
    ]
    sys.stdout.write(format_table(header, table) + "\n")
    if options.json:
        environment = environment_of(torch.device(options.device)).to_dict()
        data = {"environment": environment, "provenance": provenance_now(options.device).to_dict(), "rows": rows}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)


if __name__ == "__main__":
    main()
