"""A tiny CNN with batch norm for scikit-learn's 8×8 digits: demos and tests that take seconds."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from model_export.zoo.width import channels


def _convolution(inputs: int, outputs: int, *then: nn.Module) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), *then)


def digits_cnn(width: float = 1.0) -> nn.Module:
    first, second, third, dense = (channels(count, width) for count in (8, 16, 32, 32))
    return nn.Sequential(
        OrderedDict(
            conv1=_convolution(1, first),
            conv2=_convolution(first, second, nn.MaxPool2d(2)),
            conv3=_convolution(second, third, nn.MaxPool2d(2)),
            dense=nn.Sequential(nn.Flatten(), nn.Linear(third * 2 * 2, dense), nn.ReLU()),
            classifier=nn.Linear(dense, 10),
        )
    )
