"""The one table of commands."""

from __future__ import annotations

from smartattn.cli.command import Command
from smartattn.cli.demo import DEMO

COMMANDS: tuple[Command, ...] = (DEMO,)
