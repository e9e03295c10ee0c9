"""Doctor: devices, backends, layers and switches as they are, and each problem with its remedy."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import smartattn
from smartattn.doctor import Diagnosis, doctor
from smartattn.environment import environment_of
from smartattn.selector import selector
from tests.test_exchange import HERE, THERE, problem, record


def whats(found: Diagnosis) -> str:
    return "\n".join(f"{each.what}. {each.remedy}" for each in found.problems)


def serious(found: Diagnosis) -> list[str]:
    return [each.what for each in found.problems if each.is_serious]


def test_a_sound_process(cache_dir: Path):
    """Devices, their backends with reasons, the folder, and plain data; nothing serious."""
    found = doctor()
    cpu = found.devices[0]
    assert cpu.environment == environment_of(torch.device("cpu"))
    assert cpu.backends["flash"] == "", "the CPU has a flash of its own beside that of CUDA"
    assert cpu.backends["cudnn"] == "runs on cuda"
    assert set(cpu.versions) == {name for name, why in cpu.backends.items() if not why}
    assert (found.layers[0].path, found.layers[0].status) == (cache_dir, "absent")
    assert found.switches["flash SDPA"] == "on"
    assert serious(found) == []
    json.dumps(found.to_dict())
    assert "backends: stock, flash" in str(found)


def test_records_are_counted_for_this_machine(cache_dir: Path):
    """Each layer tells how many records it has and how many are of this environment."""
    selector.memory.store.publish(HERE, record(8))
    selector.memory.store.publish(THERE, record(8))
    layer = doctor().layers[0]
    assert (layer.num_records, layer.num_records_here, layer.status) == (2, 1, "writable")


def test_records_of_other_machines_alone_are_a_note(cache_dir: Path):
    """After an upgrade all records are another environment's; that is said with what to do."""
    selector.memory.store.publish(THERE, record(8))
    assert "none of the 1 records" in whats(doctor())
    assert "smartattn warm" in whats(doctor())


def test_pending_and_quarantine_are_told(cache_dir: Path):
    """What waits and what is kept away has a remedy."""
    selector.memory.store.note_pending(HERE, problem(20), "why")
    selector.memory.store.note_pending(THERE, problem(20), "why")
    selector.memory.store.put_in_quarantine(HERE, problem(8), "math", "was wrong", "1")
    found = doctor()
    assert (found.num_pending, found.num_quarantined) == (1, 1)
    assert "1 signatures wait to be tuned. Run: smartattn warm --pending" in whats(found)
    assert "1 pending signatures belong to other environments" in whats(found)
    assert "1 routes are in quarantine" in whats(found)
    assert serious(found) == []


def test_an_unusable_folder_is_serious(tmp_path: Path):
    """A cache folder that is a file, and a layer that is missing, are serious problems."""
    (tmp_path / "file").write_text("")
    smartattn.configure(cache_dir=tmp_path / "file", layers=(tmp_path / "absent",))
    found = doctor()
    assert [layer.status for layer in found.layers] == ["is no folder", "missing"]
    assert len(serious(found)) == 2
    assert "SMARTATTN_CACHE_DIR" in whats(found)
    assert "SMARTATTN_CACHE_LAYERS" in whats(found)
    assert found.problems[0].is_serious, "serious ones come first"


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A read-only folder is told; root may write everywhere, so the system's answer is put in its place."""
    smartattn.configure(cache_dir=tmp_path)
    monkeypatch.setattr(os, "access", lambda path, how: False)
    assert any("is not writable" in what for what in serious(doctor()))


@pytest.mark.parametrize(("mode", "what"), [("off", "mode is 'off'"), ("frozen", "no record is of this environment")])
def test_modes_that_choose_nothing(mode: str, what: str):
    """A mode that cannot choose anything is a serious problem."""
    smartattn.configure(mode=mode)
    assert any(what in each for each in serious(doctor()))


def test_switches_of_pytorch_are_told(monkeypatch: pytest.MonkeyPatch):
    """Switched-off backends, deterministic algorithms and a replaced function are named."""
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        found = doctor()
    assert found.switches["flash SDPA"] == "off"
    assert "the process switched off flash, efficient, cudnn" in whats(found)
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic algorithms are on" in whats(doctor())
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args: args)
    assert any("was replaced by another program" in what for what in serious(doctor()))


def test_too_many_threads_are_told(monkeypatch: pytest.MonkeyPatch):
    """More threads than cores spin against each other."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert "10000 threads on" in whats(doctor())
