"""Facts about PyTorch on CUDA that the package relies on, and the reported faults, each answered right."""

from __future__ import annotations

import math
import random

import pytest
import torch

from smartattn import torch_rules, versions
from smartattn.backends.stock import resolved_backend
from smartattn.clocks import CudaClock, clock_for
from smartattn.environment import environment_of
from smartattn.guards import reasons
from smartattn.signature import Call, Signature, read_signature
from smartattn.torch_reasons import torch_reasons
from tests.gpu.attention_cases import TOLERANCES, eligible, errors, reference, run, tensors

pytestmark = pytest.mark.gpu
IS_OLD = versions.TORCH < (2, 12)
HALF_TOLERANCE = TOLERANCES[torch.bfloat16]


def _signature(call: Call) -> Signature:
    signature = read_signature(call)
    assert signature is not None
    return signature


def _assert_all_right(call: Call, names: set[str], *, is_training: bool = False) -> None:
    """Assert that the named backends are eligible and that every eligible one is right."""
    found = eligible(call)
    assert names <= set(found)
    shape = (*call.query.shape[:-1], call.value.size(-1))
    grad_out = torch.randn(shape, device="cuda", dtype=call.query.dtype) if is_training else None
    right = reference(call, grad_out)
    wrong = {name: errors(run(runner, call, grad_out), right) for name, runner in found.items()}
    assert {name: e for name, e in wrong.items() if not max(e) < TOLERANCES[call.query.dtype]} == {}


def _very_negative(L: int, S: int, E: int = 64, H: int = 1) -> tuple[torch.Tensor, ...]:
    """Return inputs whose logits all lie near -120."""
    query, key, value = (t * factor for t, factor in zip(tensors(1, H, H, L, S, E), (0.1, 0.1, 1.0), strict=True))
    query[..., 0], key[..., 0] = 1.0, -120.0 * math.sqrt(E)
    return tuple(t.requires_grad_() for t in (query, key, value))


def test_masked_rows_give_zeros_in_both_passes() -> None:
    """Fault 1: a bool mask with rows that see no key; PyTorch's own choice is guarded where it resolves to cuDNN."""
    mask = torch.rand(2, 1, 64, 64, device="cuda") > 0.3
    mask[:, :, :9] = False
    call = Call(*tensors(2, 4, 4, 64, 64, 64, wants_grad=True), mask)
    _assert_all_right(call, {"efficient", "math"}, is_training=True)
    for runner in eligible(call).values():
        output, grad_query, _, _ = run(runner, call, torch.ones_like(call.query))
        assert output[:, :, :9].abs().max() == 0
        assert grad_query[:, :, :9].abs().max() == 0


def test_causal_and_left_padding() -> None:
    """Fault 2: padded rows are zero, and the gradients of real rows are right."""
    mask = torch.ones(300, 300, dtype=torch.bool, device="cuda").tril().repeat(4, 1, 1, 1)
    for index, pad in enumerate((0, 10, 100, 250)):
        mask[index, :, :, :pad] = False
    call = Call(*tensors(4, 8, 8, 300, 300, 64, wants_grad=True), mask)
    _assert_all_right(call, {"cudnn", "efficient", "math"}, is_training=True)


@pytest.mark.parametrize(
    ("L", "S", "has_mask"), [(704, 704, True), (704, 704, False), (1, 128, False), (128, 192, True)]
)
def test_very_negative_logits_give_finite_gradients(L: int, S: int, *, has_mask: bool) -> None:
    """Faults 3 and 4: no eligible backend gives NaN gradients; cuDNN's backward is guarded at these lengths."""
    mask = torch.ones(L, S, dtype=torch.bool, device="cuda").tril(S - L) if has_mask else None
    call = Call(*_very_negative(L, S), mask)
    found = eligible(call)
    assert not {"cudnn", "stock"} & set(found)
    assert {"efficient", "math"} <= set(found)
    for name, runner in found.items():
        results = run(runner, call, torch.randn_like(call.query))
        assert all(t.isfinite().all() for t in results), name


def test_very_negative_logits_at_other_lengths_stay_with_cudnn() -> None:
    """The guard on cuDNN's backward is no wider than the fault: these lengths are clean and stay eligible."""
    for L, S in ((640, 640), (97, 97), (64, 97), (2, 256), (129, 129)):
        call = Call(*_very_negative(L, S))
        results = run(eligible(call)["cudnn"], call, torch.randn_like(call.query))
        assert all(t.isfinite().all() for t in results), (L, S)


