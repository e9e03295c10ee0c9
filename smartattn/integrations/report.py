"""What ``replace_attention`` did: every place that was reached, and every one that was not, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from smartattn.formatting import format_table


@dataclass(frozen=True)
class Place:
    """One module that computes attention, or looks as if it did.

    Attributes:
        name: of the module in the model, as ``named_modules`` gives it.
        kind: its class.
        integration: which part of the table of integrations reached it; empty for a place left alone.
        reason: why it was left alone; empty for a place that was replaced.
    """

    name: str
    kind: str
    integration: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """The outcome of ``replace_attention`` or ``restore_attention``; ``str()`` is a table.

    Attributes:
        replaced: places whose attention smartattn answers now (for ``restore_attention``: places given back).
        left: places that were left as they are, with the reason.
    """

    replaced: tuple[Place, ...] = ()
    left: tuple[Place, ...] = ()

    def __str__(self) -> str:
        if not self.replaced and not self.left:
            return "No attention was found in this model."
        rows = [
            *_grouped(self.replaced, "replaced"),
            *_grouped(self.left, "left"),
        ]
        return format_table(("", "places", "first", "class", "by, or why not"), rows, width=140)


def _grouped(places: Iterable[Place], word: str) -> list[tuple[str, str, str, str, str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for place in places:
        groups.setdefault((place.kind, place.integration or place.reason), []).append(place.name)
    return [(word, str(len(names)), names[0] or "(the model)", kind, why) for (kind, why), names in groups.items()]
