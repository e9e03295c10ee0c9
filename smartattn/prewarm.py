"""Tuning ahead of use: run a model once, collect every attention it asks for, tune all of it, say what that saves.

What is stored already and still current is not measured again; of a record that a new or upgraded backend could
improve, only the affected routes are, beside the two they must beat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smartattn import events, versions
from smartattn.attention import scaled_dot_product_attention
from smartattn.buckets import bucket_of
from smartattn.choice import STOCK, choose, has_plan
from smartattn.environment import environment_of
from smartattn.errors import SettingError
from smartattn.formatting import format_ratio, format_table, format_us, shorten
from smartattn.inputs import synthesize
from smartattn.pending import devices_here, pending_signatures
from smartattn.plain import is_foreign, own_patches
from smartattn.progress import Progress, Report, report_on
from smartattn.ranges import Ranges, check_ranges, spread
from smartattn.record import Record, Rejected, Timed
from smartattn.routes import routes_for
from smartattn.selector import is_stale, selector
from smartattn.settings import EFFORTS, check_choice, configure
from smartattn.signature import Signature
from smartattn.signature_text import parse_signature
from smartattn.trials import generators_of
from smartattn.view import View
from smartattn.wishes import unbind_all, wish_of

PASSES = ("infer", "train")
STATUSES = ("tuned", "renewed", "stored", "noisy", "failed", "left")
_JUDGED_BY_RUNNING = ("a single call is too slow", "ran out of memory", "wants ")
"""How reasons begin that a tuning found by running or by looking at free memory, not by what a backend declares."""

Item = tuple[torch.device | None, Signature, bool]
"""Where to tune, what, and whether for lengths that keep changing; no device when this machine lacks its type."""


@dataclass(frozen=True)
class Warmed:
    """What became of one signature.

    Attributes:
        signature: text of the problem that stands for its bucket.
        status: ``tuned``; ``renewed`` (only new or upgraded routes were measured); ``stored`` (nothing to do);
            ``noisy`` (tuned, kept in this process only); ``failed``; ``left`` (the budget was spent).
        route: what calls of it will run; empty when unknown.
        cost_us: of that route, per call.
        stock_us: of PyTorch's own choice, per call at a length that repeats.
        saved_plan_ms: that stock would pay at each new length and ``route`` does not.
        seconds: that tuning it took.
        note: why it failed or was left.
    """

    signature: str
    status: str
    route: str = ""
    cost_us: float | None = None
    stock_us: float | None = None
    saved_plan_ms: float = 0.0
    seconds: float = 0.0
    note: str = ""

    @property
    def gain(self) -> float | None:
        """Time of stock over time of the choice."""
        return self.stock_us / self.cost_us if self.stock_us and self.cost_us else None


@dataclass(frozen=True)
class Summary:
    """What a pre-warm did; ``str()`` is a table, ``to_dict()`` plain data.

    Attributes:
        entries: one per bucket, in the order of tuning.
        seconds: that all of it took.
    """

    entries: tuple[Warmed, ...]
    seconds: float

    @property
    def counts(self) -> dict[str, int]:
        """Number of entries by status."""
        found = [entry.status for entry in self.entries]
        return {status: found.count(status) for status in STATUSES if status in found}

    @property
    def is_complete(self) -> bool:
        """Whether every signature is stored now."""
        return all(entry.status in ("tuned", "renewed", "stored") for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        entries = [dataclasses.asdict(entry) | {"gain": entry.gain} for entry in self.entries]
        return {"entries": entries, "seconds": self.seconds, "counts": self.counts, "is_complete": self.is_complete}

    def headline(self) -> str:
        """Return the result in one line."""
        if not self.entries:
            return "No attention was met: nothing to tune."
        counts = ", ".join(f"{number} {status}" for status, number in self.counts.items())
        gains = [entry.gain for entry in self.entries if entry.gain and entry.gain > 1]
        best = f"; {len(gains)} beat stock, by up to {format_ratio(max(gains))}" if gains else ""
        plans = [entry.saved_plan_ms for entry in self.entries if entry.saved_plan_ms]
        plan = (
            f"; {len(plans)} save a plan of {format_us(statistics.median(plans) * 1e3)} per new length" if plans else ""
        )
        return f"{len(self.entries)} signatures in {self.seconds:.1f} s: {counts}{best}{plan}."

    def __str__(self) -> str:
        header = ("status", "route", "per call", "vs stock", "plan saved", "signature")
        rows = [
            (
                e.status, e.route or "-", format_us(e.cost_us), format_ratio(e.gain),
                format_us(e.saved_plan_ms * 1e3 or None), e.note or e.signature,
            )
            for e in self.entries
        ]  # fmt: skip
        table = format_table(header, rows, width=200) + "\n" if rows else ""
        return table + self.headline()


def prewarm(
    model: Callable[..., object],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    passes: Sequence[str] = ("infer",),
    lengths: Ranges | None = None,
    effort: str = "standard",
    progress: bool | Report = True,
    budget_s: float | None = None,
) -> Summary:
    """Run a model once per pass, and tune every attention that it asks for.

    Args:
        model: a module or any callable, such as ``model.generate``; it must run eagerly.
        args, kwargs: what it is called with.
        passes: ``infer`` (modules in ``eval()``, no gradients) and ``train`` (in ``train()``, with gradients, forward
            only).
        lengths: ranges that sizes may take later, such as ``{"key": (1, 4096)}``, also for ``query`` and ``batch``;
            one signature per bucket is tuned then, for lengths that keep changing. Without it the sizes met stand.
        effort: ``quick``, ``standard`` or ``max``: a quarter, all or four times ``signature_budget_ms`` each.
        progress: whether to show it on a terminal, or a function that is told of each step.
        budget_s: the most seconds to tune; what is left then is reported as ``left``.

    Returns:
        What was chosen for each bucket and what it saves.

    Raises:
        UnknownNameError, SettingError: for wrong arguments, before the model runs.
        Whatever the model raises.

    Note:
        Attention inside is answered by the safe default while the model runs; ``F.scaled_dot_product_attention`` is
        collected too, unless something else than PyTorch stands there. Modes of modules, buffers, gradients and random
        state are as found afterwards. Call it while nothing else runs. When interrupted, what was tuned stays stored.
    """
    check_ranges(lengths)
    for pass_name in passes:
        check_choice("pass", pass_name, PASSES)
    check_choice("effort", effort, EFFORTS)
    found: dict[tuple[torch.device, Signature], None] = {}
    for pass_name in passes:
        found.update(dict.fromkeys(_signatures_of(model, args, kwargs or {}, pass_name)))
    return _warm(list(found), lengths, effort, progress, budget_s)


def prewarm_signatures(
    signatures: Iterable[Signature | str],
    *,
    lengths: Ranges | None = None,
    effort: str = "standard",
    progress: bool | Report = True,
    budget_s: float | None = None,
) -> Summary:
    """Tune signatures on made-up inputs; arguments, result and cost as ``prewarm``.

    Args:
        signatures: signatures or their texts, such as ``smartattn.workloads.signatures("cuda", "bfloat16")``.
        lengths, effort, progress, budget_s: as for ``prewarm``.

    Raises:
        UnknownNameError: for a text that makes no sense, saying where.
    """
    check_ranges(lengths)
    check_choice("effort", effort, EFFORTS)
    here = {device.type: device for device in devices_here()}
    parsed = [parse_signature(each) if isinstance(each, str) else each for each in signatures]
    return _warm([(here.get(s.device_type), s) for s in parsed], lengths, effort, progress, budget_s)


def prewarm_pending(
    *, effort: str = "standard", progress: bool | Report = True, budget_s: float | None = None
) -> Summary:
    """Tune everything noted as pending for this machine; arguments and result as ``prewarm``."""
    check_choice("effort", effort, EFFORTS)
    return _warm(list(pending_signatures()), None, effort, progress, budget_s)


def _signatures_of(
    model: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], pass_name: str
) -> list[tuple[torch.device, Signature]]:
    """Run the model in one pass and return what it asked for, in order."""
    # A compiled module keeps the eager one; its graphs would ask nothing while they run.
    run = getattr(model, "_orig_mod", model)
    if run is versions.sdpa:
        run = scaled_dot_product_attention
    owner = run if isinstance(run, torch.nn.Module) else getattr(run, "__self__", None)
    module = owner if isinstance(owner, torch.nn.Module) else None
    is_training = pass_name == "train"
    with _as_found(module, is_training=is_training), recording() as found, torch.set_grad_enabled(is_training):
        run(*args, **kwargs)
    return found


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[torch.device, Signature]]]:
    """Collect the device and signature of every attention asked for in the block; nothing is tuned meanwhile.

    Note:
        Process-wide, and so is the place of ``F.scaled_dot_product_attention`` that it takes for the time.
    """
    found: list[tuple[torch.device, Signature]] = []
    functional = torch.nn.functional
    before = functional.scaled_dot_product_attention
    is_ours = not is_foreign()

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        return scaled_dot_product_attention(*args, **kwargs)

    # Choices already bound would answer without a first sight.
    unbind_all()
    selector.recorder = lambda device, signature: found.append((device, signature))
    if is_ours:
        own_patches.add(recorded)
        functional.scaled_dot_product_attention = recorded
    try:
        yield found
    finally:
        if is_ours:
            functional.scaled_dot_product_attention = before
            own_patches.discard(recorded)
        selector.recorder = None
        unbind_all()


@contextlib.contextmanager
def _as_found(module: torch.nn.Module | None, *, is_training: bool) -> Iterator[None]:
    """Put modes, buffers and random state back as they were."""
    modes = [] if module is None else [(each, each.training) for each in module.modules()]
    # Batch norms and the like write to their buffers when they train.
    buffers = [] if module is None or not is_training else [(b, b.detach().clone()) for b in module.buffers()]
    generators = [each for device in devices_here() for each in generators_of(device)]
    states = [(generator, generator.get_state()) for generator in generators]
    if module is not None:
        module.train(is_training)
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        for generator, state in states:
            generator.set_state(state)


def _warm(
    found: Sequence[tuple[torch.device | None, Signature]],
    lengths: Ranges | None,
    effort: str,
    progress: bool | Report,
    budget_s: float | None,
) -> Summary:
    if budget_s is not None and not budget_s > 0:
        raise SettingError(f"budget_s is {budget_s!r}; it must be a number of seconds above 0.")
    items = _items(found, lengths or {})
    old = configure(effort=effort)
    start_s = time.monotonic()
    try:
        with report_on(progress, len(items)) as report:
            entries = _tune_all(items, report, None if budget_s is None else start_s + budget_s)
    finally:
        configure(**vars(old))
        unbind_all()
    return Summary(tuple(entries), time.monotonic() - start_s)


def _items(found: Sequence[tuple[torch.device | None, Signature]], lengths: Ranges) -> list[Item]:
    """Return what to tune: one signature per bucket, the largest of those met, or the bucket's edge for a range."""
    items: dict[tuple[torch.device | None, str], Item] = {}
    for device, signature in found:
        variants = spread(signature, lengths)
        is_dynamic = variants != (signature,)
        for variant in variants:
            name = device, bucket_of(variant).digest
            known = items.get(name)
            if known is None or (is_dynamic, variant.num_scores) > (known[2], known[1].num_scores):
                items[name] = device, variant, is_dynamic
    return list(items.values())


