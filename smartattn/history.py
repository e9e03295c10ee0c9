"""How often lengths come back: what decides whether a plan is worth its price.

Counts live in the runners that were bound while a plan was in question; a hit on a settled choice counts nothing.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from smartattn.backends.base import Runner
from smartattn.signature import Signature

MAX_LENGTHS_PER_FAMILY = 4096
NUM_LATEST = 64
"""Lengths that tell how often the next one may come back: what a program did lately, at a bounded cost."""


class CountedRunner:
    """A runner that counts its calls and hands over to ``renew`` once ``limit`` of them were made.

    Attributes:
        num_calls: calls so far (approximate under threads).
        limit: calls after which ``renew`` answers; ``None`` for never.
    """

    __slots__ = ("limit", "num_calls", "renew", "run")

    def __init__(self, run: Runner, limit: int | None = None, renew: Callable[..., torch.Tensor] | None = None) -> None:
        self.run = run
        self.num_calls = 0
        self.limit = limit
        self.renew = renew

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Count one call and answer it."""
        self.num_calls += 1
        if self.limit is not None and self.num_calls > self.limit and self.renew is not None:
            return self.renew(*arguments)
        return self.run(*arguments)


class History:
    """Calls seen per exact signature, by family."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[Hashable, OrderedDict[Hashable, list[CountedRunner]]] = {}

    def watch(self, signature: Signature, counted: CountedRunner) -> None:
        """Count the calls of ``counted`` towards a signature."""
        with self._lock:
            lengths = self._families.setdefault(signature.family_key, OrderedDict())
            lengths.setdefault(signature.lengths, []).append(counted)
            lengths.move_to_end(signature.lengths)
            while len(lengths) > MAX_LENGTHS_PER_FAMILY:
                lengths.popitem(last=False)

    def num_calls(self, signature: Signature) -> int:
        """Return the calls counted at this exact signature."""
        lengths = self._families.get(signature.family_key)
        found = None if lengths is None else lengths.get(signature.lengths)
        return 0 if found is None else sum(counted.num_calls for counted in tuple(found))

    def expected_calls(self, signature: Signature) -> float:
        """Return how often a new length of a family may be expected to come back.

        The mean over the family's other lengths, the latest ones; infinite while there is no other, since most programs
        have one shape.
        """
        with self._lock:
            lengths = self._families.get(signature.family_key, OrderedDict())
            latest = list(itertools.islice(reversed(lengths.items()), NUM_LATEST + 1))
        others = [sum(c.num_calls for c in found) for key, found in latest if key != signature.lengths]
        return sum(others) / len(others) if others else float("inf")

    def clear(self) -> None:
        """Forget all counts."""
        with self._lock:
            self._families.clear()
