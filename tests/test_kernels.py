"""Kernels and operators from traces: kinds by launching operator, own times, counts per call, resources."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from smartattn.backends.math import run_math
from smartattn.kernels import Kernel, kernels_of, labelled, read_events, trace

CPU = torch.device("cpu")


def operator(name: str, ts: float, dur: float, identity: int, types: list[str] | None = None, tid: int = 1):
    return {
        "ph": "X", "cat": "cpu_op", "name": f"aten::{name}", "ts": ts, "dur": dur, "tid": tid,
        "args": {"External id": identity, "Input type": types or []},
    }  # fmt: skip


def kernel(name: str, dur: float, identity: int, **more: object):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": 0, "dur": dur, "args": {"External id": identity, **more}}


def test_kernels_take_their_kind_from_the_operator():
    """Copies between dtypes are conversions, what tril launches builds a mask, a fused name is attention."""
    events = [
        operator("copy_", 0, 1, 1, ["float", "c10::BFloat16", "Scalar"]),
        operator("copy_", 2, 1, 2, ["float", "float", "Scalar"]),
        operator("tril", 4, 1, 3),
        operator("bmm", 6, 1, 4),
        operator("_flash_attention_forward", 8, 1, 5),
        kernel("elementwise_kernel<direct_copy>", 10, 1),
        kernel("elementwise_kernel<direct_copy>", 9, 2),
        kernel("triu_tril_kernel", 8, 3),
        kernel("nvjet_tst", 7, 4),
        kernel("flash_fwd_kernel", 6, 5),
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 5, "args": {"External id": 2}},
        {"ph": "M", "name": "process_name"},
    ]
    found = read_events(events, 1)
    assert [(k.kind, k.operator, k.dtypes) for k in found] == [
        ("cast", "copy_", "bfloat16->float32"), ("copy", "copy_", ""), ("mask", "tril", ""), ("matmul", "bmm", ""),
        ("attention", "_flash_attention_forward", ""), ("copy", "copy_", ""),
    ]  # fmt: skip


def test_resources_are_read_and_equal_kernels_added_up():
    """Counts and times are per call; registers, shared memory, block and occupancy are those of the trace."""
    more = {
        "registers per thread": 255, "shared memory": 81920, "block": [128, 1, 1], "grid": [4, 2, 1],
        "est. achieved occupancy %": 12,
    }  # fmt: skip
    found = read_events([kernel("fmha", 4.0, 1, **more), kernel("fmha", 6.0, 1, **more)], 2)
    assert found == (
        Kernel("fmha", "attention", "", 1.0, 5.0, "", 255, 81920, (128, 1, 1), (4, 2, 1), 0.12),
    )  # fmt: skip
    assert found[0].num_threads == 128


def test_missing_and_odd_facts_do_not_break():
    """A trace without resources, or with other types, gives what it has."""
    (found,) = read_events([kernel("k", 1.0, 9, **{"registers per thread": "many", "block": None})], 1)
    assert (found.registers, found.block, found.reported_occupancy, found.num_threads) == (None, (), None, 0)


def test_numbers_that_change_their_dtype_are_no_conversions():
    """A scale that becomes a tensor of one number is not told as a conversion of data."""
    event = operator("copy_", 0, 1, 1, ["float", "double", "Scalar"])
    event["args"]["Input Dims"] = [[], [], []]
    (found,) = read_events([event], 1)
    assert (found.kind, found.dtypes) == ("other", "")


def test_operators_count_their_own_time_on_cpu():
    """An operator's time is without that of those inside; those that only call others, and views, are left out."""
    events = [
        operator("_safe_softmax", 0, 100, 1),
        operator("_softmax", 10, 60, 2),
        operator("view", 71, 1, 3),
        operator("isneginf", 75, 20, 4),
        operator("bmm", 0, 30, 5, tid=2),
    ]
    found = read_events(events, 1)
    assert {(k.name, k.kind, k.us) for k in found} == {
        ("_softmax", "softmax", 60.0), ("isneginf", "mask", 20.0), ("bmm", "matmul", 30.0),
    }  # fmt: skip


def test_math_shows_its_upcast_and_its_mask():
    """Math on half precision raises its inputs to float32 and builds the causal mask anew: seen for real."""
    query = torch.randn(1, 2, 32, 16, dtype=torch.bfloat16)
    found = kernels_of(lambda: run_math(query, query, query, None, 0.0, True, None, False), CPU)
    casts = {k.dtypes: k.count for k in found if k.kind == "cast"}
    assert casts["bfloat16->float32"] >= 2
    assert casts["float32->bfloat16"] >= 1
    assert "tril" in {k.operator for k in found if k.kind == "mask"}
    assert sum(k.count for k in found if k.kind == "matmul") == 2


def test_a_trace_file_names_its_parts(tmp_path: Path):
    """The file for Perfetto holds the labels under which calls ran."""
    path = tmp_path / "trace.json"
    trace(lambda: labelled("smartattn math", lambda: torch.ones(2) + 1, 2), CPU, path)
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event.get("name") == "smartattn math" for event in events)


@pytest.mark.gpu
def test_kernels_of_a_gpu_have_resources():
    """On a GPU, Flash's kernel comes with registers and block size."""
    query = torch.randn(1, 2, 256, 64, dtype=torch.bfloat16, device="cuda")
    found = kernels_of(lambda: torch.ops.aten._scaled_dot_product_flash_attention(query, query, query), query.device)
    longest = found[0]
    assert longest.kind == "attention"
    assert longest.registers
    assert longest.num_threads >= 128