def _tune_all(items: Sequence[Item], report: Report, deadline_s: float | None) -> list[Warmed]:
    entries = []
    noisy = []
    for number, item in enumerate(items):
        if deadline_s is not None and time.monotonic() >= deadline_s:
            entries.append(Warmed(str(item[1]), "left", note="the budget was spent"))
            continue
        entries.append(_tune_item(item))
        if entries[-1].status == "noisy":
            noisy.append(number)
        report(Progress(number + 1, len(items), entries[-1].signature))
    for number in noisy:
        # The machine may have been busy for a moment only: one more try before it is left in memory alone.
        if deadline_s is None or time.monotonic() < deadline_s:
            entries[number] = _tune_item(items[number])
    return entries


def _tune_item(item: Item) -> Warmed:
    device, signature, dynamic = item
    if device is None:
        note = f"this machine has no {signature.device_type} device that PyTorch sees"
        return Warmed(str(signature), "failed", note=note)
    start_s = time.monotonic()
    view = selector.view(device, signature, wish_of())
    found = selector.memory.find(view.environment, signature)
    record = None if found is None or is_stale(found[0]) or found[0].provenance.noisy else found[0]
    renew: tuple[Record, frozenset[str]] | None = None
    if record is not None:
        routes = _routes_to_renew(view, record)
        if not routes:
            return _kept(view, record, dynamic=dynamic)
        signature, renew = record.signature, (record, routes)
        dynamic = dynamic or record.dynamic
    try:
        call = synthesize(signature, device)
    except (RuntimeError, MemoryError, ValueError) as error:
        events.logger.warning("smartattn cannot make inputs for %s: %s", signature, error)
        return Warmed(str(signature), "failed", note=shorten(f"no inputs: {error}", 200))
    tuned = selector.tune_now(call, signature, wish_of(), dynamic=dynamic, renew=renew)
    if tuned is None:
        return Warmed(str(signature), "failed", note="another process was tuning, or it broke (see the log)")
    selector.memory.store.drop_pending(environment_of(device), signature)
    status = "noisy" if tuned.provenance.noisy else "tuned" if renew is None else "renewed"
    return _entry(view, tuned, status, time.monotonic() - start_s)


