"""How often lengths come back: what decides whether a plan is worth its price.

Counts live in the runners that were bound while a plan was in question; a hit on a settled choice counts nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from smartattn.backends.base import Runner

MAX_LENGTHS_PER_FAMILY = 4096


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
        self.num_calls += 1
        if self.limit is not None and self.num_calls > self.limit and self.renew is not None:
            return self.renew(*arguments)
        return self.run(*arguments)


class History:
    """Calls seen per exact signature, by family."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, OrderedDict[str, list[CountedRunner]]] = {}

    def watch(self, family: str, signature_text: str, counted: CountedRunner) -> None:
        """Count the calls of ``counted`` towards a signature."""
        with self._lock:
            lengths = self._families.setdefault(family, OrderedDict())
            lengths.setdefault(signature_text, []).append(counted)
            lengths.move_to_end(signature_text)
            while len(lengths) > MAX_LENGTHS_PER_FAMILY:
                lengths.popitem(last=False)

    def num_calls(self, family: str, signature_text: str) -> int:
        """Return the calls counted at this exact signature."""
        with self._lock:
            return sum(counted.num_calls for counted in self._families.get(family, {}).get(signature_text, ()))

    def num_lengths(self, family: str) -> int:
        """Return how many exact signatures of a family were counted."""
        with self._lock:
            return len(self._families.get(family, ()))

    def expected_calls(self, family: str, signature_text: str) -> float:
        """Return how often a new length of a family may be expected to come back.

        The mean over the family's other lengths; infinite while there is no other, since most programs have one shape.
        """
        with self._lock:
            lengths = self._families.get(family, {})
            others = [sum(c.num_calls for c in found) for text, found in lengths.items() if text != signature_text]
        return sum(others) / len(others) if others else float("inf")

    def clear(self) -> None:
        """Forget all counts."""
        with self._lock:
            self._families.clear()
