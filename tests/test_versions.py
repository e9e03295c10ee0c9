"""What differs between PyTorch versions, and the switches that are read there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import smartattn
from smartattn import versions

CPU = "cpu"


def test_this_pytorch_is_new_enough():
    """The tests run on a PyTorch that the package says it supports, and packaging says the same."""
    assert versions.TORCH >= versions.OLDEST_TORCH
    packaging = (Path(smartattn.__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    oldest = ".".join(map(str, versions.OLDEST_TORCH[:2]))
    assert f'"torch>={oldest}"' in packaging


def test_version_has_one_source():
    """The package's version is the one in ``versions``, and packaging reads it from there."""
    packaging = (Path(smartattn.__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    pattern = re.search(r"^pattern = '(.*)'$", packaging, re.MULTILINE)
    assert pattern is not None
    found = re.search(pattern[1], Path(versions.__file__).read_text(encoding="utf-8"))
    assert found is not None
    assert found["version"] == versions.SMARTATTN == smartattn.__version__
    assert not re.search(r'^version = "\d', packaging, re.MULTILINE)


def test_sdpa_is_pytorchs_own():
    """What is called stock is the function that PyTorch ships."""
    assert versions.sdpa is torch.nn.functional.scaled_dot_product_attention


def test_operators_answer():
    """The private operators take the arguments that the backends give them."""
    query = key = value = torch.randn(1, 2, 4, 8)
    expected = versions.sdpa(query, key, value)
    flash = versions.flash_for_cpu(query, key, value, 0.0, False, attn_mask=None, scale=None)[0]
    math = versions.math_attention(query, key, value, None, 0.0, False, None, scale=None, enable_gqa=False)[0]
    torch.testing.assert_close(flash, expected)
    torch.testing.assert_close(math, expected)
    assert int(versions.fused_choice(query, key, value)) in {
        backend.value for backend in SDPBackend.__members__.values()
    }


@pytest.mark.parametrize(
    ("allowed", "letters"),
    [
        (SDPBackend.MATH, "fec"),
        (SDPBackend.FLASH_ATTENTION, "ecm"),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], "fm"),
    ],
)
def test_disabled_backends_are_named(allowed: object, letters: str):
    """What ``sdpa_kernel`` leaves out shows by its letters, and only while it lasts."""
    assert versions.disabled_backends() == ""
    with sdpa_kernel(allowed):
        assert versions.disabled_backends() == letters
    assert versions.disabled_backends() == ""


def test_deterministic_mode_has_three_values():
    """Off, warning only, and strict are told apart."""
    found = [versions.deterministic_mode()]
    try:
        for warn_only in (True, False):
            torch.use_deterministic_algorithms(mode=True, warn_only=warn_only)
            found.append(versions.deterministic_mode())
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert found == ["off", "warn", "strict"]


def test_autocast_is_read_per_device_type():
    """Autocast of one device type does not show on another, and a disabled one does not show at all."""
    assert versions.autocast_dtype_name(CPU) == ""
    with torch.autocast(CPU, dtype=torch.bfloat16):
        assert (versions.autocast_dtype_name(CPU), versions.autocast_dtype_name("cuda")) == ("bfloat16", "")
        with torch.autocast(CPU, enabled=False):
            assert versions.autocast_dtype_name(CPU) == ""


def test_full_precision_is_the_empty_word():
    """PyTorch's default float32 precision leaves the key alone; a lower one shows."""
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    assert versions.float32_precision(CPU) == ""
    try:
        backend.fp32_precision = "bf16"
        assert versions.float32_precision(CPU) == "bf16"
    finally:
        backend.fp32_precision = before


def test_nothing_is_captured_on_cpu():
    """Asking about capture is harmless on a build without CUDA."""
    assert not versions.is_capturing(CPU)


def test_backward_has_a_task_id():
    """Inside a backward pass the task id is set, outside it is -1."""
    seen = []
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda grad: seen.append(versions.graph_task_id()))
    tensor.sum().backward()
    assert versions.graph_task_id() == -1
    assert seen[0] != -1
