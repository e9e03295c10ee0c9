"""Dense masks are called by the class whose values they hold, and by no other."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smartattn import mask_facts, mask_recognition
from smartattn.mask_facts import facts_of
from smartattn.mask_recognition import recognize
from smartattn.masks import Causal, CausalLowerRight, Documents, KeyPadding, Window, canonicalize
from smartattn.signature import Call


def call_of(mask: torch.Tensor, N: int = 2, L: int = 6, S: int = 6) -> Call:
    """Return a call around a mask."""
    return Call(torch.randn(N, 2, L, 8), torch.randn(N, 2, S, 8), torch.randn(N, 2, S, 8), mask)


def additive(mask: torch.Tensor) -> torch.Tensor:
    """Return the additive form."""
    return torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


triangle = Causal().dense(6, 6)
CASES = {
    "all": (torch.ones(6, 6, dtype=torch.bool), 6, "none"),
    "causal": (triangle, 6, "causal"),
    "causal per head": (triangle.expand(2, 2, 6, 6).clone(), 6, "causal"),
    "causal, more keys": (Causal().dense(3, 6), 3, "causal"),
    "lower right": (CausalLowerRight().dense(3, 6), 3, "causal_lower_right"),
    "window": (Window(2, 0).dense(6, 6), 6, "window(2,0)"),
    "two-sided": (Window(1, 2).dense(6, 6), 6, "window(1,2)"),
    "window, more keys": (Window(2, 0).dense(3, 6), 3, "window(2,0)"),
    "window to the right": (Window(None, 1).dense(6, 6), 6, "window(-1,1)"),
    "documents": (Documents([2, 3, 1]).dense(6, 6), 6, "documents"),
    "causal documents": (Documents([2, 3, 1]).dense(6, 6) & triangle, 6, "causal+documents"),
    "diagonal": (Documents([1] * 6).dense(6, 6), 6, "window(0,0)"),
    "right padding": (KeyPadding([4, 6]).dense(6, 6), 6, "key_padding"),
    "left padding": (KeyPadding([2, 6], "left").dense(6, 6), 6, "key_padding"),
    "expanded": (KeyPadding([4, 6]).dense(6, 6).expand(2, 2, 6, 6), 6, "key_padding"),
    "causal left padding": (KeyPadding([2, 6], "left").dense(6, 6) & triangle, 6, "causal+key_padding(left)"),
    "causal right padding": (KeyPadding([2, 6]).dense(6, 6) & triangle, 6, "causal+key_padding(right)"),
    "nothing": (torch.zeros(6, 6, dtype=torch.bool), 6, "key_padding"),
}


@pytest.mark.parametrize("form", [torch.clone, additive], ids=["bool", "additive"])
@pytest.mark.parametrize(("mask", "L", "name"), CASES.values(), ids=CASES)
def test_recognizes(mask, L, name, form):
    """Each class is found from its values, bool or additive."""
    assert recognize(call_of(form(mask), L=L)).name == name


@pytest.mark.parametrize(("mask", "L"), [case[:2] for case in CASES.values()], ids=CASES)
def test_one_other_element_changes_the_verdict(mask, L):
    """Whatever element is flipped, the class found describes the flipped mask and not the old one."""
    for index in range(mask.numel()):
        flipped = mask.clone()
        flipped.view(-1)[index] ^= True
        check_exact(call_of(flipped, L=L))


@given(
    st.integers(1, 7).flatmap(
        lambda S: st.tuples(st.just(S), st.integers(1, S), st.integers(0, 2**30), st.sampled_from((0.1, 0.5, 0.9)))
    )
)
def test_random_masks_are_never_called_wrong(drawn):
    """Random masks, which are sometimes of a class by chance, are called right or not at all."""
    S, L, seed, share = drawn
    mask = torch.rand(2, 1, L, S, generator=torch.Generator().manual_seed(seed)) < share
    check_exact(call_of(mask, L=L, S=S))


def check_exact(call: Call) -> None:
    """Check that what was found, synthesised again, is the mask itself."""
    L, S, mask = call.query.size(-2), call.key.size(-2), call.attn_mask
    facts = recognize(call)
    word = facts.name.partition("(")[0]
    if not facts.is_known:
        return
    full = torch.ones(L, S, dtype=torch.bool)
    if word == "causal":
        full = Causal().dense(L, S)
    elif word in ("window", "causal_lower_right"):
        full = Window(*(None if side < 0 else side for side in (facts.left, facts.right))).dense(L, S)
    elif word.endswith("documents"):
        full = Documents(facts.ends.diff()).dense(L, S)
        assert facts.longest == max(facts.ends.diff().tolist())
    elif word.endswith("key_padding"):
        keys = torch.arange(S)
        starts, ends = facts.starts[:, None], (facts.starts + facts.lengths)[:, None]
        full = ((keys >= starts) & (keys < ends))[:, None, None]
    if word.startswith("causal+"):
        full = full & Causal().dense(L, S)
    assert torch.equal(*torch.broadcast_tensors(mask, full)), facts.name


def test_other_values_are_no_class():
    """Additive masks with other numbers, NaN among them, keep their general class."""
    for wrong in (float("nan"), 1.0, -1e9, float("inf")):
        mask = additive(triangle)
        mask[2, 1] = wrong
        assert recognize(call_of(mask)).name == "additive"


def test_remembers_by_identity_until_written():
    """A mask is looked at once; writing to it in place makes it new."""
    mask = triangle.clone()
    first = recognize(call_of(mask))
    assert recognize(call_of(mask)) is first
    mask[0, 5] = True
    assert facts_of(mask) is None
    assert recognize(call_of(mask)).name == "bool"


def test_dead_masks_answer_for_nobody():
    """Memory that is handed out again does not carry the facts of the mask that lay there."""
    storage = torch.zeros(36, dtype=torch.bool)
    mask = triangle.clone()
    recognize(call_of(mask))
    identity = mask_facts.identity_of(mask)
    del mask
    gc.collect()
    assert mask_facts._table[identity][0]() is None
    again = storage[:36].view(6, 6)
    mask_facts._table[mask_facts.identity_of(again)] = mask_facts._table[identity]
    assert facts_of(again) is None


def test_table_is_bounded():
    """Facts of the oldest masks go when the table is full."""
    kept = [triangle.clone() for _ in range(mask_facts.TABLE_SIZE + 5)]
    for mask in kept:
        recognize(call_of(mask))
    assert len(mask_facts._table) == mask_facts.TABLE_SIZE
    assert facts_of(kept[0]) is None
    assert facts_of(kept[-1]).name == "causal"


def test_looks_away():
    """Masks that want a gradient and inference tensors are not looked at."""
    with torch.inference_mode():
        made_here = triangle.clone()
    assert recognize(call_of(made_here)) is None
    assert recognize(call_of(additive(triangle).requires_grad_())) is None
    assert recognize(call_of(triangle)._replace(attn_mask=None)) is None


def test_canonical_form_of_recognized_masks():
    """A dense causal mask becomes is_causal, an all-visible one no mask; other classes keep their tensor."""
    causal = canonicalize(call_of(triangle.clone()), recognizes=True)
    assert causal.call.is_causal
    assert causal.call.attn_mask is None
    assert causal.cost_ms > 0
    assert canonicalize(call_of(torch.ones(6, 6, dtype=torch.bool)), recognizes=True).call.attn_mask is None
    window = Window(2, 0).dense(6, 6)
    assert canonicalize(call_of(window)).mask == ""
    found = canonicalize(call_of(window), recognizes=True)
    assert found.mask == "window(2,0)"
    assert found.call.attn_mask is window
    assert canonicalize(call_of(window)).mask == "window(2,0)"
    assert canonicalize(call_of(window), recognizes=True).cost_ms == 0.0


def test_facts_of_another_shape_are_not_used():
    """A mask recognised for one number of queries says nothing about a call with another."""
    mask = Window(2, 0).dense(1, 6)
    recognize(call_of(mask, L=1))
    assert canonicalize(call_of(mask, L=6)).mask in ("", "key_padding")


@pytest.mark.parametrize("form", [torch.clone, additive], ids=["bool", "additive"])
@pytest.mark.parametrize(("mask", "L"), [case[:2] for case in CASES.values()], ids=CASES)
def test_expecting_the_same_again(monkeypatch, mask, L, form):
    """The third mask like the two before is compared with those alone; one other element is found all the same."""
    monkeypatch.setattr(mask_recognition, "_EXPECTS_ON", ("cpu",))
    first, second, third = (recognize(call_of(form(mask), L=L)) for _ in range(3))
    assert first.name == second.name == third.name
    for index in range(mask.numel()):
        flipped = mask.clone()
        flipped.view(-1)[index] ^= True
        recognize(call_of(form(mask), L=L))
        recognize(call_of(form(mask), L=L))
        call = call_of(form(flipped), L=L)
        found = recognize(call)
        fresh = mask_recognition._find_out(call.attn_mask, L, 6)
        assert found.name == fresh.name
        if form is torch.clone:
            check_exact(call)
    recognize(call_of(form(mask), L=L))
    recognize(call_of(form(mask), L=L))
    monkeypatch.setattr(mask_recognition, "_words", None)
    recognize(call_of(form(mask), L=L))
