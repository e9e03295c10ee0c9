"""The classes of masks that a caller may name, as immutable values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from smartattn.mask_facts import Facts


@dataclass(frozen=True, slots=True)
class Mask:
    """Base of all classes: an immutable value that may be given as ``attn_mask``."""

    @property
    def name(self) -> str:
        """Mask class as it stands in signatures."""
        raise NotImplementedError

    def dense(self, L: int, S: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the mask as a bool tensor, true where a key is visible, that broadcasts to (N, Hq, L, S).

        Raises:
            ValueError: the lengths of the class do not fit L and S.
        """
        raise NotImplementedError

    def facts(self, L: int, S: int, device: torch.device | str = "cpu") -> Facts:
        """Return what a backend needs to know about ``dense``."""
        del L, S, device
        return Facts(self.name)


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """Query i sees keys 0 to i, as ``is_causal=True``."""

    @property
    def name(self) -> str:
        """Mask class."""
        return "causal"

    def dense(self, L: int, S: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the (L, S) lower triangle."""
        return torch.ones((L, S), dtype=torch.bool, device=device).tril()


@dataclass(frozen=True, slots=True)
class CausalLowerRight(Mask):
    """Query i sees keys 0 to i + S - L: the last query sees all, as when new tokens follow cached ones."""

    @property
    def name(self) -> str:
        """Mask class."""
        return "causal_lower_right"

    def dense(self, L: int, S: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the (L, S) triangle whose corner is at the lower right."""
        return torch.ones((L, S), dtype=torch.bool, device=device).tril(S - L)

    def facts(self, L: int, S: int, device: torch.device | str = "cpu") -> Facts:
        """Return the window that only ends at the query."""
        del L, S, device
        return Facts(self.name, left=-1, right=0)


@dataclass(frozen=True, slots=True)
class Window(Mask):
    """Query i, at position p = i + S - L, sees keys p - left to p + right.

    Attributes:
        left: keys before the query's own position; ``None`` for all.
        right: keys after it; ``None`` for all.
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for side in (self.left, self.right):
            if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
                raise ValueError(f"a window reaches a number of keys (0 or more) or None; got {side!r}")

    @property
    def name(self) -> str:
        """Mask class; -1 stands for no limit."""
        left, right = (-1 if side is None else side for side in (self.left, self.right))
        return f"window({left},{right})"

    def dense(self, L: int, S: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the (L, S) band."""
        visible = torch.ones((L, S), dtype=torch.bool, device=device)
        if self.right is not None:
            visible = visible.tril(S - L + self.right)
        return visible if self.left is None else visible.triu(S - L - self.left)

    def facts(self, L: int, S: int, device: torch.device | str = "cpu") -> Facts:
        """Return both ends of the window."""
        del L, S, device
        left, right = (-1 if side is None else side for side in (self.left, self.right))
        return Facts(self.name, left=left, right=right)


@dataclass(frozen=True, slots=True)
class Documents(Mask):
    """Sequences packed one after the other; a query sees the keys of its own document only.

    Attributes:
        lengths: of the documents, in order; they add up to L and to S.
    """

    lengths: tuple[int, ...]

    def __init__(self, lengths: Sequence[int] | torch.Tensor) -> None:
        object.__setattr__(self, "lengths", _lengths(lengths, smallest=1))

    @property
    def name(self) -> str:
        """Mask class."""
        return "documents"

    def dense(self, L: int, S: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the (S, S) blocks on the diagonal."""
        self.check(L, S)
        sizes = torch.tensor(self.lengths)
        ids = torch.arange(len(self.lengths)).repeat_interleave(sizes).to(device)
        return ids[:, None] == ids

    def facts(self, L: int, S: int, device: torch.device | str = "cpu") -> Facts:
        """Return where documents begin and end."""
        self.check(L, S)
        ends = torch.tensor((0, *self.lengths)).cumsum(0).to(device=device, dtype=torch.int32)
        return Facts(self.name, ends=ends, longest=max(self.lengths))

    def check(self, L: int, S: int) -> None:
        """Raise ``ValueError`` unless the documents make up all queries and keys."""
        if not L == S == sum(self.lengths):
            raise ValueError(f"documents of {sum(self.lengths)} tokens in all cannot mask {L} queries and {S} keys")


@dataclass(frozen=True, slots=True)
class KeyPadding(Mask):
    """Each batch element sees a number of keys: the first ones (padding on the right) or the last ones.

    Attributes:
        lengths: visible keys of each batch element.
        side: where the padding is, ``right`` or ``left``.
    """

    lengths: tuple[int, ...]
    side: str = "right"

    def __init__(self, lengths: Sequence[int] | torch.Tensor, side: str = "right") -> None:
        if side not in ("left", "right"):
            raise ValueError(f"side is {side!r}; it must be 'left' or 'right'")
        object.__setattr__(self, "lengths", _lengths(lengths, smallest=0))
        object.__setattr__(self, "side", side)

    @property
    def name(self) -> str:
        """Mask class."""
        return "key_padding"

    def dense(self, L: int, S: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the (N, 1, 1, S) mask."""
        del L
        starts, lengths = self._spans(S, device)
        keys = torch.arange(S, device=device)
        return ((keys >= starts[:, None]) & (keys < (starts + lengths)[:, None]))[:, None, None]

    def facts(self, L: int, S: int, device: torch.device | str = "cpu") -> Facts:
        """Return the first visible key and the number of them."""
        del L
        starts, lengths = self._spans(S, device)
        return Facts(self.name, starts=starts, lengths=lengths)

    def _spans(self, S: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        if max(self.lengths) > S:
            raise ValueError(f"{max(self.lengths)} keys cannot be visible; there are {S}")
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        starts = S - lengths if self.side == "left" else torch.zeros_like(lengths)
        return starts.to(device), lengths.to(device)


def _lengths(given: Sequence[int] | torch.Tensor, smallest: int) -> tuple[int, ...]:
    # A tensor on an accelerator is read here, once, when the mask is made.
    found = tuple(given.tolist() if isinstance(given, torch.Tensor) else given)
    if not found or not all(isinstance(n, int) and not isinstance(n, bool) and n >= smallest for n in found):
        raise ValueError(f"lengths are one or more whole numbers of at least {smallest}; got {found!r}")
    return found
