"""Dense masks and mask classes through the public function: the right answer, whatever was found out before."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import smartattn
from smartattn import mask_facts, masks
from smartattn.mask_policy import Ledger
from smartattn.mask_runner import MaskRunner
from smartattn.settings import configure
from smartattn.wishes import Site, all_bindings, wish_of
from tests.fakes import tensors

L = 256
"""Smallest square whose mask is looked at."""
TRIANGLE = torch.ones(L, L, dtype=torch.bool).tril()


@pytest.fixture(autouse=True)
def without_tuning(cache_dir):
    """Choose the safe default: what is looked at is which mask is used, not how fast."""
    configure(mode="frozen")


def reference(query, key, value, mask, **options):
    """Return attention by Math with a dense mask."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, **options)


def check(mask, *, dense=None, **options):
    """Check a call with a mask against its dense form."""
    query, key, value = tensors(2, 4, L, 16)
    found = smartattn.scaled_dot_product_attention(query, key, value, mask, **options)
    torch.testing.assert_close(found, reference(query, key, value, mask if dense is None else dense))


def runners() -> list[MaskRunner]:
    """Return the runners that tell masks apart."""
    return [binding.run for binding in all_bindings() if isinstance(binding.run, MaskRunner)]


def name_of_last() -> str:
    """Return the class by which the last call of the only runner was answered."""
    (runner,) = runners()
    return runner._last.name


CLASSES = {
    "causal": (masks.Causal(), TRIANGLE),
    "lower right": (masks.CausalLowerRight(), TRIANGLE),
    "window": (masks.Window(9, 3), masks.Window(9, 3).dense(L, L)),
    "documents": (masks.Documents([100, 156]), masks.Documents([100, 156]).dense(L, L)),
    "right padding": (masks.KeyPadding([200, 256]), masks.KeyPadding([200, 256]).dense(L, L)),
    "left padding": (masks.KeyPadding([1, 256], "left"), masks.KeyPadding([1, 256], "left").dense(L, L)),
    "upper left bias": (causal_upper_left(L, L), TRIANGLE),
    "lower right bias": (causal_lower_right(L, L), TRIANGLE),
}


@pytest.mark.parametrize("mode", ["frozen", "tune", "off"])
@pytest.mark.parametrize(("mask", "dense"), CLASSES.values(), ids=CLASSES)
def test_classes_are_taken_for_masks(mask, dense, mode):
    """A class given as attn_mask means its dense mask, at first sight, in hits, and in every mode."""
    configure(mode=mode, signature_budget_ms=5)
    for _ in range(3):
        check(mask, dense=dense)


def test_class_together_with_the_flag():
    """A class beside is_causal: both apply, also in a hit."""
    for _ in range(2):
        check(masks.Window(None, 3), dense=TRIANGLE, is_causal=True)
        check(masks.KeyPadding([200, 256]), dense=masks.KeyPadding([200, 256]).dense(L, L) & TRIANGLE, is_causal=True)


def test_classes_and_tensors_take_turns_at_one_site():
    """A site whose memo was made for tensors answers classes, other classes, and tensors again."""
    module = smartattn.SmartAttention()
    query, key, value = tensors(2, 4, L, 16)
    window, other = masks.Window(9, 3), masks.Window(3, 9)
    turns = [TRIANGLE, TRIANGLE, TRIANGLE, window, other, window, None, TRIANGLE]
    for mask in turns:
        dense = mask.dense(L, L) if isinstance(mask, masks.Mask) else mask
        torch.testing.assert_close(module(query, key, value, mask), reference(query, key, value, dense))


