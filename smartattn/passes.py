"""Keeping the two passes of one call together: recompute in checkpointing must meet the route of its forward."""

from __future__ import annotations

import dataclasses

from smartattn import versions
from smartattn.memory import Memory
from smartattn.record import Failed, Invalid
from smartattn.routes import Route
from smartattn.signature import Signature
from smartattn.view import View

IN_GRAPH = "in a compiled graph"
"""Note of a binding that stands in a compiled graph."""


def interrupted_route(view: View) -> tuple[Route, str] | None:
    """Return, for a recompute, the route of a forward that ran before choices were made anew, with its origin."""
    if not view.signature.wants_grad or versions.graph_task_id() == -1:
        return None
    for other in tuple(view.wish.former.values()):
        if other.signature == view.signature and other.note != IN_GRAPH:
            route = view.route(other.route)
            return None if route is None else (route, other.origin)
    return None


def shared_route(view: View, memory: Memory) -> tuple[Route, bool] | None:
    """Return the route that the same call took in the other pass, where both passes must have one.

    With dropout each route draws numbers of its own. And a training call first met in a backward pass is the
    recompute of a forward that ran without gradients.

    Returns:
        The route, and whether this signature is still to be tuned.
    """
    signature = view.signature
    is_recompute = signature.wants_grad and versions.graph_task_id() != -1
    if signature.dropout == "none" and not is_recompute:
        return None
    for other in tuple(view.wish.bindings.values()):
        if not _is_other_pass(other.signature, signature) or not other.route or other.note == IN_GRAPH:
            continue
        route = view.route(other.route)
        found = memory.find(view.environment, signature)
        is_wrong = found is not None and isinstance(found[0].outcomes.get(other.route), Invalid | Failed)
        if route is None or is_wrong or view.reasons(route):
            return None
        return route, found is None
    return None


def _is_other_pass(one: Signature, other: Signature) -> bool:
    as_other = dataclasses.replace(one, pass_name=other.pass_name, grads=other.grads)
    return one.pass_name != other.pass_name and as_other == other