def _kept(view: View, record: Record, *, dynamic: bool) -> Warmed:
    if dynamic and not record.dynamic:
        # What was measured stands; only the declared use of it is new.
        record = dataclasses.replace(record, dynamic=True)
        selector.keep(view.environment, record, view.settings)
    return _entry(view, record, "stored", 0.0)


def _routes_to_renew(view: View, record: Record) -> frozenset[str]:
    """Return the routes that a new or upgraded backend adds to a record, with stock and the choice to race against."""
    changed = []
    for route in routes_for(record.signature):
        outcome = record.outcomes.get(route.name)
        if isinstance(outcome, Rejected):
            is_current = any(reason.startswith(_JUDGED_BY_RUNNING) for reason in outcome.reasons)
        else:
            is_current = outcome is not None and outcome.version == route.backend.version()
        if not is_current and not view.reasons(route):
            changed.append(route.name)
    if not changed:
        return frozenset()
    choice = choose(record.outcomes, view.is_allowed(record), dynamic=False, num_calls=0, is_planned=True)
    return frozenset((*changed, STOCK, *(() if choice is None else (choice.route,))))


def _entry(view: View, record: Record, status: str, seconds: float) -> Warmed:
    dynamic = True if record.dynamic else view.settings.dynamic is True
    choice = choose(record.outcomes, view.is_allowed(record), dynamic=dynamic, num_calls=0, is_planned=True)
    if choice is None:
        return Warmed(str(record.signature), status, seconds=seconds, note="no route was found valid")
    chosen, stock = record.outcomes[choice.route], record.outcomes.get(STOCK)
    saves_plan = isinstance(stock, Timed) and has_plan(stock) and isinstance(chosen, Timed) and not has_plan(chosen)
    return Warmed(
        signature=str(record.signature),
        status=status,
        route=choice.route,
        cost_us=chosen.cost_us if isinstance(chosen, Timed) else None,
        stock_us=stock.cost_us if isinstance(stock, Timed) else None,
        saved_plan_ms=stock.plan_ms if saves_plan and isinstance(stock, Timed) else 0.0,
        seconds=seconds,
    )
