"""Made-up inputs have the signature and the layouts they were made up for."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smartattn.inputs import KINDS, fill, is_clean, synthesize
from smartattn.masks import canonicalize
from smartattn.signature import Call, read_signature
from tests.backends.contract import LAYOUTS, Problem, laid_out, problems

CPU = torch.device("cpu")
QUICK = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@QUICK
@given(problem=problems(), dropout_p=st.sampled_from([0.0, 0.1, 0.25]))
def test_synthesized_calls_read_back(problem: Problem, dropout_p: float) -> None:
    """A call made up for a signature has that signature."""
    signature = read_signature(problem.call._replace(dropout_p=dropout_p))
    assert signature is not None
    assert read_signature(synthesize(signature, CPU)) == signature


@QUICK
@given(problem=problems(), kind=st.sampled_from(KINDS))
def test_filled_calls_keep_the_signature(problem: Problem, kind: str) -> None:
    """Other values change neither layouts nor anything else of the signature."""
    if problem.call.attn_mask is None and kind in ("masked_rows", "one_visible_key"):
        return
    assert read_signature(fill(problem.call, kind)) == problem.signature


@pytest.mark.parametrize("layout", LAYOUTS)
def test_filled_tensors_keep_strides(layout: str) -> None:
    """Strides and alignment are those of the caller, to the element."""
    query = laid_out((2, 3, 5, 6), layout, torch.float32)
    filled = fill(Call(query, query, query), "random")
    assert filled.query.stride() == query.stride()
    assert filled.query.data_ptr() % 16 == query.data_ptr() % 16
    assert filled.query.data_ptr() != query.data_ptr()


def test_a_slice_of_a_large_cache_takes_little_memory() -> None:
    """Rows far apart are moved closer; the symbolic layout stays."""
    cache = torch.zeros(2, 4, 4096, 16)
    key = cache[:, :, :8]
    call = Call(torch.zeros(2, 4, 1, 16), key, key)
    filled = fill(call, "random")
    assert filled.key.untyped_storage().nbytes() < 8 * key.numel() * 4
    assert read_signature(filled) == read_signature(call)


def test_the_program_random_state_is_never_touched() -> None:
    """All draws come from private generators, and the same seed gives the same values."""
    call = Call(*(torch.zeros(1, 2, 4, 8) for _ in range(3)), torch.ones(4, 4, dtype=torch.bool))
    before = torch.get_rng_state()
    first, second = (fill(call, "random", seed=3) for _ in range(2))
    signature = read_signature(call)
    assert signature is not None
    synthesize(signature, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))


@pytest.mark.parametrize("scale", [None, 1.0, -0.5, 1e-3])
@pytest.mark.parametrize("layout", ["dense", "expanded_heads"])
def test_very_negative_logits(scale: float | None, layout: str) -> None:
    """Every row's logits lie around -120 for any scale and layout."""
    shape = (1, 2, 16, 32)
    call = Call(*(laid_out(shape, layout, torch.float32) for _ in range(3)), scale=scale)
    filled = fill(call, "very_negative")
    logits = filled.query @ filled.key.mT * (1 / math.sqrt(32) if scale is None else scale)
    assert -140 < float(logits.min()) < float(logits.max()) < -100


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("shape", [(6, 9), (1, 9), (2, 1, 6, 9), (2, 1, 1, 9), (1, 3, 6, 1)])
def test_masks_show_what_their_kind_says(shape: tuple[int, ...], dtype: torch.dtype, is_causal: bool) -> None:
    """Random masks leave a key to every row, even under the triangle; the other kinds hide rows or all keys but one."""
    call = Call(
        torch.zeros(2, 3, 6, 4), *(torch.zeros(2, 3, 9, 4) for _ in range(2)), torch.ones(shape, dtype=dtype),
        is_causal=is_causal,
    )  # fmt: skip

    def visible(kind: str) -> torch.Tensor:
        mask = fill(call, kind).attn_mask
        assert mask is not None
        shown = (mask if dtype == torch.bool else mask > -math.inf).expand(2, 3, 6, 9)
        return shown & torch.ones(6, 9, dtype=torch.bool).tril() if is_causal else shown

    assert visible("random").any(-1).all()
    assert visible("one_visible_key").any(-1).all()
    assert not visible("masked_rows").any(-1).all()
    if shape[-1] > 1 and not is_causal:
        assert (visible("one_visible_key").sum(-1) == 1).all()


def test_what_cannot_be_made_up_is_said() -> None:
    """Unknown kinds, missing masks, kept masks and unknown mask classes raise with their name."""
    call = Call(*(torch.zeros(1, 2, 4, 8) for _ in range(3)))
    signature = read_signature(call)
    assert signature is not None
    with pytest.raises(ValueError, match=r"'odd'.*random"):
        fill(call, "odd")
    with pytest.raises(ValueError, match="masked_rows"):
        fill(call, "masked_rows")
    with pytest.raises(ValueError, match="one_visible_key"):
        fill(call._replace(attn_mask=torch.ones(4, 4)), "one_visible_key", keeps_mask=True)
    with pytest.raises(ValueError, match="window"):
        synthesize(dataclasses.replace(signature, mask="odd_window(3,0)"), CPU)


def test_clean_masks() -> None:
    """-inf is a mask's own value; NaN and +inf are not."""
    assert is_clean(torch.tensor([True]))
    assert is_clean(torch.tensor([0.0, -math.inf]))
    assert not is_clean(torch.tensor([math.nan]))
    assert not is_clean(torch.tensor([math.inf]))


@pytest.mark.parametrize("dtype", ["bool", "float32"])
@pytest.mark.parametrize("name", ["window(3,1)", "window(3,0)", "documents", "key_padding"])
def test_masks_of_recognised_classes_are_known_to_be_of_them(name: str, dtype: str) -> None:
    """A call made up for a recognised class is canonicalised to that class again."""
    call = Call(torch.zeros(2, 1, 16, 8), *(torch.zeros(2, 1, 16, 8) for _ in range(2)))
    plain = read_signature(call._replace(attn_mask=torch.ones(16, 16)))
    assert plain is not None
    made = synthesize(dataclasses.replace(plain, mask=name, mask_dtype=dtype), CPU)
    assert made.attn_mask is not None
    assert str(made.attn_mask.dtype) == f"torch.{dtype}"
    assert canonicalize(made).mask == name
