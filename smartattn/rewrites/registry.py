"""The one table of rewrites."""

from __future__ import annotations

from smartattn.rewrites.base import Rewrite

REWRITES: tuple[Rewrite, ...] = ()
