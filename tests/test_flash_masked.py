"""``flash_masked``: the arguments it gives to the flash operator mean the mask that it replaces."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from smartattn import masks, versions
from smartattn.backends.flash_masked import FlashMasked
from smartattn.environment import environment_of
from smartattn.masks import CausalLowerRight, Documents, KeyPadding, Window, canonicalize
from smartattn.signature import Call, Signature, read_signature
from tests.rewrites.contract import dense_reference


def flash_operator(
    query, key, value, ends_q, ends_k, max_q, max_k, dropout_p, is_causal, debug,
    *, scale=None, window_size_left=None, window_size_right=None, seqused_k=None,
):  # fmt: skip
    """Do in plain PyTorch what the flash operator is documented to do: positions end together."""
    del max_q, max_k, dropout_p, debug
    if ends_q is None:
        pieces = [(query[b], key[b], value[b]) for b in range(query.size(0))]
    else:
        pieces = []
        for b in range(ends_q.numel() - 1):
            start, end = int(ends_k[b]), int(ends_k[b + 1])
            end = end if seqused_k is None else start + int(seqused_k[b])
            pieces.append((query[ends_q[b] : ends_q[b + 1]], key[start:end], value[start:end]))
    outputs = []
    for q, k, v in pieces:
        left, right = (-1 if side is None else side for side in (window_size_left, window_size_right))
        band = Window(None if left < 0 else left, 0 if is_causal else None if right < 0 else right)
        heads = (t.transpose(0, 1)[None] for t in (q, k, v))
        mask = band.dense(q.size(0), k.size(0)) if k.size(0) else None
        outputs.append(dense_reference(Call(*heads, mask, scale=scale))[0].transpose(0, 1) if k.size(0) else q * 0.0)
    joined = torch.stack(outputs) if ends_q is None else torch.cat(outputs)
    return (joined.to(query.dtype),)


def signature_of(canonical: masks.Canonical) -> Signature:
    """Return the signature with the mask's class, as on a GPU."""
    return dataclasses.replace(read_signature(canonical.call), mask=canonical.mask, device_type="cuda")


CASES = {
    "lower right": (CausalLowerRight(), 3, 7, False),
    "lower right, more queries": (CausalLowerRight(), 7, 3, False),
    "window": (Window(2, 1), 7, 7, False),
    "window, more keys": (Window(2, 0), 3, 7, False),
    "documents": (Documents([2, 4, 1]), 7, 7, False),
    "causal documents": (Documents([2, 4, 1]), 7, 7, True),
    "right padding": (KeyPadding([5, 0]), 3, 7, False),
    "left padding": (KeyPadding([5, 7], "left"), 7, 7, False),
    "causal left padding": (KeyPadding([5, 0], "left"), 7, 7, True),
}


@pytest.mark.parametrize("is_remembered", [True, False])
@pytest.mark.parametrize("is_bshd", [True, False])
@pytest.mark.parametrize(("mask", "L", "S", "is_causal"), CASES.values(), ids=CASES)
def test_arguments_mean_the_mask(monkeypatch, mask, L, S, is_causal, is_bshd, is_remembered):
    """Windows, cumulative lengths and used keys say what the dense mask says, and the output keeps its order."""
    monkeypatch.setattr(versions, "flash_forward", flash_operator)

    def tensor(heads, length):
        made = torch.randn(2, heads, length, 8)
        return made.transpose(1, 2).contiguous().transpose(1, 2) if is_bshd else made

    call = Call(tensor(4, L), tensor(2, S), tensor(2, S), mask, 0.0, is_causal, None, True)
    canonical = canonicalize(call)
    run = FlashMasked().bind(signature_of(canonical))
    given = canonical.call
    if not is_remembered:
        given = given._replace(attn_mask=given.attn_mask.clone())
    output = run(*given)
    expected = dense_reference(call._replace(attn_mask=mask.dense(L, S)))
    torch.testing.assert_close(output, expected.float(), rtol=1e-5, atol=1e-5)
    assert (output.transpose(1, 2) if is_bshd else output).is_contiguous() or mask.name.startswith(("w", "causal_l"))


def test_refuses_a_mask_that_changed(monkeypatch):
    """A mask written to between binding and running raises instead of giving the old mask's result."""
    monkeypatch.setattr(versions, "flash_forward", flash_operator)
    tensor = torch.randn(1, 2, 6, 8)
    canonical = canonicalize(Call(tensor, tensor, tensor, Documents([2, 4])))
    run = FlashMasked().bind(signature_of(canonical))
    canonical.call.attn_mask[0, 5] = True
    with pytest.raises(RuntimeError, match="was bound as documents and is bool now"):
        run(*canonical.call)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask": "bool"}, "takes masks of class"),
        ({"mask": "causal+key_padding(right)"}, "last visible key"),
        ({"mask": "key_padding", "pass_name": "train", "grads": "q"}, "no backward that knows"),
        ({"mask": "window(2,0)", "L": 9, "pass_name": "train", "grads": "q"}, "queries that see no key"),
        ({"mask": "window(2,0)", "dropout": "sixteenths"}, "has no dropout"),
        ({"dtype": "float32"}, "dtype is float32"),
    ],
)
def test_declines(changes, reason):
    """What was not seen right on a GPU is declined with its reason."""
    tensor = torch.randn(1, 2, 6, 8, dtype=torch.bfloat16)
    canonical = canonicalize(Call(tensor, tensor, tensor, Window(2, 0)))
    environment = dataclasses.replace(
        environment_of(torch.device("cpu")), device_type="cuda", capability="sm90", device_name="NVIDIA H200"
    )
    assert FlashMasked().reasons(signature_of(canonical), environment) == ()
    found = FlashMasked().reasons(dataclasses.replace(signature_of(canonical), **changes), environment)
    assert any(reason in text for text in found), found
