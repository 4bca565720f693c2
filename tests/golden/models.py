"""Small models whose bundles are kept here: `python -m tests.golden.write --bundles` exports them again."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

CHANNELS = 4


def cnn(width: float = 1.0) -> nn.Module:
    """Batch norm, pooling and dropout."""
    first, second = max(1, round(CHANNELS * width)), max(1, round(2 * CHANNELS * width))
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(nn.Conv2d(1, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU()),
            body=nn.Sequential(
                nn.Conv2d(first, second, 3, padding=1, bias=False),
                nn.BatchNorm2d(second),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ),
            head=nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(second * 9, 3)),
        )
    )


def depthwise() -> nn.Module:
    """Depthwise convolutions: batch norm stays the operator that it is."""
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU6()),
            body=nn.Sequential(
                nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False),
                nn.BatchNorm2d(CHANNELS),
                nn.ReLU6(),
                nn.Conv2d(CHANNELS, 6, 1, bias=False),
                nn.BatchNorm2d(6),
            ),
            head=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)),
        )
    )


def mlp() -> nn.Module:
    """Dense layers, and a number as the answer."""
    return nn.Sequential(
        OrderedDict(
            first=nn.Sequential(nn.Linear(5, 8), nn.Tanh()),
            second=nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            last=nn.Linear(8, 2),
        )
    )


class Text(nn.Module):
    """Words through an LSTM, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.classifier = nn.Linear(5, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _, (last, _) = self.lstm(self.dropout(self.embedding(tokens)))
        return self.classifier(last[-1])


def text() -> nn.Module:
    return Text()
