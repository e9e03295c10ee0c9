"""The table of integrations, in the order in which they are asked about a module."""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

from smartattn import versions
from smartattn.integrations.base import Integration


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        file: of this folder; offers ``INTEGRATION``.
        library: package that must have been imported for its models to exist; empty for code of any package.
        oldest: version of it that is needed.
    """

    file: str
    library: str = ""
    oldest: str = ""


ROWS = (
    Row("torch_modules"),
    Row("transformers", "transformers", "4.53"),
    Row("diffusers", "diffusers", "0.30"),
    Row("timm", "timm", "1.0"),
    Row("torchvision", "torchvision", "0.26"),
    Row("functional"),
)


def loaded_integrations() -> tuple[list[Integration], dict[str, str]]:
    """Return the integrations whose library this process has imported, and library to reason for those too old."""
    found, too_old = [], {}
    for row in ROWS:
        if row.library:
            if row.library not in sys.modules:
                continue
            version = str(getattr(sys.modules[row.library], "__version__", ""))
            if versions.parse(version) < versions.parse(row.oldest):
                given = version or "of an unknown version"
                too_old[row.library] = f"{row.library} {given} is too old; {row.oldest} or newer is needed"
                continue
        integration: Integration = importlib.import_module(f"smartattn.integrations.{row.file}").INTEGRATION
        found.append(integration)
    return found, too_old
