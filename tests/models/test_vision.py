"""timm, torchvision and diffusers: real architectures, tiny and with random weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from smartattn import replace_attention, restore_attention
from tests.models import configs
from tests.models.checks import check_model, check_same, num_calls, run

pytestmark = pytest.mark.models


def library(name: str):
    return pytest.importorskip(name, reason=f"needs {name} (extra models)", exc_type=ImportError)


@pytest.mark.parametrize("build", [configs.timm_vit, configs.timm_swin])
def test_timm(build):
    """All of it holds for timm's ViT and Swin."""
    library("timm")
    report = check_model(*build())
    assert {place.integration for place in report.replaced} == {"timm"}


def test_timm_by_hand_is_left_alone():
    """A timm model told to compute attention by hand is left with the reason."""
    library("timm")
    model, _ = configs.timm_vit()
    for block in model.blocks:
        block.attn.fused_attn = False
    report = replace_attention(model)
    assert report.replaced == ()
    assert len(report.left) == 2
    assert "fused_attn" in report.left[0].reason


def test_torchvision_vit():
    """All of it holds for torchvision's ViT, made of ``nn.MultiheadAttention``."""
    library("torchvision")
    assert check_model(*configs.torchvision_vit()).left == ()


def test_torchvision_swin_is_left_alone():
    """The report says that torchvision's Swin computes attention by hand."""
    torchvision = library("torchvision")
    model = torchvision.models.SwinTransformer([4, 4], 16, [2], [2], [4, 4], num_classes=5)
    report = replace_attention(model)
    assert report.replaced == ()
    assert len(report.left) == 2
    assert "by hand" in report.left[0].reason


@pytest.mark.parametrize("build", [configs.diffusers_unet, configs.diffusers_dit, configs.diffusers_flux])
def test_diffusers(build):
    """All of it holds for diffusers' UNet2DConditionModel, DiT and Flux."""
    library("diffusers")
    report = check_model(*build())
    assert {place.integration for place in report.replaced} == {"diffusers"}


def test_diffusers_processors():
    """A processor keeps its class and state, pickles and copies; one set later is obeyed; restoring gives back stock's."""
    diffusers = library("diffusers")
    model, batch = configs.diffusers_unet()
    model.eval()
    expected = run(model, batch, training=False)
    kinds = {name: type(processor).__name__ for name, processor in model.attn_processors.items()}
    replace_attention(model)
    assert {name: type(processor).__name__ for name, processor in model.attn_processors.items()} == kinds
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = num_calls()
        check_same(run(other, batch, training=False), expected)
        assert num_calls() > before
    by_hand = diffusers.models.attention_processor.AttnProcessor
    model.set_attn_processor(by_hand())
    before = num_calls()
    check_same(run(model, batch, training=False), expected)
    assert num_calls() == before
    restore_attention(model)
    assert {type(processor) for processor in model.attn_processors.values()} == {by_hand}


def test_diffusers_backends_are_obeyed():
    """A model whose attention backend is not the native one is not answered by smartattn."""
    library("diffusers")
    model, batch = configs.diffusers_flux()
    model.eval()
    replace_attention(model)
    with torch.no_grad():
        model(**batch)
        before = num_calls()
        assert before > 0
        model.set_attention_backend("_native_math")
        model(**batch)
    assert num_calls() == before
