"""The contract of a rewrite: an exact transformation of the inputs into an equivalent problem, and of the output back.

A rewrite is one file with a subclass of ``Rewrite`` and one line in ``registry``. It sees only the signature when it
says whether it applies and what problem it leaves; ``bind`` wraps the runner of that remaining problem. Everything in
the wrapper is differentiable PyTorch, so that gradients flow as they would through the original call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from smartattn.backends.base import Runner
from smartattn.signature import Signature


class Rewrite(ABC):
    """One exact transformation.

    Attributes:
        name: as it stands before the backend in a route, such as ``fold_gqa`` in ``fold_gqa+flash``.
    """

    name: str

    @abstractmethod
    def reasons(self, signature: Signature) -> tuple[str, ...]:
        """Return all the reasons why this rewrite does not apply or would change nothing; empty when it applies."""

    @abstractmethod
    def transform(self, signature: Signature) -> Signature:
        """Return the signature of the problem that is left; only asked when ``reasons`` is empty."""

    @abstractmethod
    def bind(self, signature: Signature, run: Runner) -> Runner:
        """Return a runner for ``signature`` that transforms, calls ``run`` on what is left, and transforms back."""

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of the copies that the transformation makes."""
        del signature
        return 0
