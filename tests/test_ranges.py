"""Ranges: one signature per bucket at its upper edge, square stays square, one query stays one, masks keep a layout."""

from __future__ import annotations

import pytest
import torch

from smartattn.buckets import bucket_of
from smartattn.errors import SettingError, UnknownNameError
from smartattn.inputs import synthesize
from smartattn.ranges import check_ranges, edges, spread
from smartattn.signature import Call, Signature, read_signature
from smartattn.signature_text import parse_signature

TEXT = "sdpa infer cpu float32 N2 Hq4 H4 L{L} S{S} E16 Ev16 layout=bhsd mask=none scale=positive"


def problem(L: int, S: int) -> Signature:
    return parse_signature(TEXT.format(L=L, S=S))


def masked(L: int, S: int, dtype: torch.dtype = torch.float32) -> Signature:
    query, key, value = torch.zeros(2, 4, L, 16), torch.zeros(2, 4, S, 16), torch.zeros(2, 4, S, 16)
    found = read_signature(Call(query, key, value, torch.zeros(2, 1, L, S, dtype=dtype)))
    assert found is not None
    return found


def test_edges_are_those_of_the_buckets():
    """Every bucket that a range touches is there once, the last cut at the range's end."""
    assert edges(1, 4096) == (128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096)
    assert edges(200, 300) == (256, 300)
    assert edges(5, 5) == (5,)


def test_square_stays_square():
    """Self-attention takes each length as both L and S; a length of 1 would be decoding and is left out."""
    found = spread(problem(50, 50), {"key": (1, 300)})
    assert [(s.L, s.S) for s in found] == [(128, 128), (181, 181), (256, 256), (300, 300)]


def test_decoding_keeps_one_query():
    """A single query stays one while the keys grow."""
    found = spread(problem(1, 50), {"key": (1, 256)})
    assert [(s.L, s.S) for s in found] == [(1, 128), (1, 181), (1, 256)]


def test_queries_and_batches_have_ranges_of_their_own():
    """Cross attention takes both ranges, batches by octave; a square problem follows its keys alone."""
    found = spread(problem(50, 77), {"query": (2, 181), "batch": (1, 3)})
    assert [(s.N, s.L, s.S) for s in found] == [
        (n, length, 77) for n in (1, 2, 3) for length in (128, 181)
    ]  # fmt: skip
    assert [s.L for s in spread(problem(50, 50), {"query": (2, 181)})] == [50]


def test_each_bucket_comes_once():
    """No two signatures share a bucket, and each lies in the range."""
    found = spread(problem(700, 700), {"key": (1, 2048), "batch": (1, 8)})
    assert len({bucket_of(s).digest for s in found}) == len(found)
    assert all(s.L <= 2048 and s.N <= 8 for s in found)


def test_a_range_that_does_not_apply_changes_nothing():
    """Without a range the signature comes back alone."""
    assert spread(problem(50, 77), {}) == (problem(50, 77),)


def test_masks_are_spread_over_both_alignments_of_their_rows():
    """An added mask has aligned rows at some lengths only; both families get a length that has their layout."""
    found = spread(masked(1, 50), {"key": (1, 256)})
    layouts = {(s.S, str(s.mask_layout)) for s in found}
    # One query row has no stride between rows, but each batch entry's row starts where S says.
    assert layouts == {(128, "bhls"), (127, "bhls!"), (181, "bhls!"), (180, "bhls"), (256, "bhls"), (255, "bhls!")}


@pytest.mark.parametrize(
    "signature", [masked(50, 50), masked(1, 50), masked(7, 50), masked(50, 50, torch.bool)], ids=str
)
def test_inputs_can_be_made_for_every_member(signature: Signature):
    """What comes out of a range is a signature that inputs have, so each can be tuned."""
    for each in spread(signature, {"key": (1, 200)}):
        call = synthesize(each, torch.device("cpu"))
        assert read_signature(call) == each


@pytest.mark.parametrize(
    ("lengths", "error", "match"),
    [
        ({"keys": (1, 2)}, UnknownNameError, "did you mean 'key'"),
        ({"key": (0, 2)}, SettingError, "from 1 on"),
        ({"key": (3, 2)}, SettingError, r"lengths\['key'\] is \(3, 2\)"),
        ({"key": 128}, SettingError, "lowest, highest"),
        ({"key": (1.0, 2)}, SettingError, "whole numbers"),
    ],
)
def test_wrong_ranges_are_refused(lengths, error, match: str):
    """A wrong axis or pair is named with what is allowed."""
    with pytest.raises(error, match=f"(?i){match}"):
        check_ranges(lengths)
