"""PyTorch's rules: what its own function resolves to, and why its operators refuse, for made-up environments."""

from __future__ import annotations

import dataclasses

import pytest

from smartattn import torch_rules
from smartattn.environment import Environment
from smartattn.layout import Layout
from tests.test_guards import A100, ADDITIVE, BOOL, H200, NEWER, make

ROCM = dataclasses.replace(H200, capability="gfx942", cudnn=0)


@pytest.mark.parametrize(
    ("changes", "environment", "resolved"),
    [
        ({}, H200, "cudnn"),
        ({}, A100, "flash"),
        ({}, dataclasses.replace(H200, cudnn=91500), "flash"),
        ({}, ROCM, "math"),
        (BOOL, H200, "cudnn"),
        (BOOL, A100, "efficient"),
        (ADDITIVE | {"grads": "qkvm"}, H200, "efficient"),
        ({"dtype": "float32"}, H200, "efficient"),
        ({"dtype": "float64"}, H200, "math"),
        ({"E": 100, "Ev": 100}, H200, "flash"),
        ({"E": 100, "Ev": 100, "mask": "causal", "L": 64}, H200, "math"),
        ({"E": 512, "Ev": 512}, H200, "efficient"),
        ({"E": 192, "Ev": 128}, H200, "cudnn"),
        ({"S": 1}, H200, "flash"),
        ({"deterministic": "strict"}, H200, "flash"),
        ({"disabled": "c"}, H200, "flash"),
        ({"disabled": "cf"}, H200, "efficient"),
        ({"disabled": "cfe"}, H200, "math"),
        ({"H": 2, "gqa": "enabled"}, H200, "cudnn"),
        ({"H": 1, "gqa": "implicit"}, H200, "math"),
        ({"H": 1, "gqa": "implicit"}, NEWER, "cudnn"),
        ({"H": 2, "gqa": "enabled", **BOOL}, A100, "math"),
        ({"H": 2, "gqa": "enabled", **BOOL}, dataclasses.replace(A100, torch="2.14.1"), "efficient"),
        ({"batch": ()}, H200, "math"),
        ({"batch": ()}, NEWER, "cudnn"),
        ({"batch": (2, 3)}, NEWER, "math"),
        ({"dropout": "other"}, H200, "cudnn"),
        ({"dropout": "other"}, NEWER, "flash"),
        ({"layouts": (Layout("bhsd", has_unit_last_stride=False),) * 3}, H200, "math"),
    ],
)
def test_stock_resolution(changes: dict[str, object], environment: Environment, resolved: str) -> None:
    """The prediction follows PyTorch's order and filters."""
    assert torch_rules.stock_resolution(make(**changes), environment) == resolved


@pytest.mark.parametrize(
    ("changes", "order"),
    [({}, "query"), ({"dtype": "float32"}, "bshd"), ({"dtype": "float64"}, "bhsd"), ({"E": 60, "Ev": 60}, "bhsd")],
)
def test_stock_output_order(changes: dict[str, object], order: str) -> None:
    """CuDNN and flash follow query, Efficient gives BSHD, Math and padded head dims BHSD."""
    assert torch_rules.stock_output_order(make(**changes), H200) == order


def test_all_reasons_are_given() -> None:
    """Every rule that a call breaks is named, not only the first."""
    signature = make(S=1, E=300, Ev=300, dropout="other", disabled="cfe", mask="causal")
    old = dataclasses.replace(H200, capability="sm75")
    assert len(torch_rules.cudnn_reasons(signature, old)) == 5
    assert len(torch_rules.flash_reasons(signature, old)) == 3
    assert len(torch_rules.efficient_reasons(signature, old)) == 3


@pytest.mark.parametrize(("sm", "is_refused"), [("sm86", True), ("sm89", True), ("sm90", False), ("sm80", False)])
def test_flash_trains_wide_heads_on_large_chips_only(sm: str, *, is_refused: bool) -> None:
    """Head dims in (192, 224] have no backward where shared memory is small."""
    environment = dataclasses.replace(A100, capability=sm)
    for E, refused_here in ((192, False), (200, is_refused), (224, is_refused), (232, False)):
        found = torch_rules.flash_reasons(make(E=E, Ev=E, grads="qkv"), environment)
        assert bool(found) == refused_here
    assert torch_rules.flash_reasons(make(E=200, Ev=200), environment) == ()


def test_missing_cudnn_is_one_plain_reason() -> None:
    """Without cuDNN nothing else is said."""
    found = torch_rules.cudnn_reasons(make(S=1), dataclasses.replace(H200, cudnn=0))
    assert found == ("needs cuDNN; this build of PyTorch has none",)
