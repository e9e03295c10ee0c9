"""When reading the values of a dense mask pays: rent or buy, as for a plan.

Reading costs a wait for the device and a pass over the mask; it wins whatever the mask's class saves in each later call
with the same mask. A ledger per kind of call holds what earlier masks taught: how often each was used, how many were of
a class, what reading them cost, what the class saved.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass

from smartattn.signature import DTYPES, Signature

MIN_SCORES = 1 << 16
"""Smallest L x S whose mask is looked at: a call on less takes less than a few times what looking costs."""
ASSUMED_SAVING_RATIO = 0.5
"""Share of a dense call that a class is taken to save while that is unknown.

Source: on an H200 causal saves 0.66, a sliding window 0.84, documents 0.88, lower-right causal 0.4, padding 0.1 to 0.7.
"""
MAX_LOOK_RATIO = 8.0
"""Time of a look over its guess up to which it is believed, so that one slow first look does not end looking."""
MAX_LEDGERS = 1024
MIN_SHARED_USES = 4
"""Uses of a mask from which it counts as shared, where the choice must not depend on measured times."""
_FIXED_US = {"cpu": 400.0}
_FIXED_US_ACCELERATOR = 200.0
_BYTES_PER_US = {"cpu": 1e3}
_BYTES_PER_US_ACCELERATOR = 4e5
"""What looking is taken to cost before it was timed.

Source: 3.8 ms for 2048 x 2048 and 55 to 73 ms for 8192 x 8192 on one CPU thread; on an H200 see the benchmark of rewrites.
"""
_FLOP_PER_US = {"cpu": 2e4}
_FLOP_PER_US_ACCELERATOR = 3e8
"""Speed of a dense call that was never measured. Source: fused kernels with a mask on an H200; one CPU core."""


@dataclass(slots=True)
class Ledger:
    """What masks of one kind of call taught.

    Attributes:
        fixed_us, flop_us: cost of a look and of a dense call, in microseconds, before either was measured.
        num_masks: masks seen, by identity and version.
        num_uses: calls with them.
        num_looked: masks that were looked at.
        num_found: those that were of a class.
        fastest_us: what the fastest look took, infinite before the first.
        dense_us: measured cost of a call by its dense mask, 0 while unknown.
        class_us: the same by the class that was found last.
    """

    fixed_us: float
    flop_us: float
    num_masks: int = 0
    num_uses: int = 0
    num_looked: int = 0
    num_found: int = 0
    fastest_us: float = math.inf
    dense_us: float = 0.0
    class_us: float = 0.0

    def note_look(self, taken_us: float, *, is_found: bool) -> None:
        """Note that a mask was looked at."""
        self.num_looked += 1
        self.num_found += is_found
        self.fastest_us = min(self.fastest_us, taken_us)

    @property
    def expected_uses(self) -> float:
        """How often a new mask may be expected to be used; infinite before the first, as most programs share masks."""
        return self.num_uses / self.num_masks if self.num_masks else math.inf

    @property
    def look_us(self) -> float:
        """What a look costs: the fastest, since the first ones hold what loading kernels took (up to seconds)."""
        return self.fixed_us if math.isinf(self.fastest_us) else min(self.fastest_us, self.fixed_us * MAX_LOOK_RATIO)

    @property
    def gain_us(self) -> float:
        """What looking may be expected to save per later call with the mask."""
        dense_us = self.dense_us or max(self.flop_us, 2 * self.class_us)
        saving_us = max(0.0, dense_us - self.class_us) if self.class_us else dense_us * ASSUMED_SAVING_RATIO
        return saving_us * (1 + self.num_found) / (1 + self.num_looked)

    def look_at(self, expected_uses: float) -> float:
        """Return the use of a mask, counted from 1, at which to look at it; infinite for never.

        Args:
            expected_uses: of this mask, from ``expected_uses`` before it was counted.

        At the first use when the uses that are expected repay it; else once the uses so far would have repaid it, so
        that no mask costs more than twice what knowing its future would.
        """
        if not self.gain_us:
            return math.inf
        paying_uses = self.look_us / self.gain_us
        return 1 if expected_uses >= paying_uses else math.ceil(paying_uses) + 1

    def is_shared(self, expected_uses: float) -> bool:
        """Return whether to look at once, from counts alone, which the same program repeats."""
        return expected_uses >= MIN_SHARED_USES and 2 * self.num_found >= self.num_looked


_ledgers: OrderedDict[str, Ledger] = OrderedDict()
_lock = threading.Lock()


def ledger_of(kind: str, signature: Signature) -> Ledger:
    """Return the ledger of a kind of call, the same one each time; ``signature`` sizes its first guesses."""
    with _lock:
        found = _ledgers.get(kind)
        if found is None:
            found = _ledgers[kind] = _new_ledger(signature)
            while len(_ledgers) > MAX_LEDGERS:
                _ledgers.popitem(last=False)
        return found


def _new_ledger(signature: Signature) -> Ledger:
    s, device = signature, signature.device_type
    axes = dict(zip("bhls", (s.N, s.Hq, s.L, s.S), strict=True))
    elements = math.prod(axes[letter] for letter in s.mask_axes if letter in axes)
    mask_bytes = elements * (1 if s.mask_dtype == "bool" else DTYPES[s.mask_dtype].itemsize)
    fixed_us = _FIXED_US.get(device, _FIXED_US_ACCELERATOR)
    fixed_us += mask_bytes / _BYTES_PER_US.get(device, _BYTES_PER_US_ACCELERATOR)
    flops = 2 * s.num_scores * (s.E + s.Ev)
    return Ledger(fixed_us, flops / _FLOP_PER_US.get(device, _FLOP_PER_US_ACCELERATOR))


def forget() -> None:
    """Forget what was learnt."""
    with _lock:
        _ledgers.clear()
