"""A route that is wrong anywhere is found out, by a reason that says where; right ones pass."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch

from smartattn import validation
from smartattn.backends.eager import run_eager
from smartattn.backends.math import run_math
from smartattn.backends.stock import run_stock
from smartattn.signature import Call, read_signature
from smartattn.validation import Validator, Verdict

Runner = Callable[..., torch.Tensor]


def _call(*, L: int = 24, S: int = 24, dtype: torch.dtype = torch.float32, grad: bool = False, **rest: object) -> Call:  # fmt: skip
    made = [torch.randn(2, 2, size, 16, dtype=dtype, requires_grad=grad) for size in (L, S, S)]
    return Call(*made, **rest)  # type: ignore[arg-type]


def _check(call: Call, run: Runner, **rest: object) -> Verdict:
    signature = read_signature(call)
    assert signature is not None
    return Validator(call, signature, **rest).check(run)  # type: ignore[arg-type]


def _mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.7


def _as_gradient(change: Callable[[torch.Tensor], torch.Tensor], which: int = 1) -> Runner:
    """Return eager with a changed gradient of one input."""

    class Change(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return change(grad.clone())

    def run(*args: object) -> torch.Tensor:
        tensors = list(args)
        tensors[which] = Change.apply(tensors[which])
        return run_eager(*tensors)  # type: ignore[arg-type]

    return run


def _as_output(change: Callable[[torch.Tensor], torch.Tensor]) -> Runner:
    return lambda *args: change(run_math(*args))


def _zero_last_key(grad: torch.Tensor) -> torch.Tensor:
    grad[..., -1, :] = 0
    return grad


def _garbage_last_row(output: torch.Tensor) -> torch.Tensor:
    changed = output.clone()
    changed[-1, -1, -1] += 0.1
    return changed


class _TakesLayoutForGranted(torch.autograd.Function):
    """A backward that reads the incoming gradient as if it lay like the output (pytorch#133671)."""

    @staticmethod
    def forward(ctx, output):
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        if grad.stride()[-1] == 0:
            memory = torch.zeros(grad.shape, dtype=grad.dtype)
            memory.view(-1)[0] = grad.reshape(-1)[0]
            return memory
        return grad


def _nan_for_hidden_rows(query, key, value, mask, *rest):
    scores = query @ key.mT / math.sqrt(query.size(-1))
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value


def _as_scores(query, key, value, mask, *rest):
    """Add a bool mask as 0 and 1."""
    return run_math(query, key, value, mask.to(query.dtype), *rest)


def _bottom_right(query, key, value, mask, dropout_p, is_causal, *rest):
    L, S = query.size(-2), key.size(-2)
    return run_math(query, key, value, torch.ones(L, S, dtype=torch.bool).tril(S - L), 0.0, False, *rest)


def _without_mask(query, key, value, mask, *rest):
    return run_math(query, key, value, None, *rest)


def _without_triangle(query, key, value, mask, dropout_p, is_causal, *rest):
    return run_math(query, key, value, mask, dropout_p, False, *rest)


def _wrong_scale(query, key, value, mask, dropout_p, is_causal, scale, gqa):
    return run_math(query, key, value, mask, dropout_p, is_causal, 1.05 / math.sqrt(query.size(-1)), gqa)


def _finite_for_hidden(query, key, value, mask, *rest):
    """Hide by -65504 instead of -inf, as cuDNN of torch 2.11 does."""
    return run_math(query, key, value, torch.where(mask, 0.0, -65504.0), *rest)


def _overflowing(query, key, value, *rest):
    """Softmax without subtracting the maximum in a narrow range: NaN below about -88 (pytorch#196678)."""
    weights = (query @ key.mT / math.sqrt(query.size(-1))).exp()
    return weights / weights.sum(-1, keepdim=True) @ value


FAULTS = [
    ("bool mask added as numbers", _as_scores, {"attn_mask": _mask(2, 1, 24, 24)}, "output"),
    ("mask ignored", _without_mask, {"attn_mask": _mask(24, 24)}, "output"),
    ("mask ignored, additive", _without_mask, {"attn_mask": torch.randn(24, 24)}, "output"),
    ("triangle ignored beside a mask", _without_triangle, {"attn_mask": _mask(24, 24), "is_causal": True}, "output"),
    ("triangle at the bottom right", _bottom_right, {"is_causal": True, "S": 32}, "output"),
    ("NaN for hidden rows", _nan_for_hidden_rows, {"attn_mask": torch.ones(2, 1, 24, 24) > 0}, "masked_rows.*NaN"),
    ("NaN for hidden rows, additive", _nan_for_hidden_rows, {"attn_mask": torch.zeros(24, 24)}, "masked_rows.*NaN"),
    ("hidden rows not zero", _finite_for_hidden, {"attn_mask": torch.ones(24, 24) > 0}, "masked_rows.*sees no key"),
    ("wrong scale", _wrong_scale, {}, "output"),
    ("garbage in the last row alone", _as_output(_garbage_last_row), {}, r"output at \[1, 1, 23, \d+\]"),
    ("NaN for very negative logits", _overflowing, {}, "very_negative.*NaN"),
    ("wrong dtype", _as_output(torch.Tensor.double), {}, "output has dtype torch.float64"),
    ("wrong shape", _as_output(lambda o: o[..., :-1]), {}, r"output has shape \(2, 2, 24, 15\)"),
    ("key gradient doubled", _as_gradient(lambda g: 2 * g), {"grad": True}, "dK"),
    ("last key's gradient lost", _as_gradient(_zero_last_key), {"grad": True}, r"dK at \[\d, \d, 23,"),
    ("query gradient is NaN in one place", _as_gradient(lambda g: g.index_fill(2, torch.tensor(5), math.nan), 0),
     {"grad": True}, r"dQ has \d+ of \d+ elements NaN or Inf.*at \[0, 0, 5, 0\]"),
    ("value gradient transposed", _as_gradient(lambda g: g.flip(-1), 2), {"grad": True}, "dV"),
    ("layout of the gradient ignored", lambda *a: _TakesLayoutForGranted.apply(run_eager(*a)), {"grad": True},
     "grad_out expanded"),
    ("mask gradient lost", _as_gradient(lambda g: 0 * g, 3), {"grad": True, "attn_mask": torch.randn(24, 24)}, "dmask"),
    ("no gradient at all", lambda *a: run_eager(*a).detach(), {"grad": True}, "does not depend"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "how", "reason"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_faults_are_found(run: Runner, how: dict, reason: str) -> None:
    """Each known kind of fault makes the route invalid, by a reason that names probe, tensor and place."""
    call = _call(**how)
    if call.attn_mask is not None and how.get("grad") and call.attn_mask.dtype != torch.bool:
        call.attn_mask.requires_grad_()
    verdict = _check(call, run)
    assert not verdict.is_valid
    assert verdict.error_ratio > 1
    assert verdict.reason.startswith("probe ")
    assert re.search(reason, verdict.reason), verdict.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fault", ["scale", "last key"])
def test_faults_are_found_in_half_precision(dtype: torch.dtype, fault: str) -> None:
    """The tolerance of half precision is small enough for a scale that is off or one key's lost gradient."""
    wide = _call(dtype=dtype, grad=True, is_causal=True, L=64, S=64)
    run = _wrong_scale if fault == "scale" else _as_gradient(_zero_last_key)
    if fault == "scale":
        run = lambda q, k, v, m, d, c, s, g: run_math(q, k, v, m, d, c, 1.3 / 4, g)  # noqa: E731
    assert not _check(wide, run).is_valid


@pytest.mark.parametrize("run", [run_math, run_eager, run_stock])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_routes_pass(run: Runner, dtype: torch.dtype) -> None:
    """Right implementations pass with room to spare, in training too."""
    verdict = _check(_call(dtype=dtype, grad=True, attn_mask=_mask(2, 1, 24, 24)), run)
    assert verdict == Verdict(is_valid=True, error_ratio=verdict.error_ratio)
    assert verdict.error_ratio < 1


def test_memory_order_of_the_output_is_free() -> None:
    """An output that lies transposed in memory is as right as another."""
    run = _as_output(lambda o: o.transpose(1, 2).contiguous().transpose(1, 2))
    assert _check(_call(), run).is_valid


def test_what_the_route_raises_is_passed_on() -> None:
    """An error of the route is the tuner's to record."""

    def run(*args: object) -> torch.Tensor:
        raise NotImplementedError("no kernel")

    with pytest.raises(NotImplementedError, match="no kernel"):
        _check(_call(), run)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_of_the_caller_that_prove_nothing_are_left_out(bad: float) -> None:
    """NaN and Inf inputs make no route invalid: correct implementations differ on them."""
    call = _call(attn_mask=torch.randn(24, 24))
    call.query[0, 0, 0, 0] = bad
    assert _check(call, run_stock).is_valid
    call = _call(attn_mask=torch.full((24, 24), math.nan))
    assert _check(call, run_stock).is_valid


def test_fault_that_only_the_callers_own_mask_shows() -> None:
    """The caller's mask is probed with its own values."""

    def run(*args):
        mask = args[3]
        return run_math(*args) + (0.1 if bool(mask[:, 0].all()) and not bool(mask[:, 1:].any()) else 0.0)

    mask = torch.zeros(24, 24, dtype=torch.bool)
    mask[:, 0] = True
    verdict = _check(_call(attn_mask=mask), run)
    assert verdict.reason.startswith("probe caller: output")
    assert not _check(_call(attn_mask=mask), run, is_own_mask=False).reason.startswith("probe caller")


def test_large_finite_mask_values_are_not_minus_inf() -> None:
    """A row hidden by finfo.min must be finite; taking it for -inf changes no other row, so only NaN is a fault."""
    mask = torch.zeros(24, 24)
    mask[3] = torch.finfo(torch.float32).min
    assert _check(_call(attn_mask=mask), run_stock).is_valid
    assert _check(_call(attn_mask=mask, grad=True), run_stock).is_valid
    verdict = _check(_call(attn_mask=mask), lambda *a: run_math(*a).index_fill(2, torch.tensor(3), math.nan))
    assert not verdict.is_valid


def test_overflow_of_eager_is_no_yardstick() -> None:
    """Inputs whose scores overflow float16 in eager reject eager, not what computes them right."""
    call = _call(dtype=torch.float16)
    call = call._replace(query=call.query * 200, key=call.key * 200)
    assert _check(call, run_math).is_valid
    assert not _check(call, run_eager).is_valid


def test_large_problems_are_checked_in_part_and_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit one call per probe on two probes; a fault in the last row of the last head is still found."""
    monkeypatch.setattr(validation, "LARGE_SCORES", 1000)
    monkeypatch.setattr(validation, "MAX_SCORES", {"cpu": 1000})
    calls: list[int] = []

    def counted(*args):
        calls.append(1)
        return run_eager(*args)

    call = _call(grad=True, attn_mask=_mask(2, 1, 24, 24), L=24)
    assert _check(call, counted).is_valid
    assert len(calls) == 2
    verdict = _check(call, _as_output(_garbage_last_row))
    assert "output at [1, 1, 23," in verdict.reason
    assert "dK at [" in _check(call, _as_gradient(_zero_last_key)).reason


def test_strict_bounds_the_mean_error() -> None:
    """A small error everywhere passes the standard bound in bfloat16 and fails the strict one."""
    call = _call(dtype=torch.bfloat16)
    run = _as_output(lambda o: (o.float() * 1.012).to(o.dtype))
    assert _check(call, run).is_valid
    assert "mean error" in _check(call, run, accuracy="strict").reason
    assert _check(call, run_math, accuracy="strict").is_valid


def test_the_program_sees_nothing_of_a_check() -> None:
    """Checking moves no random state and leaves no gradient."""
    call = _call(grad=True, dropout_p=0.25)
    before = torch.get_rng_state()
    assert _check(call, run_stock).is_valid
    assert torch.equal(torch.get_rng_state(), before)
    assert call.query.grad is None


def _drops_nothing(query, key, value, mask, dropout_p, *rest):
    return run_eager(query, key, value, mask, 0.0, *rest)


def _keeps_the_mean_low(query, key, value, mask, dropout_p, *rest):
    return run_eager(query, key, value, mask, dropout_p, *rest) * (1 - dropout_p)


def _drops_output(query, key, value, mask, dropout_p, *rest):
    output = run_eager(query, key, value, mask, 0.0, *rest)
    return torch.dropout(output, dropout_p, train=True).nan_to_num() / 0.0 if dropout_p else output


class _OtherMaskInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, dropout_p):
        ctx.save_for_backward(query, key, value)
        ctx.dropout_p = dropout_p
        return run_eager(query, key, value, None, dropout_p, False, None, False)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            output = run_eager(*inputs, None, ctx.dropout_p, False, None, False)
        return *torch.autograd.grad(output, inputs, grad), None


DROPOUT_FAULTS = [
    ("not applied", _drops_nothing, "not seem to be applied"),
    ("not rescaled", _keeps_the_mean_low, "on average"),
    ("not finite", _drops_output, "NaN or Inf"),
    ("another mask in backward", lambda q, k, v, m, p, *r: _OtherMaskInBackward.apply(q, k, v, p), "other probabilities"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "reason"), [f[1:] for f in DROPOUT_FAULTS], ids=[f[0] for f in DROPOUT_FAULTS])
def test_dropout_faults_are_found(run: Runner, reason: str) -> None:
    """Dropout that is missing, not rescaled, or redrawn in backward makes the route invalid."""
    verdict = _check(_call(grad=True, dropout_p=0.25, L=48, S=48), run)
    assert not verdict.is_valid
    assert reason in verdict.reason


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"attn_mask": _mask(48, 48)}, {"L": 1}])
def test_right_dropout_passes(dropout_p: float, dtype: torch.dtype, how: dict) -> None:
    """Eager and stock pass at every rate, with masks and with a single row."""
    call = _call(**({"grad": True, "dropout_p": dropout_p, "dtype": dtype, "L": 48, "S": 48} | how))
    for run in (run_eager, run_stock):
        assert _check(call, run) == Verdict(is_valid=True, error_ratio=pytest.approx(0.5, abs=0.5))
