"""What of this machine and process matters to attention, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smartattn import versions
from smartattn.backends.registry import all_backends
from smartattn.environment import Environment, environment_of
from smartattn.files import private_folder
from smartattn.pending import devices_here
from smartattn.plain import is_foreign
from smartattn.selector import selector
from smartattn.settings import Settings, settings, variable_of
from smartattn.stored import PENDING, QUARANTINE

SWITCH_NAMES = {"f": "flash", "e": "efficient", "c": "cudnn", "m": "math"}


@dataclass(frozen=True)
class Problem:
    """Something that costs speed or keeps results from being stored.

    Attributes:
        what: it is.
        remedy: what to do.
        is_serious: whether the product does not work as meant until it is solved.
    """

    what: str
    remedy: str
    is_serious: bool = False


@dataclass(frozen=True)
class Device:
    """One device of this process.

    Attributes:
        name: as PyTorch names it, such as ``cuda:0``.
        environment: its identity.
        folder: of its records.
        free_bytes: memory that a new allocation may take.
        backends: backend to why it cannot run, empty when it can.
        versions: backend to version, of those that can run.
    """

    name: str
    environment: Environment
    folder: str
    free_bytes: int
    backends: dict[str, str]
    versions: dict[str, str]


@dataclass(frozen=True)
class Layer:
    """One place of records.

    Attributes:
        path: folder.
        origin: ``disk`` for the writable one, else ``layer``.
        status: ``writable``, ``absent`` (made at first need), ``readable`` or what is wrong.
        num_records: of all environments.
        num_records_here: of this machine's.
    """

    path: Path
    origin: str
    status: str
    num_records: int
    num_records_here: int


@dataclass(frozen=True)
class Diagnosis:
    """All of it; ``to_dict()`` is plain data.

    Attributes:
        smartattn, torch: versions.
        devices: the CPU, and the current GPU if there is one.
        layers: the writable layer first.
        switches: state of PyTorch that decides what it runs.
        settings: in force.
        num_pending: notes for this machine.
        num_quarantined: routes in quarantine, everywhere.
        problems: serious ones first.
    """

    smartattn: str
    torch: str
    devices: tuple[Device, ...]
    layers: tuple[Layer, ...]
    switches: dict[str, str]
    settings: Settings
    num_pending: int
    num_quarantined: int
    problems: tuple[Problem, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        data = dataclasses.asdict(self)
        for layer in data["layers"]:
            layer["path"] = str(layer["path"])
        for name in ("cache_dir", "layers"):
            found = data["settings"][name]
            data["settings"][name] = list(map(str, found)) if isinstance(found, tuple) else found and str(found)
        return data

    def __str__(self) -> str:
        lines = [f"smartattn {self.smartattn}, torch {self.torch}"]
        for device in self.devices:
            can = ", ".join(name for name, why in device.backends.items() if not why)
            lines.append(f"{device.name}: {device.environment.device_name}; backends: {can}")
        lines += [f"{layer.origin} {layer.path}: {layer.status}, {layer.num_records} records" for layer in self.layers]
        lines += [f"problem: {problem.what}. {problem.remedy}" for problem in self.problems]
        return "\n".join(lines)


def doctor() -> Diagnosis:
    """Look at this machine and process, and say what is wrong.

    Note:
        Lists every record's name; starts the GPU's driver if PyTorch sees a GPU; measures nothing.
    """
    devices = tuple(map(_device, devices_here()))
    folders = {device.folder for device in devices}
    now = settings()
    layers = tuple(_layers(now, folders))
    store = selector.memory.store
    pending = sum(len(store.pending(device.environment)) for device in devices)
    quarantined = sum(1 for _ in store.notes(QUARANTINE))
    elsewhere = sum(1 for environment, _ in store.notes(PENDING) if environment.folder not in folders)
    switches = _switches()
    problems = [*_problems_of_layers(layers), *_problems_of_process(now, switches, layers)]
    if pending:
        problems.append(Problem(f"{pending} signatures wait to be tuned", "Run: smartattn warm --pending"))
    if elsewhere:
        remedy = "Tune them there, or merge an export of that machine's records."
        problems.append(Problem(f"{elsewhere} pending signatures belong to other environments", remedy))
    if quarantined:
        remedy = "See them: smartattn cache list --quarantine. Lift one: smartattn cache forget SIGNATURE"
        problems.append(Problem(f"{quarantined} routes are in quarantine because they failed or were wrong", remedy))
    problems.sort(key=lambda problem: not problem.is_serious)
    return Diagnosis(
        smartattn=versions.SMARTATTN,
        torch=str(torch.__version__),
        devices=devices,
        layers=layers,
        switches=switches,
        settings=now,
        num_pending=pending,
        num_quarantined=quarantined,
        problems=tuple(problems),
    )


def _device(device: torch.device) -> Device:
    environment = environment_of(device)
    backends: dict[str, str] = {}
    known: dict[str, str] = {}
    for backend in all_backends():
        types = backend.capabilities.device_types
        is_elsewhere = bool(types) and device.type not in types
        if backend.name in backends and (is_elsewhere or not backends[backend.name]):
            continue  # a backend of that name for this device was seen
        backends[backend.name] = f"runs on {', '.join(types)}" if is_elsewhere else backend.unavailable()
        if not backends[backend.name]:
            known[backend.name] = backend.version()
    free = versions.free_memory_bytes(device)
    return Device(str(device), environment, environment.folder, free, backends, known)


def _layers(now: Settings, folders: set[str]) -> Iterator[Layer]:
    counts: dict[str, list[int]] = {}
    for place, name, number in selector.memory.store.count():
        count = counts.setdefault(str(place), [0, 0])
        count[0] += number
        count[1] += number if name in folders else 0
    root = selector.memory.store.path()
    if root is not None:
        yield Layer(root, "disk", _writable_status(root), *counts.get(str(root), [0, 0]))
    for layer in now.layers:
        is_readable = layer.is_dir() and os.access(layer, os.R_OK | os.X_OK)
        status = "readable" if is_readable else "unreadable" if layer.exists() else "missing"
        yield Layer(layer, "layer", status, *counts.get(str(layer), [0, 0]))


def _writable_status(root: Path) -> str:
    if not root.exists():
        parent = next((each for each in root.parents if each.exists()), None)
        return "absent" if parent is not None and os.access(parent, os.W_OK | os.X_OK) else "cannot be made"
    if not root.is_dir():
        return "is no folder"
    return "writable" if os.access(root, os.R_OK | os.W_OK | os.X_OK) else "not writable"


def _switches() -> dict[str, str]:
    disabled = versions.disabled_backends()
    found = {f"{name} SDPA": "off" if letter in disabled else "on" for letter, name in SWITCH_NAMES.items()}
    found["cuDNN last (TORCH_CUDNN_SDPA_DEPRIORITIZED)"] = "yes" if versions.CUDNN_IS_LAST else "no"
    found["deterministic algorithms"] = versions.deterministic_mode()
    found["float32 matmul precision"] = (
        versions.float32_precision("cuda" if torch.cuda.is_available() else "cpu") or "full"
    )
    found["reduced precision in Math"] = "on" if versions.reduced_math_enabled() else "off"
    found["flash implementation"] = versions.active_flash_implementation()
    found["CPU threads"] = str(torch.get_num_threads())
    found["F.scaled_dot_product_attention"] = "replaced by another program" if is_foreign() else "PyTorch's or ours"
    return found


def _problems_of_layers(layers: tuple[Layer, ...]) -> Iterator[Problem]:
    variable = variable_of("cache_dir")
    if not any(layer.origin == "disk" for layer in layers):
        yield Problem(
            "this user has no cache folder, so every process tunes anew",
            f"Set {variable} to a folder.",
            is_serious=True,
        )
    for layer in layers:
        if layer.origin == "disk" and layer.status not in ("writable", "absent"):
            remedy = f"Make it writable, set {variable}, or list it in {variable_of('layers')} and use another."
            yield Problem(f"the cache folder {layer.path} {_is(layer.status)}", remedy, is_serious=True)
        if layer.origin == "layer" and layer.status != "readable":
            remedy = f"Correct {variable_of('layers')}, or mount the folder."
            yield Problem(f"the layer {layer.path} is {layer.status}", remedy, is_serious=True)
        if layer.num_records and not layer.num_records_here:
            remedy = "After an upgrade or on another machine, pre-warm again: smartattn warm"
            yield Problem(f"none of the {layer.num_records} records in {layer.path} is of this environment", remedy)


def _is(status: str) -> str:
    return status if status.startswith(("is ", "cannot ")) else f"is {status}"


def _problems_of_process(now: Settings, switches: dict[str, str], layers: tuple[Layer, ...]) -> Iterator[Problem]:
    if versions.TORCH < versions.OLDEST_TORCH:
        oldest = ".".join(map(str, versions.OLDEST_TORCH))
        yield Problem(f"torch {torch.__version__} is older than {oldest}", "Upgrade torch.", is_serious=True)
    if torch.version.cuda and not torch.cuda.is_available():
        remedy = "Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES."
        yield Problem("this PyTorch is built for CUDA, but sees no GPU", remedy)
    off = [name for letter, name in SWITCH_NAMES.items() if letter in versions.disabled_backends()]
    if off:
        remedy = "If that is not wanted, remove the torch.backends.cuda.enable_*_sdp(False) call."
        yield Problem(f"the process switched off {', '.join(off)}", remedy)
    if versions.CUDNN_IS_LAST:
        remedy = "Unset it: records say where cuDNN is faster and when its plans pay."
        yield Problem("TORCH_CUDNN_SDPA_DEPRIORITIZED=1 changes what stock runs", remedy)
    if is_foreign():
        remedy = "smartattn hands its calls over untouched; undo that replacement to have it choose."
        yield Problem("F.scaled_dot_product_attention was replaced by another program", remedy, is_serious=True)
    if switches["deterministic algorithms"] != "off":
        yield Problem("deterministic algorithms are on", "Only deterministic backends serve; switch off what you can.")
    if now.mode == "off":
        yield Problem("mode is 'off': every call is PyTorch's", f"Unset {variable_of('mode')}.", is_serious=True)
    if now.mode in ("frozen", "error") and not any(layer.num_records_here for layer in layers):
        remedy = "Pre-warm in mode 'tune' first: smartattn warm"
        yield Problem(f"mode is {now.mode!r} and no record is of this environment", remedy, is_serious=True)
    if private_folder("smartattn-locks") is None:
        remedy = "Set TMPDIR to a folder of this user."
        yield Problem("no folder for locks: processes that tune at once disturb each other's times", remedy)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if torch.get_num_threads() > usable:
        remedy = f"Call torch.set_num_threads({usable}) or set OMP_NUM_THREADS={usable}."
        yield Problem(f"PyTorch uses {torch.get_num_threads()} threads on {usable} usable cores", remedy)
