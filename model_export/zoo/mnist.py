"""The three MNIST models of generalised FedAvg: logistic regression, a perceptron, a small CNN."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def logistic_regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def two_hidden_layers(width: int = 200) -> nn.Module:
    """2NN: two hidden layers of the same width."""
    return nn.Sequential(
        OrderedDict(
            hidden1=nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU()),
            hidden2=nn.Sequential(nn.Linear(width, width), nn.ReLU()),
            classifier=nn.Linear(width, 10),
        )
    )


def cnn() -> nn.Module:
    """Convolutions without padding: 582,026 parameters, which is what the paper's megabytes amount to."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Sequential(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
            conv2=nn.Sequential(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
            dense=nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 512), nn.ReLU()),
            classifier=nn.Linear(512, 10),
        )
    )
