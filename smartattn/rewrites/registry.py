"""The one table of rewrites, in the order in which a route applies them."""

from __future__ import annotations

from smartattn.rewrites.base import Rewrite
from smartattn.rewrites.contiguous import Contiguous
from smartattn.rewrites.flatten_batch import FlattenBatch
from smartattn.rewrites.gqa import ExpandKv, FoldGqa
from smartattn.rewrites.mask_tensors import AdditiveMask, AlignMask
from smartattn.rewrites.pad_head_dim import WIDE_MULTIPLE, PadHeadDim
from smartattn.rewrites.promote import Promote
from smartattn.rewrites.split_batch import SplitBatch

REWRITES: tuple[Rewrite, ...] = (
    Promote(),
    FlattenBatch(),
    Contiguous(),
    PadHeadDim(),
    PadHeadDim(WIDE_MULTIPLE),
    FoldGqa(),
    ExpandKv(),
    AdditiveMask(),
    AlignMask(),
    SplitBatch(),
)
