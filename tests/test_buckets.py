"""Buckets: fixed ranges that cover every length once."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartattn.buckets import SMALL_LENGTH, Bucket, bucket_of, length_range, octave_range
from smartattn.layout import Layout
from smartattn.signature import Signature

BASE = Signature(
    pass_name="infer", device_type="cpu", dtype="float32", batch=(2,), Hq=4, H=4, L=64, S=64, E=32, Ev=32,
    layouts=(Layout("bhsd"),) * 3,
)  # fmt: skip
UPPER_EDGES = (128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096)


@pytest.mark.parametrize("smallest", [1, 2])
def test_every_length_is_in_exactly_one_bucket(smallest: int):
    """Walking up to 2^14 meets each bucket once, without gap or overlap, and edges only grow."""
    length = smallest
    edges = []
    while length < 1 << 14:
        low, high = length_range(length, smallest)
        assert low == length
        assert {length_range(inner, smallest) for inner in range(low, high + 1)} == {(low, high)}
        edges.append(high)
        length = high + 1
    assert edges == sorted(set(edges))
    assert tuple(edges[: len(UPPER_EDGES)]) == UPPER_EDGES


@given(st.integers(1, 1 << 40))
def test_huge_lengths_fall_between_their_edges(length: int):
    """A length of any size lies in its bucket, and the bucket's ends lie in the same one."""
    low, high = length_range(length)
    assert low <= length <= high
    assert length_range(low) == length_range(high) == (low, high)


@given(st.integers(SMALL_LENGTH + 1, 1 << 30))
def test_two_buckets_per_octave(length: int):
    """No bucket above the first spans more than half an octave, up to the rounding of its edges."""
    low, high = length_range(length)
    assert high / (low - 1) == pytest.approx(2**0.5, rel=0.01)


def test_decoding_is_a_class_of_its_own():
    """A query length of 1 shares its bucket with no other; a key length of 1 does."""
    decode, short = (bucket_of(dataclasses.replace(BASE, L=L)) for L in (1, 2))
    assert (decode.L, short.L) == ((1, 1), (2, SMALL_LENGTH))
    assert bucket_of(dataclasses.replace(BASE, S=1)).S == (1, SMALL_LENGTH)


@given(st.integers(1, 1 << 30))
def test_batches_go_by_octave(size: int):
    """N falls into 1, 2, 3-4, 5-8, 9-16, ..."""
    low, high = octave_range(size)
    assert low <= size <= high
    assert high == 1 or high == 2 * (low - 1)
    assert octave_range(low) == octave_range(high) == (low, high)


def test_bucket_holds_the_family():
    """Signatures share a bucket only within a family; square and other shapes are different families."""
    near = dataclasses.replace(BASE, L=100, S=100, batch=(1, 2))
    assert bucket_of(dataclasses.replace(BASE, L=100, S=100)) == bucket_of(BASE)
    assert bucket_of(near).family != bucket_of(BASE).family, "5-D inputs are another family"
    assert bucket_of(dataclasses.replace(BASE, S=65)).family != bucket_of(BASE).family
    assert bucket_of(dataclasses.replace(BASE, dtype="bfloat16")) != bucket_of(BASE)


@pytest.mark.parametrize("field", dataclasses.fields(Bucket), ids=lambda field: field.name)
def test_every_field_moves_the_digest(field: dataclasses.Field):
    """Two buckets that differ anywhere have different files."""
    bucket = bucket_of(BASE)
    other = "sdpa other" if field.name == "family" else (3, 9)
    assert dataclasses.replace(bucket, **{field.name: other}).digest != bucket.digest


def test_a_batch_without_axes_counts_as_one():
    """3-D inputs have an N of 1."""
    assert bucket_of(dataclasses.replace(BASE, batch=())).N == (1, 1)
