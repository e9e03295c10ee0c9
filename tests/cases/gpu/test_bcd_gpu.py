"""Reported faults of kinds B, C and D on a GPU, through the public function and every eligible route."""

from __future__ import annotations

import pytest
import torch

import smartattn
from smartattn.signature import Call
from tests import oracle
from tests.cases.common import answers, call_of, eligible_routes, everywhere_right, hiding

pytestmark = pytest.mark.gpu
stock = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("shape", [(65536, 8, 4, 64), (1, 65536, 10, 16), (65535, 8, 4, 64)])
@pytest.mark.parametrize("grads", ["", "qkv"])
def test_more_batches_or_heads_than_a_launch_grid(shape: tuple[int, ...], grads: str):
    """R38: 65536 batches or heads are answered, trained and right at both ends."""
    call = call_of(*shape, dtype=torch.float16, device="cuda", grads=grads)
    for _ in range(2):
        output = smartattn.scaled_dot_product_attention(*call)
        for n, h in ((0, 0), (shape[0] - 1, shape[1] - 1)):
            part = Call(*(tensor.detach()[n : n + 1, h : h + 1] for tensor in call[:3]))
            oracle.check(part, output[n : n + 1, h : h + 1].detach(), oracle.answer(part))
    if grads:
        output.sum().backward()
        assert torch.isfinite(call.query.grad).all()
    torch.cuda.synchronize()


def test_65536_batches_with_a_key_mask():
    """R39: the reported cell, which PyTorch's choice accepts and cannot run, is answered."""
    mask = torch.rand(65536, 1, 1, 2, device="cuda") < 0.8
    mask[..., 0] = True
    call = call_of(65536, 1, 1, 8, S=2, dtype=torch.float16, device="cuda", attn_mask=mask)
    output = smartattn.scaled_dot_product_attention(*call)
    oracle.check(call, output, oracle.answer(call))


@pytest.mark.parametrize("sizes", [(0, 10, 64, 16), (2, 0, 8, 8), (2, 2, 0, 8), (2, 2, 8, 0)])
def test_empty_sizes(sizes: tuple[int, ...]):
    """R40: empty batches, heads and lengths give PyTorch's shapes, no keys give zeros, nothing is tuned."""
    N, H, L, S = sizes
    query, key, value = (torch.randn(N, H, n, 64, device="cuda", dtype=torch.float16) for n in (L, S, S))
    output = smartattn.scaled_dot_product_attention(query, key, value)
    assert output.shape == (N, H, L, 64)
    assert not output.any()
    assert smartattn.stats().tunings == 0


def test_a_small_call_in_inference_mode():
    """R43: the tiny shape that cuDNN had no plan for is answered, and its failure would be an outcome, not an error."""
    call = call_of(2, 4, 8, 16, dtype=torch.float16, device="cuda")
    with torch.inference_mode():
        everywhere_right(call)


def test_a_stream_of_changing_lengths():
    """R44: 300 calls of ever-changing length, masked and not, are all right and finite."""
    generator = torch.Generator().manual_seed(0)
    smartattn.configure(process_budget_s=5.0, signature_budget_ms=100.0)
    for L in torch.randint(1, 1500, (300,), generator=generator).tolist():
        call = call_of(1, 4, L, 64, dtype=torch.float16, device="cuda")
        if L % 2:
            call = call._replace(attn_mask=torch.rand(L, L, device="cuda") < 0.9)
        output = smartattn.scaled_dot_product_attention(*call)
        torch.testing.assert_close(output, stock(*call[:4]), atol=5e-3, rtol=5e-3)
    assert smartattn.stats().fallbacks == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_do_not_depend_on_the_layout_of_grad_out(dtype: torch.dtype):
    """R16, R46: head-first, sequence-first, permuted and expanded gradients give the same, in any order of calls."""
    call = call_of(2, 8, 128, 64, dtype=dtype, device="cuda", grads="qkv")
    values = torch.randn(2, 8, 128, 64, device="cuda").to(dtype)
    layouts = (
        values,
        torch.ones((), dtype=dtype, device="cuda").expand(2, 8, 128, 64),
        values.transpose(1, 2).contiguous().transpose(1, 2),
        values.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        values,
    )
    everywhere_right(call, grad_outs=layouts)


