"""Environments: what makes records of one machine valid on another, and what is only shown."""

from __future__ import annotations

import dataclasses
import datetime as dt
import re

import pytest
import torch

from smartattn import versions
from smartattn.environment import SCHEMA, Environment, Provenance, environment_of, provenance_now
from tests.fakes import make_environment

OTHERS = {
    "schema": SCHEMA + 1,
    "device_type": "cuda",
    "device_name": "Imaginary 9001",
    "capability": "avx512",
    "num_multiprocessors": 132,
    "torch": "2.14.1",
    "git": "1" * 40,
    "accelerator": "13.0",
    "cudnn": 91900,
}


@pytest.mark.parametrize("field", dataclasses.fields(Environment), ids=lambda field: field.name)
def test_every_field_moves_the_folder(field: dataclasses.Field):
    """Environments that differ anywhere keep their records apart."""
    base, moved = make_environment(), make_environment(**{field.name: OTHERS[field.name]})
    assert moved.digest != base.digest
    assert moved.folder != base.folder


def test_this_machine_is_one_environment():
    """The CPU of this machine names itself, its instruction set and this PyTorch, the same each time."""
    found = environment_of(torch.device("cpu"))
    assert found is environment_of(torch.device("cpu"))
    assert (found.schema, found.device_type, found.torch) == (SCHEMA, "cpu", torch.__version__)
    assert found.device_name
    assert found.capability
    assert (found.num_multiprocessors, found.accelerator, found.cudnn, found.sm) == (0, "", 0, 0)


@pytest.mark.parametrize(
    "name", ["NVIDIA H200", "../../etc/passwd", "AMD EPYC\0 9B14", "", "C:\\x", "Ⅻ ünïcode", "x" * 500]
)
def test_folder_name_is_safe_whatever_the_device_is_called(name: str):
    """A folder name is short and made of letters, digits, dots and dashes only."""
    folder = make_environment(device_name=name).folder
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]+", folder)
    assert ".." not in folder
    assert len(folder) < 80


def test_folder_name_is_readable():
    """The folder says device, capability and release before the digest that decides."""
    folder = make_environment(
        device_type="cuda", device_name="NVIDIA H200", capability="sm90", torch="2.11.0+cu130"
    ).folder
    assert re.fullmatch(r"h200-sm90-t2\.11\.0-[0-9a-f]{8}", folder)


@pytest.mark.parametrize(("capability", "sm"), [("sm90", 90), ("sm120", 120), ("avx512", 0), ("gfx942", 0), ("", 0)])
def test_sm_is_the_number_of_a_compute_capability(capability: str, sm: int):
    """Only NVIDIA's capabilities have a number to compare."""
    assert make_environment(capability=capability).sm == sm


def test_provenance_is_now_and_here():
    """Provenance holds the moment in UTC, the threads in use and this package's version."""
    before = dt.datetime.now(dt.timezone.utc).replace(microsecond=0)
    found = provenance_now("cpu", noisy=True)
    assert before <= dt.datetime.fromisoformat(found.date) <= dt.datetime.now(dt.timezone.utc)
    assert (found.threads, found.smartattn, found.driver) == (torch.get_num_threads(), versions.SMARTATTN, "")
    assert found.noisy
    assert found.host


def test_plain_data_gives_the_value_back():
    """Environment and provenance survive a round trip through plain data."""
    environment, provenance = make_environment(), provenance_now("cpu")
    assert Environment(**environment.to_dict()) == environment
    assert Provenance(**provenance.to_dict()) == provenance


@pytest.mark.gpu
def test_gpu_names_itself():
    """A CUDA device gives model, capability, multiprocessors, CUDA and cuDNN; its index does not matter."""
    found = environment_of(torch.device("cuda"))
    assert found == environment_of(torch.device("cuda", torch.cuda.current_device()))
    assert found.device_name == torch.cuda.get_device_name()
    assert found.sm >= 50
    assert found.num_multiprocessors > 0
    assert found.accelerator
