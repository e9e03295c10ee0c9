"""Ranges of lengths that share one decision. Fixed, not learnt: the same lengths meet the same bucket everywhere.

L = 1 (decoding) is a class of its own; up to 128 is one bucket; above, two buckets per octave. S likewise without the
class of 1; N by octave. A bucket is a hint about speed, never a permission: eligibility is checked per exact shape.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from smartattn.signature import Signature, digest_of

SMALL_LENGTH = 128
BUCKETS_PER_OCTAVE = 2


@dataclass(frozen=True, slots=True)
class Bucket:
    """One range of lengths of one family; all ends are inclusive.

    Attributes:
        family: text of the signature without its lengths.
        N, L, S: lowest and highest size.
        is_square: whether L equals S throughout.
    """

    family: str
    N: tuple[int, int]
    L: tuple[int, int]
    S: tuple[int, int]

    @property
    def digest(self) -> str:
        """Name of this bucket's files."""
        return digest_of(str(self))

    def __str__(self) -> str:
        ranges = " ".join(f"{name}{low}-{high}" for name, (low, high) in self.ranges.items())
        return f"{self.family} {ranges}"

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The ranges by axis letter, as a record stores them."""
        return {"N": self.N, "L": self.L, "S": self.S}


@functools.lru_cache(maxsize=8192)
def length_range(length: int, smallest: int = 1) -> tuple[int, int]:
    """Return the bucket ``(low, high)`` that ``length`` falls into."""
    if length < smallest:
        return length, length
    if length <= SMALL_LENGTH:
        return smallest, SMALL_LENGTH
    # The upper edges are 128 * 2**(k/2), rounded to whole lengths: 181, 256, 362, 512, 724, 1024, 1448, ...
    step = max(1, math.ceil(BUCKETS_PER_OCTAVE * math.log2(length / SMALL_LENGTH) - 1e-9))
    while _edge(step) < length:
        step += 1
    while step > 1 and _edge(step - 1) >= length:
        step -= 1
    return _edge(step - 1) + 1, _edge(step)


def _edge(step: int) -> int:
    return round(SMALL_LENGTH * 2 ** (step / BUCKETS_PER_OCTAVE))


@functools.lru_cache(maxsize=1024)
def octave_range(size: int) -> tuple[int, int]:
    """Return ``(low, high)`` of the octave that ``size`` falls into: 1, 2, 3-4, 5-8, ..."""
    high = 1 << (size - 1).bit_length()
    return high // 2 + 1 if high > 1 else 1, high


def bucket_of(signature: Signature) -> Bucket:
    """Return the bucket of a signature."""
    return Bucket(
        family=signature.family,
        N=octave_range(max(1, signature.N)),
        L=length_range(signature.L, smallest=2),
        S=length_range(signature.S),
    )
