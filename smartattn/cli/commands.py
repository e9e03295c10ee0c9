"""The one table of commands."""

from __future__ import annotations

from smartattn.cli.cache import CACHE
from smartattn.cli.command import Command
from smartattn.cli.demo import DEMO
from smartattn.cli.doctor import DOCTOR
from smartattn.cli.explain import EXPLAIN
from smartattn.cli.profile import PROFILE
from smartattn.cli.warm import WARM

COMMANDS: tuple[Command, ...] = (DEMO, DOCTOR, WARM, EXPLAIN, CACHE, PROFILE)
