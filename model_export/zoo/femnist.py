"""The FEMNIST CNN of EmbracingFL, partial averaging and FedLAMA (LEAF's, Caldas et al. 2018)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from model_export.zoo.initial import he
from model_export.zoo.width import channels


def femnist_cnn(width: float = 1.0) -> nn.Module:
    first, second, dense = (channels(count, width) for count in (32, 64, 2048))
    network = nn.Sequential(
        OrderedDict(
            conv1=nn.Sequential(nn.Conv2d(1, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            conv2=nn.Sequential(nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            dense=nn.Sequential(nn.Flatten(), nn.Linear(second * 7 * 7, dense), nn.ReLU()),
            classifier=nn.Linear(dense, 62),
        )
    )
    he(network[:-1])
    return network
