"""Routes: zero or more rewrites, then one backend. Routes are what is validated, measured, stored and run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smartattn import guards
from smartattn.backends.base import Backend, Runner, declared_reasons, takes_mask
from smartattn.backends.registry import backend_names, backends_for
from smartattn.environment import Environment
from smartattn.errors import UnknownNameError
from smartattn.output_order import in_stock_order
from smartattn.rewrites.base import Rewrite
from smartattn.rewrites.registry import REWRITES
from smartattn.signature import Signature

SEPARATOR = "+"
_BY_NAME = {rewrite.name: rewrite for rewrite in REWRITES}


@dataclass(frozen=True, slots=True)
class Route:
    """One way to compute a call.

    Attributes:
        rewrites: applied to the inputs in this order, undone in reverse.
        backend: computes what is left.
    """

    rewrites: tuple[Rewrite, ...]
    backend: Backend

    @property
    def name(self) -> str:
        """Name in records and in ``backend=``, such as ``fold_gqa+flash``."""
        return SEPARATOR.join((*(rewrite.name for rewrite in self.rewrites), self.backend.name))

    def _stages(self, signature: Signature) -> Iterator[tuple[Rewrite, Signature]]:
        for rewrite in self.rewrites:
            yield rewrite, signature
            signature = rewrite.transform(signature)

    def remaining(self, signature: Signature) -> Signature:
        """Return the signature that reaches the backend."""
        for rewrite in self.rewrites:
            signature = rewrite.transform(signature)
        return signature

    def reasons(self, signature: Signature, environment: Environment) -> tuple[str, ...]:
        """Return all the reasons why this route cannot serve the signature here; empty when it is eligible.

        A rewrite that does not apply ends the list, since nothing can be said about what would follow it.
        """
        for rewrite, before in self._stages(signature):
            found = rewrite.reasons(before)
            if found:
                return tuple(f"{rewrite.name}: {text}" for text in found)
        left = self.remaining(signature)
        return self.backend.reasons(left, environment) + guards.reasons(self.backend.name, left, environment)

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the estimated bytes beyond the output: copies of the rewrites and buffers of the backend."""
        copies = sum(rewrite.workspace_bytes(before) for rewrite, before in self._stages(signature))
        return copies + self.backend.workspace_bytes(self.remaining(signature))

    def bind(self, signature: Signature, environment: Environment | None = None) -> Runner:
        """Return the callable that the hot path runs; only for a signature without ``reasons``.

        Args:
            signature: of the calls it will answer.
            environment: where it runs; given, the output lies in memory as PyTorch's own would.
        """
        run = self.backend.bind(self.remaining(signature))
        for rewrite, before in reversed(list(self._stages(signature))):
            run = rewrite.bind(before, run)
        if environment is None:
            return run
        return in_stock_order(self.backend.name, signature, environment, run, is_rewritten=bool(self.rewrites))


def routes_for(signature: Signature) -> tuple[Route, ...]:
    """Return the routes worth thinking of for a signature, eligible or not, in the order that breaks ties.

    Every backend stands alone first, so that its reasons are kept; then come its rewritten routes. A rewritten route is
    left out when a rewrite does not apply, when the backend declares that it cannot take what is left, or when the
    backend does the same by itself.
    """
    backends = tuple(backends_for(signature.device_type).values())
    plain = tuple(Route((), backend) for backend in backends)
    rewritten = tuple(Route(chain, backend) for backend in backends for chain in _chains(signature, backend))
    return plain + rewritten


WIDE = {"pad_head_dim": "pad_head_dim_64"}
"""Rewrites to the wider forms of them."""
_FOLDS_ITSELF = ("eager", "eager_inplace")
"""Backends that fold the query group by themselves."""
_NEVER_REWRITTEN = ("stock", "math")
"""Stock is PyTorch's own call as it came; what a rewrite wins for Math, eager wins by itself."""
_PADS_WORTH = ("efficient", "cudnn")
"""Backends that take head dims in multiples of 8 and do not pad by themselves."""


