"""Reported faults of kind A on a GPU, through the public function and every eligible route, at the reported shapes."""

from __future__ import annotations

import math

import pytest
import torch

import smartattn
from smartattn.environment import environment_of
from smartattn.routes import parse_route, routes_for
from smartattn.signature import Call, read_signature
from tests import oracle
from tests.backends.contract import laid_out
from tests.cases.common import answers, call_of, eligible_routes, everywhere_right, hiding, lower

pytestmark = pytest.mark.gpu
HALVES = (torch.bfloat16, torch.float16)


def negative(L: int, S: int, logit: float, **rest: object) -> Call:
    """Return a training call in bfloat16 whose scores are all near ``logit``."""
    query, key = (torch.randn(1, 2, n, 64, device="cuda") * 0.1 for n in (L, S))
    query[..., 0], key[..., 0] = 1.0, logit * 8.0
    made = [t.bfloat16().requires_grad_() for t in (query, key, torch.randn(1, 2, S, 64, device="cuda"))]
    return Call(*made, **rest)


@pytest.mark.parametrize("S", [704, 640, 768, 64, 192])
@pytest.mark.parametrize("mask", ["none", "causal", "lower", "all"])
def test_very_negative_scores_keep_gradients(S: int, mask: str):
    """R01: the reported shape and its neighbours: dQ, dK and dV are finite and right on every eligible route."""
    rest = {
        "none": {}, "causal": {"is_causal": True}, "lower": {"attn_mask": lower(S, S, "cuda")[None, None]},
        "all": {"attn_mask": torch.ones(1, 1, S, S, dtype=torch.bool, device="cuda")},
    }  # fmt: skip
    everywhere_right(negative(S, S, -120.0, **rest[mask]))


@pytest.mark.parametrize("S", [128, 97, 64, 65, 256])
def test_very_negative_scores_at_one_query(S: int):
    """R23: the same with one query."""
    everywhere_right(negative(1, S, -122.0))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("grads", ["", "qkv"])
def test_a_float32_mask_beside_halves(dtype: torch.dtype, grads: str):
    """R02, R53: what the stock square-subsequent-mask helper returns works beside half inputs."""
    mask = torch.nn.Transformer.generate_square_subsequent_mask(32, device="cuda")
    everywhere_right(call_of(2, 4, 32, 64, dtype=dtype, device="cuda", grads=grads, attn_mask=mask))


def last_rows_right(call: Call, name: str | None, rows: int = 64) -> None:
    """Assert that the last query rows of a large call are right."""
    output = smartattn.scaled_dot_product_attention(*call, backend=name)
    mask = call.attn_mask
    part = call._replace(query=call.query[..., -rows:, :], attn_mask=None if mask is None else mask[..., -rows:, :])
    right = oracle.answer(part)
    oracle.check(part, output[..., -rows:, :], right)


def test_mask_offsets_beyond_32_bits():
    """R04: with a (65537, 65537) mask the last query rows are right on every eligible route."""
    call = call_of(1, 1, 65537, 64, dtype=torch.bfloat16, device="cuda", attn_mask=lower(65537, 65537, "cuda"))
    assert "efficient" not in eligible_routes(call)
    smartattn.configure(signature_budget_ms=50.0)
    last_rows_right(call, None)
    for name in eligible_routes(call):
        if name.split("+")[-1] not in ("math", "eager", "eager_inplace"):
            last_rows_right(call, name)


@pytest.mark.parametrize("S", [33, 65, 97, 129, 34])
@pytest.mark.parametrize("E", [64, 512])
def test_keys_broadcast_over_heads(S: int, E: int):
    """R05: keys of one head as stride-0 views at lengths of 1 modulo 32, with rows that see no key."""
    mask = torch.rand(1, 1, 17, S, device="cuda") < 0.5
    mask[..., :3, :] = False
    call = call_of(1, 8, 17, E, S=S, dtype=torch.bfloat16, device="cuda", attn_mask=mask)
    one = call._replace(key=call.key[:, :1].expand(1, 8, S, E), value=call.value[:, :1].expand(1, 8, S, E))
    everywhere_right(one)
    everywhere_right(one._replace(key=one.key.contiguous(), value=one.value.contiguous()))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("form", ["bool", "own", "float32", "with_triangle", "by_key"])
