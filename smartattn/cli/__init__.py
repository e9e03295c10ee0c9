"""The command line ``smartattn``: reads arguments, calls one command, prints what it returned.

A command is one file: a keyword function that returns plain data, and what prints that data (``command``). Exit codes:
0 done, 1 the command ran and what it found is not good, 2 it could not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence

from smartattn.errors import SmartAttnError
from smartattn.versions import SMARTATTN

COULD_NOT_RUN = 2
NEEDS_RICH = "smartattn's command line needs rich; install the extra that brings it: pip install 'smartattn[cli]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: words after the program's name; default: those of this process.

    Returns:
        The exit code.
    """
    if importlib.util.find_spec("rich") is None:
        print(NEEDS_RICH, file=sys.stderr)
        return COULD_NOT_RUN
    # Only now, since the commands import rich.
    from smartattn.cli.command import make_console  # noqa: PLC0415
    from smartattn.cli.commands import COMMANDS  # noqa: PLC0415

    parser = argparse.ArgumentParser(
        prog="smartattn",
        description="Attention that measures, remembers and runs the fastest correct backend.",
        epilog="exit codes: 0 done; 1 it ran, and what it found is not good; 2 it could not run",
    )
    parser.add_argument("--version", action="version", version=f"smartattn {SMARTATTN}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(subparsers)
    options = vars(parser.parse_args(arguments))
    name = options.pop("command")
    command = next(command for command in COMMANDS if command.name == name)
    is_json = options.pop("json")
    try:
        data = command.run(**options)
    except SmartAttnError as error:
        print(f"smartattn {command.name}: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        print(f"smartattn {command.name}: interrupted", file=sys.stderr)
        return COULD_NOT_RUN
    if is_json:
        print(json.dumps(data, indent=2))
    else:
        command.show(data, make_console())
    return 0 if command.is_good(data) else 1