def test_float32_mask_beside_halves() -> None:
    """Fault 5: the mask is cast, not reinterpreted."""
    mask = torch.zeros(32, 32, device="cuda").masked_fill(torch.ones(32, 32, device="cuda").triu(1) > 0, float("-inf"))
    call = Call(*tensors(2, 4, 4, 32, 32, 64, dtype=torch.float16), mask)
    _assert_all_right(call, {"cudnn", "efficient", "math"})


@pytest.mark.parametrize("S", [33, 65, 97, 129])
@pytest.mark.parametrize("E", [64, 512])
def test_expanded_keys_under_a_mask(S: int, E: int) -> None:
    """Fault 6: keys of stride 0 over heads; Efficient is guarded where S is 1 modulo 32."""
    query, key, value = tensors(1, 4, 1, S, S, E)
    mask = torch.ones(1, 1, S, S, dtype=torch.bool, device="cuda").tril()
    mask[..., :8, :] = False
    call = Call(query, key.expand(-1, 4, -1, -1), value.expand(-1, 4, -1, -1), mask)
    assert "efficient" not in eligible(call)
    _assert_all_right(call, {"eager", "math"})


def test_masks_beyond_32_bit_offsets() -> None:
    """Fault 7: with a 65537 x 65537 mask the last rows are right, and Efficient is not eligible."""
    length = 65537
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril_()
    call = Call(*tensors(1, 1, 1, length, length, 64), mask)
    found = eligible(call)
    assert not {"efficient", "stock"} & set(found) or not IS_OLD
    assert "efficient" not in found
    last = slice(length - 64, length)
    right = reference(Call(call.query[:, :, last], call.key, call.value, mask[last]))
    assert errors((found["cudnn"](*call)[:, :, last],), right)[0] < HALF_TOLERANCE


