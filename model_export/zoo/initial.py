"""First weights: He et al. 2015, for layers before a ReLU, and Glorot and Bengio 2010, which are those of Keras."""

from __future__ import annotations

from torch import nn


def he(part: nn.Module) -> None:
    """Draw the weights of every convolution and dense layer anew, and set its biases to 0.

    PyTorch's own first weights are smaller by a factor of about 2.4 and fade from layer to layer.
    """
    for module in part.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def glorot(part: nn.Module) -> None:
    """Draw the weights of every convolution and dense layer anew as Keras does, and set its biases to 0."""
    for module in part.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
