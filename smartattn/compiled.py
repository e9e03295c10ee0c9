"""Attention under ``torch.compile``: a choice made while tracing, carried by one library operator.

While Dynamo traces a call it runs ``_choose`` for real: records in memory or on disk are looked up, nothing is
measured, and the name of the route becomes a constant of the graph. When the choice is stock, PyTorch's own function
stands in the graph, as it would without smartattn. Otherwise ``smartattn::attention`` does: its Python body is taken
apart when the graph is lowered, so that autograd, checkpointing policies and compilers see PyTorch's own operators.
No guard depends on records, so nothing recompiles when they change; the route is an argument of the operator, so
compile caches of other processes answer only for the same choice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from smartattn import events, versions
from smartattn.backends.base import Runner
from smartattn.backends.stock import run_stock
from smartattn.choice import STOCK, Choice, choose_compiled
from smartattn.environment import environment_of
from smartattn.errors import UnknownNameError
from smartattn.first_sight import cast_for_autocast
from smartattn.mask_classes import Causal, Mask
from smartattn.passes import IN_GRAPH
from smartattn.plain import MEASURED_DEVICE_TYPES, is_foreign
from smartattn.record import Failed, Invalid, Outcome, Record
from smartattn.routes import Route, parse_route
from smartattn.selector import selector
from smartattn.signature import Call, Signature
from smartattn.traced import guard_sizes, has_symbols, read_traced_signature, symbols_of, variants
from smartattn.view import View, missing_record, unavailable
from smartattn.wishes import Binding, Wish, wish_of

FOREIGN = "foreign"
_BY_NAME_ONLY = ("math", "eager", "eager_inplace")
"""Backends that a graph holds only by explicit name: a compiler rewrites what they consist of, so that their measured
times say nothing."""
_TRACEABLE = (STOCK, "flash", "efficient", "cudnn", *_BY_NAME_ONLY)
"""Backends that consist of PyTorch's operators; others hand real memory to a package."""
_LENGTH_BLIND = ("promote", "additive_mask", "pad_head_dim")
"""Rewrites that look at no length, so that they put no guard on a symbolic one."""
_CALL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")