@pytest.mark.parametrize("H", [2, 1])
def test_a_row_that_sees_no_key_is_zero(dtype: torch.dtype, form: str, H: int):
    """R07, R08: rows without a visible key are 0 and all gradients finite, in every form of mask."""
    visible = torch.ones(2, 1, 40, 72, dtype=torch.bool, device="cuda")
    visible[0, :, 3], visible[1, :, 39] = False, False
    rest = {}
    if form == "with_triangle":
        visible[1, :, :, :5] = False
        rest = {"is_causal": True}
    if form == "by_key":
        visible = torch.ones(2, 1, 1, 72, dtype=torch.bool, device="cuda")
        visible[0] = False
    mask = visible
    if form in ("own", "float32"):
        mask = hiding(visible, dtype=dtype if form == "own" else torch.float32)
    call = call_of(
        2, 2, 40, 64, S=72, H=H, enable_gqa=H == 1, dtype=dtype, device="cuda", grads="qkv", attn_mask=mask, **rest
    )
    everywhere_right(call)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("columns", [1, 128, 441])
def test_columns_of_the_smallest_number(dtype: torch.dtype, columns: int):
    """R10: key tiles hidden by finfo.min leave output and gradients finite and right."""
    mask = torch.zeros(4, 3, 441, 441, device="cuda", dtype=dtype)
    mask[..., :columns] = torch.finfo(dtype).min
    everywhere_right(call_of(4, 3, 441, 64, dtype=dtype, device="cuda", grads="qkv", attn_mask=mask))


@pytest.mark.parametrize("grads", ["", "qkv"])
@pytest.mark.parametrize("layout", ["packed", "gapped", "sequence_first", "late_start", "stepped", "transposed"])
def test_views_are_read_where_they_lie(layout: str, grads: str):
    """R17, R20, R34: packed, gapped, late and stepped views give what dense copies give, gradients included."""
    made = [laid_out((2, 4, 128, 64), layout, torch.bfloat16, "cuda").requires_grad_("q" in grads) for _ in range(3)]
    everywhere_right(Call(*made, is_causal=True))


def test_a_packed_projection_split_over_heads():
    """R20: the reported split of one packed tensor into 16 query heads and one key head."""
    packed = torch.randn(512, 1, 18, 64, dtype=torch.float16, device="cuda")
    query, key, value = (part.permute(1, 2, 0, 3) for part in packed.split([16, 1, 1], dim=2))
    everywhere_right(Call(query, key, value, is_causal=True, enable_gqa=True))


@pytest.mark.parametrize("offsets", [(1, 2, 3), (0, 1, 0), (0, 0, 4)])
def test_views_that_start_between(offsets: tuple[int, ...]):
    """R34: float32 views that start 4, 8 and 12 bytes into a buffer."""
    size = 6 * 4 * 64 * 64
    memory = torch.randn(3 * size + 16, device="cuda")
    made = [memory[i * size + o : (i + 1) * size + o].view(6, 4, 64, 64) for i, o in enumerate(offsets)]
    everywhere_right(Call(*made))


@pytest.mark.parametrize("E", [72, 80, 96, 100, 104, 112, 30, 40])
def test_odd_head_dims_have_right_gradients(E: int):
    """R22, R49: head dims that are no multiple of 32, or of 8, forward and backward; a fused way exists."""
    names = everywhere_right(call_of(2, 4, 512, E, dtype=torch.bfloat16, device="cuda", grads="qkv"))
    assert {name.split("+")[-1] for name in names} & {"flash", "efficient", "cudnn"}


def test_large_values_do_not_overflow():
    """R25: float16 scores beyond 65504 are finite on every eligible route."""
    call = call_of(2, 2, 64, 64, dtype=torch.float16, device="cuda")
    large = call._replace(query=call.query * 200, key=call.key * 200)
    for name, output in answers(large):
        assert torch.isfinite(output).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_alone_wants_a_gradient(dtype: torch.dtype):
    """R26: the gradient of the mask alone is right, and the context lives."""
    mask = torch.randn(1, 2, 64, 64, device="cuda", dtype=dtype)
    everywhere_right(call_of(1, 2, 64, 16, dtype=dtype, device="cuda", grads="m", attn_mask=mask))
    torch.cuda.synchronize()


@pytest.mark.parametrize(("L", "S"), [(8, 8), (40, 72), (72, 40), (1, 72), (128, 128)])
@pytest.mark.parametrize("form", ["none", "bool", "own"])
@pytest.mark.parametrize("H", [4, 2])
def test_mask_and_triangle_both_apply(L: int, S: int, form: str, H: int):
    """R27, R28: the triangle is top-left and holds together with any mask, on every eligible route."""
    visible = torch.rand(1, 1, L, S, device="cuda") < 0.7
    mask = {"none": None, "bool": visible, "own": hiding(visible, dtype=torch.bfloat16)}[form]
    call = call_of(
        2, 4, L, 64, S=S, H=H, enable_gqa=H != 4, dtype=torch.bfloat16, device="cuda", grads="qkv",
        attn_mask=mask, is_causal=True,
    )  # fmt: skip
    everywhere_right(call)


