"""Tuning later what a program could not tune when it met it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from smartattn import events
from smartattn.environment import environment_of
from smartattn.inputs import synthesize
from smartattn.record import Record
from smartattn.selector import selector
from smartattn.signature import Call, Signature
from smartattn.wishes import unbind_all, wish_of


def tune_pending() -> tuple[Record, ...]:
    """Tune every signature that was noted as pending, in this process or on disk for this environment.

    Returns:
        The new records.

    Note:
        Call it between steps: it synchronises the device, allocates inputs of each signature, and lets every call
        take its choice anew, training included. Signatures of devices that this machine lacks stay pending.
    """
    records = tune_signatures(pending_signatures())
    unbind_all()
    return records


def pending_signatures() -> tuple[tuple[torch.device, Signature], ...]:
    """Return what is pending for the devices of this process, each once."""
    found: dict[str, tuple[torch.device, Signature]] = {}
    devices = {device.type: device for device in devices_here()}
    for environment, signature in selector.notes.pending():
        device = devices.get(signature.device_type)
        if device is not None and environment == environment_of(device):
            found[str(signature)] = device, signature
    for device in devices.values():
        for signature in selector.memory.store.pending(environment_of(device)):
            if signature.device_type == device.type:
                found.setdefault(str(signature), (device, signature))
    return tuple(found.values())


def devices_here() -> tuple[torch.device, ...]:
    """Return the CPU and the current GPU, if there is one."""
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        found.append(torch.device("cuda", torch.cuda.current_device()))
    return tuple(found)


def tune_signatures(signatures: Iterable[tuple[torch.device, Signature]]) -> tuple[Record, ...]:
    """Tune signatures on synthesised inputs; one that cannot be tuned is logged and left out."""
    records = []
    for device, signature in signatures:
        record = tune_one(device, signature)
        if record is not None:
            records.append(record)
    return tuple(records)


def tune_one(device: torch.device, signature: Signature, *, call: Call | None = None) -> Record | None:
    """Tune one signature now, whatever the mode says about misses; ``None`` when no memory is left for its inputs."""
    try:
        if call is None:
            call = synthesize(signature, device)
    except (RuntimeError, MemoryError) as error:
        events.logger.warning("smartattn cannot make inputs for %s: %s", signature, error)
        return None
    record = selector.tune_now(call, signature, wish_of())
    if record is not None:
        selector.memory.store.drop_pending(environment_of(device), signature)
    return record