def _chains(signature: Signature, backend: Backend) -> list[tuple[Rewrite, ...]]:
    """Return the lists of rewrites to try before ``backend``, none of them empty."""
    if backend.name in _NEVER_REWRITTEN:
        return []
    repairs = _repairs(signature, backend)
    if repairs is None:
        return []
    found = [repairs]
    if backend.name == "cudnn" and _BY_NAME["pad_head_dim"] in repairs:
        # Its kernels are built for these sizes; which padding wins depends on how much is copied.
        found.append(tuple(_BY_NAME[WIDE.get(rewrite.name, rewrite.name)] for rewrite in repairs))
    wholes = [
        (*one, *more) for one in found for more in _heads_and_masks(Route(one, backend).remaining(signature), backend)
    ]
    return [whole for whole in wholes if whole and _is_thinkable(signature, Route(whole, backend))]


def _repairs(signature: Signature, backend: Backend) -> tuple[Rewrite, ...] | None:
    """Return what brings rank, memory and head dims into the form of a backend, ``None`` when nothing does."""
    can = backend.capabilities
    found: list[Rewrite] = []
    left = signature

    def apply(name: str) -> None:
        nonlocal left
        rewrite = _BY_NAME[name]
        if not rewrite.reasons(left):
            found.append(rewrite)
            left = rewrite.transform(left)

    if can.ranks and left.rank not in can.ranks:
        apply("promote" if left.rank < min(can.ranks) else "flatten_batch")
        if left.rank not in can.ranks:
            return None
    if can.needs_unit_last_stride or can.needs_aligned_start:
        apply("contiguous")
    if can.head_dim_multiple > 1 or backend.name in _PADS_WORTH:
        apply("pad_head_dim")
    if left.device_type != "cpu" and can.ranks:
        apply("split_batch")
    return tuple(found)


def _heads_and_masks(left: Signature, backend: Backend) -> list[tuple[Rewrite, ...]]:
    """Return the ways to write grouped heads and the mask for a backend, the empty one first."""
    heads: list[tuple[Rewrite, ...]] = [()]
    if left.group > 1 and backend.name not in _FOLDS_ITSELF:
        fold, expand = _BY_NAME["fold_gqa"], _BY_NAME["expand_kv"]
        if not fold.reasons(left):
            heads.append((fold,))
        elif not backend.capabilities.supports_groups:
            # Repeating keys reads group times the bytes: worth a thought only where folding cannot be.
            heads.append((expand,))
    masks: list[tuple[Rewrite, ...]] = [()]
    kind = left.tensor_mask.removeprefix("causal+")
    if kind == "bool" and not takes_mask(backend.capabilities.masks, left):
        masks = [(_BY_NAME["additive_mask"],)]
    aligned = _BY_NAME["align_mask"]
    if kind == "additive" and backend.name in _PADS_WORTH and not aligned.reasons(left):
        masks.append((aligned,))
    return [head + mask for head in heads for mask in masks]


def _is_thinkable(signature: Signature, route: Route) -> bool:
    for rewrite, before in route._stages(signature):
        if rewrite.reasons(before):
            return False
    return not declared_reasons(route.backend.capabilities, route.remaining(signature))


def parse_route(name: str, device_type: str) -> Route:
    """Return the route called ``name``.

    Raises:
        UnknownNameError: names the part that does not exist and the nearest ones that do.
    """
    *rewrite_names, backend_name = name.split(SEPARATOR)
    backends = backends_for(device_type)
    if backend_name not in backends:
        raise UnknownNameError.of(f"backend of route {name!r} on {device_type}", backend_name, backends)
    for rewrite_name in rewrite_names:
        if rewrite_name not in _BY_NAME:
            raise UnknownNameError.of(f"rewrite of route {name!r}", rewrite_name, _BY_NAME)
    return Route(tuple(_BY_NAME[part] for part in rewrite_names), backends[backend_name])


def check_route_name(name: str) -> str:
    """Return ``name`` when it is a backend or route that exists on some device, else raise ``UnknownNameError``."""
    *rewrite_names, backend_name = name.split(SEPARATOR) if isinstance(name, str) else [str(name)]
    if backend_name not in backend_names():
        raise UnknownNameError.of("backend", name, backend_names())
    for rewrite_name in rewrite_names:
        if rewrite_name not in _BY_NAME:
            raise UnknownNameError.of(f"rewrite of route {name!r}", rewrite_name, _BY_NAME)
    return name


def matches(route: Route, wish: str) -> bool:
    """Return whether a wish (a backend's name or a route's) allows ``route``."""
    return wish in (route.name, route.backend.name)
