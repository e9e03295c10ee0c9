"""Calls with dense masks: by the mask's class once its values were read and have one, else by the dense mask.

One runner stands for all masks of one form. It tells masks apart by identity, so that one changed in place, or another
one of the same shape, never meets what was found out about the first. Under graph capture the dense mask is used, since
a program may write to it between replays.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from smartattn import versions
from smartattn.backends.base import Runner
from smartattn.mask_facts import Identity, can_be_remembered, facts_of, identity_of, owner_of
from smartattn.mask_policy import MIN_SCORES, Ledger
from smartattn.mask_recognition import can_be_recognized
from smartattn.masks import canonicalize
from smartattn.signature import Call, Signature
from smartattn.wishes import Binding, Wish

_is_capturing = versions.is_capturing
MAX_USES = 64
"""Masks that a runner knows at a time; forgetting one costs looking at it again."""
DENSE = ""
"""Stands for the dense mask among the classes; ``none`` and ``causal`` are calls without a mask tensor."""
Bind = Callable[[Call, str, Callable[..., torch.Tensor]], Binding]
"""(call in PyTorch's own arguments, class for the signature, what answers when the binding is to be renewed)."""
Recover = Callable[[Call, Exception, Binding], torch.Tensor]


def is_watched(call: Call, signature: Signature, wish: Wish) -> bool:
    """Return whether calls of this form get a runner that looks for classes."""
    mask = call.attn_mask
    if mask is None or not wish.recognizes or wish.backend is not None or not wish.settings().recognize_masks:
        return False
    if signature.L * signature.S < MIN_SCORES or "m" in signature.grads or not can_be_recognized(call):
        return False
    # A mask that autocast casts anew for every call cannot be told from others.
    return not signature.autocast or str(mask.dtype).removeprefix("torch.") in ("bool", signature.autocast)


class Use:
    """One mask at one moment, and what answers calls with it.

    Attributes:
        mask_id: ``id`` of the tensor that was given last, 0 once that is gone.
        owner: the tensor whose life is that of the memory.
        version, address: of the mask.
        owner_address: to see that the owner still holds that memory.
        num_uses: calls so far.
        num_told: those that the ledger knows.
        look_at: use at which to look at the values.
        name: of the class; ``DENSE`` for none.
        run: what answers.
    """

    __slots__ = (
        "__weakref__", "_watch", "address", "look_at", "mask_id", "name", "num_told", "num_uses", "owner",
        "owner_address", "run", "version",
    )  # fmt: skip

    def __init__(self, mask: torch.Tensor) -> None:
        owner = owner_of(mask)
        self.mask_id = 0
        self._watch: weakref.ref[torch.Tensor] | None = None
        self.owner = TensorWeakRef(owner)
        self.owner_address = owner.data_ptr()
        self.version = mask._version
        self.address = mask.data_ptr()
        self.num_uses = self.num_told = 0
        self.look_at: float = 1
        self.name = DENSE
        self.run: Runner | None = None

    def is_alive(self) -> bool:
        """Return whether the memory is still the mask's."""
        owner = self.owner()
        return owner is not None and owner.data_ptr() == self.owner_address and owner._version == self.version

    def meet(self, mask: torch.Tensor) -> None:
        """Know this tensor by its ``id`` for as long as it lives."""
        self.mask_id = id(mask)
        this = weakref.ref(self)

        def forget(watch: weakref.ref[torch.Tensor]) -> None:
            use = this()
            if use is not None and use._watch is watch:
                use.mask_id = 0

        # Only its end is watched: a weak reference to a tensor must not be followed without PyTorch's own care.
        self._watch = weakref.ref(mask, forget)


class MaskRunner:
    """Answers the calls of one hot key.

    Args:
        bind: makes the binding of a class, or of the dense mask.
        recover: answers a call whose route raised.
        ledger: what masks of this kind of call taught.
        is_final: whether a mask's choice must not depend on times, nor change once made (deterministic programs).
        device_type: of the calls.
    """

    __slots__ = ("_bind", "_bindings", "_is_cuda", "_last", "_recover", "_uses", "is_final", "ledger")

    def __init__(self, bind: Bind, recover: Recover, ledger: Ledger, *, is_final: bool, device_type: str) -> None:
        self._is_cuda = device_type == "cuda"
        self._bind = bind
        self._recover = recover
        self.ledger = ledger
        self.is_final = is_final
        self._bindings: dict[str, Binding] = {}
        self._uses: OrderedDict[Identity, Use] = OrderedDict()
        self._last: Use | None = None

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Answer one call; about 1 us more than its route when the mask is the last one."""
        mask = arguments[3]
        use = self._last
        if (
            use is None
            or use.mask_id != id(mask)
            or use.version != mask._version
            or use.address != mask.data_ptr()
            or use.num_uses >= use.look_at
            or (self._is_cuda and _is_capturing("cuda"))
        ):
            return self._settle(Call(*arguments))
        use.num_uses += 1
        try:
            return use.run(*arguments)  # type: ignore[misc]  # the last use always has a runner
        except Exception as error:
            return self._recover(Call(*arguments), error, self._bindings[use.name])

    def binding_of(self, name: str) -> Binding | None:
        """Return what answers for a class, ``DENSE`` for none; ``None`` before its first call."""
        return self._bindings.get(name)

    def _settle(self, call: Call) -> torch.Tensor:
        """Answer a call whose mask is not the last one, or is to be looked at."""
        mask = call.attn_mask
        if mask is None or not can_be_remembered(mask) or versions.is_capturing(mask.device.type):
            return self._answer(DENSE, self._runner(DENSE, call), call)
        is_backward = versions.graph_task_id() != -1
        self._tell(self._last)
        use = self._use_of(mask)
        if is_backward:
            use.num_told += 1
        self._tell(use)
        if use.run is None or (use.num_uses >= use.look_at and not is_backward):
            self._choose(use, call, is_first=use.run is None)
        use.meet(mask)
        self._last = use
        return self._answer(use.name, use.run or self._runner(DENSE, call), call)

    def _tell(self, use: Use | None) -> None:
        """Tell the ledger of calls that it does not know."""
        if use is not None:
            self.ledger.num_uses += use.num_uses - use.num_told
            use.num_told = use.num_uses

    def _use_of(self, mask: torch.Tensor) -> Use:
        identity = identity_of(mask)
        use = self._uses.get(identity)
        if use is None or not use.is_alive():
            expected_uses = self.ledger.expected_uses
            use = Use(mask)
            use.look_at = self._look_at(expected_uses)
            self._uses[identity] = use
            while len(self._uses) > MAX_USES:
                self._uses.popitem(last=False)
            # A recomputed forward makes its masks anew; the program did not.
            self.ledger.num_masks += versions.graph_task_id() == -1
        use.num_uses += 1
        return use

    def _look_at(self, expected_uses: float) -> float:
        """Return the use at which a new mask is to be looked at.

        Note:
            What a checkpoint recomputes must meet the route of its forward. While hooks on saved tensors say that there
            may be one, a mask is looked at when it is new or never, and only once others were seen to be shared: a
            recomputation that makes its masks anew then decides as its forward did.
        """
        is_recomputed = versions.has_saved_tensors_hooks() or versions.graph_task_id() != -1
        if not self.is_final and not is_recomputed:
            return self.ledger.look_at(expected_uses)
        is_unknown = math.isinf(expected_uses) and is_recomputed
        return 1 if self.ledger.is_shared(expected_uses) and not is_unknown else math.inf

    def _choose(self, use: Use, call: Call, *, is_first: bool) -> None:
        may_look = use.num_uses >= use.look_at and (is_first or not versions.has_saved_tensors_hooks())
        mask = call.attn_mask
        is_new = may_look and mask is not None and facts_of(mask) is None
        canonical = canonicalize(call, recognizes=may_look)
        if is_new:
            self.ledger.note_look(canonical.cost_ms * 1e3, is_found=canonical.call is not call or bool(canonical.mask))
        name = canonical.mask
        if canonical.call is not call:
            name = "causal" if canonical.call.is_causal and not call.is_causal else "none"
        run = self._runner(name, canonical.call)
        if name != DENSE or may_look:
            use.look_at = math.inf
        use.name = name
        use.run = run if name not in ("none", "causal") else _without_mask(run, canonical.call.is_causal)

    def _runner(self, name: str, call: Call) -> Runner:
        """Return what answers for a class, bound at its first call."""
        binding = self._bindings.get(name)
        if binding is not None:
            return binding.run

        def renew(*arguments: Any) -> torch.Tensor:
            if versions.graph_task_id() != -1 or versions.is_capturing(arguments[0].device.type):
                return counted.run(*arguments)  # type: ignore[no-any-return]  # only counters are renewed
            self._bindings.pop(name, None)
            run = self._runner(name, Call(*arguments))
            # Every mask of this class is to meet the new choice.
            for use in self._uses.values():
                if use.name == name:
                    use.run = None
            self._last = None
            return run(*arguments)

        binding = self._bind(call, "" if name in ("none", "causal") else name, renew)
        counted: Any = binding.run
        self._bindings[name] = binding
        cost_us = 0.0 if binding.choice is None else binding.choice.cost_us
        if name == DENSE:
            self.ledger.dense_us = cost_us or self.ledger.dense_us
        else:
            self.ledger.class_us = cost_us or self.ledger.class_us
        return binding.run

    def _answer(self, name: str, run: Runner, call: Call) -> torch.Tensor:
        try:
            return run(*call)
        except Exception as error:
            return self._recover(call, error, self._bindings[name])


def _without_mask(run: Runner, is_causal: bool) -> Runner:
    """Return a runner that leaves the mask out, since the flag says all of it."""

    def run_without_mask(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_given_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        del attn_mask, is_given_causal
        return run(query, key, value, None, dropout_p, is_causal, scale, enable_gqa)

    return run_without_mask
