"""The public attention: a function and a module with PyTorch's arguments, and the hot path behind both.

A hit is one key, one look-up, one call: no lock, log, disk or flag. Whatever is not a plain eager call has a key that
is never in the table (its type, mode, transform or symbolic size is part of the key), so it needs no test of its own.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from smartattn import versions
from smartattn.backends.base import Runner
from smartattn.backends.stock import run_steady_stock, run_stock
from smartattn.compiled import attend_compiled
from smartattn.events import hot_hits
from smartattn.first_sight import first_sight, recover
from smartattn.wishes import NO_MEMO, Memo, Site, never, wish_of

_functional = torch.nn.functional
_forward_ad = torch.autograd.forward_ad
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_len_function_modes = versions.len_function_modes
_flash_enabled = versions.flash_enabled
_efficient_enabled = versions.efficient_enabled
_cudnn_enabled = versions.cudnn_enabled
_math_enabled = versions.math_enabled
_is_deterministic = versions.is_deterministic
_stock = versions.sdpa
_CAN_MISALIGN = torch.backends.cuda.is_built()
"""Whether the start of the data can matter: only kernels on a GPU load 16 bytes at a time."""


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Compute scaled dot-product attention by the fastest valid route known for this call.

    Args:
        query: (N, Hq, L, E); other ranks as PyTorch takes them.
        key: (N, H, S, E); H divides Hq when ``enable_gqa``.
        value: (N, H, S, Ev).
        attn_mask: broadcastable to (N, Hq, L, S); bool (True is visible) or added to the scores.
        dropout_p: share of probabilities to drop; applied whenever above 0, as in PyTorch.
        is_causal: apply the top-left triangle; together with ``attn_mask`` both apply.
        scale: factor on the scores; default 1 / sqrt(E).
        enable_gqa: let each key head serve a group of query heads.
        backend: name of a backend or route that must serve; default: the best one.

    Returns:
        (N, Hq, L, Ev), of the dtype and device of ``query``. A query row that sees no key is zero.

    Raises:
        RouteUnavailableError: when ``backend`` cannot serve, with all reasons.
        UnknownNameError: when ``backend`` names nothing.
        MissingRecordError: in mode ``error`` on a signature without a record.
        RuntimeError: for wrong shapes, dtypes or devices, as PyTorch raises it.

    Note:
        A hit takes no lock and allocates nothing. A first sight may tune (bounded by ``signature_budget_ms`` and
        ``process_budget_s``; synchronises the device). Under ``torch.compile`` nothing is measured: what memory or disk
        knows at the first trace is what the graph runs.
    """
    if backend is not None and _is_dynamo_compiling():
        return attend_compiled(backend, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    site = _SITE if backend is None else Site(wish_of(backend))
    return attend(site, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


class SmartAttention(torch.nn.Module):
    """Scaled dot-product attention as a module: no parameters, no buffers, no entries in ``state_dict``.

    Args:
        backend: name of a backend (``cudnn``: the best route that ends in it) or of a route that must serve.
        mode: ``tune``, ``record``, ``frozen``, ``error`` or ``off`` for this place; default: the process's setting.
        accuracy: ``standard``, ``strict`` or ``approximate``; default: the process's setting.
        dynamic: ``True``: lengths keep changing; ``False``: they repeat; default: the process's setting.
        double_backward: keep to backends that can be differentiated twice (math and eager).

    Raises:
        UnknownNameError: for a backend, route, mode or accuracy that does not exist.

    Note:
        Holds no state: instances with equal arguments share their choices; ``deepcopy``, ``pickle`` and ``spawn``
        carry the arguments alone.
    """

    def __init__(
        self,
        backend: str | None = None,
        mode: str | None = None,
        accuracy: str | None = None,
        dynamic: bool | None = None,
        double_backward: bool = False,
    ) -> None:
        super().__init__()
        self._site = Site(wish_of(backend, mode, accuracy, dynamic, double_backward))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Compute attention; arguments, result, errors and cost as ``scaled_dot_product_attention``."""
        return attend(self._site, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def extra_repr(self) -> str:
        """Return the arguments that differ from their default."""
        names = ("backend", "mode", "accuracy", "dynamic", "double_backward")
        given = zip(names, self._site.wish.arguments, strict=True)
        return ", ".join(f"{name}={value!r}" for name, value in given if value is not None and value is not False)

    def __prepare_scriptable__(self) -> SmartAttention:
        """Return the module that ``torch.jit.script`` compiles in the place of this one."""
        prepared = _Scriptable.__new__(_Scriptable)
        prepared.__dict__.update(self.__dict__)
        return prepared


class _Scriptable(SmartAttention):
    """The same module for TorchScript, which knows no keyword-only arguments and no Python types.

    ``torch.jit.script`` puts it into the model given to it too; there it stays what it replaces.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Run PyTorch's own function when scripted, else what the replaced module runs."""
        if torch.jit.is_scripting():
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        else:  # noqa: RET505 - TorchScript leaves out what follows such an else, and only that
            return attend(self._site, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def _get_name(self) -> str:
        return "SmartAttention"


_SITE = Site(wish_of())


def attend(
    site: Site,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Answer one call of a site: by the memo of its last choice, else by its key, else as a first sight."""
    if _is_dynamo_compiling():
        return attend_compiled(site.wish, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    hot_key: Hashable = None
    table, scalars, grad, function, flags, guard, mask_guard, is_cpu, run = site.memo
    try:
        if (
            table is site.wish.table
            and scalars == (dropout_p, is_causal, scale, enable_gqa)
            and _is_grad_enabled() is grad
            and _functional.scaled_dot_product_attention is function
            and not _len_function_modes()
            and not _is_deterministic()
            and _forward_ad._current_level == -1
            and (flags is None or flags == sdp_flags())
            and (guard(query, key, value) if attn_mask is None else mask_guard(query, key, value, attn_mask))
            and (is_cpu or not start_key(query, key, value, attn_mask))
        ):
            hot_hits[0] += 1
            if run is None:
                return _stock(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        else:
            hot_key = hot_key_of(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            run = site.wish.table[hot_key]
            hot_hits[0] += 1
            remember(site, run, query, key, value, attn_mask, (dropout_p, is_causal, scale, enable_gqa))
    except (KeyError, TypeError, AttributeError, RuntimeError):
        # A first sight, or arguments without a key (symbolic sizes, nested tensors, no tensors at all), or PyTorch's
        # own function refusing the call: it is asked once more, and what is wrong is added to its error.
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return first_sight(site.wish, hot_key, arguments)
    try:
        return run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except Exception as error:
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return recover(site.wish, hot_key_of(*arguments), arguments, error)


def sdp_flags() -> tuple[bool, bool, bool, bool]:
    """Return which backends of PyTorch's function the process allows."""
    return _flash_enabled(), _efficient_enabled(), _cudnn_enabled(), _math_enabled()


def hot_key_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Hashable:
    """Return all that decides the choice of a call, exact strides included; raises for tensors without them."""
    return (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
        query.dtype, key.dtype, value.dtype, query.device, type(query), type(key), type(value),
        None if attn_mask is None else mask_key(attn_mask),
        dropout_p, is_causal, scale, enable_gqa,
        _is_grad_enabled() and (query.requires_grad, key.requires_grad, value.requires_grad),
        versions.is_any_autocast() and autocast_key(),
        versions.len_dispatch_modes(), versions.functorch_level(), versions.deterministic_level(),
        _functional.scaled_dot_product_attention, _len_function_modes(), _forward_ad._current_level, sdp_flags(),
        _CAN_MISALIGN and query.is_cuda and start_key(query, key, value, attn_mask),
    )  # fmt: skip


def remember(
    site: Site,
    run: Runner,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any,
    scalars: tuple[Any, ...],
) -> None:
    """Make the memo of a site once the same choice answered twice in a row; drop a memo that no longer fits.

    A guard compares type, dtype, device, sizes, strides, ``requires_grad`` and the active dispatch keys (autocast,
    transforms, dispatch modes) in one call of C++. What a memo takes for granted (no modes, no determinism, data that
    starts on 16 bytes) is asked of each call.
    """
    if site.last_run is not run:
        site.last_run, site.memo = run, NO_MEMO
        return
    is_cpu = not query.is_cuda
    is_usual = not _len_function_modes() and not _is_deterministic() and _forward_ad._current_level == -1
    if not is_usual or not (is_cpu or not start_key(query, key, value, attn_mask)):
        return
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    guard = versions.tensor_guard(tensors)
    if guard is None:
        return
    is_stock = run in (run_stock, run_steady_stock)
    site.memo = Memo(
        table=site.wish.table,
        scalars=scalars,
        grad=_is_grad_enabled(),
        function=_functional.scaled_dot_product_attention,
        # PyTorch's function heeds its own switches.
        flags=None if is_stock else sdp_flags(),
        guard=guard if attn_mask is None else never,
        mask_guard=never if attn_mask is None else guard,
        is_cpu=is_cpu,
        run=None if run is run_stock else run,
    )


def mask_key(mask: Any) -> Hashable:
    """Return what of a mask decides the choice: its facts, not its values."""
    if isinstance(mask, torch.Tensor):
        wants_grad = _is_grad_enabled() and mask.requires_grad
        return type(mask), mask.shape, mask.stride(), mask.dtype, mask.device, wants_grad
    return mask  # type: ignore[no-any-return]  # a value object of smartattn.masks is its own key


def start_key(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any) -> int:
    """Return 0 when every tensor starts on 16 bytes, else which ones do not, as bits."""
    found = query.data_ptr() | key.data_ptr() | value.data_ptr()
    if isinstance(attn_mask, torch.Tensor):
        found |= attn_mask.data_ptr()
    if not found & 15:
        return 0
    tensors = (query, key, value, attn_mask) if isinstance(attn_mask, torch.Tensor) else (query, key, value)
    return sum(bool(tensor.data_ptr() & 15) << i for i, tensor in enumerate(tensors))


def autocast_key() -> Hashable:
    """Return the autocast dtypes in force."""
    return versions.autocast_dtype_name("cpu"), versions.autocast_dtype_name("cuda")
