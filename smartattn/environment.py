"""Where a call runs: the facts that make records of one machine valid on another, and those only shown beside them.

``Environment`` is identity: records are kept in a folder named by its digest. ``Provenance`` (driver, threads, host,
date) is stored and shown but is no identity.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import platform
import re
import socket
from dataclasses import dataclass
from typing import Any

import torch

from smartattn import versions
from smartattn.signature import digest_of

SCHEMA = 1
"""Version of everything on disk. History: 1 = first."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Identity of a device with its software.

    Attributes:
        schema: version of the stored form.
        device_type: ``cpu``, ``cuda``, ...
        device_name: model, for example ``NVIDIA H200`` or the processor's name.
        capability: ``sm90`` on CUDA, the instruction set that PyTorch uses on CPU.
        num_multiprocessors: of the GPU (a MIG slice has fewer); 0 elsewhere.
        torch: version of PyTorch.
        git: commit that PyTorch was built from.
        accelerator: CUDA or ROCm version that PyTorch was built for, empty on CPU.
        cudnn: run-time version of cuDNN, 0 without it.
    """

    schema: int
    device_type: str
    device_name: str
    capability: str
    num_multiprocessors: int
    torch: str
    git: str
    accelerator: str
    cudnn: int

    @property
    def digest(self) -> str:
        """Digest over every attribute."""
        return _digest_of(self)

    @property
    def folder(self) -> str:
        """Folder name: readable parts, then the digest that decides."""
        return _folder_of(self)

    @property
    def sm(self) -> int:
        """Compute capability as one number, 90 for sm_90; 0 where there is none."""
        number = self.capability.removeprefix("sm")
        return int(number) if number.isdecimal() else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)


@functools.lru_cache(maxsize=64)
def _digest_of(environment: Environment) -> str:
    return digest_of("\n".join(f"{k}={v}" for k, v in sorted(environment.to_dict().items())))


@functools.lru_cache(maxsize=64)
def _folder_of(environment: Environment) -> str:
    word = re.sub(r"[^a-z0-9]+", "-", environment.device_name.lower().removeprefix("nvidia ")).strip("-")[:24]
    release = environment.torch.partition("+")[0]
    return f"{word or environment.device_type}-{environment.capability.lower()}-t{release}-{environment.digest[:8]}"


def environment_of(device: torch.device) -> Environment:
    """Return the environment of a device; cached per device, reads the driver at the first call."""
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()
    return _environment_of(device.type, index)


@functools.cache
def _environment_of(device_type: str, index: int | None) -> Environment:
    name, capability, num_multiprocessors = platform.processor() or platform.machine(), "generic", 0
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(index)
        name = properties.name
        num_multiprocessors = properties.multi_processor_count
        hip_name = getattr(properties, "gcnArchName", "")
        capability = hip_name.partition(":")[0] if torch.version.hip else f"sm{properties.major}{properties.minor}"
    elif device_type == "cpu":
        name = _processor_name()
        capability = str(torch.backends.cpu.get_cpu_capability())
    return Environment(
        schema=SCHEMA,
        device_type=device_type,
        device_name=name,
        capability=re.sub(r"[^a-z0-9]+", "", capability.lower()),
        num_multiprocessors=num_multiprocessors,
        torch=str(torch.__version__),
        git=str(torch.version.git_version or "unknown"),
        accelerator=str(torch.version.cuda or torch.version.hip or "") if device_type == "cuda" else "",
        cudnn=(torch.backends.cudnn.version() or 0) if device_type == "cuda" else 0,
    )


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.lower().startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the platform's own word serves
    return platform.processor() or platform.machine() or "cpu"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Circumstances of a record that are shown but do not decide where it is valid.

    Attributes:
        date: UTC, ISO 8601.
        driver: of the accelerator, empty on CPU.
        threads: of PyTorch's operators on CPU at the time.
        host: name of the machine.
        smartattn: version of this package.
        noisy: whether the order of routes turned while they were timed; noisy records stay in memory.
    """

    date: str
    driver: str
    threads: int
    host: str
    smartattn: str
    noisy: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)


def provenance_now(device_type: str, *, noisy: bool = False) -> Provenance:
    """Return the circumstances of this moment."""
    return Provenance(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        driver=versions.driver_version() if device_type == "cuda" else "",
        threads=torch.get_num_threads() if device_type == "cpu" else 0,
        host=socket.gethostname(),
        smartattn=versions.SMARTATTN,
        noisy=noisy,
    )
