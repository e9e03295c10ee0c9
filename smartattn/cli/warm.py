"""``smartattn warm``: tune ahead of use, and say what that saves."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from smartattn.cli.command import Command, Data
from smartattn.cli.problem import HOW, add_device_arguments, device_and_dtype, read_problem
from smartattn.cli.tables import print_table
from smartattn.errors import SettingError, UnknownNameError
from smartattn.formatting import format_ratio, format_us, shorten
from smartattn.prewarm import Summary, prewarm, prewarm_pending, prewarm_signatures
from smartattn.progress import Progress, Report
from smartattn.ranges import AXES, Ranges
from smartattn.settings import EFFORTS
from smartattn.workloads import WORKLOADS, workload_names


def warm(
    *,
    workload: Sequence[str] = (),
    signature: Sequence[str] = (),
    pending: bool = False,
    model: str | None = None,
    lengths: Sequence[str] = (),
    passes: str = "infer",
    effort: str = "standard",
    budget: float | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> Data:
    """Tune what was named; the Python twins are ``prewarm``, ``prewarm_signatures`` and ``prewarm_pending``.

    Args:
        workload: names, or the part before the slash for all of a model, or ``all``.
        signature: texts, or what else means one.
        pending: whether to tune what was noted as pending.
        model: ``pkg.module:factory``.
        lengths: ``key=1:4096`` and the like.
        passes: ``infer``, ``train`` or ``infer,train``.
        effort: ``quick``, ``standard`` or ``max``.
        budget: seconds, for each of the sources.
        device, dtype: of workloads.

    Returns:
        The entries of all summaries; ``interrupted`` when it was.
    """
    ranges = read_ranges(lengths)
    names = tuple(passes.split(","))
    signatures = [
        *(each.signature(p, *device_and_dtype(device, dtype)) for each in _workloads(workload) for p in names
          if p == "infer" or each.trains),
        *(read_problem(text, device=device, dtype=dtype, pass_name=names[0]) for text in signature),
    ]  # fmt: skip
    if not signatures and not pending and model is None:
        raise UnknownNameError("nothing to tune was named: give --workload, --signature, --pending or --model.")
    made = None if model is None else load_model(model)
    summaries: list[Summary] = []
    steps = [0, 0]
    common: dict[str, Any] = {"effort": effort, "budget_s": budget}
    try:
        if signatures:
            with _bar("signatures", steps) as report:
                summaries.append(prewarm_signatures(signatures, lengths=ranges, progress=report, **common))
        if pending:
            with _bar("pending", steps) as report:
                summaries.append(prewarm_pending(progress=report, **common))
        if made is not None:
            with _bar("model", steps) as report:
                summaries.append(
                    prewarm(made[0], made[1], made[2], passes=names, lengths=ranges, progress=report, **common)
                )
    except KeyboardInterrupt:
        return {"interrupted": True, "num_done": steps[0], "num_steps": steps[1], "entries": [], "is_complete": False}
    summary = Summary(tuple(e for each in summaries for e in each.entries), sum(each.seconds for each in summaries))
    return {**summary.to_dict(), "headline": summary.headline(), "interrupted": False}


def _workloads(names: Sequence[str]) -> list[Any]:
    found = []
    for name in names:
        chosen = [each for each in WORKLOADS if name in ("all", each.name, each.name.partition("/")[0])]
        if not chosen:
            models = {each.partition("/")[0] for each in workload_names()}
            raise UnknownNameError.of("workload", name, (*workload_names(), *models, "all"))
        found += chosen
    return found


def read_ranges(texts: Sequence[str]) -> Ranges | None:
    """Return the ranges of ``key=1:4096`` and the like; ``None`` for none.

    Raises:
        SettingError: for another form.
    """
    found = {}
    for text in texts:
        name, _, ends = text.partition("=")
        low, colon, high = ends.partition(":")
        if not colon or not low.isdecimal() or not high.isdecimal():
            raise SettingError(f"--lengths is {text!r}; it must be like key=1:4096, for one of {', '.join(AXES)}.")
        found[name] = int(low), int(high)
    return found or None


def load_model(text: str) -> tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]:
    """Import ``pkg.module:factory``, call it, and return the model with the arguments to run it with.

    Raises:
        UnknownNameError: when module or factory do not exist.
        SettingError: when importing or calling raised, or what came back is no model; with what to check.
    """
    module_name, _, factory_name = text.partition(":")
    if not module_name or not factory_name:
        raise SettingError(f"--model is {text!r}; it must be like pkg.module:factory.")
    if str(Path.cwd()) not in sys.path:
        # As ``python -m`` would find it.
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise UnknownNameError(
                f"--model names the module {module_name!r}, and there is no {error.name!r} in {Path.cwd()} or among the "
                f"installed packages."
            ) from error
        raise _factory_error(text, error, "importing its module") from error
    except Exception as error:
        raise _factory_error(text, error, "importing its module") from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UnknownNameError.of(f"factory of {module_name}", factory_name, names)
    try:
        made = factory()
    except Exception as error:
        raise _factory_error(text, error, "calling it") from error
    model, args, kwargs = (*made, (), {})[:3] if isinstance(made, tuple) else (made, (), {})
    if isinstance(made, tuple) and len(made) == 2:
        model, args, kwargs = made[0], made[1], {}
    if not callable(model) or not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise SettingError(
            f"--model {text} returned {type(made).__name__}; it must return a model, or (model, args), or (model, args, "
            f"kwargs) with args a tuple and kwargs a dict."
        )
    return model, tuple(args), kwargs


def _factory_error(text: str, error: BaseException, doing: str) -> SettingError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return SettingError(
        f"--model {text} raised while {doing}: {type(error).__name__}: {error}\n"
        f"  at {last.filename}:{last.lineno}, in {last.name}\n"
        f"Check that the factory takes no arguments, that its weights and data are where it looks for them, and that it "
        f"returns (model, args, kwargs) on the device to pre-warm."
    )


@contextlib.contextmanager
def _bar(what: str, steps: list[int]) -> Iterator[Report]:
    """Draw a bar with the time left on a terminal's error stream; count what is done."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"tuning {what}", total=None)

        def report(step: Progress) -> None:
            steps[:] = step.num_done, step.num_steps
            bar.update(task, completed=step.num_done, total=step.num_steps)

        yield report


