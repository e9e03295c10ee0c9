"""What happens off the hot path: the first sight of a call, and a route that failed when it was run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch

from smartattn import events, mask_policy, versions
from smartattn.backends.base import Runner
from smartattn.backends.math import run_math
from smartattn.buckets import bucket_of
from smartattn.environment import environment_of
from smartattn.formatting import shorten
from smartattn.history import CountedRunner
from smartattn.mask_runner import MaskRunner, is_watched
from smartattn.masks import Canonical, canonicalize, is_class
from smartattn.plain import belongs_to_math, has_unequal_lengths, own_patches, passthrough_reason, wrong_call_text
from smartattn.selector import CAPTURED, INTERRUPTED, selector
from smartattn.settings import Settings, on_change
from smartattn.signature import Call, Signature, read_signature
from smartattn.tuner import one_line
from smartattn.wishes import Binding, Wish, forget_former, unbind_all


def first_sight(wish: Wish, hot_key: Hashable, arguments: tuple[Any, ...]) -> torch.Tensor:
    """Answer a call that has no bound choice, and bind one when it is a plain eager call."""
    call, mask, _ = said(Call(*arguments))
    if wish.settings().mode == "off" or not _are_tensors(call):
        return pass_through(call)
    if belongs_to_math(call, double_backward=wish.double_backward):
        return run_math(*call)
    if passthrough_reason(call):
        return pass_through(call)
    cast = cast_for_autocast(call)
    signature = read_signature(cast)
    if signature is None:
        if has_unequal_lengths(call):
            raise RuntimeError(wrong_call_text(call))
        return pass_through(call)
    is_said = arguments[3] is not call.attn_mask
    if hot_key is not None and not is_said and is_watched(call, signature, wish):
        watching = _watching(wish, hot_key, signature)
        wish.bind(hot_key, Binding(watching, "", "mask", signature, environment_of(call.query.device)))
        return watching(*call)
    binding = _bound(cast, signature, mask, wish, is_cast=cast is not call)
    if is_said:
        binding = dataclasses.replace(binding, run=_wrapped(binding.run, _saying))
    if hot_key is not None and is_kept(binding):
        _set_renewal(binding, wish, hot_key)
        wish.bind(hot_key, binding)
    try:
        return binding.run(*arguments)
    except Exception as error:
        return recover(wish, hot_key, arguments, error, binding)


def said(call: Call) -> Canonical:
    """Return a call whose mask is a class, by smartattn's or PyTorch's objects, in PyTorch's own arguments."""
    is_refused = call.is_causal and isinstance(call.attn_mask, torch.Tensor)  # PyTorch's objects refuse the flag
    if not is_class(call.attn_mask) or is_refused or not all(isinstance(t, torch.Tensor) for t in call[:3]):
        return Canonical(call)
    return canonicalize(call)


def _saying(run: Runner) -> Runner:
    """Return a runner for calls whose mask is a class."""
    return lambda *arguments: run(*said(Call(*arguments)).call)


def _bound(cast: Call, signature: Signature, mask: str, wish: Wish, *, is_cast: bool) -> Binding:
    """Return the choice for a call whose mask is of a class, or of none when it is empty."""
    if mask:
        signature = dataclasses.replace(signature, mask=mask)
    binding = selector.decide(cast, signature, wish)
    return dataclasses.replace(binding, run=_wrapped(binding.run, _under_autocast)) if is_cast else binding


def _watching(wish: Wish, hot_key: Hashable, signature: Signature) -> MaskRunner:
    """Return the runner for calls of a signature whose dense masks may turn out to be of a class."""

    def bind(call: Call, mask: str, renew: Callable[..., torch.Tensor]) -> Binding:
        cast = cast_for_autocast(call)
        found = read_signature(cast)
        binding = _bound(cast, found or signature, mask, wish, is_cast=cast is not call)
        if isinstance(binding.run, CountedRunner):
            binding.run.renew = renew
        return binding

    def answer(call: Call, error: Exception, binding: Binding) -> torch.Tensor:
        return recover(wish, hot_key, tuple(call), error, binding)

    ledger = mask_policy.ledger_of(str(bucket_of(signature)), signature)
    is_final = signature.deterministic != "off"
    return MaskRunner(bind, answer, ledger, is_final=is_final, device_type=signature.device_type)


def is_kept(binding: Binding) -> bool:
    """Return whether a binding answers later calls too."""
    return binding.note not in (CAPTURED, INTERRUPTED) and not binding.note.startswith("out of memory")


def _are_tensors(call: Call) -> bool:
    return all(isinstance(tensor, torch.Tensor) for tensor in call.tensors)


