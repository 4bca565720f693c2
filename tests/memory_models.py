"""Models that no zoo has, as users bring them: whose memory the papers' formula does not tell."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn


class SqueezeExcite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.down = nn.Conv2d(channels, channels // 4, 1)
        self.up = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True)))))


class GroupedBlock(nn.Module):
    def __init__(self, channels, out, groups, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.excite = SqueezeExcite(out)
        self.conv2 = nn.Conv2d(out, out, 1)
        self.act = nn.GELU()

    def forward(self, x):
        return self.act(self.conv2(self.excite(self.act(self.norm(self.conv1(x))))))


def grouped():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1),
        GroupedBlock(32, 32, 4, 1),
        GroupedBlock(32, 64, 8, 2),
        GroupedBlock(64, 64, 8, 1),
        GroupedBlock(64, 128, 16, 2),
        GroupedBlock(128, 128, 16, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class Depthwise(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.depth = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.point = nn.Conv2d(channels, out, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)

    def forward(self, x):
        x = torch.relu(self.norm1(self.depth(x)))
        return torch.relu(self.norm2(self.point(x)))


def depthwise():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        Depthwise(32, 64, 1),
        Depthwise(64, 128, 2),
        Depthwise(128, 128, 1),
        Depthwise(128, 256, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


class Attention(nn.Module):
    def __init__(self, length, width, heads):
        super().__init__()
        self.heads = heads
        self.length = length
        self.width = width
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = self.qkv(h).reshape(-1, self.length, 3, self.heads, self.width // self.heads).permute(2, 0, 3, 1, 4)
        w = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(self.width // self.heads), -1)
        x = x + self.out((w @ v).transpose(1, 2).reshape(-1, self.length, self.width))
        return x + self.mlp(self.norm2(x))


class Patches(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 4, 4)

    def forward(self, x):
        return self.conv(x).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def attention():
    return nn.Sequential(Patches(64), *[Attention(64, 64, 4) for _ in range(4)], Mean(), nn.Linear(64, 10))


def mlp():
    return nn.Sequential(
        nn.Linear(784, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


class Last(nn.Module):
    def forward(self, x):
        return x[:, -1]


class Rec(nn.Module):
    def __init__(self, cell, a, b):
        super().__init__()
        self.cell = cell(a, b, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


def lstm():
    return nn.Sequential(nn.Embedding(1000, 32), Rec(nn.LSTM, 32, 64), Rec(nn.LSTM, 64, 64), Last(), nn.Linear(64, 5))


def gru():
    return nn.Sequential(Rec(nn.GRU, 16, 96), Rec(nn.GRU, 96, 64), Last(), nn.Linear(64, 5))


@dataclass(frozen=True)
class Exported:
    """How `embrace export` is called for one of them, or for a model of the zoo."""

    reference: str
    options: dict[str, Any] = field(default_factory=dict)  # of load_source


_HERE = Path(__file__).resolve()
_IMAGES = {"input_shape": (3, 32, 32)}
OWN = {
    "grouped": Exported(f"{_HERE}:grouped", _IMAGES),
    "depthwise": Exported(f"{_HERE}:depthwise", _IMAGES),
    "attention": Exported(f"{_HERE}:attention", _IMAGES),
    "mlp": Exported(f"{_HERE}:mlp", {"input_shape": (784,)}),
    "lstm": Exported(f"{_HERE}:lstm", {"input_shape": (40,), "input_dtype": "int64", "vocabulary": 1000}),
    "gru": Exported(f"{_HERE}:gru", {"input_shape": (40, 16)}),
}


def export_named(name: str, directory: Path) -> Any:
    """Export a model by its name here or in the zoo; return its manifest."""
    from model_export.bundle import export_bundle
    from model_export.source import load_source

    wanted = OWN.get(name, Exported(name))
    return export_bundle(load_source(wanted.reference, **wanted.options), directory / name)
