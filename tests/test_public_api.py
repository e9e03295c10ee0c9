"""What the package exports, that it documents itself, and what importing it does."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import smartattn

ROOT = Path(smartattn.__file__).parent.parent
OWN = [name for name in smartattn.__all__ if name not in ("__version__", "cache")]


def test_all_is_sorted_and_real():
    """Every exported name exists, once, in order."""
    assert smartattn.__all__ == sorted(set(smartattn.__all__))
    for name in smartattn.__all__:
        assert hasattr(smartattn, name), name


@pytest.mark.parametrize("name", OWN)
def test_exports_document_themselves(name: str):
    """Every exported class and function has a docstring and lives in this package."""
    thing = getattr(smartattn, name)
    assert inspect.getdoc(thing)
    assert thing.__module__.startswith("smartattn.")


def test_functions_are_not_hidden_by_modules():
    """``explain`` and ``settings`` stay functions, also after their modules are imported by name."""
    code = (
        "import smartattn.explain, smartattn.settings, smartattn.attention, smartattn\n"
        "assert callable(smartattn.explain) and callable(smartattn.settings)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_signature_is_pytorchs():
    """Function and module take PyTorch's arguments under PyTorch's names, in its order and with its defaults."""
    theirs = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    function = inspect.signature(smartattn.scaled_dot_product_attention).parameters
    module = inspect.signature(smartattn.SmartAttention.forward).parameters
    assert [name for name in function if name != "backend"] == theirs
    assert [name for name in module if name != "self"] == theirs
    for parameters in (function, module):
        defaults = [parameters[name].default for name in theirs[3:]]
        assert defaults == [None, 0.0, False, None, False]


def test_import_reads_no_disk_starts_no_gpu_and_changes_no_state(tmp_path: Path):
    """Importing makes no cache folder, leaves generators and default settings alone, and imports no CLI."""
    code = (
        "import json, sys, torch\n"
        "before = torch.get_rng_state().tolist()\n"
        "import smartattn\n"
        "print(json.dumps([before == torch.get_rng_state().tolist(), torch.cuda.is_initialized(),\n"
        "    sorted(set(sys.modules) & {'rich', 'transformers', 'torch._dynamo', 'smartattn.cli', 'triton'})]))\n"
    )
    environ = {"SMARTATTN_CACHE_DIR": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, False, []]
    assert not (tmp_path / "cache").exists()
    assert done.stderr == ""


def test_a_wrong_variable_does_not_break_the_import():
    """A wrong environment variable is told at the first use, not by an import that fails."""
    code = (
        "import smartattn, torch\n"
        "try:\n    smartattn.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3)\n"
        "except smartattn.UnknownNameError as error:\n    print(error)\n"
    )
    environ = {"SMARTATTN_MODE": "tuen", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "environment variable SMARTATTN_MODE is 'tuen'" in done.stdout


def test_module_is_without_state():
    """The module has no parameters, buffers or state, and prints the arguments that differ from their default."""
    module = smartattn.SmartAttention(backend="math", dynamic=True)
    assert list(module.parameters()) == list(module.buffers()) == []
    assert module.state_dict() == {}
    assert repr(module) == "SmartAttention(backend='math', dynamic=True)"
    assert repr(smartattn.SmartAttention()) == "SmartAttention()"


def test_main_job(quiet_machine: None):
    """Module and function give SDPA's result, measured once and then remembered."""
    query, key, value = torch.randn(3, 2, 4, 48, 32).unbind()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    module = smartattn.SmartAttention()
    for _ in range(3):
        torch.testing.assert_close(module(query, key, value, is_causal=True), expected)
        found = smartattn.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.testing.assert_close(found, expected)
    assert smartattn.stats().tunings == 1
    assert len(smartattn.cache.records()) == 1


def test_mixed_ranks_raise_what_pytorch_raises():
    """What is added to PyTorch's error asks nothing of tensors that they lack."""
    with pytest.raises(RuntimeError, match="dtype"):
        smartattn.scaled_dot_product_attention(torch.randn(1, 5, 3), torch.randn(4, 3).double(), torch.randn(4, 2))


def test_one_key_head_without_enable_gqa_has_pytorchs_strides():
    """PyTorch runs Math there, whose output is contiguous, whatever answers here."""
    query = torch.randn(2, 33, 2, 17).transpose(1, 2)
    key = torch.randn(2, 1, 33, 17)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key)
    assert smartattn.scaled_dot_product_attention(query, key, key).stride() == expected.stride()
