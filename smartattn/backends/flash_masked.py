"""``flash_masked``: masks of a known class on PyTorch's flash-attention operator, which takes no mask tensor.

Windows and triangles at the lower right are arguments of the operator. Documents become packed sequences, and padded
keys become sequences that start behind the padding and use so many keys; nothing is packed for them, the operator only
reads from shifted starts. What it then skips, a kernel that reads the mask would have computed and thrown away.
Source: ``_flash_attention_forward`` of PyTorch 2.11; compared with a float32 reference on an H200.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from smartattn import torch_rules, versions
from smartattn.backends.base import Backend, Capabilities, Runner
from smartattn.environment import Environment
from smartattn.mask_facts import Facts, facts_of
from smartattn.mask_recognition import recognize
from smartattn.signature import Call, Signature

_CLASSES = (
    "causal_lower_right", "window", "documents", "causal+documents", "key_padding", "causal+key_padding",
)  # fmt: skip


class FlashMasked(Backend):
    """The flash-attention CUDA operator with windows and cumulative lengths in place of a mask."""

    name = "flash_masked"
    capabilities = Capabilities(
        device_types=("cuda",),
        dtypes=("float16", "bfloat16"),
        masks=_CLASSES,
        ranks=(4,),
        max_head_dim=torch_rules.FLASH_MAX_HEAD_DIM,
        head_dim_multiple=8,
        supports_different_head_dims=False,
        supports_mask_grad=False,
        supports_dropout=False,
        supports_non_positive_scale=False,
        needs_unit_last_stride=True,
        needs_aligned_start=True,
    )

    def extra_reasons(self, signature: Signature, environment: Environment) -> tuple[str, ...]:
        """Add the rules on architecture, classes, training, sizes and switches."""
        s = signature
        found = list(torch_rules.flash_reasons(s, environment))
        implementation = versions.active_flash_implementation()
        if implementation != "FA2":
            found.append(f"was tried with FA2 only; the active flash implementation is {implementation}")
        if s.mask == "causal+key_padding(right)":
            found.append("has its triangle at the last visible key; padding on the right needs it at the last key")
        if s.wants_grad and s.mask.partition("(")[0].endswith("key_padding"):
            found.append("has no backward that knows how many keys were used; gradients are wanted")
        if s.L > s.S and s.wants_grad:
            found.append(f"has queries that see no key; L is {s.L}, S is {s.S}, and gradients are wanted")
        if versions.MAX_GRID < s.N:
            found.append(f"takes up to {versions.MAX_GRID} batch elements; there are {s.N}")
        return tuple(found)

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes of inputs brought to BSHD and of the output put back in order."""
        s = signature
        sizes = (s.Hq * s.L * s.E, s.H * s.S * s.E, s.H * s.S * s.Ev)
        if s.mask.partition("(")[0] in ("window", "causal_lower_right"):
            return 0
        pairs = zip(sizes, s.layouts, strict=True)
        elements = sum(size for size, layout in pairs if layout.order != "bshd" or layout.is_gapped)
        if s.layouts[0].order != "bshd":
            elements += s.Hq * s.L * s.Ev
        return s.N * elements * s.itemsize_bytes

    def bind(self, signature: Signature) -> Runner:
        """Return the runner of the signature's mask class."""
        word, _, parameters = signature.mask.partition("(")
        if word == "window":
            left, right = map(int, parameters.rstrip(")").split(","))
            return functools.partial(_run_window, left, right)
        if word == "causal_lower_right":
            return functools.partial(_run_window, -1, 0)
        is_causal = word.startswith("causal+")
        keeps_order = signature.layouts[0].order == "bshd"
        run = _run_documents if word.endswith("documents") else _run_padded
        return functools.partial(_run_packed, run, signature.mask, is_causal, keeps_order)


def _run_window(
    left: int,
    right: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Run the operator with a window; it counts positions from the last query and the last key."""
    del attn_mask, is_causal, enable_gqa
    output: torch.Tensor = versions.flash_forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, None, query.size(2), key.size(2),
        dropout_p, left < 0 and right == 0, False, scale=scale, window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip
    return output.transpose(1, 2)


_Packed = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Facts, tuple[int, int, int], bool, "float | None"], torch.Tensor
]


def _run_packed(
    run: _Packed,
    name: str,
    is_class_causal: bool,
    keeps_order: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Bring the inputs to (tokens, heads, E), run, and give the output back in the order of query."""
    facts = None if attn_mask is None else facts_of(attn_mask)
    if facts is None:
        # A copy of a known mask, such as a stand-in's, is looked at anew.
        facts = recognize(Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    if facts is None or facts.name != name:
        raise RuntimeError(f"the mask was bound as {name} and is {facts.name if facts else 'unknown'} now")
    N, Hq, L, _ = query.shape
    sizes = N, L, key.size(2)
    output = run(_packed(query), _packed(key), _packed(value), facts, sizes, is_class_causal, scale)
    output = output.view(N, L, Hq, -1).transpose(1, 2)
    return output if keeps_order else output.contiguous()


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).reshape(-1, tensor.size(1), tensor.size(3))


def _run_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    facts: Facts,
    sizes: tuple[int, int, int],
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    N, _, S = sizes
    ends = facts.repeated.get(N)
    if ends is None and facts.ends is not None:
        shifts = torch.arange(N, dtype=torch.int32, device=query.device)[:, None] * S
        # All but the last end of a batch element begin a document; the very last closes the whole.
        ends = torch.cat([(shifts + facts.ends[:-1]).flatten(), shifts[-1] + facts.ends[-1:]])
        facts.repeated[N] = ends
    output: torch.Tensor = versions.flash_forward(
        query, key, value, ends, ends, facts.longest, facts.longest, 0.0, is_causal, False, scale=scale
    )[0]
    return output


def _run_padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    facts: Facts,
    sizes: tuple[int, int, int],
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    N, L, S = sizes
    if sizes not in facts.repeated and facts.starts is not None and facts.lengths is not None:
        elements = torch.arange(N + 1, dtype=torch.int32, device=query.device)
        ends_key = elements * S
        ends_key[:-1] += facts.starts
        facts.repeated[sizes] = elements * L, ends_key, facts.lengths.expand(N).contiguous()
    ends_query, ends_key, used = facts.repeated[sizes]
    output: torch.Tensor = versions.flash_forward(
        query, key, value, ends_query, ends_key, L, S, 0.0, is_causal, False, scale=scale, seqused_k=used
    )[0]
    return output
