"""The table of reported faults is whole, and names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.cases.table import IDS, NOT_TESTED, OPEN, PARTLY, TESTS

ROOT = Path(__file__).parent.parent
MENTIONED = sorted({name for names in TESTS.values() for name in names})


def functions_of(path: Path) -> set[str]:
    """Return the names of the test functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_case_has_tests_or_a_reason():
    """Each case is held by tests, or says why it cannot be tested here, or which work is open; never two of these."""
    assert len(set(IDS)) == len(IDS)
    parts = [set(TESTS), set(NOT_TESTED), set(OPEN)]
    assert set.union(*parts) == set(IDS)
    assert sum(map(len, parts)) == len(IDS)
    assert set(PARTLY) <= set(TESTS)


@pytest.mark.parametrize("name", MENTIONED)
def test_each_named_test_exists(name: str):
    """A test that the table names is a function of that file."""
    file, _, function = name.partition("::")
    assert function in functions_of(ROOT / file), f"{name} does not exist"


def test_reasons_say_something():
    """What is not tested, or only in part, says why in words."""
    for reason in (*NOT_TESTED.values(), *PARTLY.values(), *OPEN.values()):
        assert len(reason.split()) >= 3


def test_the_cases_of_a_docstring_are_in_the_table():
    """A case that a test of this folder names in its docstring is a case of the table, which names that test's file."""
    for path in sorted((ROOT / "cases").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            head, _, _ = (ast.get_docstring(node) or "").partition(":")
            for case in (part.strip() for part in head.split(",")):
                if case[:1] in ("R", "N") and case[1:].isdigit():
                    assert case in IDS, f"{path.name}::{node.name} names {case}"
