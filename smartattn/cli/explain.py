"""``smartattn explain``: which route a problem runs, and why not the others."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console

from smartattn.cli.command import Command, Data
from smartattn.cli.problem import HOW, add_device_arguments, add_shape_arguments, read_problem
from smartattn.cli.tables import print_table
from smartattn.environment import environment_of
from smartattn.errors import SettingError
from smartattn.explain import explain_signature
from smartattn.formatting import format_bytes, format_ratio, format_us
from smartattn.pending import devices_here, tune_one
from smartattn.signature import Signature


def explain(*, problem: str | None = None, tune: bool = False, backend: str | None = None, **words: Any) -> Data:
    """Explain a problem; the Python twins are ``smartattn.explain`` and ``explain_signature``.

    Args:
        problem: what means a signature; ``None`` for shapes.
        tune: whether to measure it now if nothing is stored.
        backend: as for a call.
        words: ``device``, ``dtype``, ``query``, ``key``, ``value``, ``mask``, ``layout``, ``pass_name``.
    """
    signature = read_problem(problem, **words)
    device = device_for(signature)
    found = explain_signature(signature, device, backend=backend)
    if tune and not found.provenance:
        tune_one(device, signature)
        found = explain_signature(signature, device, backend=backend)
    return {**found.to_dict(), "environment": environment_of(device).folder}


def device_for(signature: Signature) -> torch.device:
    """Return the device of this machine that a signature is for.

    Raises:
        SettingError: when there is none.
    """
    for device in devices_here():
        if device.type == signature.device_type:
            return device
    raise SettingError(
        f"the signature is of device type {signature.device_type!r}, and PyTorch sees none here; smartattn doctor says why."
    )


def show(data: Data, console: Console) -> None:
    """Print the explanation."""
    console.print(data["signature"], style="bold", soft_wrap=True)
    note = f": {data['note']}" if data["note"] else ""
    console.print(f"chosen    {data['route']} ({data['origin']}){note}", soft_wrap=True)
    if data["record_signature"] and data["record_signature"] != data["signature"]:
        console.print(f"measured  {data['record_signature']}", soft_wrap=True)
    if data["faster"]:
        console.print(f"faster    {data['faster']}, once {data['break_even_calls']} calls of a length pay for its plan")
    if data["provenance"]:
        console.print(f"recorded  {data['provenance']['date']} on {data['provenance']['host']}")
    else:
        console.print("nothing was measured; --tune does it now")
    rows = [_cells(name, outcome, data) for name, outcome in data["outcomes"].items()]
    console.print()
    print_table(console, ("", "route", "per call", "plan", "extra", "vs stock", "error", "why"), rows)


def _cells(name: str, outcome: Data, data: Data) -> tuple[str, ...]:
    mark = "->" if name == data["route"] else ""
    if outcome["is"] != "timed":
        why = "; ".join(outcome.get("reasons", [outcome.get("reason", "")]))
        return mark, name, "-", "-", "-", "-", "-", f"{outcome['is']}: {why}"
    cost_us = max(outcome["device_us"], outcome["host_us"])
    stock = data["outcomes"].get("stock", {})
    gain = max(stock["device_us"], stock["host_us"]) / cost_us if stock.get("is") == "timed" else None
    plan = f"{outcome['plan_ms']:.3g} ms" if outcome.get("plan_ms") else "-"
    why = f"runs {outcome['resolved']}" if outcome.get("resolved") else ""
    extra = format_bytes(outcome.get("peak_bytes", 0))
    return mark, name, format_us(cost_us), plan, extra, format_ratio(gain), f"{outcome['error']:.2g}", why


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", nargs="?", metavar="SIGNATURE", help=HOW)
    add_shape_arguments(parser)
    add_device_arguments(parser)
    parser.add_argument("--backend", metavar="NAME", help="a backend or route that must serve")
    parser.add_argument("--tune", action="store_true", help="measure now if nothing is stored")


EXPLAIN = Command(
    name="explain",
    summary="Explain which route a problem runs, and why not the others.",
    example="smartattn explain --query 2x16x2048x64 --mask causal --device cpu",
    add_arguments=_add_arguments,
    run=explain,
    show=show,
)
