"""The floors of the code: every import goes down, and every module stands in the table."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import smartattn

ROOT = Path(smartattn.__file__).parent

FLOORS = {
    "errors": 0,
    "events": 0,
    "formatting": 0,
    "settings": 0,
    "buckets": 1,
    "clocks": 1,
    "environment": 1,
    "files": 1,
    "kernels": 1,
    "layout": 1,
    "mask_facts": 1,
    "measurement": 1,
    "occupancy": 1,
    "progress": 1,
    "signature": 1,
    "signature_text": 1,
    "torch_rules": 1,
    "versions": 1,
    "backends": 2,
    "denylist": 2,
    "dropout_check": 2,
    "guards": 2,
    "inputs": 2,
    "mask_classes": 2,
    "mask_recognition": 2,
    "mask_runs": 2,
    "masks": 2,
    "parts": 2,
    "plain": 2,
    "probes": 2,
    "profiled": 2,
    "ranges": 2,
    "reference": 2,
    "rewrites": 2,
    "timing": 2,
    "torch_reasons": 2,
    "traced": 2,
    "trials": 2,
    "validation": 2,
    "workloads": 2,
    "mask_policy": 3,
    "choice": 3,
    "output_order": 3,
    "record": 3,
    "routes": 3,
    "history": 4,
    "locks": 4,
    "store": 4,
    "stored": 4,
    "tuner": 4,
    "wishes": 4,
    "exchange": 5,
    "listing": 5,
    "memory": 5,
    "notes": 5,
    "passes": 5,
    "selector": 5,
    "view": 5,
    "attention": 6,
    "cache": 6,
    "compiled": 6,
    "first_sight": 6,
    "mask_runner": 6,
    "multihead": 6,
    "multihead_masks": 6,
    "multihead_nested": 6,
    "pending": 6,
    "verify": 6,
    "comparison": 7,
    "distributed": 7,
    "doctor": 7,
    "explain": 7,
    "integrations": 7,
    "patching": 7,
    "prewarm": 7,
    "profiling": 7,
    "__init__": 8,
    "cli": 9,
    "__main__": 10,
}
"""Module or folder of the package to its floor. ``__init__`` stands over what it exports, under the command line."""

BESIDE = {
    "passes": {"memory", "view"},
    "routes": {"output_order"},
    "settings": {"errors"},
    "buckets": {"signature"},
    "clocks": {"measurement", "versions"},
    "environment": {"signature", "versions"},
    "signature": {"layout", "versions"},
    "signature_text": {"layout", "signature"},
    "torch_rules": {"environment", "signature", "versions"},
    "dropout_check": {"backends", "inputs", "parts", "probes", "reference", "trials"},
    "guards": {"denylist"},
    "backends": {"mask_recognition"},
    "mask_recognition": {"mask_runs"},
    "inputs": {"masks"},
    "masks": {"mask_classes", "mask_recognition"},
    "parts": {"reference"},
    "probes": {"backends", "inputs", "parts", "reference"},
    "reference": {"backends", "inputs", "masks"},
    "rewrites": {"backends", "masks"},
    "trials": {"backends"},
    "validation": {"backends", "dropout_check", "inputs", "masks", "parts", "probes", "reference", "trials"},
    "choice": {"record", "routes"},
    "store": {"locks", "stored"},
    "selector": {"memory", "view", "notes", "passes"},
    "attention": {"compiled", "first_sight"},
    "compiled": {"first_sight"},
    "first_sight": {"mask_runner"},
    "cache": {"attention", "pending", "verify"},
    "verify": {"pending"},
    "multihead": {"attention", "multihead_masks", "multihead_nested"},
    "comparison": {"integrations"},
    "integrations": {"explain"},
    "prewarm": {"explain", "integrations"},
}
"""What a module may import of its own floor. The tuner and the store do not know each other."""


def part_of(path: Path) -> str:
    """Return the name that stands in the table: the folder's for modules in folders."""
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_parts(source: str) -> set[str]:
    """Return the parts of smartattn that a module imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            names = [f"smartattn.{alias.name}" for alias in node.names] if module == "smartattn" else [module]
        else:
            continue
        for first, *rest in (name.split(".") for name in names):
            if first == "smartattn":
                # A name that is no module, such as __version__, comes from the package itself.
                found.add(rest[0] if rest and rest[0] in FLOORS else "__init__")
    return found


MODULES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path):
    """A module imports only lower floors, and of its own floor only what the table allows."""
    part = part_of(path)
    if part not in FLOORS:
        pytest.fail(f"{part} stands on no floor: add it to FLOORS")
    for other in imported_parts(path.read_text(encoding="utf-8")) - {part}:
        is_below = FLOORS[other] < FLOORS[part]
        is_beside = FLOORS[other] == FLOORS[part] and other in BESIDE.get(part, set())
        assert is_below or is_beside, f"{part} (floor {FLOORS[part]}) imports {other} (floor {FLOORS[other]})"


def test_table_allows_only_same_floor():
    """What the table allows beside a module stands on that module's floor."""
    wrong = [(part, other) for part, others in BESIDE.items() for other in others if FLOORS[part] != FLOORS[other]]
    assert wrong == []


def test_same_floor_imports_form_no_circle():
    """No two modules of a floor may import each other, directly or through others."""
    for start, others in BESIDE.items():
        seen, todo = set(), set(others)
        while todo:
            part = todo.pop()
            assert part != start, f"{start} may reach itself"
            seen.add(part)
            todo |= BESIDE.get(part, set()) - seen


def test_reader_sees_every_form_of_import():
    """The reader of imports sees plain, renamed, function-level and from-imports, and no other package."""
    source = "import smartattn.store as s\nfrom smartattn import cache, __version__\nimport torch, smartattnx\n"
    source += "def f():\n    from smartattn.tuner import Tuning\n"
    assert imported_parts(source) == {"store", "cache", "tuner", "__init__"}


def test_every_module_stands_in_the_table():
    """A new module without a floor is a failure, since a name outside the table would pass for a plain name."""
    assert {part_of(path) for path in MODULES} - set(FLOORS) == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_torch_names_live_in_versions(path: Path):
    """Only ``versions`` reads torch's private names or its version."""
    if path.stem == "versions":
        return
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            # Documented for code that is traced, its underscore notwithstanding.
            if text == "torch._check":
                continue
            is_private = any(word.startswith("_") and not word.startswith("__") for word in text.split("."))
            if text.startswith("torch.") and is_private:
                found.append(text)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [name for name in names if name.startswith("_")]
    assert found == []


def test_every_test_states_its_fact():
    """Each test function has a docstring."""
    missing = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        tests = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        missing += [f"{path.name}: {node.name}" for node in tests if not ast.get_docstring(node)]
    assert missing == []
