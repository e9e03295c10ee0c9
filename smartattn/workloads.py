"""Named shapes of real models, each with its public source: one frozen list for the command line, tests and benchmarks.

Sizes are those of the published configurations at a stated batch and length; none is made up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from smartattn.layout import MASK_AXES, Layout, read_layout
from smartattn.signature import DTYPES, Signature


@dataclass(frozen=True, slots=True)
class Workload:
    """One attention call of one model.

    Attributes:
        name: ``model/case``.
        source: where the sizes are published.
        N, Hq, H, L, S, E, Ev: sizes.
        mask: ``none``, ``causal``, ``padding`` (bool, one row per batch entry), ``bool`` (dense, shared by batch and
            heads) or ``bias`` (added, per head).
        layout: ``bhsd`` or ``bshd`` memory.
        tags: ``prefill``, ``decode``, ``encoder``, ``cross``, ``window``, ``vae``, ``mla``, ``mask``.
        trains: whether the case also occurs in training.
    """

    name: str
    source: str
    N: int
    Hq: int
    H: int
    L: int
    S: int
    E: int
    Ev: int
    mask: str = "none"
    layout: str = "bshd"
    tags: tuple[str, ...] = ()
    trains: bool = True

    def signature(self, pass_name: str, device_type: str, dtype: str) -> Signature:
        """Return the signature of this call for ``infer`` or ``train``."""
        itemsize_bytes = DTYPES[dtype].itemsize
        shapes = (
            (self.N, self.Hq, self.L, self.E),
            (self.N, self.H, self.S, self.E),
            (self.N, self.H, self.S, self.Ev),
        )
        layouts = tuple(_layout(shape, self.layout, itemsize_bytes) for shape in shapes)
        signature = Signature(
            pass_name=pass_name,
            device_type=device_type,
            dtype=dtype,
            batch=(self.N,),
            Hq=self.Hq,
            H=self.H,
            L=self.L,
            S=self.S,
            E=self.E,
            Ev=self.Ev,
            layouts=layouts,  # type: ignore[arg-type]  # three shapes make three layouts
            gqa="enabled" if self.Hq != self.H else "none",
            grads="qkv" if pass_name == "train" else "",
        )
        if self.mask in ("none", "causal"):
            return dataclasses.replace(signature, mask=self.mask)
        sizes = {
            "padding": (self.N, 1, 1, self.S),
            "bool": (1, 1, self.L, self.S),
            "bias": (1, self.Hq, self.L, self.S),
        }
        shape = sizes[self.mask]
        is_bias = self.mask == "bias"
        return dataclasses.replace(
            signature,
            mask="additive" if is_bias else "bool",
            mask_axes="".join(a if n > 1 else "1" for a, n in zip(MASK_AXES[-4:], shape, strict=True)),
            mask_dtype=dtype if is_bias else "bool",
            mask_layout=_mask_layout(shape, itemsize_bytes if is_bias else 16),
        )


def _layout(shape: tuple[int, ...], order: str, itemsize_bytes: int) -> Layout:
    N, H, S, E = shape
    strides = (H * S * E, S * E, E, 1) if order == "bhsd" else (S * H * E, E, H * E, 1)
    del N
    return read_layout(shape, strides, itemsize_bytes, 0)


def _mask_layout(shape: tuple[int, ...], itemsize_bytes: int) -> Layout:
    _, H, L, S = shape
    return read_layout(shape, (H * L * S, L * S, S, 1), itemsize_bytes, 0, MASK_AXES)


def workload_names() -> tuple[str, ...]:
    """Return the name of every workload."""
    return tuple(workload.name for workload in WORKLOADS)


def signatures(device_type: str, dtype: str, passes: tuple[str, ...] = ("infer", "train")) -> Iterator[Signature]:
    """Yield the signature of every workload in every pass that it occurs in."""
    for workload in WORKLOADS:
        for pass_name in passes:
            if pass_name == "infer" or workload.trains:
                yield workload.signature(pass_name, device_type, dtype)


_BERT = "arXiv:1810.04805, BERT-base: 12 heads of 64"
_VIT = "arXiv:2010.11929, ViT-B/16 at 224: 197 tokens, 12 heads of 64"
_LLAMA2 = "arXiv:2307.09288, Llama 2 7B: 32 heads of 128"
_LLAMA3 = "arXiv:2407.21783, Llama 3 8B: 32 query and 8 key heads of 128"
_DEEPSEEK = "arXiv:2405.04434, DeepSeek-V2 latent attention: 128 heads, 512 + 64 latent dims"
_SD15 = "arXiv:2112.10752 and Stable Diffusion 1.5's UNet: 8 heads of 40, 80 and 160"
_SDXL = "arXiv:2307.01952, SDXL's UNet: 10 and 20 heads of 64"

WORKLOADS: tuple[Workload, ...] = (
    Workload("bert/encoder-512", _BERT, 32, 12, 12, 512, 512, 64, 64, tags=("encoder",)),
    Workload("bert/padded-128", _BERT, 32, 12, 12, 128, 128, 64, 64, mask="padding", tags=("encoder", "mask")),
    Workload("vit-b16/encoder", _VIT, 64, 12, 12, 197, 197, 64, 64, layout="bhsd", tags=("encoder",)),
    Workload(
        "siglip/encoder", "arXiv:2303.15343, SigLIP So400m/14 at 384: 729 tokens, 16 heads of 72",
        16, 16, 16, 729, 729, 72, 72, tags=("encoder",),
    ),
    Workload(
        "whisper/encoder", "arXiv:2212.04356, Whisper large: 1500 frames, 20 heads of 64",
        8, 20, 20, 1500, 1500, 64, 64, tags=("encoder",),
    ),
    Workload(
        "whisper/cross", "arXiv:2212.04356, Whisper large's decoder over the encoder",
        8, 20, 20, 1, 1500, 64, 64, tags=("cross", "decode"), trains=False,
    ),
    Workload("llama2/prefill-2048", _LLAMA2, 1, 32, 32, 2048, 2048, 128, 128, mask="causal", tags=("prefill",)),
    Workload("llama2/decode-2048", _LLAMA2, 8, 32, 32, 1, 2048, 128, 128, layout="bhsd", tags=("decode",), trains=False),
    Workload("llama3/prefill-4096", _LLAMA3, 1, 32, 8, 4096, 4096, 128, 128, mask="causal", tags=("prefill",)),
    Workload("llama3/prefill-1024", _LLAMA3, 4, 32, 8, 1024, 1024, 128, 128, mask="causal", tags=("prefill",)),
    Workload("llama3/decode-4096", _LLAMA3, 8, 32, 8, 1, 4096, 128, 128, layout="bhsd", tags=("decode",), trains=False),
    Workload(
        "llama3/speculative", _LLAMA3, 32, 32, 8, 4, 4096, 128, 128, layout="bhsd", mask="bool",
        tags=("decode", "mask"), trains=False,
    ),
    Workload(
        "gemma/prefill", "arXiv:2403.08295, Gemma 2B: 8 query heads and 1 key head of 256",
        2, 8, 1, 2048, 2048, 256, 256, mask="causal", tags=("prefill",),
    ),
    Workload(
        "phi3/prefill", "arXiv:2404.14219, Phi-3-mini: 32 heads of 96",
        2, 32, 32, 2048, 2048, 96, 96, mask="causal", tags=("prefill",),
    ),
    Workload(
        "deepseek/mla-prefill", "arXiv:2405.04434, DeepSeek-V2: query and key 192, value 128",
        1, 16, 16, 2048, 2048, 192, 128, mask="causal", tags=("prefill", "mla"),
    ),
    Workload("deepseek/mla-decode", _DEEPSEEK, 4, 128, 1, 1, 4096, 576, 512, layout="bhsd", tags=("decode", "mla"), trains=False),
    Workload("sd15/self-64", _SD15, 2, 8, 8, 4096, 4096, 40, 40, tags=("encoder",)),
    Workload("sd15/cross-64", _SD15, 2, 8, 8, 4096, 77, 40, 40, tags=("cross",)),
    Workload("sd15/self-32", _SD15, 2, 8, 8, 1024, 1024, 80, 80, tags=("encoder",)),
    Workload(
        "sd15/vae", "arXiv:2112.10752, the autoencoder's mid block at 512 pixels: one head of 512",
        1, 1, 1, 4096, 4096, 512, 512, layout="bhsd", tags=("vae",), trains=False,
    ),
    Workload("sdxl/self-64", _SDXL, 2, 10, 10, 4096, 4096, 64, 64, tags=("encoder",)),
    Workload("sdxl/cross-64", _SDXL, 2, 10, 10, 4096, 77, 64, 64, tags=("cross",)),
    Workload("sdxl/self-32", _SDXL, 2, 20, 20, 1024, 1024, 64, 64, tags=("encoder",)),
    Workload(
        "flux/joint", "FLUX.1 transformer: 24 heads of 128 over 512 text and 4096 image tokens",
        1, 24, 24, 4608, 4608, 128, 128, tags=("encoder",),
    ),
    Workload(
        "swin/window", "arXiv:2103.14030, Swin-T stage 1: batch 64, windows of 49, 3 heads of 32, relative position bias",
        4096, 3, 3, 49, 49, 32, 32, layout="bhsd", mask="bias", tags=("window", "mask"),
    ),
    Workload(
        "t5/encoder", "arXiv:1910.10683, T5-base: 12 heads of 64, position bias",
        8, 12, 12, 512, 512, 64, 64, mask="bias", tags=("encoder", "mask"),
    ),
    Workload(
        "alphafold/row", "doi:10.1038/s41586-021-03819-2, row attention with pair bias: 8 heads of 32",
        128, 8, 8, 256, 256, 32, 32, mask="bias", tags=("mask",),
    ),
)  # fmt: skip
"""Every workload, in the order that tables show them."""
