# SPDX-License-Identifier: Apache-2.0
"""A plain GPT over bytes: pre-norm blocks, learned positions, no biases.

Shape legend: ``B`` sequences, ``T`` positions, ``H`` heads, ``D`` width, ``V`` vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from typing_extensions import override

VOCAB_SIZE = 256  # one token a byte


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the model.

    Attributes:
        context: Longest sequence, in bytes.
        width: Features of the residual stream. A multiple of ``num_heads``.
        num_layers: Number of blocks.
        num_heads: Attention heads per block.
        dropout: Share of what each half of a block adds that is dropped in training.
    """

    context: int = 128
    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention, ``(B, T, D)`` to ``(B, T, D)``.

    Query, key and value are three matrices, not one fused one: Muon orthogonalizes each alone.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, T, D / H)
            for linear in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two matrices and a GELU, ``(B, T, D)`` to ``(B, T, D)``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width, bias=False)
        self.project = nn.Linear(4 * config.width, config.width, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.project(gelu(self.expand(x)))


class Block(nn.Module):
    """Attention, then MLP, each on a normalized copy of the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Bytes ``(B, T)`` in, logits of the next byte ``(B, T, V)`` out.

    Weights are drawn from torch's global generator: seed it, and every rank starts equal.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(VOCAB_SIZE, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCAB_SIZE, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        # Each block adds twice to the residual stream: scaled so that its variance stays flat.
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = residual_std if name.endswith("project") else 0.02
                nn.init.normal_(module.weight, std=std)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    *,
    num_new: int,
    context: int,
    generator: torch.Generator,
    top_k: int = 20,
    temperature: float = 0.8,
) -> Tensor:
    """Continue ``tokens`` one byte at a time.

    Args:
        model: Maps ``(B, T)`` bytes to ``(B, T, V)`` logits. When sharded, every rank must call.
        tokens: ``(B, T)`` int64 prompt, ``T >= 1``. Not modified.
        num_new: Number of bytes to add.
        context: Longest sequence that ``model`` takes; older bytes are dropped from its view.
        generator: Source of the draws, on the CPU.
        top_k: Draw among this many likeliest bytes.
        temperature: Below 1 favours likely bytes.

    Returns:
        ``(B, T + num_new)`` int64.
    """
    for _ in range(num_new):
        logits = model(tokens[:, -context:])[:, -1].float().cpu() / temperature
        values, choices = logits.topk(top_k)
        drawn = torch.multinomial(values.softmax(-1), num_samples=1, generator=generator)
        tokens = torch.cat([tokens, choices.gather(-1, drawn).to(tokens.device)], dim=1)
    return tokens
