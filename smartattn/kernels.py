"""What runs during a call, as PyTorch's profiler sees it: kernels on a GPU, operators on CPU.

Kernels are told apart by the operator that launched them, since kernel names say how and not what for: a kernel behind
``copy_`` with two dtypes is a conversion, one behind ``tril`` builds a mask. Reads the profiler's own trace file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

NUM_CALLS = 3
"""Calls that are traced; kernel counts are the same in each."""
_OPERATORS = {
    "mask": ("tril", "triu", "masked_fill", "where", "logical_not", "bitwise_not", "ones", "ones_like", "fill_", "zero_",
             "scalar_tensor", "isneginf", "all", "any", "eq", "lt", "le", "gt", "ge", "arange"),
    "copy": ("copy_", "clone", "contiguous", "cat", "constant_pad_nd", "_to_copy"),
    "matmul": ("bmm", "mm", "addmm", "baddbmm", "matmul", "linear", "einsum"),
    "softmax": ("_softmax", "softmax", "_safe_softmax", "_softmax_backward_data"),
    "scale": ("mul", "mul_", "div", "div_"),
}  # fmt: skip
_KIND_OF = {name: kind for kind, names in _OPERATORS.items() for name in names}
_ATTENTION = ("attention", "fmha", "flash", "sdpa", "cudnn_generated")
_VIEWS = frozenset((
    "as_strided", "view", "transpose", "expand", "reshape", "_reshape_alias", "_unsafe_view", "permute",
    "slice", "select", "narrow", "unsqueeze", "squeeze", "t", "empty", "empty_like", "empty_strided", "detach",
    "alias", "resolve_conj", "resolve_neg", "to", "matmul", "contiguous", "result_type", "item",
    "_local_scalar_dense", "split", "chunk", "unbind", "resize_", "set_", "new_empty", "new_empty_strided",
    "expand_as", "lift_fresh", "flatten", "unflatten", "is_nonzero", "numpy_T", "mT", "mH",
))  # fmt: skip
"""Operators that compute nothing themselves."""
SHORT_NAME_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel or operator of a call; times and counts are per call.

    Attributes:
        name: of the kernel, or of the operator on CPU.
        kind: ``attention``, ``matmul``, ``softmax``, ``scale``, ``copy``, ``cast`` (copy between dtypes), ``mask`` or
            ``other``.
        operator: that launched it.
        count: how often it runs.
        us: time of all of them.
        dtypes: of a conversion, such as ``bfloat16->float32``.
        registers: per thread; ``None`` on CPU, as all that follows.
        shared_bytes: of a block.
        block: threads of a block by dimension.
        grid: blocks by dimension.
        reported_occupancy: as the profiler estimates it, 0 to 1.
    """

    name: str
    kind: str
    operator: str
    count: float
    us: float
    dtypes: str = ""
    registers: int | None = None
    shared_bytes: int | None = None
    block: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    reported_occupancy: float | None = None

    @property
    def num_threads(self) -> int:
        """Threads of a block; 0 on CPU."""
        found = 1 if self.block else 0
        for size in self.block:
            found *= size
        return found


def kernels_of(run: Callable[[], object], device: torch.device, num_calls: int = NUM_CALLS) -> tuple[Kernel, ...]:
    """Trace calls of ``run`` and return what runs in one, the longest first.

    Note:
        Starts PyTorch's profiler, of which a process can have one; synchronises the device.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace(lambda: [run() for _ in range(num_calls)], device, path)
        events = json.loads(path.read_text(encoding="utf-8", errors="replace")).get("traceEvents", [])
    return read_events(events, num_calls)


def trace(work: Callable[[], object], device: torch.device, path: Path) -> None:
    """Run ``work`` under the profiler and write its trace to ``path``, as Perfetto and Chrome read it."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities, record_shapes=True) as profiler:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(path))


def labelled(name: str, run: Callable[[], object], num_calls: int) -> None:
    """Run calls under a label that shows in a trace."""
    with record_function(name):
        for _ in range(num_calls):
            run()


def read_events(events: Iterable[Mapping[str, Any]], num_calls: int) -> tuple[Kernel, ...]:
    """Return what a trace of ``num_calls`` calls says of one call: its kernels if it has any, else its operators."""
    events = [event for event in events if event.get("ph") == "X"]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not on_device:
        return _merged([_operator(event, us) for event, us in _own_times(operators)], num_calls)
    by_id = {_argument(event, "External id"): event for event in operators}
    return _merged([_kernel(event, by_id.get(_argument(event, "External id"))) for event in on_device], num_calls)


def _argument(event: Mapping[str, Any], name: str) -> Any:
    return event.get("args", {}).get(name)


