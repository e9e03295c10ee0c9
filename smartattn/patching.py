"""``patch_sdpa``: smartattn in the place of ``torch.nn.functional.scaled_dot_product_attention``, for the whole process.

Reach: every call that looks the name up in ``torch.nn.functional`` when it is made, ``nn.MultiheadAttention`` and all
libraries that write ``F.scaled_dot_product_attention(...)`` included. Out of reach: names bound earlier (``from
torch.nn.functional import scaled_dot_product_attention`` in a module already imported), PyTorch's fast paths in C++,
attention computed by hand, and compiled code (where smartattn stands aside anyway).
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from smartattn import events, versions
from smartattn.attention import attend
from smartattn.plain import own_patches
from smartattn.wishes import Site, wish_of

_functional = torch.nn.functional
_NAME = "scaled_dot_product_attention"
_lock = threading.RLock()


class SdpaPatch:
    """A patch that can be switched on and off; as a context manager, on inside the block.

    On several times, it is off after as many times off. Patches of other wishes may be nested.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._depth = 0
        self._below: Any = versions.sdpa
        self._function: Any = None

    @property
    def is_on(self) -> bool:
        """Whether the patch is in force."""
        return self._depth > 0

    def on(self) -> SdpaPatch:
        """Put smartattn in the place of PyTorch's function, and return the patch."""
        with _lock:
            self._depth += 1
            if self._depth == 1:
                self._below = getattr(_functional, _NAME)
                self._function = self._make(self._below)
                own_patches.add(self._function)
                setattr(_functional, _NAME, self._function)
        return self

    def off(self) -> None:
        """Put back what stood there before.

        Where something else has been put over the patch meanwhile, that stays, and the patch under it stands aside.
        """
        with _lock:
            if self._depth == 0:
                return
            self._depth -= 1
            if self._depth == 0:
                if getattr(_functional, _NAME) is self._function:
                    setattr(_functional, _NAME, _still_on(self._below))
                self._function.is_on = False
                own_patches.discard(self._function)

    def __enter__(self) -> SdpaPatch:  # noqa: PYI034 - Self is newer than Python 3.10
        return self.on()

    def __exit__(self, *error: object) -> None:
        self.off()

    def _make(self, below: Any) -> Any:
        site = self._site

        # Named as what it replaces, since context_parallel restores by the function's name.
        def scaled_dot_product_attention(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> torch.Tensor:
            is_ours = getattr(_functional, _NAME) in own_patches and (below is versions.sdpa or below in own_patches)
            if patched.is_on and is_ours:
                return attend(site, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            # Called by a replacement that was put over this one, or standing over one: theirs is the call.
            events.count("passthroughs")
            found: torch.Tensor = below(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return found

        patched: Any = scaled_dot_product_attention
        patched.is_on = True
        patched.below = below
        return patched


def _still_on(function: Any) -> Any:
    """Return what to put back: patches that were switched off meanwhile are skipped."""
    while getattr(function, "is_on", True) is False:
        function = function.below
    return function


def patch_sdpa(
    *, backend: str | None = None, dynamic: bool | None = None, mode: str | None = None, accuracy: str | None = None
) -> SdpaPatch:
    """Return a patch that answers the process's ``scaled_dot_product_attention`` calls by smartattn while it is on.

    Args:
        backend, dynamic, mode, accuracy: wishes for all these calls, as ``SmartAttention`` takes them.

    Returns:
        A context manager (``with patch_sdpa(): ...``) that is also switched by its ``on()`` and ``off()``.

    Raises:
        UnknownNameError: for a backend, route, mode or accuracy that does not exist.

    Note:
        Process-wide: other threads see it too. Reach and limits: see the module. The values of dense masks are not
        read, since nobody knows how all the code of a process writes its masks (see ``recognize_masks``). A replacement that stands there
        already, or is put over it later (context parallelism), keeps its calls.
    """
    # Whoever patches a process did not ask for its masks to be read, nor for what that costs.
    return SdpaPatch(Site(wish_of(backend, mode, accuracy, dynamic, recognizes=False)))
