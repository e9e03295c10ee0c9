"""Every CUDA backend is right wherever it calls itself eligible."""

from __future__ import annotations

import pytest
import torch

from smartattn.backends.output_layout import in_order, like_query
from smartattn.backends.registry import backends_for
from smartattn.signature import Call
from tests.gpu.attention_cases import TOLERANCES, eligible, errors, reference, run, tensors

SHAPES = [
    (2, 4, 4, 64, 64, 64, 64),
    (2, 4, 4, 65, 129, 40, 40),
    (1, 8, 2, 128, 128, 128, 128),
    (1, 8, 1, 1, 300, 64, 64),
    (2, 4, 2, 100, 200, 67, 67),
    (2, 2, 2, 130, 70, 192, 128),
    (1, 2, 2, 33, 33, 512, 512),
    (2, 3, 3, 43, 43, 8, 8),
]
MASKS = ["none", "causal", "bool", "masked rows", "key padding", "additive", "float32", "causal+bool", "one key column"]


def _mask(kind: str, N: int, L: int, S: int, dtype: torch.dtype) -> torch.Tensor | None:
    visible = torch.rand(N, 1, L, S, device="cuda") > 0.3
    if kind == "masked rows":
        visible[:, :, : max(1, L // 4)] = False
    made = {
        "bool": visible,
        "masked rows": visible,
        "causal+bool": visible[:, :, :1],
        "key padding": visible[:, :, :1],
        "one key column": visible[0, 0, :, :1],
        "additive": torch.randn(L, S, device="cuda").to(dtype),
        "float32": torch.zeros(N, 1, L, S, device="cuda").masked_fill(~visible, float("-inf")),
    }
    return made.get(kind)


@pytest.mark.gpu
@pytest.mark.parametrize("wants_grad", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_eligible_backend_equals_the_reference(shape, kind: str, dtype: torch.dtype, *, wants_grad: bool) -> None:
    """Output and gradients are right over shapes, masks, dtypes and grouped heads, in each of three layouts."""
    N, Hq, H, L, S, E, Ev = shape
    for layout in ("bhsd", "bshd", "packed"):
        qkv = tensors(N, Hq, H, L, S, E, Ev, dtype=dtype, layout=layout, wants_grad=wants_grad)
        call = Call(*qkv, _mask(kind, N, L, S, dtype), 0.0, "causal" in kind, None, Hq != H)
        grad_out = torch.randn(N, Hq, L, Ev, device="cuda", dtype=dtype) if wants_grad else None
        right = reference(call, grad_out)
        found = {name: errors(run(runner, call, grad_out), right) for name, runner in eligible(call).items()}
        assert "math" in found
        assert {name: e for name, e in found.items() if not max(e) < TOLERANCES[dtype]} == {}


@pytest.mark.gpu
def test_one_key_head_is_broadcast_without_enable_gqa() -> None:
    """A single key head serves every query head, as Math does it, also where PyTorch's own selector refuses."""
    call = Call(*tensors(2, 8, 1, 64, 200, 64))
    found = eligible(call)
    assert {"cudnn", "flash"} <= set(found)
    right = reference(call)
    assert all(errors(run(runner, call), right)[0] < TOLERANCES[torch.bfloat16] for runner in found.values())


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["gap", "off1", "off2", "off4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_unaligned_memory_is_refused_by_every_fused_backend(layout: str, dtype: torch.dtype) -> None:
    """Data or rows that start between multiples of 16 bytes reach no kernel that reads 16 bytes at a time."""
    call = Call(*tensors(2, 4, 4, 64, 64, 64, dtype=dtype, layout=layout))
    if dtype == torch.float32 and layout == "off4":
        pytest.skip("four float32 elements are 16 bytes: aligned")
    assert set(eligible(call)) == {"eager_inplace", "eager", "math"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["stock", "cudnn", "flash", "efficient"])
def test_gradients_do_not_depend_on_the_layouts_seen_before(name: str) -> None:
    """Calls of one shape whose gradients come back in different layouts all get right gradients."""
    shape = (2, 5, 5, 96, 96, 64)
    for _ in range(2):
        for order in ("bshd", "bhsd", "expanded", "transposed"):
            call = Call(*tensors(*shape, wants_grad=True))
            grad_out = torch.randn(2, 5, 96, 64, device="cuda", dtype=torch.bfloat16)
            if order == "bshd":
                grad_out = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
            elif order == "expanded":
                grad_out = grad_out[:1, :1, :1, :1].expand(2, 5, 96, 64)
            elif order == "transposed":
                grad_out = grad_out.transpose(2, 3).contiguous().transpose(2, 3)
            found = errors(run(eligible(call)[name], call, grad_out), reference(call, grad_out))
            assert max(found) < TOLERANCES[torch.bfloat16], (order, found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_efficient_differentiates_the_mask_alone(dtype: torch.dtype) -> None:
    """The mask's gradient is right when query, key and value want none, where PyTorch loses the CUDA context."""
    mask = torch.randn(1, 1, 64, 64, device="cuda", dtype=dtype, requires_grad=True)
    call = Call(*tensors(1, 1, 1, 64, 64, 16, dtype=dtype), mask)
    found = eligible(call)
    assert "stock" not in found
    assert "efficient" in found
    (gradient,) = torch.autograd.grad(found["efficient"](*call).sum(), mask)
    (right,) = torch.autograd.grad(found["math"](*call).sum(), mask)
    assert (gradient - right).abs().max() < TOLERANCES[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
def test_dropout_drops_the_same_places_in_backward(name: str) -> None:
    """The gradient of value shows the mask that the output shows, at the asked rate."""
    query, key, _ = tensors(2, 4, 4, 128, 128, 128, wants_grad=True)
    eye = torch.eye(128, device="cuda", dtype=torch.bfloat16).expand(2, 4, 128, 128).contiguous()
    call = Call(query, key, eye.clone().requires_grad_(), None, 0.25)
    output, _, _, grad_value = run(eligible(call)[name], call, eye)
    assert torch.allclose(grad_value.transpose(-1, -2), output, atol=1e-2)
    assert abs((output == 0).float().mean().item() - 0.25) < 0.03


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_like_query_gives_the_order_of_query(axes: tuple[int, ...]) -> None:
    """Values stay, and a dense query's strides are the output's."""
    sizes = [(2, 3, 5, 4)[axis] for axis in axes]
    back = [axes.index(axis) for axis in range(4)]
    query, output = torch.randn(sizes).permute(back), torch.randn(2, 3, 5, 4)
    found = like_query(output, query)
    assert found.stride() == query.stride()
    assert torch.equal(found, output)


def test_in_order_gives_the_named_order() -> None:
    """BSHD and BHSD are given whatever query's order is."""
    output = torch.randn(2, 3, 5, 4)
    assert in_order(output, output, "bshd").stride() == (60, 4, 12, 1)
    assert in_order(output.transpose(1, 2), output, "bhsd").is_contiguous()


def test_cuda_backends_stand_in_tie_order() -> None:
    """Ties go to stock, then to the faster fused operators, then to plain PyTorch."""
    names = [name for name in backends_for("cuda") if name in ("stock", "cudnn", "flash", "efficient", "eager", "math")]
    assert names == ["stock", "cudnn", "flash", "efficient", "eager", "math"]
