"""Mask classes as values, and calls in canonical form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from smartattn import masks
from smartattn.mask_facts import facts_of
from smartattn.masks import Causal, CausalLowerRight, Documents, KeyPadding, Window, canonicalize
from smartattn.signature import Call
from tests.rewrites.contract import dense_reference


def call_of(N=2, L=6, S=6, mask=None, *, is_causal=False) -> Call:
    """Return a small call."""
    query, key = torch.randn(N, 2, L, 8), torch.randn(N, 2, S, 8)
    return Call(query, key, key, mask, 0.0, is_causal)


SAID = {
    "causal": (Causal(), 6, 6),
    "causal, more keys": (Causal(), 3, 6),
    "lower right": (CausalLowerRight(), 3, 6),
    "lower right, square": (CausalLowerRight(), 6, 6),
    "lower right, more queries": (CausalLowerRight(), 6, 3),
    "window": (Window(2, 1), 6, 6),
    "window, more keys": (Window(2, 0), 3, 6),
    "window without left end": (Window(None, 0), 3, 6),
    "window of everything": (Window(9, 9), 6, 6),
    "documents": (Documents([2, 3, 1]), 6, 6),
    "one document": (Documents([6]), 6, 6),
    "right padding": (KeyPadding([4, 6]), 6, 6),
    "left padding": (KeyPadding([1, 6], side="left"), 6, 6),
    "no padding": (KeyPadding([6, 6]), 6, 6),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("mask", "L", "S"), SAID.values(), ids=SAID)
def test_said_class_equals_its_dense_mask(mask, L, S, is_causal):
    """A class means what its dense mask means, also beside is_causal, whatever canonical form it takes."""
    call = call_of(L=L, S=S, is_causal=is_causal)
    canonical = canonicalize(call._replace(attn_mask=mask))
    expected = dense_reference(call._replace(attn_mask=mask.dense(L, S)))
    torch.testing.assert_close(dense_reference(canonical.call), expected)


@pytest.mark.parametrize(
    ("mask", "is_causal", "name"),
    [
        (Causal(), False, ""),
        (CausalLowerRight(), False, ""),
        (Window(2, 0), False, "window(2,0)"),
        (Window(2, 5), True, "window(2,0)"),
        (Window(9, 9), False, ""),
        (Documents([2, 4]), False, "documents"),
        (Documents([2, 4]), True, "causal+documents"),
        (KeyPadding([2, 4]), False, "key_padding"),
        (KeyPadding([2, 4], side="left"), True, "causal+key_padding(left)"),
        (KeyPadding([2, 4]), True, "causal+key_padding(right)"),
    ],
)
def test_names_classes(mask, is_causal, name):
    """The class goes into the signature under its own name; what is_causal or no mask says needs none."""
    assert canonicalize(call_of(mask=mask, is_causal=is_causal)).mask == name


def test_classes_are_values():
    """Equal classes are equal, hash alike and cannot be changed."""
    assert Documents([1, 2]) == Documents(torch.tensor([1, 2]))
    assert len({KeyPadding([1, 2]), KeyPadding((1, 2)), KeyPadding([1, 2], side="left")}) == 2
    with pytest.raises(AttributeError):
        Window(1, 0).left = 2


def test_same_class_shares_one_dense_mask():
    """The dense mask of a class is made once per size and device."""
    first = canonicalize(call_of(mask=Documents([2, 4]))).call.attn_mask
    assert canonicalize(call_of(mask=Documents([2, 4]))).call.attn_mask is first
    assert facts_of(first).ends.tolist() == [0, 2, 6]


def test_dense_mask_written_to_is_made_anew():
    """A caller who writes into the dense mask of a class spoils no later call."""
    first = canonicalize(call_of(mask=Documents([2, 4]))).call.attn_mask
    first.fill_(True)
    assert canonicalize(call_of(mask=first), recognizes=True).call.attn_mask is None
    assert not canonicalize(call_of(mask=Documents([2, 4]))).call.attn_mask.all()


def test_pytorchs_causal_bias():
    """PyTorch's own causal bias classes are understood."""
    upper = canonicalize(call_of(L=3, mask=causal_upper_left(3, 6)))
    lower = canonicalize(call_of(L=3, mask=causal_lower_right(3, 6)))
    assert upper.call.is_causal
    assert upper.call.attn_mask is None
    assert lower.mask == "causal_lower_right"
    assert torch.equal(lower.call.attn_mask, CausalLowerRight().dense(3, 6))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Window(-1, 0),
        lambda: Documents([]),
        lambda: Documents([3, 0]),
        lambda: KeyPadding([-1]),
        lambda: KeyPadding([1], side="top"),
        lambda: canonicalize(call_of(mask=Documents([2, 2]))),
        lambda: canonicalize(call_of(mask=KeyPadding([2]))),
        lambda: canonicalize(call_of(mask=KeyPadding([2, 7]))),
    ],
)
def test_refuses_lengths_that_do_not_fit(make):
    """Lengths that make no sense raise instead of masking something else."""
    with pytest.raises(ValueError, match=r"."):
        make()


@given(
    name=st.sampled_from(
        ("causal_lower_right", "window(2,0)", "documents", "causal+documents", "key_padding",
         "causal+key_padding(left)", "causal+key_padding(right)")
    ),
    N=st.integers(1, 3),
    S=st.integers(4, 20),
)  # fmt: skip
def test_examples_are_of_their_class(name, N, S):
    """A made-up mask is remembered as a member of its class."""
    mask = masks.example(name, N, S, S)
    assert facts_of(mask).name == name
