"""The small transformer of ``smartattn demo``: random weights, the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

Attention: TypeAlias = Callable[..., torch.Tensor]
"""Takes what ``torch.nn.functional.scaled_dot_product_attention`` takes."""

WIDTH, NUM_LAYERS, Hq, H, VOCABULARY = 256, 4, 8, 2, 512
BATCH, PROMPT_LENGTH, NUM_STEPS = 4, 200, 3
SEED = 20


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a norm; keys and values are kept for later steps."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.head_dim = WIDTH // Hq
        self.project = nn.Linear(WIDTH, (Hq + 2 * H) * self.head_dim)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.cache: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, states: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool) -> torch.Tensor:
        """Apply the layer to (N, L, width) states."""
        N, L, _ = states.shape
        packed = self.project(self.norms[0](states)).view(N, L, Hq + 2 * H, self.head_dim).transpose(1, 2)
        query, key, value = packed.split([Hq, H, H], dim=1)
        if self.cache is not None:
            key, value = torch.cat([self.cache[0], key], dim=2), torch.cat([self.cache[1], value], dim=2)
        self.cache = key, value
        found = self.attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=True)
        states = states + self.output(found.transpose(1, 2).reshape(N, L, WIDTH))
        result: torch.Tensor = states + self.feed(self.norms[1](states))
        return result


class DemoModel(nn.Module):
    """A few layers over an embedding.

    Args:
        attention: what computes attention in every layer.
        device: where the weights live.
    """

    def __init__(self, attention: Attention, device: torch.device) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList([Layer(attention) for _ in range(NUM_LAYERS)])
            self.tokens = torch.randint(VOCABULARY, (BATCH, PROMPT_LENGTH + NUM_STEPS))
        self.to(device)
        self.tokens = self.tokens.to(device)

    @torch.no_grad()
    def work(self) -> dict[str, torch.Tensor]:
        """Do three kinds of work: encode padded texts, read a prompt, and decode a few tokens after it."""
        lengths = torch.linspace(PROMPT_LENGTH // 4, PROMPT_LENGTH, BATCH, device=self.tokens.device).long()
        is_visible = torch.arange(PROMPT_LENGTH, device=self.tokens.device) < lengths[:, None]
        prompt = self.tokens[:, :PROMPT_LENGTH]
        outputs = {"encode": self._run(prompt, is_visible[:, None, None, :])}
        outputs["prefill"] = self._run(prompt, is_causal=True)
        steps = [self._run(self.tokens[:, i : i + 1], keep=True) for i in range(PROMPT_LENGTH, self.tokens.shape[1])]
        outputs["decode"] = torch.cat(steps, dim=1)
        return outputs

    def blocks(self) -> list[Layer]:
        """Return the layers in order."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _run(
        self,
        tokens: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *,
        is_causal: bool = False,
        keep: bool = False,
    ) -> torch.Tensor:
        states: torch.Tensor = self.embedding(tokens)
        for layer in self.blocks():
            layer.cache = layer.cache if keep else None
            states = layer(states, attn_mask, is_causal=is_causal)
        return states
