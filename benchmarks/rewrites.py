"""What exact rewrites and mask classes win over PyTorch's own choice, row by row, with the goal of each.

    python benchmarks/rewrites.py [--device cuda] [--only NAME ...] [--kernels] [--json FILE]

Every row calls the public function with what a program would pass (dense masks are dense) until it is tuned, shapes
declared as repeating. Then stock and the chosen route are timed in turn: on CUDA by graph replay, on CPU (one thread) in
blocks. Results are compared with float32 attention in parts; rows in which stock itself is wrong are listed apart. Rows
with a shared mask are timed by the wall: a new mask for every 32 calls, reading it counted. ``--kernels`` lists what the
chosen route launches.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from choice import remeasure_cpu, remeasure_cuda

import smartattn
from smartattn import mask_facts
from smartattn.environment import environment_of, provenance_now
from smartattn.formatting import format_table, format_us
from smartattn.history import CountedRunner
from smartattn.mask_recognition import recognize
from smartattn.mask_runner import MaskRunner
from smartattn.masks import Causal, CausalLowerRight, Documents, KeyPadding, Window
from smartattn.signature import Call
from smartattn.wishes import all_bindings

sdpa = torch.nn.functional.scaled_dot_product_attention
SHARED_CALLS = 32
WRONG_ERROR = 0.1
"""Difference from float32 attention, values being unit normal, from which a bfloat16 result is wrong."""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        name: what it stands for.
        goal: ratio to stock that it must reach.
        shape: N, Hq, H, L, S, E, Ev.
        mask: makes the mask on a device.
        is_bshd: whether query, key and value lie in BSHD memory.
        is_shared: whether to time ``SHARED_CALLS`` calls with a new mask each time, by the wall.
    """

    name: str
    goal: float
    shape: tuple[int, ...]
    mask: Callable[[torch.device], torch.Tensor] | None = None
    is_bshd: bool = False
    is_shared: bool = False

    def call(self, device: torch.device, dtype: torch.dtype) -> Call:
        """Return the call that a program would make."""
        N, Hq, H, L, S, E, Ev = self.shape
        generator = torch.Generator(device).manual_seed(0)

        def tensor(heads: int, length: int, width: int) -> torch.Tensor:
            shape = (N, length, heads, width) if self.is_bshd else (N, heads, length, width)
            made = torch.randn(shape, device=device, dtype=dtype, generator=generator)
            return made.transpose(1, 2) if self.is_bshd else made

        mask = None if self.mask is None else self.mask(device)
        return Call(tensor(Hq, L, E), tensor(H, S, E), tensor(H, S, Ev), mask, enable_gqa=Hq != H)


def bias(device: torch.device) -> torch.Tensor:
    """Return the learnt bias of window attention."""
    return torch.randn(1, 4, 49, 49, device=device, dtype=torch.bfloat16)


def left_padded(device: torch.device) -> torch.Tensor:
    """Return the mask of four prompts, the shortest a quarter as long as the longest."""
    lengths = [4096, 3072, 2048, 1024]
    return KeyPadding(lengths, "left").dense(4096, 4096, device) & Causal().dense(4096, 4096, device)


def dense(mask: Any, L: int, S: int) -> Callable[[torch.device], torch.Tensor]:
    """Return what makes the dense form of a class."""
    return functools.partial(mask.dense, L, S)


