"""Records of this process in front of the disk: exact before bucket, memory before disk.

A record on disk is read once; a look-up that found nothing is repeated, since another process may have tuned since.
"""

from __future__ import annotations

import math
import threading

from smartattn.buckets import Bucket, bucket_of
from smartattn.environment import Environment
from smartattn.record import Record
from smartattn.signature import Signature
from smartattn.store import Store


class Memory:
    """Records met so far, with the store behind them.

    Attributes:
        store: the disk layers; replaced when settings change.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._records: dict[tuple[str, str], tuple[Record, str]] = {}
        self._exact: set[Signature] = set()

    def find(self, environment: Environment, signature: Signature) -> tuple[Record, str] | None:
        """Return the record for a signature with its origin: its own, else its bucket's, else ``None``.

        Note:
            Reads at most two files per layer when memory has neither.
        """
        bucket = bucket_of(signature)
        for digest in (signature.digest, bucket.digest):
            found = self._records.get((environment.digest, digest))
            if found is not None:
                return found[0], "memory"
            stored = self.store.find(environment, digest)
            if stored is not None:
                self._remember(environment, digest, *stored)
                return stored
        return None

    def add(self, environment: Environment, record: Record, *, publish: bool) -> None:
        """Keep a record, and write it to disk when ``publish``."""
        self._remember(environment, record.digest, record, "tuned")
        if publish:
            self.store.publish(environment, record)

    def _remember(self, environment: Environment, digest: str, record: Record, origin: str) -> None:
        with self._lock:
            self._records[environment.digest, digest] = record, origin
            if record.bucket is None:
                self._exact.add(record.signature)

    def has_exact(self, signature: Signature) -> bool:
        """Return whether memory has a record of this signature's own."""
        return signature in self._exact

    def nearest(self, environment: Environment, signature: Signature) -> Record | None:
        """Return the record of the same family whose lengths are closest, among those in memory."""
        family = signature.family
        with self._lock:
            known = [record for (digest, _), (record, _) in self._records.items() if digest == environment.digest]
        alike = [record for record in known if record.signature.family == family]
        return min(alike, key=lambda record: _distance(record.signature, signature), default=None)

    def records(self) -> list[tuple[Record, str]]:
        """Return every record in memory with its origin."""
        with self._lock:
            return list(self._records.values())

    def forget(self, environment: Environment, signature: Signature) -> None:
        """Forget the exact and the bucket's record of a signature."""
        bucket: Bucket = bucket_of(signature)
        with self._lock:
            for digest in (signature.digest, bucket.digest):
                self._records.pop((environment.digest, digest), None)
            self._exact.discard(signature)

    def clear(self) -> None:
        """Forget every record in memory; files stay."""
        with self._lock:
            self._records.clear()
            self._exact.clear()


def _distance(one: Signature, other: Signature) -> float:
    return sum(abs(math.log2(max(1, a) / max(1, b))) for a, b in ((one.N, other.N), (one.L, other.L), (one.S, other.S)))
