"""Which chains of rewrites and backends are tried for a signature, and that each of them is right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from smartattn import versions
from smartattn.backends import registry
from smartattn.backends.cudnn import Cudnn
from smartattn.backends.efficient import Efficient
from smartattn.backends.flash import FlashCuda
from smartattn.backends.registry import backends_for
from smartattn.environment import environment_of
from smartattn.routes import check_route_name, parse_route, routes_for
from smartattn.signature import Call, read_signature
from smartattn.signature_text import parse_signature
from tests.rewrites.contract import calls, dense_reference, gradients

CUDA = {
    "decode": "sdpa infer cuda bfloat16 N1 Hq32 H8 L1 S4096 E128 Ev128 layout=bhsd mask=none scale=positive gqa=enabled",
    "mla": "sdpa infer cuda bfloat16 N16 Hq16 H1 L1 S4096 E576 Ev512 layout=bhsd mask=none scale=positive gqa=enabled",
    "prefill": "sdpa infer cuda bfloat16 N1 Hq32 H8 L512 S512 E128 Ev128 layout=bhsd mask=causal scale=positive gqa=enabled",
    "odd": "sdpa infer cuda bfloat16 N2 Hq8 H8 L64 S64 E67 Ev67 layout=bhsd! mask=none scale=positive",
    "window": "sdpa infer cuda bfloat16 N4x8 Hq4 H4 L49 S49 E32 Ev32 layout=2bhsd mask=additive scale=positive"
    " mask_axes=1bhls mask_dtype=bfloat16 mask_layout=2bhls!",
    "unbatched": "sdpa infer cuda float16 N- Hq8 H8 L128 S128 E64 Ev64 layout=hsd mask=none scale=positive",
    "huge": "sdpa infer cuda float16 N65536 Hq8 H8 L4 S4 E64 Ev64 layout=bhsd mask=none scale=positive",
    "strided": "sdpa infer cuda float16 N2 Hq8 H8 L4 S4 E64 Ev64 layout=bhds~% mask=none scale=positive",
}


@pytest.fixture(autouse=True)
def cuda_backends():
    """Register the CUDA backends that the table lacks."""
    for backend in (FlashCuda(), Efficient(), Cudnn()):
        if backend.name not in backends_for("cuda"):
            registry._plugins.append(backend)


def names(text: str) -> list[str]:
    """Return the names of the routes for a signature text."""
    return [route.name for route in routes_for(parse_signature(text))]


@pytest.mark.parametrize("text", CUDA.values(), ids=CUDA)
def test_starts_with_every_backend_alone(text):
    """Plain routes come first and in the table's order, so that each backend's reasons are kept."""
    backends = list(backends_for("cuda"))
    assert names(text)[: len(backends)] == backends


@pytest.mark.parametrize("text", CUDA.values(), ids=CUDA)
def test_names_parse_back_and_are_few(text):
    """Every enumerated route can be named, once, and about a dozen remain."""
    found = names(text)
    assert len(set(found)) == len(found) <= 16
    assert [parse_route(name, "cuda").name for name in found] == found
    assert [check_route_name(name) for name in found] == found


@pytest.mark.parametrize(
    ("case", "route"),
    [
        ("decode", "fold_gqa+flash"),
        ("decode", "fold_gqa+efficient"),
        ("mla", "fold_gqa+efficient"),
        ("odd", "pad_head_dim+cudnn"),
        ("odd", "pad_head_dim+efficient"),
        ("window", "flatten_batch+efficient"),
        ("window", "flatten_batch+align_mask+efficient"),
        ("unbatched", "promote+flash"),
        ("huge", "split_batch+flash"),
        ("strided", "contiguous+flash"),
    ],
)
def test_opens_routes(case, route):
    """The rewrites that made slow calls fast are among the routes."""
    assert route in names(CUDA[case])


def test_repeats_keys_only_where_folding_cannot_be():
    """A causal prefill cannot be folded, so keys are repeated for a backend without groups, and only there."""
    found = names(CUDA["prefill"])
    assert not any("fold_gqa" in name for name in found)
    assert ("expand_kv+efficient" in found) is not versions.EFFICIENT_TAKES_GROUPS
    assert not any("expand_kv" in name for name in names(CUDA["decode"]))


def test_plain_square_call_has_no_rewritten_routes():
    """Nothing is tried that changes nothing."""
    text = "sdpa infer cuda bfloat16 N2 Hq8 H8 L64 S64 E64 Ev64 layout=bhsd mask=none scale=positive"
    assert not [name for name in names(text) if "+" in name]


@settings(max_examples=120)
@given(call=calls(dtypes=("float32", "bfloat16", "float64")))
def test_every_eligible_route_is_right(call: Call):
    """Every route that calls itself eligible gives the reference's values and gradients, whatever the call."""
    signature = read_signature(call)
    environment = environment_of(torch.device("cpu"))
    expected = dense_reference(call)
    wanted = gradients(expected, call) if signature.wants_grad else {}
    for route in routes_for(signature):
        if route.reasons(signature, environment):
            continue
        run = route.bind(signature)
        with torch.set_grad_enabled(signature.wants_grad):
            output = run(*call)
        loose = {"rtol": 0, "atol": 6e-2} if call.query.dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(
            output.double(), expected, msg=lambda text, route=route: f"{route.name} on {signature}: {text}", **loose
        )
        if not signature.wants_grad:
            continue
        for name, gradient in gradients(output, call).items():
            torch.testing.assert_close(
                gradient.double(), wanted[name].double(), equal_nan=True,
                msg=lambda text, route=route, name=name: f"{name} of {route.name} on {signature}: {text}",
                **({"rtol": 0.1, "atol": 0.2} if call.query.dtype == torch.bfloat16 else loose),
            )  # fmt: skip
