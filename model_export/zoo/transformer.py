"""A small text transformer written out in plain operations.

Attention is matrix products and a softmax rather than PyTorch's fused call, so that the exported graph
consists of ordinary operators. One hidden tensor is all that passes from block to block: there is no mask
made from the tokens, which would reach past every boundary; padding is read like any other word.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_NEVER = 1e9  # what a masked word's score is lowered by


class Embedding(nn.Module):
    """Words and their learned positions."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.positions


class SelfAttention(nn.Module):
    def __init__(self, length: int, width: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.split = (-1, length, heads, width // heads)  # constants in the graph: only the batch is open
        self.merged = (-1, length, width)
        self.scale = 1 / math.sqrt(width // heads)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend to all words, or to those that a mask of zeros and ones keeps."""
        query = self.query(x).reshape(self.split).permute(0, 2, 1, 3)
        key = self.key(x).reshape(self.split).permute(0, 2, 3, 1)
        value = self.value(x).reshape(self.split).permute(0, 2, 1, 3)
        scores = query @ key * self.scale
        if mask is not None:
            scores = scores + ((mask - 1) * _NEVER).unsqueeze(1).unsqueeze(1)
        weights = torch.softmax(scores, dim=-1)
        return self.output((weights @ value).permute(0, 2, 1, 3).reshape(self.merged))


class Block(nn.Module):
    """Pre-norm: attention, then two dense layers, each normalising its input and adding to it."""

    def __init__(self, length: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(length, width, heads)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.mlp(self.norm2(x)))


class Head(nn.Module):
    """Normalise, average over the words, decide."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(x).mean(dim=1))


class TextTransformer(nn.Module):
    def __init__(
        self,
        vocabulary: int,
        length: int,
        num_classes: int,
        width: int = 64,
        heads: int = 4,
        blocks: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(length, width, heads, dropout) for _ in range(blocks)))
        self.head = Head(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.dropout(self.embedding(tokens))))
