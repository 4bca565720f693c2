"""Models as people write them, each with something that makes capture or differentiation difficult."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    """PyTorch's own encoder layers: fused attention with dropout inside, and a padded embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 16, padding_idx=0)
        self.after = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.before = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True, activation="gelu")
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.before(self.after(self.embedding(x))).mean(1))


class VisionTransformer(nn.Module):
    """A class token expanded to the batch, learned positions."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 17, 16))
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        patches = self.patches(x).flatten(2).transpose(1, 2)
        whole = torch.cat([self.token.expand(x.size(0), -1, -1), patches], 1) + self.position
        return self.head(self.layer(whole)[:, 0])


class SkipConnections(nn.Module):
    """A small U-Net: transposed convolution, upsampling, concatenation; predicts an image."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.bottom = nn.Conv2d(8, 16, 3, 2, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.join = nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        wide = F.relu(self.down(x))
        narrow = self.up(F.relu(self.bottom(wide)))
        joined = F.relu(self.join(torch.cat([wide, narrow], 1)))
        return self.head(F.avg_pool2d(F.interpolate(joined, scale_factor=2), 2))


class Recurrent(nn.Module):
    """Stacked, bidirectional, dropout between the layers; sequence output and last state."""

    def __init__(self):
        super().__init__()
        self.first = nn.GRU(6, 10, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.second = nn.LSTM(20, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        sequence, _ = self.first(x)
        sequence, (last, _) = self.second(sequence)
        return self.head(last[-1] + F.dropout(sequence, 0.3, self.training).mean(1))


def odd_convolutions():
    """Kernels, strides, dilations and groups that no fast layout covers, on an image of odd size."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 16, 5, 2, 2),
        nn.Mish(),
        nn.Conv2d(16, 32, 3, padding=2, dilation=2, groups=2),
        nn.Hardswish(),
        nn.Conv2d(32, 64, 3, padding=1, groups=32),
        nn.InstanceNorm2d(64, affine=True),
        nn.GELU("tanh"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


def shuffled():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.PixelShuffle(2),
        nn.ReLU6(),
        nn.Conv2d(4, 8, 3, 2, 1),
        nn.GroupNorm(2, 8),
        nn.ELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def signal():
    """One-dimensional convolutions."""
    return nn.Sequential(
        nn.Conv1d(2, 8, 5, padding=2),
        nn.BatchNorm1d(8),
        nn.PReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(8, 8, 3, groups=8),
        nn.LayerNorm([8, 6]),
        nn.Softplus(),
        nn.Flatten(),
        nn.Linear(48, 4),
    )


class UsedTwice(nn.Module):
    """One batch norm and one convolution, applied twice; one parameter that nothing reads."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.stem(x)
        for _ in range(2):
            x = torch.relu(self.norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


class OtherExporter(nn.Module):
    """The first exporter does not know Threshold; the second must not fold the recurrent weights away."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.norm, self.head = nn.LSTM(6, 8, batch_first=True), nn.GroupNorm(2, 8), nn.Linear(8, 3)

    def forward(self, x):
        sequence, _ = self.recurrent(x)
        return self.head(F.threshold(self.norm(sequence[:, -1]), 0.1, 0.0))
