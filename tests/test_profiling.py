"""Profiles: every route with its numbers or its reasons, arithmetic and traffic, and what is read from them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import smartattn
from smartattn.errors import SettingError, UnknownNameError
from smartattn.kernels import Kernel
from smartattn.occupancy import Occupancy
from smartattn.profiling import ROUTES, Ceilings, Profiled, flops_of, profile, read, traffic_bytes_of
from smartattn.selector import selector
from smartattn.signature_text import parse_signature
from smartattn.workloads import WORKLOADS
from tests.fakes import FakeBackend, FakeClock, registered

TEXT = "sdpa infer cpu float32 N1 Hq2 H2 L16 S16 E8 Ev8 layout=bhsd mask=causal scale=positive"
CEILINGS = Ceilings(copy_gb_s=100.0, matmul_tflop_s=1.0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Measure small ceilings with a clock that only fakes move."""
    clock = FakeClock()
    monkeypatch.setattr(selector, "clock", lambda device: clock)
    monkeypatch.setattr("smartattn.profiling.COPY_BYTES", {"cpu": 4096})
    monkeypatch.setattr("smartattn.profiling.MATRIX_SIZE", {"cpu": 16})
    return clock


def test_every_route_is_there_with_numbers_or_reasons(tmp_path: Path):
    """The usual routes and the chosen one are run or skipped with a reason; the data is plain; the trace is written."""
    found = profile(TEXT, num_samples=3, trace_file=tmp_path / "trace.json")
    names = [each.route for each in found.routes]
    assert names == list(ROUTES), "nothing is stored, so calls run stock"
    by_name = {each.route: each for each in found.routes}
    assert by_name["efficient"].skipped == by_name["cudnn"].skipped == "does not exist on cpu"
    for name in ("stock", "eager", "eager_inplace", "math", "flash"):
        assert by_name[name].p50_us == 100.0
        assert by_name[name].num_kernels >= 1
        assert by_name[name].error is not None
    assert by_name["stock"].is_chosen
    assert by_name["eager"].num_kernels > by_name["eager_inplace"].num_kernels, "masked_fill copies"
    assert by_name["eager"].of_kind("copy")
    json.dumps(found.to_dict())
    assert (tmp_path / "trace.json").stat().st_size > 1000
    text = str(found)
    assert "efficient: skipped, does not exist on cpu" in text
    assert "operators" in text


def test_statistics_are_those_of_the_samples(small: FakeClock):
    """Mean, percentiles, rate, arithmetic and traffic follow the device times."""
    with registered(FakeBackend("fake", clock=small, cost_us=50.0, plan_ms=2.0, workspace_bytes=77)):
        (found, _) = profile(TEXT, routes=["fake"], num_samples=5).routes
    assert (found.mean_us, found.p50_us, found.p95_us, found.p99_us) == pytest.approx((50.0,) * 4)
    assert found.num_samples == 5
    assert found.plan_ms == pytest.approx(2.0)
    assert found.calls_per_s == pytest.approx(20_000)
    assert found.tflop_s == pytest.approx(flops_of(parse_signature(TEXT)) / 50.0 / 1e6)
    assert found.peak_bytes == 77


def test_wrong_and_failing_routes_are_told(small: FakeClock):
    """A route with wrong values is marked and said to be wrong; one that raises is skipped with its error."""
    wrong = FakeBackend("wrong", clock=small, error=1.0)
    broken = FakeBackend("broken", clock=small, raises=RuntimeError("no such kernel"))
    with registered(wrong, broken):
        found = profile(TEXT, routes=["wrong", "broken"], num_samples=2)
    assert found.routes[0].invalid
    assert any(sentence.startswith("wrong is WRONG here") for sentence in found.reading)
    assert found.routes[1].skipped == "failed: RuntimeError: no such kernel"


def test_reasons_skip(small: FakeClock):
    """A route that is not eligible is skipped with all its reasons."""
    with registered(FakeBackend("picky", reason="needs another moon")):
        assert profile(TEXT, routes=["picky"], num_samples=1).routes[0].skipped == "needs another moon"


def test_the_chosen_route_is_always_there(small: FakeClock, quiet_machine: None):
    """A record's choice is profiled although it was not named."""
    with registered(FakeBackend("fast", clock=small, cost_us=1.0)):
        smartattn.prewarm_signatures([TEXT])
        found = profile(TEXT, routes=["math"], num_samples=1)
        assert [(each.route, each.is_chosen) for each in found.routes] == [("math", False), ("fast", True)]


def test_training_is_profiled_with_its_backward():
    """The kernels of a training problem include those of its gradients, and nothing keeps a gradient."""
    text = TEXT.replace("infer", "train") + " grads=qkv"
    infer, train = (profile(each, routes=["math"], num_samples=1).routes[0] for each in (TEXT, text))
    assert train.num_kernels > infer.num_kernels
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"signature": "sdpa infer cpu"}, UnknownNameError, "then comes 'the end'"),
        ({"routes": ["flsh"]}, UnknownNameError, "Did you mean 'flash"),
        ({"signature": TEXT.replace("cpu", "xpu")}, SettingError, "device type 'xpu'"),
        ({"num_samples": 0}, SettingError, "num_samples is 0"),
        (
            {"trace_file": "/absent/folder/trace.json", "routes": ["math"], "num_samples": 1},
            SettingError,
            "cannot write",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, match: str):
    """Each wrong argument is named."""
    with pytest.raises(error, match=match):
        profile(**{"signature": TEXT, **arguments})


