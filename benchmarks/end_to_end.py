"""Whole work on a GPU, stock against smartattn: generation, training with changing lengths, and repeated shapes.

    python benchmarks/end_to_end.py [--json FILE] [--only generate-1 ...]

Every variant runs in a process of its own, so that no plan or library that one loaded serves another. Variants:
``stock`` (PyTorch's own choice), ``empty`` (smartattn, empty cache folder, tuning included), ``warmed`` (smartattn on the
cache that ``empty`` left behind, where training says ``dynamic=True``), ``fixed`` (the best single backend chosen by
hand: flash and efficient, cuDNN left out). ``again`` repeats the same lengths in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

WORKS = ("generate-1", "generate-8", "train", "train-repeat", "decode")
VARIANTS = ("stock", "fixed", "empty", "warmed")
TRAIN_STEPS = 200
STOCK_TRAIN_STEPS = 60
DECODE_STEPS = 4096


def by_hand() -> AbstractContextManager[None]:
    """Return the setting of a user who found out that cuDNN's plans are to blame."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of ``work``, device included."""
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s


def llama(variant: str) -> Any:
    """Return a 16-layer Llama of width 2048 with 32 query and 8 key heads, random weights, in bfloat16."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - seconds that the other works do without

    if variant in ("empty", "warmed"):
        import smartattn.integrations.transformers  # noqa: F401, PLC0415 - registers the name used below
    name = "smartattn" if variant in ("empty", "warmed") else "sdpa"
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=4096, attn_implementation=name,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def generate(variant: str, batch: int, num_new: int) -> dict[str, float]:
    """Return tokens per second of one generation with lengths not met before, and of the same once more."""
    model = llama(variant)
    tokens = torch.randint(5, 32000, (batch, 777), device="cuda")
    mask = torch.ones_like(tokens)
    if batch > 1:
        for row in range(batch):
            mask[row, : row * 60] = 0

    def work(length: int, count: int) -> None:
        model.generate(
            tokens[:, -length:], attention_mask=mask[:, -length:], max_new_tokens=count, min_new_tokens=count,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip

    context = by_hand() if variant == "fixed" else nullcontext()
    with context, torch.no_grad():
        work(100, 2)  # libraries and kernels of everything else are loaded before the clock starts
        first_s = seconds(lambda: work(777, num_new))
        again_s = min(seconds(lambda: work(777, num_new)) for _ in range(2))
    return {"first": num_new / first_s, "again": num_new / again_s, **counters(variant)}


def train(variant: str) -> dict[str, float]:
    """Return attention steps (forward and backward) per second, a new length each step, then one length again."""
    import random  # noqa: PLC0415

    attend = attention_of(variant, dynamic=True if variant == "warmed" else None)
    order = list(range(1024, 2048))
    random.Random(0).shuffle(order)  # noqa: S311 - an order, not a secret
    steps = STOCK_TRAIN_STEPS if variant == "stock" else TRAIN_STEPS

    def step(length: int) -> None:
        shape = (4, 16, length, 64)
        query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
        attend(query, key, value, is_causal=True).sum().backward()

    context = by_hand() if variant == "fixed" else nullcontext()
    with context:
        step(128)
        first_s = seconds(lambda: [step(length) for length in order[:steps]]) / steps
    return {"first": 1 / first_s, "again": 1 / first_s, **counters(variant)}


def train_repeat(variant: str) -> dict[str, float]:
    """Return attention steps (forward and backward) per second of one length that comes back, after its first."""
    attend = attention_of(variant, dynamic=None)

    def step() -> None:
        shape = (4, 16, 1536, 64)
        query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
        attend(query, key, value, is_causal=True).sum().backward()

    context = by_hand() if variant == "fixed" else nullcontext()
    with context:
        first_s = seconds(step)
        for _ in range(20):
            step()
        again_s = min(seconds(lambda: [step() for _ in range(100)]) / 100 for _ in range(5))
    return {"first": 1 / first_s, "again": 1 / again_s, **counters(variant)}


def decode(variant: str) -> dict[str, float]:
    """Return steps per second of one attention layer whose keys grow by one, 4,096 times, from 64."""
    attend = attention_of(variant, dynamic=None)
    keys = torch.randn(8, 8, 64 + DECODE_STEPS, 128, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(8, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    steps = 200 if variant == "stock" else DECODE_STEPS

    def step(length: int) -> None:
        attend(query, keys[:, :, :length].contiguous(), keys[:, :, :length].contiguous(), enable_gqa=True)

    context = by_hand() if variant == "fixed" else nullcontext()
    with context, torch.no_grad():
        step(32)
        first_s = seconds(lambda: [step(64 + i) for i in range(steps)]) / steps
        found = new_length_cost(step) if variant in ("empty", "warmed") else {}
        for _ in range(3):
            step(2048)
        again_s = min(seconds(lambda: [step(2048) for _ in range(200)]) / 200 for _ in range(3))
    return {"first": 1 / first_s, "again": 1 / again_s, **found, **counters(variant)}


def new_length_cost(step: Callable[[int], None]) -> dict[str, float]:
    """Return what a new length of a known bucket costs beyond the call, in microseconds."""
    import smartattn  # noqa: PLC0415

    lengths = range(3000, 4000)
    smartattn.configure(dynamic=None)  # forgets every bound choice, so that each length is met anew
    new_s = seconds(lambda: [step(length) for length in lengths])
    met_s = seconds(lambda: [step(length) for length in lengths])
    return {"new_length_us": (new_s - met_s) / len(lengths) * 1e6}


def attention_of(variant: str, *, dynamic: bool | None) -> Callable[..., torch.Tensor]:
    """Return what the variant calls for attention."""
    if variant in ("stock", "fixed"):
        return torch.nn.functional.scaled_dot_product_attention
    import smartattn  # noqa: PLC0415 - stock runs without it

    return smartattn.SmartAttention(dynamic=dynamic)


def counters(variant: str) -> dict[str, float]:
    """Return what smartattn counted."""
    if variant in ("stock", "fixed"):
        return {}
    import smartattn  # noqa: PLC0415

    found = smartattn.stats()
    return {"tunings": found.tunings, "tuning_s": round(found.tuning_s, 2), "misses": found.misses}


def run_one(work: str, variant: str) -> dict[str, float]:
    """Run one work in this process."""
    if work == "generate-1":
        return generate(variant, 1, 128)
    if work == "generate-8":
        return generate(variant, 8, 64)
    works = {"train": train, "train-repeat": train_repeat, "decode": decode}
    return works[work](variant)


def run_all(only: list[str], variants: list[str]) -> dict[str, Any]:
    """Run every work and variant, each in a fresh process."""
    found: dict[str, Any] = {}
    for work in only or WORKS:
        with tempfile.TemporaryDirectory() as folder:
            for variant in variants:
                environment = {**os.environ, "SMARTATTN_CACHE_DIR": folder, "TOKENIZERS_PARALLELISM": "false"}
                command = [sys.executable, __file__, "--run", work, variant]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.stderr.write(done.stderr[-3000:])
                    found.setdefault(work, {})[variant] = {"error": done.stderr[-500:]}
                    continue
                found.setdefault(work, {})[variant] = json.loads(done.stdout.splitlines()[-1])
                sys.stderr.write(f"{work} {variant}: {done.stdout.splitlines()[-1]}\n")
    return found


def show(found: dict[str, Any]) -> str:
    """Return the table of rates and ratios to stock."""
    from smartattn.formatting import format_table  # noqa: PLC0415

    rows = []
    for work, variants in found.items():
        base = variants.get("stock") or next(iter(variants.values()))
        for variant, row in variants.items():
            if "error" in row:
                rows.append((work, variant, "failed", "", "", "", ""))
                continue
            first, again = row["first"] / base["first"], row["again"] / base["again"]
            tunings = f"{row['tunings']:.0f} in {row['tuning_s']:.1f} s" if "tunings" in row else ""
            if "new_length_us" in row:
                tunings += f"; a new length {row['new_length_us']:.0f} us"
            rates = f"{row['first']:.1f}/s", f"{first:.2f}x", f"{row['again']:.1f}/s", f"{again:.3f}x"
            rows.append((work, variant, *rates, tunings))
    header = ("work", "variant", "new lengths", "to stock", "same lengths again", "to stock", "tunings")
    return format_table(header, rows)


def main() -> None:
    """Run all, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], choices=WORKS)
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--run", nargs=2, metavar=("WORK", "VARIANT"), help=argparse.SUPPRESS)
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    if options.run:
        sys.stdout.write(json.dumps(run_one(*options.run)) + "\n")
        return
    found = run_all(options.only, options.variants)
    from smartattn.environment import environment_of, provenance_now  # noqa: PLC0415

    data = {
        "environment": environment_of(torch.device("cuda", 0)).to_dict(),
        "provenance": provenance_now("cuda").to_dict(),
        "works": found,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(data, indent=1), encoding="utf-8")
    sys.stdout.write(show(found) + "\n")


if __name__ == "__main__":
    main()
