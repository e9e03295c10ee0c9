"""``smartattn doctor``: what of this machine matters, and what is wrong with it."""

from __future__ import annotations

import argparse

from rich.console import Console

from smartattn.cli.command import Command, Data
from smartattn.cli.tables import print_table
from smartattn.doctor import doctor as diagnose
from smartattn.formatting import format_bytes


def doctor() -> Data:
    """Return the diagnosis as plain data; the Python twin is ``smartattn.doctor``."""
    return diagnose().to_dict()


def is_good(data: Data) -> bool:
    """Return whether nothing serious is wrong."""
    return not any(problem["is_serious"] for problem in data["problems"])


def show(data: Data, console: Console) -> None:
    """Print the diagnosis."""
    console.print(f"smartattn {data['smartattn']}, torch {data['torch']}\n")
    for device in data["devices"]:
        environment = device["environment"]
        parts = [device["name"], environment["device_name"], environment["capability"]]
        if environment["cudnn"]:
            parts.append(f"CUDA {environment['accelerator']}, cuDNN {environment['cudnn']}")
        console.print(", ".join(parts), style="bold", soft_wrap=True)
        console.print(f"  environment  {device['folder']}", soft_wrap=True)
        console.print(f"  free memory  {format_bytes(device['free_bytes'])}")
        rows = [
            (f"  {name}", "no" if why else "yes", why or f"version {device['versions'][name]}")
            for name, why in device["backends"].items()
        ]
        print_table(console, ("  backend", "available", "why not"), rows)
        console.print()
    for layer in data["layers"]:
        here = f"{layer['num_records']} records, {layer['num_records_here']} of this machine"
        console.print(f"{layer['origin']}  {layer['path']}: {layer['status']}, {here}", soft_wrap=True)
    if not data["layers"]:
        console.print("no cache folder: everything stays in memory")
    console.print(f"pending {data['num_pending']}, in quarantine {data['num_quarantined']}\n")
    print_table(console, ("switch", "state"), list(data["switches"].items()))
    changed = {k: v for k, v in data["settings"].items() if k in ("mode", "accuracy", "effort", "dynamic", "agreement")}
    console.print("\nsettings  " + ", ".join(f"{name} {value}" for name, value in changed.items()), soft_wrap=True)
    if not data["problems"]:
        console.print("\nNothing is wrong.")
    for problem in data["problems"]:
        console.print()
        console.print(("PROBLEM  " if problem["is_serious"] else "note  ") + problem["what"], soft_wrap=True)
        console.print(f"  {problem['remedy']}", soft_wrap=True)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


DOCTOR = Command(
    name="doctor",
    summary="Show devices, backends, cache folders and switches, and what is wrong with them.",
    example="smartattn doctor",
    add_arguments=_add_arguments,
    run=doctor,
    show=show,
    is_good=is_good,
)