def is_good(data: Data) -> bool:
    """Return whether everything named is stored now."""
    return bool(data["is_complete"])


def show(data: Data, console: Console) -> None:
    """Print one line per signature, then the sum."""
    if data["interrupted"]:
        console.print(f"Interrupted after {data['num_done']} of {data['num_steps']}: what was tuned is stored.")
        return
    rows = [
        (
            each["status"], each["route"] or "-", format_us(each["cost_us"]), format_ratio(each["gain"]),
            format_us(each["saved_plan_ms"] * 1e3 or None),
            f"{each['seconds']:.1f} s" if each["seconds"] else "-",
            short_signature(each["signature"]) + (f": {shorten(each['note'], 120)}" if each["note"] else ""),
        )
        for each in data["entries"]
    ]  # fmt: skip
    print_table(console, ("status", "route", "per call", "vs stock", "plan saved", "took", "signature"), rows)
    console.print(("\n" if rows else "") + data["headline"], soft_wrap=True)


def short_signature(text: str) -> str:
    """Return a signature's text without the words that are the same in nearly every line."""
    return text.removeprefix("sdpa ").replace(" scale=positive", "").replace(" mask=none", "").replace("mask=", "")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    many: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--workload", **many, metavar="NAME", help="such as bert/encoder-512, bert or all; repeatable")
    parser.add_argument("--signature", **many, metavar="TEXT", help=f"{HOW}; repeatable")
    parser.add_argument("--pending", action="store_true", help="what programs noted in mode 'record' or could not tune")
    parser.add_argument("--model", metavar="PKG.MODULE:FACTORY", help="returns a model, or (model, args, kwargs)")
    parser.add_argument(
        "--lengths", **many, metavar="AXIS=LOW:HIGH", help="such as key=1:4096, tuned by buckets; repeatable"
    )
    parser.add_argument("--passes", default="infer", metavar="PASSES", help="infer (default), train, or infer,train")
    parser.add_argument("--effort", default="standard", choices=EFFORTS, help="time per signature; default: standard")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop after so long; the rest is told as left")
    add_device_arguments(parser)


WARM = Command(
    name="warm",
    summary="Tune signatures, workloads or a model ahead of use.",
    example="smartattn warm --workload llama3 --lengths key=1:4096 --device cpu --budget 20",
    add_arguments=_add_arguments,
    run=warm,
    show=show,
    is_good=is_good,
)