@pytest.mark.parametrize(("N", "H", "L", "S"), [(2, 8, 498, 498), (8, 16, 43, 43), (2, 1, 16, 700), (2, 2, 7, 129)])
@pytest.mark.parametrize("form", ["own", "bool", "slice", "rows"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mask_rows_of_any_length(N: int, H: int, L: int, S: int, form: str, dtype: torch.dtype):
    """R47: masks whose rows start at odd places are right on every eligible route."""
    visible = torch.rand(N, 1, 1 if form == "rows" else L, S, device="cuda") < 0.8
    mask = visible if form == "bool" else hiding(visible, dtype=dtype)
    if form == "slice":
        mask = hiding(torch.rand(N, 1, L, S + 3, device="cuda") < 0.8, dtype=dtype)[..., 1 : S + 1]
    everywhere_right(call_of(N, H, L, 32, S=S, dtype=dtype, device="cuda", attn_mask=mask))


@pytest.mark.parametrize(("E", "Ev"), [(48, 32), (192, 128), (64, 128)])
@pytest.mark.parametrize("grads", ["", "qkv"])
def test_value_dims_that_differ(E: int, Ev: int, grads: str):
    """R50: value head dims of their own are right on every way that takes them."""
    everywhere_right(call_of(1, 4, 64, E, Ev=Ev, dtype=torch.bfloat16, device="cuda", grads=grads))


@pytest.mark.parametrize("mask", ["none", "float32", "bool"])
def test_autocast(mask: str):
    """R52, R89: under autocast float32 inputs, unequal dtypes and float32 masks run in its dtype."""
    masks = {
        "none": None,
        "float32": torch.zeros(64, 64, device="cuda"),
        "bool": torch.rand(64, 64, device="cuda") < 0.8,
    }
    call = call_of(2, 4, 64, 64, device="cuda", grads="qkv", attn_mask=masks[mask])
    with torch.autocast("cuda", torch.bfloat16):
        for made in (call, call._replace(value=call.value.detach().bfloat16())):
            output = smartattn.scaled_dot_product_attention(*made)
            assert output.dtype == torch.bfloat16
            expected = oracle.answer(made._replace(**{n: getattr(made, n).detach() for n in ("query", "key", "value")}))
            torch.testing.assert_close(output.double(), expected.output, atol=3e-2, rtol=3e-2)
    output.float().sum().backward()


@pytest.mark.parametrize(("E", "H", "enable_gqa"), [(64, 4, True), (64, 1, False), (512, 4, True), (128, 1, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("L", [1, 130])
def test_grouped_heads(E: int, H: int, enable_gqa: bool, dtype: torch.dtype, L: int):
    """R61, R62: grouped heads are right on every eligible route, and up to a head dim of 256 one of them is fused."""
    call = call_of(2, 16, L, E, S=257, H=H, enable_gqa=enable_gqa, dtype=dtype, device="cuda")
    names = everywhere_right(call)
    fused = {name.split("+")[-1] for name in names} & {"flash", "efficient", "cudnn", "flash_masked"}
    assert fused


@pytest.mark.parametrize("batch", [(), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_other_ranks_reach_fused_backends(batch: tuple[int, ...], masked: bool):
    """R63, R64: inputs of 3, 5 and 6 dimensions have a fused way with the right values."""
    mask = torch.rand(128, 128, device="cuda") < 0.8 if masked else None
    call = call_of(*batch, 4, 128, 64, dtype=torch.float16, device="cuda", attn_mask=mask)
    assert any(name.split("+")[-1] in ("flash", "efficient", "cudnn") for name in everywhere_right(call))


def test_broadcast_masks_take_no_memory_per_head():
    """R67: a (1, 1, L, L) mask beside 12 heads costs at most a few copies of itself, on the chosen route."""
    L = 3000
    mask = torch.randn(1, 1, L, L, device="cuda", dtype=torch.bfloat16)
    call = call_of(1, 12, L, 64, dtype=torch.bfloat16, device="cuda", attn_mask=mask)
    smartattn.scaled_dot_product_attention(*call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    smartattn.scaled_dot_product_attention(*call)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 4 * mask.numel() * mask.element_size(), smartattn.explain(*call).route


def test_the_memory_order_is_that_of_pytorch():
    """R91: whatever route answers, the output lies in memory as PyTorch's own answer would."""
    for dtype in (torch.bfloat16, torch.float32):
        for dims in ((2, 4, 128, 64), (2, 128, 4, 64)):
            made = [torch.randn(dims, device="cuda", dtype=dtype) for _ in range(3)]
            made = made if dims[1] == 4 else [tensor.transpose(1, 2) for tensor in made]
            expected = stock(*made)
            for name, output in answers(Call(*made)):
                assert output.stride() == expected.stride(), (name, dtype, dims)


def test_tuned_is_not_slower_than_stock_by_its_own_measurements():
    """R56: the chosen route's measured time is at most stock's, for the shapes whose default order was reported."""
    for call in (
        call_of(1, 24, 4608, 128, dtype=torch.bfloat16, device="cuda"),
        call_of(1, 32, 4096, 128, dtype=torch.bfloat16, device="cuda", is_causal=True, grads="qkv"),
    ):
        explanation = smartattn.explain(*call, tune=True)
        outcomes = explanation.outcomes
        if outcomes["stock"].is_ == "timed":
            assert outcomes[explanation.route].device_us <= outcomes["stock"].device_us * 1.001


def test_decoding_pays_no_plan_per_step():
    """R58, R59: one query against 1 to 600 keys: few tunings, right answers."""
    module = smartattn.SmartAttention(dynamic=True)
    smartattn.configure(signature_budget_ms=100.0)
    for S in range(1, 600, 7):
        call = call_of(1, 8, 1, 64, S=S, H=2, enable_gqa=True, dtype=torch.bfloat16, device="cuda")
        output = module(*call[:3], enable_gqa=True)
        torch.testing.assert_close(output, stock(*call[:3], enable_gqa=True), atol=2e-2, rtol=2e-2)
    assert smartattn.stats().tunings <= 8


def test_verify_finds_nothing_wrong_after_tuning():
    """Every choice that was tuned on this device passes all probes."""
    for rest in ({}, {"is_causal": True}, {"attn_mask": torch.rand(300, 300, device="cuda") < 0.8}):
        for grads in ("", "qkv"):
            smartattn.scaled_dot_product_attention(
                *call_of(2, 4, 300, 64, dtype=torch.bfloat16, device="cuda", grads=grads, **rest)
            )
    found = smartattn.verify(every_route=True)
    assert found
    assert [str(each) for each in found if each.is_quarantined] == []


def test_nothing_is_left_of_a_tuning():
    """Contract: memory statistics, generators and gradients are as found after a tuning on a GPU."""
    call = call_of(2, 4, 300, 64, dtype=torch.bfloat16, device="cuda", grads="qkv")
    smartattn.scaled_dot_product_attention(*call_of(2, 4, 64, 64, dtype=torch.bfloat16, device="cuda", grads="qkv"))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.get_rng_state(), torch.get_rng_state()
    output = smartattn.scaled_dot_product_attention(*call)
    torch.cuda.synchronize()
    del output
    assert torch.cuda.memory_allocated() <= before[0] + (1 << 21)
    assert torch.equal(torch.cuda.get_rng_state(), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert all(tensor.grad is None for tensor in call[:3])
    assert eligible_routes(call)
