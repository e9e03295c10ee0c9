"""Every registered backend keeps the contract on CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from smartattn.backends.registry import backends_for
from smartattn.signature import Call, Signature
from tests.backends.contract import Problem, call_of, problems, signatures, verdict_on

BACKENDS = list(backends_for("cpu").values())
SIGNATURES = signatures()


@pytest.mark.parametrize("signature", SIGNATURES, ids=str)
def test_every_backend_is_right_or_says_why_not(signature: Signature) -> None:
    """Each backend either equals the reference, gradients included, or is rejected with reasons."""
    call = call_of(signature)
    verdicts = {backend.name: verdict_on(backend, call) for backend in BACKENDS}
    assert {name: v.reason for name, v in verdicts.items() if v is not None and not v.is_valid} == {}


def test_math_takes_everything() -> None:
    """The last resort is eligible for every signature of the contract."""
    backend = backends_for("cpu")["math"]
    assert all(verdict_on(backend, call_of(signature)) is not None for signature in SIGNATURES[::5])


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(problem=problems())
def test_random_calls_in_random_layouts(problem: Problem) -> None:
    """No layout, broadcast, scale or mask makes an eligible backend wrong."""
    for backend in BACKENDS:
        verdict = verdict_on(backend, problem.call)
        assert verdict is None or verdict.is_valid, (backend.name, verdict)


def test_strict_accuracy_admits_what_is_exact() -> None:
    """The exact backends hold the bound on the mean error too, in float32."""
    call = Call(*(torch.randn(2, 2, 40, 16) for _ in range(3)))
    for backend in BACKENDS:
        verdict = verdict_on(backend, call, accuracy="strict")
        assert verdict is None or verdict.is_valid, (backend.name, verdict)
