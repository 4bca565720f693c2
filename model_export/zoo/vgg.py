"""VGG (Simonyan and Zisserman 2014) for small images, without batch norm: partial averaging, DOMO."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from model_export.zoo.initial import he
from model_export.zoo.width import channels

# Channels of the convolutions of each of the five stages; a stage ends with a pooling that halves the image.
VGG11 = ((64,), (128,), (256, 256), (512, 512), (512, 512))
VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
SIDE = 32  # five poolings leave one pixel


class VGG(nn.Module):
    """Convolutions one by one in `features`, then a single dense layer.

    Images of 28×28 get the two missing pixels on every side as extra padding of the first convolution.
    """

    def __init__(
        self, stages: Sequence[Sequence[int]], inputs: int, side: int, num_classes: int, width: float = 1.0
    ) -> None:
        super().__init__()
        self.features = nn.Sequential()
        padding = 1 + (SIDE - side) // 2
        for stage in stages:
            for position, count in enumerate(stage, start=1):
                outputs = channels(count, width)
                convolution = nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=padding), nn.ReLU())
                if position == len(stage):
                    convolution.append(nn.MaxPool2d(2))
                self.features.append(convolution)
                inputs, padding = outputs, 1
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(inputs, num_classes)
        he(self.features)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.flatten(self.features(x)))
