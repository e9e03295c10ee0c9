"""One stored record as a line of a list: its choice, what that gains, how old and how noisy it is."""

from __future__ import annotations

import dataclasses
import datetime
import os
from dataclasses import dataclass
from typing import Any

from smartattn.choice import STOCK, choose
from smartattn.record import Timed
from smartattn.stored import StoredRecord


@dataclass(frozen=True, slots=True)
class Row:
    """A record in short.

    Attributes:
        digest: name of its file; the first digits are enough to ask for it.
        signature: text of the problem that was measured.
        bucket: ranges it answers for, such as ``N1-1 L725-1024 S725-1024``; empty for an exact record.
        device: model.
        torch: version of PyTorch.
        origin: ``disk`` or ``layer <path>``.
        route: what steady calls run; empty when nothing in it is valid.
        cost_us: per call of that route.
        gain: time of stock over that of the route; ``None`` without both.
        noise: interquartile range over the cost.
        date: UTC, ISO 8601.
        dynamic: whether it was made for lengths that keep changing.
        environment: folder name.
        path: of its file.
    """

    digest: str
    signature: str
    bucket: str
    device: str
    torch: str
    origin: str
    route: str
    cost_us: float | None
    gain: float | None
    noise: float | None
    date: str
    dynamic: bool
    environment: str
    path: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}


def row_of(entry: StoredRecord) -> Row:
    """Return a stored record in short; what may serve in this process is not asked, so any machine's record has one."""
    record = entry.record
    choice = choose(record.outcomes, lambda _: True, dynamic=record.dynamic, num_calls=0, is_planned=True)
    chosen = None if choice is None else record.outcomes[choice.route]
    stock = record.outcomes.get(STOCK)
    cost_us = chosen.cost_us if isinstance(chosen, Timed) else None
    ranges = {} if record.bucket is None else record.bucket.ranges
    # Path's own parts would take longer than all else here.
    path = str(entry.path)
    folder, _, name = path.rpartition(os.sep)
    return Row(
        digest=name.removesuffix(".json"),
        signature=str(record.signature),
        bucket=" ".join(f"{axis}{low}-{high}" for axis, (low, high) in ranges.items()),
        device=entry.environment.device_name if entry.environment else "",
        torch=entry.environment.torch if entry.environment else "",
        origin=entry.origin,
        route=choice.route if choice else "",
        cost_us=cost_us,
        gain=stock.cost_us / cost_us if isinstance(stock, Timed) and cost_us else None,
        noise=chosen.spread_us / cost_us if isinstance(chosen, Timed) and cost_us else None,
        date=record.provenance.date,
        dynamic=record.dynamic,
        environment=folder.rpartition(os.sep)[0].rpartition(os.sep)[2],
        path=path,
    )


def age_days(date: str) -> float | None:
    """Return the days since an ISO 8601 date; ``None`` for text that is none."""
    try:
        then = datetime.datetime.fromisoformat(date)
    except ValueError:
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=datetime.timezone.utc)
    return (datetime.datetime.now(datetime.timezone.utc) - then).total_seconds() / 86400


def format_age(date: str) -> str:
    """Format the time since a date in its largest whole unit."""
    days = age_days(date)
    if days is None:
        return "-"
    for limit, factor, unit in ((1 / 24, 1440, "min"), (2, 24, "h")):
        if days < limit:
            return f"{max(0.0, days) * factor:.0f} {unit}"
    return f"{days:.0f} d"