def pass_through(call: Call) -> torch.Tensor:
    """Hand a call to PyTorch's function (or what replaced it) untouched; add to its error what is wrong."""
    events.count("passthroughs")
    found = torch.nn.functional.scaled_dot_product_attention
    run = versions.sdpa if found in own_patches else found
    try:
        return run(
            call.query, call.key, call.value, call.attn_mask, call.dropout_p, call.is_causal,
            scale=call.scale, enable_gqa=call.enable_gqa,
        )  # fmt: skip
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        text = wrong_call_text(call)
        if not text or type(error) not in (RuntimeError, IndexError, ValueError, TypeError):
            raise
        raise type(error)(f"{error}\n{text}") from error


def cast_for_autocast(call: Call) -> Call:
    """Return the call as autocast would cast it, or the very same object when autocast is off."""
    name = versions.autocast_dtype_name(call.query.device.type)
    if not name:
        return call
    dtype = getattr(torch, name)
    return call._replace(
        query=_cast(call.query, dtype), key=_cast(call.key, dtype), value=_cast(call.value, dtype),
        attn_mask=None if call.attn_mask is None else _cast(call.attn_mask, dtype),
    )  # fmt: skip


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Autocast leaves float64 and whatever is not floating alone.
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_cast else tensor


def _under_autocast(run: Runner) -> Runner:
    """Return a runner that casts as autocast does, then runs with autocast off."""

    def cast_and_run(*arguments: Any) -> torch.Tensor:
        call = cast_for_autocast(Call(*arguments))
        with torch.autocast(call.query.device.type, enabled=False):
            return run(*call)

    return cast_and_run


def _wrapped(run: Runner, wrap: Callable[[Runner], Runner]) -> Runner:
    """Put a wrapper around a runner, inside its counter: what that hands over to must see the caller's own arguments."""
    if not isinstance(run, CountedRunner):
        return wrap(run)
    run.run = wrap(run.run)
    return run


def _set_renewal(binding: Binding, wish: Wish, hot_key: Hashable) -> None:
    counted = binding.run
    if not isinstance(counted, CountedRunner):
        return

    def renew(*arguments: Any) -> torch.Tensor:
        query = arguments[0]
        if versions.graph_task_id() != -1 or versions.is_capturing(query.device.type):
            return counted.run(*arguments)
        wish.unbind(hot_key)
        return first_sight(wish, hot_key, arguments)

    counted.renew = renew


def recover(
    wish: Wish, hot_key: Hashable, arguments: tuple[Any, ...], error: Exception, binding: Binding | None = None
) -> torch.Tensor:
    """Answer a call whose route raised: by the safe default, or by raising what PyTorch raises.

    Out of memory: the safe default for this call. An accelerator error that outlives its call: raised again. Any
    other error after which the safe default answers the same inputs puts the route into quarantine.
    """
    binding = binding or wish.bindings.get(hot_key)
    if binding is None or not binding.route or versions.is_sticky_error(error):
        raise error
    if versions.graph_task_id() != -1:
        # Checkpoints end a recomputation by an error of their own, and a pass must meet the routes of its forward.
        raise error
    call = said(Call(*arguments)).call
    view = selector.view(call.query.device, binding.signature, wish)
    safe = view.safe_route({})
    if safe.name == binding.route or versions.is_capturing(call.query.device.type):
        raise error
    is_memory = versions.is_out_of_memory(error)
    if is_memory:
        versions.release_memory(call.query.device)
    output = _run_safe(safe.bind(binding.signature, binding.environment), call, error)
    events.count("fallbacks")
    reason = f"failed at run time: {one_line(error)}"
    events.announce("fallback", signature=str(binding.signature), route=binding.route, reason=reason)
    if is_memory:
        return output
    events.warn_once(
        f"quarantine {binding.route} {binding.signature.digest}",
        "smartattn route %r failed on %s (%s); %r answered, and the route is in quarantine until "
        "smartattn.cache.forget() lifts it",
        binding.route, binding.signature, shorten(reason, 200), safe.name,
    )  # fmt: skip
    selector.notes.quarantine(binding, reason)
    wish.unbind(hot_key)
    return output


def _run_safe(run: Runner, call: Call, error: Exception) -> torch.Tensor:
    cast = cast_for_autocast(call)
    try:
        if cast is call:
            return run(*call)
        with torch.autocast(call.query.device.type, enabled=False):
            return run(*cast)
    except Exception as second:
        # The inputs themselves are at fault: the user gets PyTorch's error, with the first one as its cause.
        raise second from error


def forget_everything() -> None:
    """Forget all choices, records, counts and statistics of this process; files stay."""
    unbind_all()
    forget_former()
    events.reset_stats()
    mask_policy.forget()
    selector.reset()


def _apply(now: Settings) -> None:
    unbind_all()
    selector.settings_changed(now)


on_change(_apply)
