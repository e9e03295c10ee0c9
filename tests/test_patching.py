"""``patch_sdpa``: its reach, its end, and how it lives with other replacements of PyTorch's function."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import smartattn
from smartattn import patch_sdpa, versions
from smartattn.plain import own_patches
from smartattn.wishes import all_bindings


def qkv() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, 6, 8) for _ in range(3))


def by_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


def num_calls() -> int:
    counters = smartattn.stats()
    return counters.hits + counters.misses + counters.memory_hits + counters.disk_hits


@pytest.fixture(autouse=True)
def stock_after():
    """Hold that every test leaves PyTorch's own function in its place, and no patch in the books."""
    yield
    left = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = versions.sdpa
    assert left is versions.sdpa
    assert own_patches == set()


def test_context_reaches_every_caller_by_name():
    """Inside the block calls by module attribute, modules of PyTorch and function modules reach smartattn; after it none."""
    q, k, v = qkv()
    expected = functional.scaled_dot_product_attention(q, k, v)
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)
    with patch_sdpa() as patch:
        assert patch.is_on
        torch.testing.assert_close(functional.scaled_dot_product_attention(q, k, v), expected)
        torch.testing.assert_close(nn.functional.scaled_dot_product_attention(query=q, key=k, value=v), expected)
        assert num_calls() == 2
        module(x, x, x, need_weights=False)
        assert num_calls() == 3
    functional.scaled_dot_product_attention(q, k, v)
    assert not patch.is_on
    assert num_calls() == 3
    assert smartattn.stats().passthroughs == 0


def test_on_and_off():
    """``on`` and ``off`` switch it without a block; twice on needs twice off; off once too often is harmless."""
    patch = patch_sdpa()
    assert functional.scaled_dot_product_attention is versions.sdpa, "a patch starts off"
    patch.on().on()
    patch.off()
    assert patch.is_on
    assert functional.scaled_dot_product_attention is not versions.sdpa
    patch.off()
    patch.off()
    assert functional.scaled_dot_product_attention is versions.sdpa
    with pytest.raises(ValueError, match="ends the block"), patch:
        raise ValueError("ends the block")


def test_names_bound_before_are_out_of_reach():
    """A name bound before the patch keeps PyTorch's function, as documented."""
    bound = functional.scaled_dot_product_attention
    with patch_sdpa():
        bound(*qkv())
    assert num_calls() == 0


def test_wishes_hold_and_patches_nest():
    """The inner of two patches answers with its own wishes, and leaving it brings the outer back."""
    q, k, v = qkv()
    with patch_sdpa(backend="math"):
        outer = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention(q, k, v)
        with patch_sdpa(mode="off"):
            functional.scaled_dot_product_attention(q, k, v)
            assert smartattn.stats().passthroughs == 1
        assert functional.scaled_dot_product_attention is outer
    assert [binding.route for binding in all_bindings()] == ["math"]
    with pytest.raises(smartattn.UnknownNameError):
        patch_sdpa(backend="no such")


def test_patches_may_end_in_any_order():
    """An outer patch switched off first leaves the inner one in force, and nothing behind in the end."""
    first, second = patch_sdpa(), patch_sdpa()
    first.on()
    second.on()
    first.off()
    functional.scaled_dot_product_attention(*qkv())
    second.off()
    assert functional.scaled_dot_product_attention is versions.sdpa


def foreign(calls: list[str]):
    """Return a replacement as context parallelism makes it: around whatever stands there now."""
    below = functional.scaled_dot_product_attention

    @functools.wraps(below)
    def replaced(*args, **kwargs):
        calls.append("foreign")
        return below(*args, **kwargs)

    return replaced, below


def test_a_replacement_over_the_patch_keeps_its_calls():
    """A foreign function put over the patch is called, and the patch under it hands on to PyTorch's without a circle."""
    q, k, v = qkv()
    calls: list[str] = []
    with patch_sdpa():
        replaced, below = foreign(calls)
        functional.scaled_dot_product_attention = replaced
        functional.scaled_dot_product_attention(q, k, v)
        smartattn.scaled_dot_product_attention(q, k, v)
        assert calls == ["foreign"] * 2
        assert num_calls() == 0, "what a local shard would answer is not asked"
        functional.scaled_dot_product_attention = below
        functional.scaled_dot_product_attention(q, k, v)
        assert num_calls() == 1


def test_the_patch_over_a_replacement_leaves_its_calls_to_it():
    """A patch over a foreign function hands every call on to it, and brings it back at the end."""
    calls: list[str] = []
    replaced, below = foreign(calls)
    functional.scaled_dot_product_attention = replaced
    with patch_sdpa():
        functional.scaled_dot_product_attention(*qkv())
    assert calls == ["foreign"]
    assert num_calls() == 0
    assert functional.scaled_dot_product_attention is replaced
    functional.scaled_dot_product_attention = below


def test_a_replacement_that_outlives_the_patch():
    """A patch that ends under a foreign function stands aside in it, and the foreign function goes on."""
    calls: list[str] = []
    patch = patch_sdpa().on()
    replaced, below = foreign(calls)
    functional.scaled_dot_product_attention = replaced
    patch.off()
    functional.scaled_dot_product_attention(*qkv())
    assert calls == ["foreign"]
    functional.scaled_dot_product_attention = below
    functional.scaled_dot_product_attention(*qkv())
    assert num_calls() == 0
    functional.scaled_dot_product_attention = versions.sdpa


def test_named_as_what_it_replaces():
    """The patched function has PyTorch's name and arguments, by which context_parallel finds and restores it."""
    with patch_sdpa():
        assert functional.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_other_threads_see_it():
    """The patch is process-wide: a call from another thread reaches smartattn."""
    with patch_sdpa():
        thread = threading.Thread(target=lambda: functional.scaled_dot_product_attention(*qkv()))
        thread.start()
        thread.join()
    assert num_calls() == 1


def test_compiled_code_gives_the_answer():
    """Code that is compiled inside the block gives the eager answer."""
    torch.compiler.reset()
    q, k, v = qkv()
    expected = functional.scaled_dot_product_attention(q, k, v)
    with patch_sdpa():
        compiled = torch.compile(by_name, backend="eager")
        torch.testing.assert_close(compiled(q, k, v), expected)
