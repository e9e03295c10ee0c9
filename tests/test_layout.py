"""Symbolic layouts: what they say, what they leave out, and their text form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smartattn.layout import AXES, Layout, parse_layout, read_layout


def layout_of(tensor: torch.Tensor) -> Layout:
    return read_layout(tuple(tensor.shape), tensor.stride(), tensor.element_size(), tensor.data_ptr())


def whole(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


CASES = {
    "contiguous": (whole(2, 3, 8, 16), "bhsd"),
    "transposed from BSHD": (whole(2, 8, 3, 16).transpose(1, 2), "bshd"),
    "view of a packed projection": (whole(2, 8, 3, 48)[..., :16].transpose(1, 2), "bshd~"),
    "sliced keys of a longer cache": (whole(2, 3, 32, 16)[:, :, :8], "bhsd~"),
    "one key head expanded": (whole(2, 1, 8, 16).expand(2, 3, 8, 16), "bhsd/h"),
    "batch of one expanded": (whole(1, 3, 8, 16).expand(4, 3, 8, 16), "bhsd/b"),
    "last axis transposed": (whole(2, 3, 16, 8).transpose(2, 3), "bhds%!"),
    "every second element": (whole(2, 3, 8, 32)[..., ::2], "bhsd~%"),
    "odd rows": (whole(2, 3, 8, 5), "bhsd!"),
    "started between": (whole(2 * 3 * 8 * 16 + 1)[1:].view(2, 3, 8, 16), "bhsd@"),
    "3-D": (whole(3, 8, 16), "hsd"),
    "5-D": (whole(2, 2, 3, 8, 16), "2bhsd"),
    "sizes of one": (whole(1, 1, 8, 16), "bhsd"),
    "a single element": (whole(1, 1, 1, 1), "bhsd"),
    "decoding step from BSHD": (whole(2, 1, 3, 16).transpose(1, 2), "bhsd"),
}


@pytest.mark.parametrize("name", CASES)
def test_layout_reads(name: str):
    """Each way that models store their tensors has its own short text."""
    tensor, text = CASES[name]
    assert str(layout_of(tensor)) == text


@pytest.mark.parametrize("name", CASES)
def test_text_parses_back(name: str):
    """The text of a real layout gives an equal layout back."""
    layout = layout_of(CASES[name][0])
    assert parse_layout(str(layout)) == layout


layouts = st.builds(
    Layout,
    order=st.integers(1, len(AXES)).flatmap(lambda n: st.permutations(AXES[-n:]).map("".join)),
    is_gapped=st.booleans(),
    expanded=st.sampled_from(["", "h", "bh", "s", "d"]),
    has_aligned_rows=st.booleans(),
    has_aligned_start=st.booleans(),
    has_unit_last_stride=st.booleans(),
)


@given(layouts)
def test_any_layout_parses_back(layout: Layout):
    """Every combination of marks is readable again."""
    assert parse_layout(str(layout)) == layout


@given(layouts, layouts)
def test_different_layouts_have_different_texts(one: Layout, other: Layout):
    """No two layouts share a text."""
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize("text", ["", "BHSD", "bhsd ", " bhsd", "bhsd~~", "bhsd@!", "bhsd/", "bh sd", "bhsd\n", "~"])
def test_other_text_is_refused(text: str):
    """What no layout prints is no layout."""
    with pytest.raises(ValueError, match="is no layout"):
        parse_layout(text)


@given(st.permutations(range(4)), st.lists(st.integers(2, 5), min_size=4, max_size=4))
def test_order_is_the_order_in_memory(axes: list[int], sizes: list[int]):
    """A permuted contiguous tensor reads back as its permutation, without a gap."""
    tensor = torch.zeros([sizes[axis] for axis in axes])
    back = [axes.index(i) for i in range(4)]
    layout = layout_of(tensor.permute(back))
    assert layout.order == "".join("bhsd"[axis] for axis in axes)
    assert not layout.is_gapped


@given(st.lists(st.integers(1, 6), min_size=4, max_size=4), st.integers(2, 4))
def test_lengths_do_not_move_the_layout_of_a_family(sizes: list[int], factor: int):
    """Tensors that differ only in sequence length (above 1) share a layout: aligned rows keep families together."""
    N, H, L, E = sizes[0], sizes[1], sizes[2] + 1, 4 * sizes[3]
    assert layout_of(whole(N, H, L, E)) == layout_of(whole(N, H, L * factor, E))