CUDA_ROWS = (
    Row("MLA-like decode, 16 heads", 90, (16, 16, 1, 1, 4096, 576, 512)),
    Row("MLA-like decode, 128 heads", 300, (4, 128, 1, 1, 4096, 576, 512)),
    Row("MQA, 4 speculative tokens", 7, (8, 32, 1, 4, 8192, 128, 128)),
    Row(
        "dense causal mask, 32 calls",
        2.5,
        (2, 32, 32, 2048, 2048, 128, 128),
        dense(Causal(), 2048, 2048),
        is_shared=True,
    ),
    Row("dense causal mask", 2.5, (2, 32, 32, 2048, 2048, 128, 128), dense(Causal(), 2048, 2048)),
    Row("window attention with bias", 3, (1024, 4, 4, 49, 49, 32, 32), bias),
    Row("VAE mid block", 2.8, (1, 1, 1, 4096, 4096, 512, 512)),
    Row("head_dim 67", 1.25, (2, 8, 8, 1024, 1024, 67, 67)),
    Row("head_dim 100", 1.25, (2, 8, 8, 1024, 1024, 100, 100)),
    Row("chunked prefill", 1.5, (1, 32, 8, 256, 8192, 128, 128), dense(CausalLowerRight(), 256, 8192)),
    Row("sliding window", 5, (1, 32, 32, 8192, 8192, 128, 128), dense(Window(1023, 0), 8192, 8192)),
    Row("8 documents", 9, (1, 32, 32, 8192, 8192, 128, 128), dense(Documents([1024] * 8), 8192, 8192)),
    Row("causal, left padding", 3.5, (4, 32, 8, 4096, 4096, 128, 128), left_padded, is_bshd=True),
)
CPU_ROWS = (
    Row("GQA decode", 2.5, (1, 32, 8, 1, 4096, 128, 128)),
    Row("MLA-like decode", 4, (1, 16, 1, 1, 4096, 576, 512)),
)


def stock(call: Call) -> torch.Tensor:
    """Run PyTorch's own function."""
    return sdpa(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)


def error_of(output: torch.Tensor, call: Call) -> float:
    """Return the largest difference from float32 attention, on the first and the last batch element and head."""
    worst = 0.0
    group = call.query.size(1) // call.key.size(1)
    for n, head in {(0, 0), (call.query.size(0) - 1, call.query.size(1) - 1)}:
        query, key, value = (
            call.query[n, head].float(),
            call.key[n, head // group].float(),
            call.value[n, head // group].float(),
        )
        scores = query @ key.T / math.sqrt(query.size(-1))
        if call.attn_mask is not None:
            mask = call.attn_mask.expand(*call.query.shape[:-1], call.key.size(-2))[n, head]
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        right = torch.softmax(scores, -1).nan_to_num(0.0) @ value
        worst = max(worst, float((output[n, head].float() - right).abs().max()))
    return worst


def chosen() -> tuple[str, str, Callable[..., torch.Tensor]]:
    """Return route, mask class and runner of the only bound choice."""
    binding = all_bindings()[-1]
    run, name = binding.run, binding.signature.mask
    if isinstance(run, MaskRunner):
        use = run._last
        found = run.binding_of(use.name)
        binding, name, run = found, use.name or "dense", use.run
    return binding.route, name, run.run if isinstance(run, CountedRunner) else run


def time_shared(call: Call, run: Callable[[Call], torch.Tensor], forwards: int) -> list[float]:
    """Return microseconds per call, by the wall, of calls that share a mask which is new each time."""
    taken = []
    for _ in range(forwards):
        fresh = call._replace(attn_mask=call.attn_mask.clone())
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(SHARED_CALLS):
            run(fresh)
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start_s) * 1e6 / SHARED_CALLS)
    return taken