def test_class_that_does_not_fit():
    """Lengths that do not fit the call are an error that says so."""
    with pytest.raises(ValueError, match="3 lengths; the call has 2"):
        check(masks.KeyPadding([1, 2, 3]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_class_in_training_and_under_vmap():
    """Classes serve calls with gradients, and calls that PyTorch answers itself."""
    query, key, value = tensors(2, 4, L, 16)
    query.requires_grad_()
    output = smartattn.scaled_dot_product_attention(query, key, value, masks.Window(9, 3))
    (found,) = torch.autograd.grad(output.sum(), query)
    dense = masks.Window(9, 3).dense(L, L)
    (right,) = torch.autograd.grad(reference(query, key, value, dense).sum(), query)
    torch.testing.assert_close(found, right)
    mapped = torch.func.vmap(smartattn.scaled_dot_product_attention, in_dims=(0, 0, 0, None))
    torch.testing.assert_close(
        mapped(query.detach()[:, None], key[:, None], value[:, None], masks.Window(9, 3))[:, 0],
        reference(query.detach(), key, value, dense),
    )


def test_dense_causal_mask_runs_as_causal():
    """A dense causal mask, bool or additive, is answered without the mask."""
    check(TRIANGLE.clone())
    assert name_of_last() == "causal"
    assert runners()[0].binding_of("") is None


@pytest.mark.parametrize("word", ["bool", "additive"])
def test_mask_changed_in_place(word):
    """Whoever writes to a recognised mask gets the new mask's answer in the very next call."""
    mask = TRIANGLE.clone() if word == "bool" else torch.zeros(L, L).masked_fill(~TRIANGLE, float("-inf"))
    for _ in range(4):
        check(mask)
    assert name_of_last() == "causal"
    mask[3, 200] = True if word == "bool" else 0.0
    for _ in range(4):
        check(mask)
    assert name_of_last() == ""
    mask[5] = mask[3]
    check(mask)


def test_masks_that_take_turns():
    """Two masks of one form, alive at once, keep their own answers."""
    window = masks.Window(9, 3).dense(L, L)
    some = torch.rand(L, L) < 0.5
    for mask in (TRIANGLE, some, window) * 30:
        check(mask.view(1, 1, L, L))
    (runner,) = runners()
    assert sorted(use.name for use in runner._uses.values()) == ["", "causal", "window(9,3)"]


def test_new_mask_in_old_memory():
    """A mask that is handed the memory of a dead one is looked at for itself."""
    storage = TRIANGLE.clone()
    mask = storage.view(L, L)
    check(mask)
    identity = mask_facts.identity_of(mask)
    values = torch.rand(L, L) < 0.5
    (runner,) = runners()
    use = runner._uses[identity]
    del mask, storage
    gc.collect()
    assert not use.is_alive()
    # The same identity again, as an allocator may give it.
    again = values.clone()
    runner._uses[mask_facts.identity_of(again)] = use
    check(again)
    assert name_of_last() == ""


def test_views_cut_anew_are_one_mask():
    """A view that every layer cuts anew from one mask is looked at once."""
    whole = torch.ones(1, 1, L, 2 * L, dtype=torch.bool)
    whole[..., :L] = TRIANGLE
    for _ in range(4):
        check(whole[:, :, :, :L])
    (runner,) = runners()
    assert runner.ledger.num_masks == 1
    assert runner.ledger.num_looked == 1
    assert name_of_last() == "causal"


def test_looks_away():
    """No mask is read where that was switched off, for explicit backends, small calls, or masks with gradients."""
    query, key, value = tensors(1, 2, L, 16)
    configure(recognize_masks=False)
    check(TRIANGLE)
    configure(recognize_masks=True)
    smartattn.scaled_dot_product_attention(query, key, value, TRIANGLE, backend="math")
    smartattn.attention.attend(Site(wish_of(recognizes=False)), query, key, value, TRIANGLE, 0.0, False, None, False)
    small = torch.ones(8, 8, dtype=torch.bool).tril()
    smartattn.scaled_dot_product_attention(query[:, :, :8], key[:, :, :8], value[:, :, :8], small)
    additive = torch.zeros(L, L, requires_grad=True)
    smartattn.scaled_dot_product_attention(query, key, value, additive)
    assert runners() == []


def test_inference_tensors_are_not_read():
    """Masks made in inference mode cannot be followed, so they are used as they are; changes show at once."""
    with torch.inference_mode():
        mask = TRIANGLE.clone()
        for _ in range(3):
            check(mask)
        mask[3, 200] = True
        check(mask)
    assert all(not runner._uses for runner in runners())


def test_mask_with_nan():
    """A mask that holds NaN is of no class; NaN comes out where PyTorch has it."""
    mask = torch.zeros(L, L).masked_fill(~TRIANGLE, float("-inf"))
    mask[7, 3] = float("nan")
    query, key, value = tensors(1, 2, L, 16)
    found = smartattn.scaled_dot_product_attention(query, key, value, mask)
    right = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(found, right, equal_nan=True)
    assert bool(found[:, :, 7].isnan().all())


@pytest.mark.parametrize("mask", [TRIANGLE[:-1], torch.ones(L, L + 1, dtype=torch.bool), torch.ones(3, 1, L, L)])
def test_mask_of_the_wrong_size(mask):
    """A mask that does not broadcast raises what PyTorch raises, saying what is wrong."""
    with pytest.raises(RuntimeError, match="attn_mask has shape"):
        check(mask)


def test_route_that_fails_is_kept_away():
    """A class whose route raises is answered by the safe default, and the route goes into quarantine."""
    configure(mode="tune")
    query, key, value = tensors(1, 2, L, 16)
    mask = TRIANGLE.clone()
    right = reference(query, key, value, mask)
    torch.testing.assert_close(smartattn.scaled_dot_product_attention(query, key, value, mask), right)
    (runner,) = runners()
    binding = runner.binding_of("causal")
    # As if another route than the safe default had been chosen.
    runner._bindings["causal"] = dataclasses.replace(binding, route="eager")

    def broken(*arguments):
        raise RuntimeError("broken on purpose")

    runner._last.run = broken
    torch.testing.assert_close(smartattn.scaled_dot_product_attention(query, key, value, mask), right)
    assert smartattn.explain(query, key, value, mask).outcomes["eager"].reasons[-1].startswith("is in quarantine")
    torch.testing.assert_close(smartattn.scaled_dot_product_attention(query, key, value, mask), right)


@pytest.mark.parametrize("is_inside", [True, False], ids=["made inside", "given"])
def test_checkpoint_meets_its_own_route(is_inside):
    """What a checkpoint recomputes agrees with its forward, for masks given to it and for masks made inside."""
    configure(mode="tune", signature_budget_ms=5)
    query, key, value = tensors(1, 2, L, 16)
    query.requires_grad_()

    def block(x, mask):
        mask = TRIANGLE.clone() if mask is None else mask
        return smartattn.scaled_dot_product_attention(x, key, value, mask)

    for _ in range(3):
        given = None if is_inside else TRIANGLE.clone()
        x = query
        for _ in range(6):
            x = checkpoint(block, x, given, use_reentrant=False)
        x.sum().backward()
    (runner,) = runners()
    assert (runner.ledger.num_found > 0) is not is_inside


def test_autocast_keeps_to_masks_it_can_follow():
    """Under autocast a bool mask is recognised; an additive one that is cast for every call is not."""
    query, key, value = tensors(1, 2, L, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = smartattn.scaled_dot_product_attention(query, key, value, TRIANGLE)
        assert name_of_last() == "causal"
        additive = torch.zeros(L, L).masked_fill(~TRIANGLE, float("-inf"))
        again = smartattn.scaled_dot_product_attention(query, key, value, additive)
    assert len(runners()) == 1
    assert found.dtype == again.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), reference(query, key, value, TRIANGLE), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(again.float(), reference(query, key, value, TRIANGLE), atol=2e-2, rtol=2e-2)


def test_explain_names_the_class():
    """An explanation of a call with a dense causal mask, or with a class, says what is run."""
    query, key, value = tensors(2, 4, L, 16)
    assert smartattn.explain(query, key, value, TRIANGLE).mask == "causal"
    assert smartattn.explain(query, key, value, masks.Window(9, 3)).mask == "window(9,3)"
    configure(recognize_masks=False)
    assert smartattn.explain(query, key, value, TRIANGLE.clone()).mask == "bool"


def test_rewrite_without_memory_for_its_copy():
    """A rewrite whose copy would take more memory than is allowed is rejected, with the bytes that it wanted."""
    configure(mode="tune", memory_share=0.0)
    query, key, value = tensors(2, 3, 64, 10)
    outcomes = smartattn.explain(query, key, value, tune=True).outcomes
    wanted = [text for outcome in outcomes.values() for text in getattr(outcome, "reasons", ()) if "wants" in text]
    assert any("of workspace; 0 B are allowed" in text for text in wanted)
    torch.testing.assert_close(
        smartattn.scaled_dot_product_attention(query, key, value), reference(query, key, value, None)
    )


def test_looked_at_when_it_pays():
    """The first mask is looked at at once; later ones by what earlier ones taught about their uses and gains."""
    ledger = Ledger(fixed_us=200.0, flop_us=100.0)
    assert ledger.look_at(ledger.expected_uses) == 1
    ledger.num_masks, ledger.num_uses, ledger.dense_us, ledger.class_us = 4, 4, 100.0, 60.0
    # Used once each: a look costs five savings, so it waits until five calls have paid for it.
    assert ledger.look_at(ledger.expected_uses) == 6
    ledger.num_uses = 40
    assert ledger.look_at(ledger.expected_uses) == 1
    ledger.note_look(90_000.0, is_found=True)
    # The first look loads kernels; it is not believed, and the next one says what a look costs.
    assert ledger.look_us == 1600.0
    ledger.note_look(300.0, is_found=True)
    assert ledger.look_us == 300.0
    for _ in range(9):
        ledger.note_look(300.0, is_found=False)
    # Two in eleven are of a class: a look gains a quarter of what it did.
    assert ledger.look_at(20) == pytest.approx(300 / (40 * 3 / 12) + 1, abs=1)
    ledger.class_us = 120.0
    assert ledger.look_at(ledger.expected_uses) == float("inf")


def test_guesses_before_anything_was_measured():
    """A class that was measured alone stands for half of its dense call."""
    ledger = Ledger(fixed_us=200.0, flop_us=100.0)
    assert ledger.gain_us == 50.0
    ledger.class_us = 80.0
    assert ledger.gain_us == 80.0


def test_never_costs_more_than_twice_the_best():
    """However often a mask is used, renting then buying costs at most twice what knowing that would."""
    ledger = Ledger(fixed_us=300.0, flop_us=0.0, num_masks=10, num_uses=10, dense_us=100.0, class_us=30.0)
    look_at = ledger.look_at(ledger.expected_uses)
    for num_uses in range(1, 100):
        best_us = min(num_uses * 100.0, 300.0 + num_uses * 30.0)
        rented = min(num_uses, look_at - 1)
        taken_us = rented * 100.0 + (300.0 + (num_uses - rented) * 30.0 if num_uses >= look_at else 0.0)
        assert taken_us <= 2 * best_us