def test_arithmetic_counts_visible_scores():
    """Two products over the scores that the causal triangle leaves; a backward adds two and a half times that."""
    base = parse_signature(TEXT)
    assert flops_of(base) == 2 * (16 * 17 // 2) * 2 * (8 + 8)
    assert flops_of(dataclasses.replace(base, mask="none")) == 2 * 256 * 2 * 16
    train = dataclasses.replace(base, pass_name="train", grads="qkv")
    assert flops_of(train) == pytest.approx(3.5 * flops_of(base))


@pytest.mark.parametrize("name", ["llama2/decode-2048", "swin/window", "bert/padded-128"])
def test_traffic_counts_every_tensor_once(name: str):
    """Query, key, value, mask and output are each read or written once."""
    w = next(each for each in WORKLOADS if each.name == name)
    expected = 2 * (w.N * w.Hq * w.L * (w.E + w.Ev) + w.N * w.H * w.S * (w.E + w.Ev))
    expected += {"none": 0, "bias": 2 * w.Hq * w.L * w.S, "padding": w.N * w.S}[w.mask]
    assert traffic_bytes_of(w.signature("infer", "cuda", "bfloat16")) == expected


def kernels(*kinds: tuple[str, str, float], **more: object) -> tuple[Kernel, ...]:
    return tuple(Kernel(f"{kind}_kernel", kind, operator, 1, us, **more) for kind, operator, us in kinds)


def test_reading_says_what_math_does():
    """Conversions, masks and their share of the time are put in words."""
    found = Profiled(
        "math", p50_us=100.0, tflop_s=0.5, gb_s=1.0,
        kernels=(*kernels(("matmul", "bmm", 50.0), ("mask", "tril", 25.0)),
                 Kernel("copy", "cast", "copy_", 3, 25.0, "bfloat16->float32")),
        occupancies=(None, None, None),
    )  # fmt: skip
    sentences = read([found], "kernels", CEILINGS)
    assert sentences[0] == (
        "math converted dtypes (bfloat16->float32) in 3 kernels, built or applied masks in 1 kernel (tril): "
        "50% of the time of its 5 kernels."
    )
    assert sentences[-1] == "Fastest here is math at 100 us: 50% of this device's measured arithmetic ceiling."


def test_reading_keeps_the_caveats_of_occupancy():
    """A reported 0 % is a gap of the measuring, and a low occupancy is not called slow."""
    block = {"registers": 240, "shared_bytes": 131 * 1024, "block": (256, 1, 1)}
    low = Occupancy(0.125, 1, "registers")
    cudnn = Profiled(
        "cudnn",
        p50_us=1.0,
        kernels=kernels(("attention", "", 1.0), **block, reported_occupancy=0.0),
        occupancies=(low,),
    )
    flash = Profiled(
        "flash",
        p50_us=2.0,
        kernels=kernels(("attention", "", 1.0), **block, reported_occupancy=0.13),
        occupancies=(low,),
    )
    text = " ".join(read([cudnn, flash], "kernels", CEILINGS))
    assert "cudnn: 0 % occupancy as reported is a gap of the profiler's estimate (it knows no blocks with more" in text
    assert "this one has 131.0 KiB); the kernel's resources allow 12% (limited by registers)" in text
    assert "flash: 12% occupancy is by design (256 threads of 240 registers a block" in text
    assert "does not make it slow" in text


def test_reading_says_what_writing_in_place_saves():
    """The kernel that ``masked_fill`` adds to eager is named."""
    eager = Profiled("eager", p50_us=3.0, kernels=kernels(("matmul", "bmm", 1.0), ("copy", "copy_", 1.0)))
    inplace = Profiled("eager_inplace", p50_us=2.0, kernels=kernels(("matmul", "bmm", 1.0)))
    assert "Writing the mask in place saves eager_inplace 1 of eager's 2 kernels." in read(
        [eager, inplace], "kernels", CEILINGS
    )


@pytest.mark.gpu
def test_the_comparison_on_a_gpu():
    """Math's upcast and mask, eager's copy, and computed occupancies show on a real GPU."""
    text = "sdpa infer cuda bfloat16 N2 Hq8 H8 L512 S512 E64 Ev64 layout=bhsd mask=causal scale=positive"
    found = {each.route: each for each in profile(text, num_samples=10).routes}
    assert found["math"].of_kind("cast")
    assert found["math"].of_kind("mask")
    assert found["eager"].num_kernels > found["eager_inplace"].num_kernels
    assert found["flash"].occupancies[0] is not None
