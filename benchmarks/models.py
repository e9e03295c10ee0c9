"""Whole models on a GPU, their own attention against smartattn's, in one run: milliseconds per call of each.

    python benchmarks/models.py [--device cuda] [--only bert vit ...] [--json FILE] [--tiny]

Random weights at real sizes, bfloat16, no gradients unless the name says ``train``. Stock and replaced take turns.
``bert`` draws new lengths in every round, as dynamic padding does, and who goes first alternates, since a plan that one
builds serves the other; its first rounds, in which smartattn tunes, are reported apart. ``unet`` is diffusers'
UNet2DConditionModel where diffusers is installed, else (``unet_blocks``) SDXL's transformer blocks alone, rebuilt at
their sizes from PyTorch's modules. ``--tiny`` runs everything small, to see that it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

import smartattn
from smartattn import compare, replace_attention
from smartattn.formatting import format_ratio, format_table, format_us
from smartattn.integrations.replacing import stock_attention

Row = dict[str, Any]
BATCHES_PER_ROUND = 12
COLD_ROUNDS, ROUNDS = 4, 8
REPEATS = 15


def build(make: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Return a model with random weights on the device, in bfloat16 (float32 on CPU)."""
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return make().eval()
    finally:
        torch.set_default_dtype(before)


def fixed(name: str, model: nn.Module, kwargs: dict[str, Any], *, repeats: int = REPEATS, **options: Any) -> Row:
    """Compare calls of one shape."""
    start_s = time.perf_counter()
    result = compare(model, kwargs=kwargs, repeats=repeats, **options)
    row = {key: value for key, value in result.to_dict().items() if "samples" not in key}
    return {"name": name, **row, "total_s": round(time.perf_counter() - start_s, 1)}