_library = torch.library.Library("smartattn", "DEF")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, "
    "float? scale, bool enable_gqa, str route) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def attend_compiled(
    place: Wish | str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Answer one call in code that Dynamo traces; ``place`` is a wish or the name of a backend."""
    # Branches turn into guards what may be symbolic here: a comparison of sizes, and numbers that Dynamo lets vary.
    is_causal = True if is_causal else False  # noqa: SIM210 - bool() of a symbol is no branch
    dropout_p = 0.0 if dropout_p == 0 else dropout_p
    is_positive = scale is None or scale > 0
    sign = 1 if is_positive else -1
    if isinstance(attn_mask, Causal):
        attn_mask, is_causal = None, True
    elif isinstance(attn_mask, Mask):
        attn_mask = attn_mask.dense(query.size(-2), key.size(-2), query.device)
    if versions.is_exporting():
        return versions.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    hook = versions.trace_hook()
    hook(_look)
    # Constants, since Dynamo of torch 2.11 hands no object over; it guards each of them.
    asked = (place,) if isinstance(place, str) else (*place.arguments, place.recognizes)
    route = _choose(asked, sign)
    if route == STOCK:
        return versions.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if route == FOREIGN:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    output: torch.Tensor = torch.ops.smartattn.attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, route
    )
    return output


class _Seen(threading.local):
    call: Call | None = None


_seen = _Seen()


def _look(context: Any) -> None:
    _seen.call = Call(*(versions.traced_local(context, name) for name in _CALL))


@versions.run_for_real
def _choose(asked: tuple[Any, ...], sign: int) -> str:
    """Return the name of the route for the call that ``_look`` saw, ``stock``, or ``foreign``.

    Args:
        asked: arguments of the wish.
        sign: of the scale, where that is a number that Dynamo lets vary.
    """
    call, _seen.call = _seen.call, None
    if call is not None and isinstance(call.scale, torch.SymFloat):
        call = call._replace(scale=float(sign))
    wish = wish_of(*asked)
    if call is None or wish.settings().mode == "off":
        return STOCK
    if is_foreign():
        return FOREIGN
    if not all(versions.is_plain_fake(tensor) for tensor in call.tensors):
        return STOCK
    if call.query.device.type not in MEASURED_DEVICE_TYPES or versions.functorch_level() is not None:
        return STOCK
    signature = read_traced_signature(call)
    return STOCK if signature is None else _route_name(call, signature, wish)


def _route_name(call: Call, signature: Signature, wish: Wish) -> str:
    """Return the choice for a signature in this process, made at its first trace and kept beside the eager ones."""
    symbolic = tuple(tuple(bool(versions.symbols_in(size)) for size in tensor.shape) for tensor in call.tensors)
    kept_as = "compiled", signature, symbolic, _lengths_agree(call)
    binding = wish.bindings.get(kept_as)
    if binding is None:
        binding = _decide(call, signature, wish)
        wish.bind(kept_as, binding)
    return binding.route


def _lengths_agree(call: Call) -> bool:
    L, S = call.query.shape[-2], call.key.shape[-2]
    if versions.symbols_in(L) or versions.symbols_in(S):
        return versions.symbols_in(L) == versions.symbols_in(S)
    return L == S


def _decide(call: Call, signature: Signature, wish: Wish) -> Binding:
    view = selector.view(call.query.device, signature, wish)
    against = _reasons_in_graph(call, view)
    if wish.backend is not None:
        wished = {route.name: view.reasons(route) + against(route) for route in view.wished_routes()}
        if all(wished.values()):
            raise unavailable(view, wished)
    found = selector.memory.find(view.environment, signature)
    mode = view.settings.mode
    if mode in ("tune", "record") and (found is None or selector.find(view) is None):
        selector.notes.note_pending(view.environment, signature, "first met under torch.compile")
    if found is not None:
        events.count("memory_hits" if found[1] in ("memory", "tuned") else "disk_hits")
        may_plan = view.settings.dynamic is not True and not symbols_of(call)
        binding = _bind_record(view, *found, against, may_plan=may_plan)
        if binding is not None:
            return binding
    else:
        events.count("misses")
        if mode == "error" and wish.backend is None:
            raise missing_record(signature)
    return _safe_default(view, found[0].outcomes if found is not None else {}, against)


def _bind_record(
    view: View, record: Record, origin: str, against: Callable[[Route], tuple[str, ...]], *, may_plan: bool
) -> Binding | None:
    is_measured = view.is_allowed(record)

    def is_allowed(name: str) -> bool:
        route = view.route(name)
        if route is None or not is_measured(name):
            return False
        is_offered = view.wish.backend is not None or route.backend.name not in _BY_NAME_ONLY
        return is_offered and not against(route)

    choice = choose_compiled(record.outcomes, is_allowed, may_plan=may_plan)
    route = None if choice is None else view.route(choice.route)
    return None if route is None else _binding(view, route, origin, choice)


def _safe_default(view: View, outcomes: Mapping[str, Outcome], against: Callable[[Route], tuple[str, ...]]) -> Binding:
    events.count("safe_defaults")
    for route in view.safe_candidates():
        is_wrong = isinstance(outcomes.get(route.name), Invalid | Failed)
        if not is_wrong and not view.reasons(route) and not against(route):
            return _binding(view, route, "safe default")
    return _binding(view, parse_route(STOCK, view.signature.device_type), "safe default")


def _binding(view: View, route: Route, origin: str, choice: Choice | None = None) -> Binding:
    run = route.bind(view.signature, view.environment)
    return Binding(run, route.name, origin, view.signature, view.environment, choice, IN_GRAPH)


def _reasons_in_graph(call: Call, view: View) -> Callable[[Route], tuple[str, ...]]:
    """Return the function that says what speaks against a route in the graph of this call."""
    signatures = tuple(dict.fromkeys(variants(call))) if symbols_of(call) else ()

    def against(route: Route) -> tuple[str, ...]:
        if route.name == STOCK:
            return ()
        if route.backend.name not in _TRACEABLE:
            return ("is no part of a compiled graph",)
        for signature in signatures:
            found = ("is not measured",) if signature is None else route.reasons(signature, view.environment)
            if found:
                return (f"must serve every length of a dynamic graph: {found[0]}",)
        if signatures and view.wish.backend is None and not _is_length_blind(route, call):
            return ("looks at a length that varies in this graph",)
        return ()

    return against


def _is_length_blind(route: Route, call: Call) -> bool:
    """Return whether a route's own Python puts no guard on the symbolic sizes of a call."""
    reads_query_alone = "fold_gqa" if not has_symbols(call.query) else ""
    is_blind = all(rewrite.name in (*_LENGTH_BLIND, reads_query_alone) for rewrite in route.rewrites)
    return is_blind and not (route.backend.name == "efficient" and call.attn_mask is not None)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    route: str,
) -> torch.Tensor:
    """Run the operator: while a graph is lowered on traced tensors, and on real ones where a backend runs it as it is."""
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    run = _runner(call, route)
    cast = cast_for_autocast(call)
    if cast is call:
        return run(*call)
    with torch.autocast(query.device.type, enabled=False):
        return run(*cast)


def _runner(call: Call, name: str) -> Runner:
    """Return what runs a route here; stock where it may not, since a graph may outlive what it was made for."""
    known = call._replace(scale=1.0) if isinstance(call.scale, torch.SymFloat) else call
    signature = read_traced_signature(known)
    if signature is None:
        return run_stock
    try:
        route = parse_route(name, signature.device_type)
    except UnknownNameError:
        return run_stock
    environment = environment_of(call.query.device)
    if route.reasons(signature, environment):
        return run_stock
    guard_sizes(*call[:4])
    return route.bind(signature, environment)


_library.impl("attention", _attention, "CompositeImplicitAutograd")