def kernels_of(run: Callable[[], object]) -> list[tuple[str, float]]:
    """Return what one call launches, with the microseconds of each kernel."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name[:90], round(e.device_time_total, 1)) for e in events]


def measure(row: Row, device: torch.device, seconds: float, *, has_kernels: bool) -> dict[str, Any]:
    """Tune one row by calling it, then time it against stock."""
    call = row.call(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    smartattn.configure(dynamic=False)
    start_s = time.perf_counter()
    for _ in range(3):
        output = smartattn.scaled_dot_product_attention(*call)
    tuning_ms = (time.perf_counter() - start_s) * 1e3
    route, name, run = chosen()
    if row.is_shared:
        ours = statistics.median(time_shared(call, lambda c: smartattn.scaled_dot_product_attention(*c), 14)[4:])
        times = {"stock": statistics.median(time_shared(call, stock, 8)[2:]), "chosen": ours}
        route, name, run = chosen()
    else:
        trials = {"stock": lambda: stock(call), "chosen": lambda: run(*call)}
        times = (remeasure_cpu if device.type == "cpu" else remeasure_cuda)(trials, seconds)
    errors = {"stock": error_of(stock(call), call), "chosen": error_of(output, call)}
    found = {
        "name": row.name,
        "shape": row.shape,
        "mask": name,
        "route": route,
        "stock_us": times["stock"],
        "chosen_us": times["chosen"],
        "gain_ratio": times["stock"] / times["chosen"],
        "goal_ratio": row.goal,
        "stock_error": errors["stock"],
        "chosen_error": errors["chosen"],
        "is_stock_wrong": errors["stock"] > WRONG_ERROR,
        "tuning_ms": tuning_ms,
        "outcomes": smartattn.explain(*call).to_dict()["outcomes"],
    }
    if has_kernels and device.type == "cuda":
        found["kernels"] = kernels_of(lambda: run(*call))
        found["stock_kernels"] = kernels_of(lambda: stock(call))
    return found


def look_times(device: torch.device) -> dict[str, float]:
    """Return the median microseconds that reading a new mask takes, waiting for the device included."""
    found = {}
    for S in (2048, 8192):
        tensor = torch.empty(1, 1, S, 8, device=device)
        for mask in (Causal(), Window(1023, 0), Documents([S // 8] * 8)):
            taken = []
            for _ in range(12):
                call = Call(tensor, tensor, tensor, mask.dense(S, S, device).clone())
                if device.type == "cuda":
                    torch.cuda.synchronize()
                start_s = time.perf_counter()
                recognize(call)
                taken.append((time.perf_counter() - start_s) * 1e6)
                mask_facts.forget()
            found[f"{mask.name} {S}x{S}"] = statistics.median(taken)
    return found


def show(rows: list[dict[str, Any]]) -> str:
    """Return the tables: rows in which stock is right, then those in which it is wrong."""
    header = ("row", "mask", "route", "stock", "chosen", "gain", "goal", "", "error", "stock's error")
    lines = []
    for is_wrong, title in ((False, "stock is right"), (True, "stock is wrong here")):
        table = [
            (
                row["name"], row["mask"], row["route"], format_us(row["stock_us"]), format_us(row["chosen_us"]),
                f"{row['gain_ratio']:.2f}x", f"{row['goal_ratio']:g}x",
                "" if row["gain_ratio"] >= row["goal_ratio"] else "below",
                f"{row['chosen_error']:.2g}", f"{row['stock_error']:.2g}",
            )
            for row in rows if row["is_stock_wrong"] == is_wrong
        ]  # fmt: skip
        if table:
            lines += [title, format_table(header, table, width=170), ""]
    return "\n".join(lines)


def main() -> None:
    """Run the rows, write the JSON, print the table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", default=[], help="parts of row names")
    parser.add_argument("--seconds", type=float, default=0.3, help="measuring time per row")
    parser.add_argument("--kernels", action="store_true", help="list what the chosen route launches")
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    rows = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        smartattn.configure(cache_dir=folder, process_budget_s=1e6)
        for row in CUDA_ROWS if options.device == "cuda" else CPU_ROWS:
            if not options.only or any(text in row.name for text in options.only):
                rows.append(measure(row, device, options.seconds, has_kernels=options.kernels))
                last = rows[-1]
                sys.stderr.write(f"{row.name}: {last['route']} {last['gain_ratio']:.2f}x ({row.goal}x)\n")
                for name, us in last.get("kernels", ()):
                    sys.stderr.write(f"    {us:9.1f} us  {name}\n")
    looks = look_times(device) if options.device == "cuda" else {}
    data = {
        "environment": environment_of(device).to_dict(),
        "provenance": provenance_now(device.type).to_dict(),
        "look_us": looks,
        "rows": rows,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(data, indent=1), encoding="utf-8")
    for name, us in looks.items():
        sys.stdout.write(f"reading a mask, {name}: {us:.0f} us\n")
    sys.stdout.write(show(rows) + "\n")


if __name__ == "__main__":
    main()
