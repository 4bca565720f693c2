"""MobileNetV2 (Sandler et al. 2018) for 32×32 images, half as wide: depthwise convolutions and ReLU6."""

from __future__ import annotations

from torch import Tensor, nn

# expansion, channels, blocks, stride of the first block; the strides are those usual for 32×32 images
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class InvertedResidual(nn.Module):
    """Widen by a 1×1 convolution, filter every channel by itself, narrow again without a nonlinearity."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        widen = [*_convolution(inputs, wide, 1), nn.ReLU6()] if expansion > 1 else []
        depthwise = [*_convolution(wide, wide, 3, stride, groups=wide), nn.ReLU6()]
        self.body = nn.Sequential(*widen, *depthwise, *_convolution(wide, outputs, 1))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class MobileNetV2(nn.Module):
    def __init__(self, num_classes: int, width: float = 0.5) -> None:
        super().__init__()
        channels = int(32 * width)
        self.stem = nn.Sequential(*_convolution(3, channels, 3), nn.ReLU6())
        self.blocks = nn.Sequential()
        for expansion, full, blocks, first_stride in STAGES:
            outputs = int(full * width)
            for block in range(blocks):
                stride = first_stride if block == 0 else 1
                self.blocks.append(InvertedResidual(channels, outputs, stride, expansion))
                channels = outputs
        last = int(1280 * width)
        self.top = nn.Sequential(*_convolution(channels, last, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(last, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.top(self.blocks(self.stem(x))))