def wall_ms(run: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of one call, device included."""
    synchronize(device)
    start_s = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - start_s) * 1e3


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def bert(device: torch.device, *, is_tiny: bool) -> list[Row]:
    """BERT-base, batches padded to their longest sequence: new lengths all the time."""
    from transformers import BertConfig, BertModel  # noqa: PLC0415 - only this benchmark needs it

    config = BertConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4) if is_tiny else BertConfig()
    model = build(lambda: BertModel(config, add_pooling_layer=False), device)
    report = replace_attention(model, dynamic=True)
    draw = random.Random(1)  # noqa: S311 - lengths, not secrets
    N, longest = (2, 48) if is_tiny else (32, 512)
    rounds, num_batches = (2, 2) if is_tiny else (COLD_ROUNDS + ROUNDS, BATCHES_PER_ROUND)

    def batch() -> dict[str, torch.Tensor]:
        lengths = [int(16 * (longest / 16) ** draw.random()) for _ in range(N)]
        L = max(lengths)
        ids = torch.randint(999, 9999, (N, L), device=device)
        mask = torch.arange(L, device=device) < torch.tensor(lengths, device=device)[:, None]
        return {"input_ids": ids, "attention_mask": mask.long()}

    taken: dict[str, list[float]] = {"stock": [], "replaced": []}
    with torch.no_grad():
        model(**batch())
        for number in range(rounds):
            batches = [batch() for _ in range(num_batches)]
            order = ("stock", "replaced") if number % 2 == 0 else ("replaced", "stock")
            for who in order:
                if who == "stock":
                    with stock_attention(model):
                        ms = wall_ms(lambda given=batches: [model(**each) for each in given], device)
                else:
                    ms = wall_ms(lambda given=batches: [model(**each) for each in given], device)
                taken[who].append(ms / num_batches)
        given = batch()
        found = model(**given).last_hidden_state.float()
        with stock_attention(model):
            expected = model(**given).last_hidden_state.float()
    seen = given["attention_mask"].bool()
    error = float((found - expected)[seen].abs().max() / expected[seen].abs().max())
    rows = []
    cold = min(COLD_ROUNDS, rounds // 2)
    for name, part in (("bert cold", slice(None, cold)), ("bert", slice(cold, None))):
        # The mean: what a user waits for, plans and tunings included.
        stock, replaced = (statistics.fmean(taken[who][part]) for who in ("stock", "replaced"))
        rows.append({
            "name": name, "stock_ms": stock, "replaced_ms": replaced, "ratio": stock / replaced, "max_error": error,
            "stock_rounds_ms": taken["stock"][part], "replaced_rounds_ms": taken["replaced"][part],
            "num_replaced": len(report.replaced),
        })  # fmt: skip
    return rows


def vit(device: torch.device, *, is_tiny: bool) -> list[Row]:
    """ViT-B/16, from timm where it is installed, else torchvision's."""
    N, size = (2, 32) if is_tiny else (64, 224)
    if importlib.util.find_spec("timm") is not None:
        import timm  # noqa: PLC0415 - optional

        name, options = (
            "vit (timm)",
            {"img_size": size, **({"depth": 2, "embed_dim": 64, "num_heads": 4} if is_tiny else {})},
        )
        model = build(lambda: timm.create_model("vit_base_patch16_224", **options), device)
    else:
        from torchvision.models import VisionTransformer  # noqa: PLC0415 - optional

        name, sizes = "vit (torchvision)", (2, 4, 64, 96) if is_tiny else (12, 12, 768, 3072)
        model = build(lambda: VisionTransformer(size, 16, *sizes), device)
    image = torch.randn(N, 3, size, size, device=device, dtype=next(model.parameters()).dtype)
    return [fixed(name, model, {"x": image}), train_step(f"{name} train", model, image)]


class Step(nn.Module):
    """One step of training of a model, gradients included, as a call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss after a backward pass."""
        with torch.enable_grad():
            loss = self.model(x).float().square().mean()
            loss.backward()
        self.model.zero_grad()
        return loss.detach()


def train_step(name: str, model: nn.Module, x: torch.Tensor) -> Row:
    """Compare forward and backward together."""
    return fixed(name, Step(model), {"x": x})


def llama(device: torch.device, *, is_tiny: bool) -> list[Row]:
    """Generate with a Llama of about 1B parameters: prompts of 512 with left padding, a growing cache."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - only this benchmark needs it

    sizes = {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    }  # fmt: skip
    if is_tiny:
        sizes |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "vocab_size": 999}
    model = build(lambda: LlamaForCausalLM(LlamaConfig(**sizes)), device)
    N, L, new = (2, 16, 4) if is_tiny else (4, 512, 128)
    rows = []
    for name, hidden in (("llama generate", 0), ("llama generate, left padding", L // 4)):
        mask = torch.ones(N, L, dtype=torch.long, device=device)
        mask[0, :hidden] = 0
        given = {
            "input_ids": torch.randint(3, 999, (N, L), device=device), "attention_mask": mask, "do_sample": False,
            "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0,
        }  # fmt: skip
        row = fixed(name, model, given, repeats=5, warmup=2, method="generate", dynamic=True)
        # Greedy tokens part ways at the first near-tie, so that agreement is judged by logits.
        logits = compare(model, kwargs={"input_ids": given["input_ids"], "attention_mask": mask}, repeats=1, warmup=1)
        seen = {"max_error": logits.max_error, "agrees": logits.agrees, "ms_per_token": row["replaced_ms"] / new}
        rows.append({**row, **seen})
    return rows


class Block(nn.Module):
    """One transformer block of SDXL's U-Net, without its feed-forward: self-attention, then cross-attention to text."""

    def __init__(self, width: int, num_heads: int, text_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.cross = nn.MultiheadAttention(width, num_heads, kdim=text_width, vdim=text_width, batch_first=True)
        self.norm3 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        y = self.norm1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        x = x + self.cross(self.norm2(x), text, text, need_weights=False)[0]
        return x + self.feed_forward(self.norm3(x))


class Blocks(nn.Module):
    """The transformer blocks of SDXL's U-Net at 1024 x 1024 pixels, down, middle and up.

    Source: the published configuration: depths 2 and 10, widths 640 and 1280, heads of 64, text width 2048, 77 tokens.
    """

    def __init__(self, *, is_tiny: bool) -> None:
        super().__init__()
        small, large = (1, 1) if is_tiny else (10, 60)
        self.wide = nn.ModuleList(Block(640, 10, 2048) for _ in range(small))
        self.deep = nn.ModuleList(Block(1280, 20, 2048) for _ in range(large))

    def forward(self, wide: torch.Tensor, deep: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both resolutions' outputs; (N, 4096, 640), (N, 1024, 1280) and text (N, 77, 2048)."""
        for block in self.wide:
            wide = block(wide, text)
        for block in self.deep:
            deep = block(deep, text)
        return wide, deep


def unet(device: torch.device, *, is_tiny: bool) -> list[Row]:
    """SDXL's U-Net, two samples (with and without text), 1024 x 1024 pixels."""
    N, side = (2, 16) if is_tiny else (2, 128)
    if importlib.util.find_spec("diffusers") is None:
        model = build(lambda: Blocks(is_tiny=is_tiny), device)
        options = {"device": device, "dtype": next(model.parameters()).dtype}
        given = {
            "wide": torch.randn(N, (side // 2) ** 2, 640, **options), "deep": torch.randn(N, (side // 4) ** 2, 1280, **options),
            "text": torch.randn(N, 77, 2048, **options),
        }  # fmt: skip
        return [fixed("unet_blocks", model, given)]
    from diffusers import UNet2DConditionModel  # noqa: PLC0415 - optional

    model = build(
        lambda: UNet2DConditionModel(
            sample_size=side, block_out_channels=(320, 640, 1280), layers_per_block=1 if is_tiny else 2,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=1 if is_tiny else (1, 2, 10), attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048, use_linear_projection=True,
        ),
        device,
    )  # fmt: skip
    options = {"device": device, "dtype": next(model.parameters()).dtype}
    given = {
        "sample": torch.randn(N, 4, side, side, **options), "timestep": torch.tensor(500, device=device),
        "encoder_hidden_states": torch.randn(N, 77, 2048, **options),
    }  # fmt: skip
    return [fixed("unet", model, given)]


def mistral(device: torch.device, *, is_tiny: bool) -> list[Row]:
    """Prefill of a long prompt by layers of Mistral 7B's size with a sliding window of 4096."""
    from transformers import MistralConfig, MistralModel  # noqa: PLC0415 - only this benchmark needs it

    sizes = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 4096,
    }  # fmt: skip
    if is_tiny:
        sizes |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16}
    model = build(lambda: MistralModel(MistralConfig(**sizes)), device)
    L = 64 if is_tiny else 16384
    ids = torch.randint(3, 999, (1, L), device=device)
    return [fixed("mistral prefill", model, {"input_ids": ids, "use_cache": False}, repeats=5 if is_tiny else REPEATS)]


MODELS = {"bert": bert, "vit": vit, "llama": llama, "unet": unet, "mistral": mistral}


def main() -> int:
    """Run the chosen models and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows: list[Row] = []
    for name in options.only:
        # A cache of its own for every model: what it needed to learn is part of its total time.
        with tempfile.TemporaryDirectory() as folder:
            smartattn.configure(cache_dir=Path(folder))
            try:
                rows += MODELS[name](device, is_tiny=options.tiny)
            except (ImportError, RuntimeError) as error:
                rows.append({"name": name, "failed": f"{type(error).__name__}: {error}"[:300]})
        print(name, "done", file=sys.stderr, flush=True)
        if options.json:
            data = {
                "torch": torch.__version__,
                "device": describe(device),
                "rows": rows,
                "stats": smartattn.stats().to_dict(),
            }
            options.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    print(format_table(("model", "stock", "replaced", "speed", "error", "places"), [line(row) for row in rows]))
    return int(any("failed" in row for row in rows))


def describe(device: torch.device) -> str:
    """Return the name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def line(row: Row) -> tuple[str, ...]:
    """Return one row of the table."""
    if "failed" in row:
        return row["name"], "-", "-", "-", "-", row["failed"]
    error = "-" if row["max_error"] is None else f"{row['max_error']:.2g}"
    times = (format_us(row["stock_ms"] * 1e3), format_us(row["replaced_ms"] * 1e3), format_ratio(row["ratio"]))
    return (row["name"], *times, error, str(row["num_replaced"]))


if __name__ == "__main__":
    raise SystemExit(main())