def closed_form(shape: str, name: str) -> tuple[str, ...]:
    """Return the reasons against a backend for a signature given by text, without any tensor."""
    from smartattn.signature_text import parse_signature

    signature = parse_signature(shape)
    environment = environment_of(torch.device("cuda"))
    return parse_route(name, "cuda").reasons(signature, environment)


def test_index_ranges_that_would_end_the_process_are_closed():
    """R31, R32: sizes whose backward faults are refused by arithmetic, before anything runs."""
    flash = "sdpa train cuda bfloat16 N400 Hq4 H4 L10496 S128 E128 Ev128 layout=bhsd mask=none scale=positive grads=qkv"
    assert any("2^31" in reason or "2147483648" in reason for reason in closed_form(flash, "flash")), closed_form(
        flash, "flash"
    )
    masked = (
        "sdpa train cuda bfloat16 N1 Hq3 H3 L65600 S65600 E128 Ev128 layout=bhsd mask=bool scale=positive grads=qkv "
        "mask_axes=11ls mask_dtype=bool mask_layout=bhls"
    )
    assert closed_form(masked, "additive_mask+efficient")


def test_a_mask_between_31_and_32_bits_trains():
    """R32: a mask of more than 2^31 elements trains: rows at the end have right outputs and finite gradients."""
    L = 46400
    assert 1 << 31 < L * L < 1 << 32
    call = call_of(1, 1, L, 64, dtype=torch.bfloat16, device="cuda", grads="qkv", attn_mask=lower(L, L, "cuda"))
    smartattn.configure(mode="frozen")
    output = smartattn.scaled_dot_product_attention(*call)
    found = torch.autograd.grad(output, call[:3], torch.randn_like(output))
    assert all(bool(torch.isfinite(gradient).all()) for gradient in found)
    last_rows_right(call, None)


@pytest.mark.parametrize(("Hq", "H"), [(28, 4), (24, 4), (8, 1)])
def test_decoding_with_few_key_heads_and_left_padding(Hq: int, H: int):
    """R37: the decode cell (one query, mask, groups) is validated for itself, and right on every eligible route."""
    mask = torch.ones(8, 1, 1, 200, dtype=torch.bool, device="cuda")
    mask[3, ..., :77] = False
    call = call_of(8, Hq, 1, 128, S=200, H=H, enable_gqa=True, dtype=torch.bfloat16, device="cuda", attn_mask=mask)
    everywhere_right(call)


def test_the_reported_sm100_fault_is_denied_there():
    """R37: on sm100 with the reported cuDNN, few key heads keep cuDNN away; elsewhere it stays eligible."""
    import dataclasses

    call = call_of(64, 28, 1, 128, S=512, H=4, enable_gqa=True, dtype=torch.bfloat16, device="cuda")
    here = environment_of(torch.device("cuda"))
    there = dataclasses.replace(here, capability="sm100", cudnn=91900, torch="2.11.0")
    route = next(route for route in routes_for(read_signature(call)) if route.name == "cudnn")
    assert any("193893" in reason for reason in route.reasons(read_signature(call), there))
    assert not any("193893" in reason for reason in route.reasons(read_signature(call), here))


@pytest.mark.parametrize("kind", ["strict", "warn", "off"])
def test_strict_mode_repeats_bit_for_bit(kind: str):
    """R86: in strict mode outputs and gradients repeat bit for bit."""
    call = call_of(2, 8, 512, 64, dtype=torch.bfloat16, device="cuda", grads="qkv", is_causal=True)
    torch.use_deterministic_algorithms(kind != "off", warn_only=kind == "warn")
    try:
        found = []
        for _ in range(5):
            output = smartattn.scaled_dot_product_attention(*call)
            found.append((output, *torch.autograd.grad(output, call[:3], torch.ones_like(output))))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found[0])
    if kind == "strict":
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("form", ["plain", "causal", "mask"])
def test_scales_of_zero_and_below(scale: float, form: str):
    """Contract: scale 0 and negative scales mean what they say on every eligible route."""
    rest = {"plain": {}, "causal": {"is_causal": True}, "mask": {"attn_mask": torch.rand(40, 72, device="cuda") < 0.7}}
    call = call_of(2, 2, 40, 64, S=72, dtype=torch.bfloat16, device="cuda", grads="qkv", scale=scale, **rest[form])
    everywhere_right(call)
    assert math.isfinite(scale)
