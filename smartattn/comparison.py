"""``compare``: milliseconds per call of a whole model with its own attention and with smartattn's, in one run."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from smartattn.formatting import format_ratio, format_table, format_us
from smartattn.integrations.replacing import is_replaced, replace_attention, restore_attention, stock_attention
from smartattn.integrations.report import Report

TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference, over the largest output, that counts as agreement.

Source: about 1e3 times the rounding of float32 and 12 times that of bfloat16 (2^-7): a dozen layers each add about one
rounding of their own, whichever backend runs.
"""
SEED = 0


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found; ``str()`` is a table, ``to_dict()`` plain data.

    Attributes:
        stock_ms: median milliseconds per call with the model's own attention.
        replaced_ms: the same with smartattn's.
        stock_samples_ms, replaced_samples_ms: every call, in order.
        max_error: largest difference between outputs over the largest output; ``None`` where there was nothing to
            compare.
        tolerance: largest ``max_error`` that counts as agreement.
        report: what was replaced.
    """

    stock_ms: float
    replaced_ms: float
    stock_samples_ms: tuple[float, ...]
    replaced_samples_ms: tuple[float, ...]
    max_error: float | None
    tolerance: float
    report: Report

    @property
    def ratio(self) -> float:
        """How many times as fast the replaced model is."""
        return self.stock_ms / self.replaced_ms if self.replaced_ms else math.inf

    @property
    def agrees(self) -> bool:
        """Whether the outputs agree; false where there was nothing to compare."""
        return self.max_error is not None and self.max_error <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the report."""
        data = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "report"}
        return {**data, "ratio": self.ratio, "agrees": self.agrees, "num_replaced": len(self.report.replaced)}

    def __str__(self) -> str:
        rows = [
            ("stock", format_us(self.stock_ms * 1e3), format_ratio(1.0), ""),
            ("replaced", format_us(self.replaced_ms * 1e3), format_ratio(self.ratio), self._agreement()),
        ]
        return format_table(("attention", "per call", "speed", "outputs"), rows)

    def _agreement(self) -> str:
        if self.max_error is None:
            return "nothing to compare"
        return f"{'agree' if self.agrees else 'DIFFER'} (error {self.max_error:.2g}, tolerance {self.tolerance:.2g})"


def compare(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    repeats: int = 10,
    warmup: int = 3,
    method: str = "__call__",
    backend: str | None = None,
    dynamic: bool | None = None,
    mode: str | None = None,
    accuracy: str | None = None,
    now_s: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Run a model with its own attention and with smartattn's, in turns, and compare time and outputs.

    Args:
        model: any module; left as it was found (replaced or not).
        args, kwargs: of the call.
        repeats: timed calls of each.
        warmup: calls of each before, in which smartattn may tune.
        method: of the model to call, ``generate`` for one.
        backend, dynamic, mode, accuracy: as for ``replace_attention``; ignored where the model is replaced already.
        now_s: clock, in seconds.

    Returns:
        Medians, all samples, and how far outputs differ. Without gradients; random numbers start alike in each call.

    Raises:
        ValueError: ``repeats`` below 1 or ``warmup`` below 0.

    Note:
        Waits for the device around each call. Outputs of calls that drop attention probabilities differ by chance.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats is {repeats} and warmup {warmup}; they must be at least 1 and 0")
    was_replaced = is_replaced(model)
    report = Report() if was_replaced else replace_attention(
        model, backend=backend, dynamic=dynamic, mode=mode, accuracy=accuracy
    )  # fmt: skip
    tensors = tensors_in([list(model.parameters()), args, kwargs])
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))

    def once() -> tuple[float, object]:
        torch.manual_seed(SEED)
        _wait(device)
        start_s = now_s()
        output = getattr(model, method)(*args, **(kwargs or {}))
        _wait(device)
        return (now_s() - start_s) * 1e3, output

    stock_ms, replaced_ms = [], []
    devices = [device] if device.type != "cpu" else []
    try:
        with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"), torch.no_grad():
            for i in range(warmup + repeats):
                with stock_attention(model):
                    taken_ms, expected = once()
                if i >= warmup:
                    stock_ms.append(taken_ms)
                taken_ms, found = once()
                if i >= warmup:
                    replaced_ms.append(taken_ms)
            error, tolerance = _difference(expected, found)
    finally:
        if not was_replaced:
            restore_attention(model)
    return Comparison(
        statistics.median(stock_ms), statistics.median(replaced_ms), tuple(stock_ms), tuple(replaced_ms),
        error, tolerance, report,
    )  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def tensors_in(data: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors_in(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for item in dataclasses.fields(data):
            yield from tensors_in(getattr(data, item.name))


def _difference(expected: object, found: object) -> tuple[float | None, float]:
    """Return the largest difference over the largest value, and the tolerance of the least precise dtype."""
    worst: float | None = None
    tolerance = 0.0
    for a, b in zip(tensors_in(expected), tensors_in(found), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf, tolerance
        if a.numel() == 0:
            continue
        tolerance = max(tolerance, TOLERANCES.get(a.dtype, 0.0))
        largest = max(float(a.double().abs().nan_to_num().max()), torch.finfo(torch.float32).tiny)
        if torch.equal(a.isnan(), b.isnan()):
            error = float((a.double() - b.double()).abs().nan_to_num(nan=0.0).max()) / largest
        else:
            error = math.inf
        worst = error if worst is None else max(worst, error)
    return worst, tolerance
