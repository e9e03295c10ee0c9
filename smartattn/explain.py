"""Why a call runs what it runs: the signature, the choice and its origin, and every route's outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from smartattn.backends.stock import resolved_backend
from smartattn.buckets import bucket_of
from smartattn.choice import STOCK
from smartattn.first_sight import cast_for_autocast, said
from smartattn.formatting import format_bytes, format_ratio, format_table, format_us
from smartattn.mask_runner import is_watched
from smartattn.masks import canonicalize
from smartattn.pending import tune_one
from smartattn.plain import passthrough_reason
from smartattn.record import Outcome, Record, Rejected, Timed, outcome_to_dict
from smartattn.routes import routes_for
from smartattn.selector import selector
from smartattn.signature import Call, Signature, read_signature
from smartattn.view import View
from smartattn.wishes import wish_of

NOT_MEASURED = "not measured yet"


@dataclass(frozen=True)
class Explanation:
    """Everything about the choice for one call; ``str()`` is a table, ``to_dict()`` plain data.

    Attributes:
        signature: text; empty for a call that is handed to PyTorch.
        mask: mask class.
        bucket: text of the bucket.
        route: name of the route that would run.
        origin: ``memory``, ``disk``, ``layer <path>``, ``tuned``, ``safe default``, ``off`` or ``passed through``.
        stock_runs: backend that PyTorch's own function would run.
        outcomes: route name to outcome, every route that was thought of.
        note: why it is so, where that needs words.
        num_calls: calls counted at this exact length while a plan was in question.
        faster: route that becomes the choice once its plan is paid.
        break_even_calls: calls at this length that pay for it.
        record_signature: exact problem that was measured, when a bucket's record answers.
        provenance: circumstances of the record.
    """

    signature: str
    mask: str
    bucket: str
    route: str
    origin: str
    stock_runs: str
    outcomes: Mapping[str, Outcome]
    note: str = ""
    num_calls: int = 0
    faster: str = ""
    break_even_calls: int = 0
    record_signature: str = ""
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        data = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        data["outcomes"] = {name: outcome_to_dict(outcome) for name, outcome in self.outcomes.items()}
        data["provenance"] = dict(self.provenance)
        return data

    def __str__(self) -> str:
        lines = [f"signature  {self.signature}"] if self.signature else []
        if self.bucket:
            lines.append(f"bucket     N{self.bucket.rpartition(' N')[2]}")
        lines.append(f"chosen     {self.route} ({self.origin}){f': {self.note}' if self.note else ''}")
        if self.stock_runs:
            lines.append(f"stock runs {self.stock_runs}")
        if self.record_signature and self.record_signature != self.signature:
            lines.append(f"measured   {self.record_signature}")
        if self.faster:
            lines.append(
                f"faster     {self.faster}, once {self.break_even_calls} calls at this length pay for its plan "
                f"({self.num_calls} seen)"
            )
        if self.provenance:
            lines.append(f"recorded   {self.provenance.get('date')} on {self.provenance.get('host')}")
        if self.outcomes:
            header = ("", "route", "device", "host", "plan", "workspace", "vs stock", "error", "why")
            lines += ["", format_table(header, [self._row(name) for name in self.outcomes])]
        return "\n".join(lines)

    def _row(self, name: str) -> tuple[str, ...]:
        outcome = self.outcomes[name]
        mark = "->" if name == self.route else ""
        if not isinstance(outcome, Timed):
            why = "; ".join(outcome.reasons) if isinstance(outcome, Rejected) else outcome.reason
            text = why if why == NOT_MEASURED else f"{outcome.is_}: {why}"
            return (mark, name, "-", "-", "-", "-", "-", "-", text)
        stock = self.outcomes.get(STOCK)
        gain = stock.cost_us / outcome.cost_us if isinstance(stock, Timed) else None
        plan = f"{outcome.plan_ms:.3g} ms" if outcome.plan_ms else "-"
        why = f"runs {outcome.resolved}" if outcome.resolved else ""
        return (
            mark, name, format_us(outcome.device_us), format_us(outcome.host_us), plan,
            format_bytes(outcome.peak_bytes), format_ratio(gain), f"{outcome.error:.2g}", why,
        )  # fmt: skip


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
    tune: bool = False,
) -> Explanation:
    """Explain which route this call would run, and why not the others.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: as for the call itself.
        backend: as for the call itself.
        tune: measure now when nothing is stored for it.

    Returns:
        The explanation; every route that was thought of has its outcome or its reasons.

    Note:
        Runs nothing and writes nothing unless ``tune``; reads the disk when memory has no record, and the values of a
        dense mask that a call would look at once that pays (then it waits for the device).
    """
    given, mask, _ = said(Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    why = passthrough_reason(given)
    signature = None if why else read_signature(cast_for_autocast(given))
    if signature is None:
        note = why or "sizes, dtypes or broadcasting that PyTorch answers in its own way"
        return Explanation("", "", "", "stock", "passed through", "", {}, note=f"handed to PyTorch untouched: {note}")
    call = cast_for_autocast(given)
    if is_watched(given, signature, wish_of(backend)):
        given, mask, _ = canonicalize(given, recognizes=True)
        call = cast_for_autocast(given)
        signature = read_signature(call) or signature
    signature = dataclasses.replace(signature, mask=mask) if mask else signature
    view = selector.view(query.device, signature, wish_of(backend))
    found = selector.find(view)
    if found is None and tune:
        record = tune_one(query.device, signature, call=call)
        found = None if record is None else (record, "tuned")
    return _explain_signature(view, found, resolved_backend(call))


def explain_signature(signature: Signature, device: torch.device, *, backend: str | None = None) -> Explanation:
    """Explain the choice for a signature alone, without tensors; measures nothing."""
    view = selector.view(device, signature, wish_of(backend))
    return _explain_signature(view, selector.find(view), "")


def _explain_signature(view: View, found: tuple[Record, str] | None, stock_runs: str) -> Explanation:
    signature = view.signature
    outcomes: dict[str, Outcome] = {}
    if found is not None:
        outcomes.update(found[0].outcomes)
    for route in routes_for(signature):
        reasons = view.reasons(route)
        if reasons:
            outcomes[route.name] = Rejected(reasons)
        elif route.name not in outcomes:
            outcomes[route.name] = Rejected((NOT_MEASURED,))
    choice = None if found is None else selector.consider(view, found[0])
    base: dict[str, Any] = {
        "signature": str(signature),
        "mask": signature.mask,
        "bucket": str(bucket_of(signature)),
        "stock_runs": stock_runs,
        "outcomes": outcomes,
        "num_calls": selector.history.num_calls(signature),
    }
    if view.settings.mode == "off":
        return Explanation(route=STOCK, origin="off", note="mode is 'off': PyTorch's own function, always", **base)
    if found is None or choice is None:
        route = view.safe_route(outcomes)
        note = "nothing is stored for it" if found is None else "no stored route may serve it"
        if view.settings.mode == "error":
            note += "; in mode 'error' the call would raise MissingRecordError"
        return Explanation(route=route.name, origin="safe default", note=note, **base)
    return Explanation(
        route=choice.route,
        origin=found[1],
        faster=choice.faster,
        break_even_calls=choice.break_even_calls,
        record_signature=str(found[0].signature),
        provenance=found[0].provenance.to_dict(),
        **base,
    )
