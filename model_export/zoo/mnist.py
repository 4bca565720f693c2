"""The three MNIST models of generalised FedAvg: logistic regression, a perceptron, a small CNN."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from model_export.zoo.width import channels


def logistic_regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def two_hidden_layers(width: float = 1.0) -> nn.Module:
    """2NN: two hidden layers of 200 units each."""
    units = channels(200, width)
    return nn.Sequential(
        OrderedDict(
            hidden1=nn.Sequential(nn.Flatten(), nn.Linear(784, units), nn.ReLU()),
            hidden2=nn.Sequential(nn.Linear(units, units), nn.ReLU()),
            classifier=nn.Linear(units, 10),
        )
    )


def cnn(width: float = 1.0) -> nn.Module:
    """Convolutions without padding: 582,026 parameters, which is what the paper's megabytes amount to."""
    first, second, dense = (channels(count, width) for count in (32, 64, 512))
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Sequential(nn.Conv2d(1, first, 5), nn.ReLU(), nn.MaxPool2d(2)),
            conv2=nn.Sequential(nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2)),
            dense=nn.Sequential(nn.Flatten(), nn.Linear(second * 4 * 4, dense), nn.ReLU()),
            classifier=nn.Linear(dense, 10),
        )
    )
