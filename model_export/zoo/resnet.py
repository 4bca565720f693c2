"""ResNets for 32×32 images (He et al. 2016, section 4.2), as EmbracingFL and DOMO train them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from federation.errors import InputError
from model_export.zoo.initial import glorot
from model_export.zoo.width import channels

Norm = Callable[[int], nn.Module]  # number of channels -> normalisation


def group_norm(count: int) -> nn.Module:
    """Eight groups: DOMO's replacement for batch norm, whose statistics suffer under skewed data."""
    if count % 8:
        raise InputError(f"{count} channels do not divide into its 8 groups of group norm; at a width of 0.5 they do")
    return nn.GroupNorm(8, count)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, a 1×1 projection where asked for."""

    def __init__(self, inputs: int, outputs: int, stride: int, project: bool, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if project:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return torch.relu(y + self.shortcut(x))


def _stage(inputs: int, outputs: int, stride: int, blocks: int, norm: Norm) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride, project=True, norm=norm)
    rest = (BasicBlock(outputs, outputs, 1, project=False, norm=norm) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)


class ResNet(nn.Module):
    """6n + 2 layers in three stages of 16, 32 and 64 channels, or a share of them.

    The first block of every stage projects its shortcut, that of the first stage too, as in the network whose
    memory EmbracingFL tabulates.
    """

    def __init__(
        self, blocks: int, num_classes: int, norm: Norm = nn.BatchNorm2d, width: float = 1.0, inputs: int = 3
    ) -> None:
        super().__init__()
        first, second, third = (channels(count, width) for count in (16, 32, 64))
        self.stem = nn.Sequential(nn.Conv2d(inputs, first, 3, padding=1, bias=False), norm(first), nn.ReLU())
        self.layer1 = _stage(first, first, 1, blocks, norm)
        self.layer2 = _stage(first, second, 2, blocks, norm)
        self.layer3 = _stage(second, third, 2, blocks, norm)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(third, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.layer3(self.layer2(self.layer1(self.stem(x))))))


def keras_resnet(blocks: int, num_classes: int, width: float = 1.0) -> ResNet:
    """Build the network as the authors of EmbracingFL do in Keras, by the code that they published for FedLAMA.

    Batch norm has Keras's constants: running statistics move by a hundredth in a step, a tenth of PyTorch's. The first
    weights are Glorot's, and the last batch norm of each block begins at zero, so that a block begins as its shortcut.
    Two things of theirs are not here: Keras pads convolutions of stride 2 on one side only, and their weight decay
    leaves batch norm out.
    """
    network = ResNet(blocks, num_classes, partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01), width)
    glorot(network)
    for module in network.modules():
        if isinstance(module, BasicBlock):
            nn.init.zeros_(module.norm2.get_parameter("weight"))
    return network