def _own_times(operators: list[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float]]:
    """Return each operator that computes with its time less that of the operators inside it."""
    own: dict[int, float] = {}
    stacks: dict[Any, list[tuple[int, float]]] = {}
    ordered = sorted(operators, key=lambda e: (float(e["ts"]), -float(e["dur"])))
    for index, event in enumerate(ordered):
        start, us = float(event["ts"]), float(event["dur"])
        stack = stacks.setdefault(event.get("tid"), [])
        while stack and stack[-1][1] <= start:
            stack.pop()
        own[index] = us
        if stack:
            own[stack[-1][0]] -= us
        stack.append((index, start + us))
    parents = _parents(ordered)
    return [
        (event, max(0.0, own[index]))
        for index, event in enumerate(ordered)
        if _short(event["name"]) not in _VIEWS and (index not in parents or _is_own_work(event))
    ]


def _parents(ordered: list[Mapping[str, Any]]) -> set[int]:
    """Return the operators that call others which compute; those are told instead of them."""
    found: set[int] = set()
    stacks: dict[Any, list[tuple[int, float]]] = {}
    for index, event in enumerate(ordered):
        start = float(event["ts"])
        stack = stacks.setdefault(event.get("tid"), [])
        while stack and stack[-1][1] <= start:
            stack.pop()
        if _short(event["name"]) not in _VIEWS:
            found.update(outer for outer, _ in stack)
        stack.append((index, start + float(event["dur"])))
    return found


def _is_own_work(event: Mapping[str, Any]) -> bool:
    # Fused operators compute themselves and call small ones for their workspace.
    name = _short(event["name"])
    return name.startswith(("_scaled_dot_product_flash", "_flash_attention", "_scaled_dot_product_efficient"))


def _short(name: str) -> str:
    return name.removeprefix("aten::")


def _dtypes(operator: Mapping[str, Any] | None) -> list[str]:
    found = [] if operator is None else _argument(operator, "Input type") or []
    names = {"c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32", "double": "float64"}
    return [names.get(each, str(each)) for each in found]


def _is_number(operator: Mapping[str, Any] | None) -> bool:
    dims = [] if operator is None else _argument(operator, "Input Dims") or []
    return len(dims) > 1 and dims[1] == []


def _operator(event: Mapping[str, Any], us: float) -> Kernel:
    name = _short(event["name"])
    kind, dtypes = _kind(name, "", _dtypes(event), is_number=_is_number(event))
    return Kernel(name, kind, name, 1, us, dtypes)


def _kind(operator: str, name: str, dtypes: list[str], *, is_number: bool) -> tuple[str, str]:
    """Return the kind of a kernel, and the dtypes of a conversion; one of a single number is none worth telling."""
    text = (name or operator).lower()
    if any(word in text for word in _ATTENTION) and operator not in _KIND_OF:
        return "attention", ""
    kind = _KIND_OF.get(operator.removesuffix("_") if operator not in _KIND_OF else operator, "other")
    if operator == "copy_" and len(dtypes) > 1 and dtypes[0] and dtypes[1] and dtypes[0] != dtypes[1]:
        return ("other", "") if is_number else ("cast", f"{dtypes[1]}->{dtypes[0]}")
    return kind, ""


def _kernel(event: Mapping[str, Any], operator: Mapping[str, Any] | None) -> Kernel:
    name = str(event["name"])
    source = "" if operator is None else _short(str(operator["name"]))
    kind, dtypes = _kind(source, name, _dtypes(operator), is_number=_is_number(operator))
    if event.get("cat") != "kernel":
        kind = "copy" if event.get("cat") == "gpu_memcpy" else "other"
    occupancy = _number(_argument(event, "est. achieved occupancy %"))
    return Kernel(
        name=name,
        kind=kind,
        operator=source,
        count=1,
        us=float(event.get("dur", 0.0)),
        dtypes=dtypes,
        registers=_whole(_argument(event, "registers per thread")),
        shared_bytes=_whole(_argument(event, "shared memory")),
        block=_sizes(_argument(event, "block")),
        grid=_sizes(_argument(event, "grid")),
        reported_occupancy=None if occupancy is None else occupancy / 100,
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _sizes(value: object) -> tuple[int, ...]:
    return tuple(int(size) for size in value) if isinstance(value, list | tuple) else ()


def _merged(found: list[Kernel], num_calls: int) -> tuple[Kernel, ...]:
    """Add up equal kernels, per call."""
    groups: dict[tuple[Any, ...], list[Kernel]] = {}
    for each in found:
        key = (each.name, each.operator, each.kind, each.dtypes, each.registers, each.shared_bytes, each.block)
        groups.setdefault(key, []).append(each)
    merged = []
    for group in groups.values():
        first = group[0]
        merged.append(
            Kernel(
                first.name, first.kind, first.operator, len(group) / num_calls, sum(k.us for k in group) / num_calls,
                first.dtypes, first.registers, first.shared_bytes, first.block, first.grid, first.reported_occupancy,
            )
        )  # fmt: skip
    return tuple(sorted(merged, key=lambda kernel: -kernel.us))
