"""A tiny CNN with batch norm for scikit-learn's 8×8 digits: demos and tests that take seconds."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def _convolution(inputs: int, outputs: int, *then: nn.Module) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), *then)


def digits_cnn() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv1=_convolution(1, 8),
            conv2=_convolution(8, 16, nn.MaxPool2d(2)),
            conv3=_convolution(16, 32, nn.MaxPool2d(2)),
            dense=nn.Sequential(nn.Flatten(), nn.Linear(32 * 2 * 2, 32), nn.ReLU()),
            classifier=nn.Linear(32, 10),
        )
    )