@pytest.mark.parametrize("layout", ["off1", "off2"])
def test_unaligned_float32_views_are_guarded(layout: str) -> None:
    """Fault 8: PyTorch's own choice would lose the CUDA context; what is left is right."""
    call = Call(*tensors(6, 4, 4, 64, 64, 64, dtype=torch.float32, layout=layout))
    assert "stock" not in eligible(call) or not IS_OLD
    _assert_all_right(call, {"math"})


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 65536, 65536, 10, 10, 16), torch.float32), ((65536, 8, 8, 4, 4, 64), torch.float16)],
    ids=["heads", "batches"],
)
def test_more_than_a_launch_grid_holds(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Fault 9: 65536 heads or batches are answered by whoever can, in both passes."""
    for is_training in (False, True):
        call = Call(*tensors(*shape, dtype=dtype, wants_grad=is_training))
        _assert_all_right(call, {"math"}, is_training=is_training)


def test_cudnn_with_65536_batches_and_a_mask_is_guarded() -> None:
    """Fault 10: cuDNN accepts this and fails when it runs; Efficient answers it."""
    mask = torch.rand(65536, 1, 1, 2, device="cuda") > 0.3
    call = Call(*tensors(65536, 1, 1, 1, 2, 8, dtype=torch.float16), mask)
    assert not {"cudnn", "stock"} & set(eligible(call))
    _assert_all_right(call, {"efficient", "math"})


@pytest.mark.parametrize("scale", [0.0, -0.1])
def test_scales_of_zero_and_below(scale: float) -> None:
    """PyTorch's flash and cuDNN give NaN for them; PyTorch's own choice is guarded and the rest is right."""
    call = Call(*tensors(2, 4, 4, 64, 64, 64), None, 0.0, True, scale)
    assert "stock" not in eligible(call)
    _assert_all_right(call, {"eager", "math"})


def test_odd_starts_of_masks_are_copied() -> None:
    """A mask that starts 2 bytes into its buffer reaches Efficient and cuDNN as a copy."""
    buffer = torch.randn(64 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    _assert_all_right(Call(*tensors(2, 2, 2, 64, 64, 64), buffer[1:].view(64, 64)), {"cudnn", "efficient"})


def test_raw_flash_is_causal_at_the_lower_right() -> None:
    """The operator's own triangle ends at the last key, which is why only squares are given to it."""
    query, key, value = tensors(1, 4, 4, 64, 128, 64)
    found = versions.flash_attention(query, key, value, 0.0, True, False)[0]
    visible = torch.ones(64, 128, dtype=torch.bool, device="cuda").tril(64)
    assert errors((found,), reference(Call(query, key, value, visible)))[0] < HALF_TOLERANCE


def test_output_order_is_predicted() -> None:
    """The memory order of PyTorch's own output is what ``stock_output_order`` says."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for E in (64, 60):
            for layout in ("bhsd", "bshd"):
                call = Call(*tensors(2, 4, 4, 16, 16, E, dtype=dtype, layout=layout))
                order = torch_rules.stock_output_order(_signature(call), environment_of(call.query.device))
                output = versions.sdpa(*call[:3])
                is_bshd = output.stride(1) < output.stride(2)
                assert is_bshd == ((order if order != "query" else layout) == "bshd"), (dtype, E, layout)


@pytest.mark.skipif(not IS_OLD, reason="seen on torch 2.11; not looked at on this version")
def test_pytorch_forgets_the_gradient_layout_of_cudnn_plans() -> None:
    """Without ``steady_gradient`` two gradient layouts of one shape share a plan: the reason for that function."""
    worst = 0.0
    for is_bshd in (False, True):
        call = Call(*tensors(3, 7, 7, 96, 96, 64, wants_grad=True))
        grad_out = torch.randn(3, 7, 96, 64, device="cuda", dtype=torch.bfloat16)
        if is_bshd:
            grad_out = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
        output = versions.cudnn_attention(*call[:3], None, True, 0.0, False, False)[0]
        gradients = torch.autograd.grad(output, call.tensors, grad_out)
        worst = max(worst, *errors((output.detach(), *gradients), reference(call, grad_out)))
    assert worst > 0.5


def test_the_resolution_of_stock_is_predicted() -> None:
    """The pure prediction equals what PyTorch's dispatch says, over random calls."""
    chance = random.Random(0)
    environment = environment_of(torch.device("cuda", torch.cuda.current_device()))
    num_compared = 0
    for _ in range(1500):
        call = _random_call(chance)
        signature = read_signature(call)
        if signature is None:
            continue
        try:
            resolved = resolved_backend(call)
        except RuntimeError:
            continue  # a call that PyTorch itself refuses
        num_compared += 1
        assert torch_rules.stock_resolution(signature, environment) == resolved, str(signature)
    assert num_compared > 500


def _random_call(chance: random.Random) -> Call:
    H, group, L = chance.choice([1, 2, 4]), chance.choice([1, 1, 2]), chance.choice([1, 2, 16, 33])
    S, E = chance.choice([1, L, 16, 33]), chance.choice([8, 16, 20, 64, 67, 128, 136, 192, 256, 264])
    dtype = chance.choice([torch.float16, torch.bfloat16, torch.float32])
    layout = chance.choice(["bhsd", "bshd", "packed", "gap", "off1", "off4"])
    Ev = chance.choice([E, E, 64, 128])
    qkv = tensors(2, H * group, H, L, S, E, Ev, dtype=dtype, layout=layout, wants_grad=chance.random() < 0.4)
    mask = None
    if chance.random() < 0.5:
        sizes = chance.choice([(L, S), (1, S), (2, 1, 1, S), (2, 1, L, S), (H * group, L, S), (L, 1)])
        mask = torch.rand(*sizes, device="cuda") > 0.5
        if chance.random() < 0.4:
            mask = mask.to(chance.choice([dtype, torch.float32])).requires_grad_(chance.random() < 0.3)
    return Call(*qkv, mask, chance.choice([0.0, 0.0, 0.25, 0.1]), chance.random() < 0.4, None, chance.random() < 0.6)


def test_torch_says_why_it_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch's own reasons come as text, and nothing reaches standard error."""
    call = Call(*tensors(1, 4, 4, 8, 16, 300), torch.ones(8, 16, dtype=torch.bool, device="cuda"))
    found = torch_reasons(call)
    assert "head_dim" in found["cudnn"][0]
    assert "attn_mask" in found["flash"][0]
    assert "divisible by 8" in found["efficient"][0]
    assert torch_reasons(Call(*tensors(1, 4, 4, 8, 16, 64)))["flash"] == ()
    assert capfd.readouterr().err == ""


def test_the_clock_counts_every_call_and_leaves_the_device_alone() -> None:
    """A sample runs exactly the calls asked for, on the device given, and both times are positive."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    counter = torch.zeros((), device=device)
    clock = clock_for(device)
    assert isinstance(clock, CudaClock)
    current = torch.cuda.current_device()
    sample = clock.sample(lambda: counter.add_(1), 45)
    assert counter.item() >= 45
    assert sample.device_us > 0
    assert sample.host_us > 0
    assert torch.cuda.current_device() == current


def test_reasons_of_stock_name_what_would_run() -> None:
    """The reasons of ``stock`` say which operator PyTorch would take, and why that is wrong here."""
    call = Call(*tensors(2, 4, 4, 64, 64, 64), None, 0.0, False, -1.0)
    (text,) = reasons("stock", _signature(call), environment_of(call.query.device))
    assert text.startswith(f"PyTorch would run {resolved_backend(call)}, which gives NaN")
