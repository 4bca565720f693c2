"""The FEMNIST CNN of EmbracingFL, partial averaging and FedLAMA (LEAF's, Caldas et al. 2018)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def femnist_cnn() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            conv2=nn.Sequential(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            dense=nn.Sequential(nn.Flatten(), nn.Linear(64 * 7 * 7, 2048), nn.ReLU()),
            classifier=nn.Linear(2048, 62),
        )
    )
