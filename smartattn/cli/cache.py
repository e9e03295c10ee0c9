"""``smartattn cache``: look at, check, carry and tidy what is stored."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from smartattn import cache as module
from smartattn.buckets import bucket_of
from smartattn.cli.command import Command, Data
from smartattn.cli.problem import HOW, add_device_arguments, read_problem
from smartattn.cli.tables import print_table
from smartattn.cli.warm import short_signature
from smartattn.errors import UnknownNameError
from smartattn.formatting import format_bytes, format_ratio, format_us
from smartattn.listing import Row, format_age, row_of
from smartattn.selector import selector

ID_CHARACTERS = 8


def path() -> Data:
    """Return the cache folder; the Python twin is ``cache.path``."""
    found = module.path()
    return {"path": None if found is None else str(found)}


def list_records(
    *, backend: str | None = None, family: str | None = None, device: str | None = None, quarantine: bool = False
) -> Data:
    """Return all records in short; the Python twin is ``cache.rows``.

    Args:
        backend: only records whose choice ends in this backend, or is this route.
        family: only records whose signature holds all these words.
        device: only records of devices whose name holds this text.
        quarantine: list the routes in quarantine instead.
    """
    if quarantine:
        entries = selector.memory.store.quarantine_entries()
        return {"quarantine": [{**dataclasses.asdict(each), "signature": str(each.signature)} for each in entries]}
    rows = [row for row in module.rows() if _is_wanted(row, backend, family, device)]
    rows.sort(key=lambda row: (row.environment, row.signature))
    return {"records": [row.to_dict() for row in rows]}


def _is_wanted(row: Row, backend: str | None, family: str | None, device: str | None) -> bool:
    if backend is not None and backend not in (row.route, row.route.rpartition("+")[2]):
        return False
    if device is not None and device.lower() not in f"{row.device} {row.environment}".lower():
        return False
    return family is None or set(family.split()) <= set(row.signature.split())


def show_record(*, problem: str, device: str | None = None, dtype: str | None = None) -> Data:
    """Return the records of a problem in full; the Python twin is ``cache.records``."""
    signature = read_problem(problem, device=device, dtype=dtype)
    digests = signature.digest, bucket_of(signature).digest
    entries = [entry for entry in module.iterate() if entry.record.digest in digests]
    # A record's own form has the bucket by axis, where a row has it as text.
    found = [{**row_of(entry).to_dict(), "bucket": {}, **entry.record.to_dict()} for entry in entries]
    return {"signature": str(signature), "records": found}


def forget(
    *, problem: str, device: str | None = None, dtype: str | None = None, dry_run: bool = False, yes: bool = False
) -> Data:
    """Remove what is stored for a problem; the Python twin is ``cache.forget``."""
    signature = read_problem(problem, device=device, dtype=dtype)
    if dry_run or not yes:
        num_files = len(show_record(problem=str(signature))["records"])
        return _removal(num_files, 0, what=f"records of {signature}", dry_run=dry_run)
    return _removal(0, module.forget(signature), what=f"files of {signature}", dry_run=False)


def clear(*, dry_run: bool = False, yes: bool = False) -> Data:
    """Remove everything of the writable layer; the Python twin is ``cache.clear``."""
    if dry_run or not yes:
        found = module.stats()
        num_files = found.origins.get("disk", 0) + found.num_pending + found.num_quarantined
        return _removal(num_files, 0, what=f"files in {found.path}", dry_run=dry_run)
    where = module.path()
    return _removal(0, module.clear(), what=f"files in {where}", dry_run=False)


def prune(*, days: float | None = None, others: bool = False, dry_run: bool = False, yes: bool = False) -> Data:
    """Remove what serves no more; the Python twin is ``cache.prune``."""
    is_real = yes and not dry_run
    found = module.prune(days=days, others=others, dry_run=not is_real)
    records = [{**dataclasses.asdict(each), "path": str(each.path)} for each in found]
    left, gone = (0, len(found)) if is_real else (len(found), 0)
    return {**_removal(left, gone, what="records that serve no more", dry_run=dry_run), "records": records}


def _removal(left: int, gone: int, *, what: str, dry_run: bool) -> Data:
    return {"what": what, "num_to_remove": left, "num_removed": gone, "needs_yes": bool(left) and not dry_run}


def export(*, file: str, pending: bool = True) -> Data:
    """Write all records into one file; the Python twin is ``cache.export``."""
    found = module.export(file, pending=pending)
    return {**dataclasses.asdict(found), "path": str(found.path)}


def merge(*, files: Sequence[str]) -> Data:
    """Add the records of exports; the Python twin is ``cache.merge``."""
    return dataclasses.asdict(module.merge(*files))


def verify(*, every_route: bool = False) -> Data:
    """Check stored choices against the reference; the Python twin is ``cache.verify``."""
    return {"verified": [each.to_dict() for each in module.verify(every_route=every_route)]}


def stats() -> Data:
    """Return how much is stored; the Python twin is ``cache.stats``."""
    return module.stats().to_dict()


def _show_path(data: Data, console: Console) -> None:
    console.print(data["path"] or "this user has no cache folder; everything stays in memory", soft_wrap=True)


def _show_list(data: Data, console: Console) -> None:
    if "quarantine" in data:
        quarantined = [
            (e["route_name"], format_age(e["date"]), f"{short_signature(e['signature'])}: {e['reason']}")
            for e in data["quarantine"]
        ]
        print_table(console, ("route", "age", "signature and reason"), quarantined)
        console.print(f"{len(quarantined)} routes in quarantine.")
        return
    groups: dict[tuple[str, str], list[Data]] = {}
    for row in data["records"]:
        groups.setdefault((row["environment"], row["origin"]), []).append(row)
    for (environment, origin), found in groups.items():
        console.print(f"{environment} ({origin})", style="bold", soft_wrap=True)
        rows = [
            (
                row["digest"][:ID_CHARACTERS], row["route"] or "-", format_us(row["cost_us"]), format_ratio(row["gain"]),
                "-" if row["noise"] is None else f"{row['noise']:.0%}", format_age(row["date"]),
                short_signature(row["signature"]) + (f" for {row['bucket']}" if row["bucket"] else ""),
            )
            for row in found
        ]  # fmt: skip
        print_table(console, ("id", "chosen", "per call", "vs stock", "noise", "age", "signature"), rows)
        console.print()
    console.print(f"{len(data['records'])} records.")


def _show_record(data: Data, console: Console) -> None:
    if not data["records"]:
        console.print(f"Nothing is stored for {data['signature']}", soft_wrap=True)
    for record in data["records"]:
        console.print(record["signature"], style="bold", soft_wrap=True)
        console.print(f"id        {record['digest']} ({record['origin']})", soft_wrap=True)
        console.print(
            f"measured  {record['date']} on {record['provenance']['host']}, {record['environment']}", soft_wrap=True
        )
        lengths = "keep changing" if record["dynamic"] else "may repeat"
        if record["bucket"]:
            ranges = " ".join(f"{axis}{low}-{high}" for axis, (low, high) in record["bucket"].items())
            console.print(f"bucket    {ranges}; lengths {lengths}")
        rows = [_outcome_cells(name, outcome, record["route"]) for name, outcome in record["outcomes"].items()]
        print_table(console, ("", "route", "device", "host", "plan", "noise", "error", "version", "why"), rows)
        console.print()


def _outcome_cells(name: str, outcome: Data, route: str) -> tuple[str, ...]:
    mark = "->" if name == route else ""
    if outcome["is"] != "timed":
        why = "; ".join(outcome.get("reasons", [outcome.get("reason", "")]))
        return mark, name, "-", "-", "-", "-", "-", outcome.get("version", "-"), f"{outcome['is']}: {why}"
    cost_us = max(outcome["device_us"], outcome["host_us"])
    noise = f"{outcome['spread_us'] / cost_us:.0%}" if cost_us else "-"
    plan = f"{outcome['plan_ms']:.3g} ms" if outcome.get("plan_ms") else "-"
    times = format_us(outcome["device_us"]), format_us(outcome["host_us"])
    why = f"runs {outcome['resolved']}" if outcome.get("resolved") else ""
    return mark, name, *times, plan, noise, f"{outcome['error']:.2g}", outcome["version"], why


def _show_removal(data: Data, console: Console) -> None:
    rows = [(each["environment"], each["reason"], each["signature"]) for each in data.get("records", ())]
    print_table(console, ("environment", "reason", "signature"), rows)
    if data["num_removed"] or not data["num_to_remove"]:
        console.print(f"Removed {data['num_removed']} {data['what']}.", soft_wrap=True)
    else:
        hint = " Nothing was removed: say --yes to do it." if data["needs_yes"] else ""
        console.print(f"Would remove {data['num_to_remove']} {data['what']}.{hint}", soft_wrap=True)


def _show_export(data: Data, console: Console) -> None:
    console.print(
        f"Wrote {data['num_records']} records, {data['num_pending']} pending and {data['num_quarantined']} quarantined "
        f"of {len(data['environments'])} environments to {data['path']}.",
        soft_wrap=True,
    )
    if data["num_skipped"]:
        console.print(f"{data['num_skipped']} records of environments without a description were left out.")


def _show_merge(data: Data, console: Console) -> None:
    console.print(
        f"{data['num_added']} added, {data['num_replaced']} replaced older ones, {data['num_kept']} were no newer than "
        f"what was here; {data['num_pending']} pending, {data['num_quarantined']} in quarantine.",
        soft_wrap=True,
    )
    for name, number in data["environments"].items():
        use = "merged, not used on this machine: another environment" if name in data["elsewhere"] else "used here"
        console.print(f"  {name}: {number} records, {use}", soft_wrap=True)
    if data["num_skipped"]:
        console.print(f"{data['num_skipped']} lines made no sense to this version and were skipped.")
    if data["num_unwritten"]:
        console.print(f"{data['num_unwritten']} records could not be written; smartattn doctor says why.")


def _show_verify(data: Data, console: Console) -> None:
    rows = [
        (each["status"], each["route"] or "-", short_signature(each["signature"]) + (f": {each['reason']}" if each["reason"] else ""))
        for each in data["verified"]
    ]  # fmt: skip
    print_table(console, ("status", "route", "signature"), rows)
    bad = sum(each["status"] in ("invalid", "failed") for each in data["verified"])
    console.print(f"{len(rows)} choices checked, {bad} put into quarantine.")


def _show_stats(data: Data, console: Console) -> None:
    console.print(f"folder       {data['path']}", soft_wrap=True)
    console.print(f"records      {data['num_records']} ({format_bytes(data['size_bytes'])})")
    console.print(f"pending      {data['num_pending']}")
    console.print(f"quarantined  {data['num_quarantined']}")
    for title, numbers in (
        ("environment", data["environments"]),
        ("from", data["origins"]),
        ("chosen", data["routes"]),
    ):
        if numbers:
            console.print()
            here = data["here"] if title == "environment" else ()
            rows = [(str(number), name + (" (here)" if name in here else "")) for name, number in numbers.items()]
            print_table(console, ("records", title), rows)


@dataclasses.dataclass(frozen=True)
class Action:
    """One thing that the command does with the cache.

    Attributes:
        name: word after ``cache``.
        summary: one line of help.
        run: keyword function that returns plain data.
        show: prints it.
        add_arguments: declares arguments.
        is_good: whether the data means exit code 0.
    """

    name: str
    summary: str
    run: Callable[..., Data]
    show: Callable[[Data, Console], None]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None  # noqa: ARG005 - most have none
    is_good: Callable[[Data], bool] = lambda data: True  # noqa: ARG005 - most have nothing to judge


def _problem_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", metavar="SIGNATURE", help=HOW)
    add_device_arguments(parser)


def _removal_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument("--yes", action="store_true", help="do it")


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", metavar="NAME", help="only choices that end in this backend, or are this route")
    parser.add_argument("--family", metavar="WORDS", help="only signatures with all these words, such as 'train E64'")
    parser.add_argument("--device", metavar="TEXT", help="only devices whose name holds this text")
    parser.add_argument("--quarantine", action="store_true", help="list the routes in quarantine instead")


def _forget_arguments(parser: argparse.ArgumentParser) -> None:
    _problem_arguments(parser)
    _removal_arguments(parser)


def _prune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--days", type=float, metavar="N", help="also what is older than so many days")
    parser.add_argument("--others", action="store_true", help="also what belongs to other environments")
    _removal_arguments(parser)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--no-pending", dest="pending", action="store_false", help="records only")


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="an export, or another cache folder")


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--every-route", action="store_true", help="all measured routes, not only the choices")


def _is_settled(data: Data) -> bool:
    return not data["needs_yes"]


def _is_verified(data: Data) -> bool:
    return not any(each["status"] in ("invalid", "failed") for each in data["verified"])


def _is_merged(data: Data) -> bool:
    return not data["num_skipped"] and not data["num_unwritten"]


ACTIONS = {
    action.name: action
    for action in (
        Action("path", "Show the cache folder.", path, _show_path),
        Action("list", "List all records: choice, gain over stock, noise, age.", list_records, _show_list, _list_arguments),
        Action("show", "Show the records of one problem in full.", show_record, _show_record, _problem_arguments),
        Action("stats", "Count what is stored.", stats, _show_stats),
        Action("verify", "Check stored choices against the reference; what fails goes into quarantine.", verify,
               _show_verify, _verify_arguments, _is_verified),
        Action("export", "Write all records into one file.", export, _show_export, _export_arguments),
        Action("merge", "Add the records of exports; the newer of two stays.", merge, _show_merge, _merge_arguments,
               _is_merged),
        Action("forget", "Remove what is stored for one problem.", forget, _show_removal, _forget_arguments, _is_settled),
        Action("prune", "Remove records that serve no more.", prune, _show_removal, _prune_arguments, _is_settled),
        Action("clear", "Remove everything of the writable layer.", clear, _show_removal, _removal_arguments, _is_settled),
    )
}  # fmt: skip


def cache(*, action: str, **words: Any) -> Data:
    """Run one action; the Python twins are the functions of ``smartattn.cache``.

    Raises:
        UnknownNameError: for an action that does not exist.
    """
    if action not in ACTIONS:
        raise UnknownNameError.of("action of cache", action, ACTIONS)
    return {"action": action, **ACTIONS[action].run(**words)}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action in ACTIONS.values():
        inner = subparsers.add_parser(action.name, help=action.summary, description=action.summary)
        # Suppressed, so that it does not undo one that stands before the action.
        inner.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the data as JSON")
        action.add_arguments(inner)


CACHE = Command(
    name="cache",
    summary="Look at, check, carry and tidy what is stored.",
    example="smartattn cache list --backend stock",
    add_arguments=_add_arguments,
    run=cache,
    show=lambda data, console: ACTIONS[data["action"]].show(data, console),
    is_good=lambda data: ACTIONS[data["action"]].is_good(data),
)
