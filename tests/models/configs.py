"""Tiny models with random weights, and one batch for each."""

from __future__ import annotations

import os

# Before transformers is imported: nothing here may ask a network.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VOCABULARY = 99


def tokens(N: int = 2, L: int = 10) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (N, L), generator=torch.Generator().manual_seed(1))


def padding(N: int = 2, L: int = 10, *, side: str = "right") -> torch.Tensor:
    visible = torch.ones(N, L, dtype=torch.long)
    if side == "right":
        visible[-1, L - 3 :] = 0
    else:
        visible[-1, :3] = 0
    return visible


def text_batch(*, side: str = "right", labels: bool = False) -> dict[str, torch.Tensor]:
    found = {"input_ids": tokens(), "attention_mask": padding(side=side)}
    return {**found, "labels": tokens()} if labels else found


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **SIZES)), text_batch(labels=True)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return GPT2LMHeadModel(config), text_batch(labels=True)


def decoder_config(kind, **changes):
    return kind(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=8, **{**SIZES, **changes})


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(decoder_config(LlamaConfig)), text_batch(side="left", labels=True)


def mistral():
    from transformers import MistralConfig, MistralForCausalLM

    batch = {"input_ids": tokens(), "labels": tokens()}
    return MistralForCausalLM(decoder_config(MistralConfig, sliding_window=4)), batch


def gemma():
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(decoder_config(GemmaConfig)), text_batch(labels=True)


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), text_batch(labels=True)


def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=12,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    features = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(2))
    return WhisperForConditionalGeneration(config), {"input_features": features, "labels": tokens()}


def image(size: int = 16) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(3))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=16, patch_size=4, num_labels=5, **SIZES)
    return ViTForImageClassification(config), {"pixel_values": image(), "labels": torch.tensor([1, 3])}


def clip():
    from transformers import CLIPConfig, CLIPModel

    text = {**SIZES, "vocab_size": VOCABULARY, "projection_dim": 16, "eos_token_id": 2, "max_position_embeddings": 32}
    vision = {**SIZES, "image_size": 16, "patch_size": 4, "projection_dim": 16}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return CLIPModel(config), {**text_batch(), "pixel_values": image(), "return_loss": True}


TRANSFORMERS = {f.__name__: f for f in (bert, gpt2, llama, mistral, gemma, t5, whisper, vit, clip)}


def timm_vit():
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5
    )
    return model, {"x": image(32)}


def timm_swin():
    import timm

    model = timm.models.swin_transformer.SwinTransformer(
        img_size=32, patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=5
    )
    for module in model.modules():
        # Off by default in timm, which calls it experimental there.
        if hasattr(module, "fused_attn"):
            module.fused_attn = True
    return model, {"x": image(32)}


def torchvision_vit():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=5
    )
    torch.nn.init.normal_(model.heads[0].weight)
    return model, {"x": image(32)}


def diffusers_unet():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=24, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    batch = {
        "sample": torch.randn(2, 4, 8, 8, generator=generator),
        "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": torch.randn(2, 7, 24, generator=generator),
    }
    return model, batch


def diffusers_dit():
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    hidden = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    batch = {"hidden_states": hidden, "timestep": torch.tensor([3, 700]), "class_labels": torch.tensor([1, 4])}
    return model, batch


def diffusers_flux():
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=24, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4), guidance_embeds=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(6)
    batch = {
        "hidden_states": torch.randn(2, 16, 4, generator=generator),
        "encoder_hidden_states": torch.randn(2, 7, 24, generator=generator),
        "pooled_projections": torch.randn(2, 16, generator=generator),
        "timestep": torch.tensor([0.2, 0.7]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
    }
    return model, batch
