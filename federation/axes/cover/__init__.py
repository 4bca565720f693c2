"""What a device trains: everything, the output side, the input side, or fewer channels of every layer."""

from typing import Final

from federation.axes.cover.balance import ensure_coverage, uncovered_layers
from federation.axes.cover.input_side import InputSide
from federation.axes.cover.output_side import Everything, OutputSide
from federation.axes.cover.rule import MOST_NEEDS, TIERS, Cover, DeviceProfile
from federation.axes.cover.width import OrderedDropout, Width
from federation.decode import Axis

COVER: Final = Axis(
    {
        "output_side": OutputSide,
        "everything": Everything,
        "width": Width,
        "ordered_dropout": OrderedDropout,
        "input_side": InputSide,
    },
    default="output_side",
)

__all__ = [
    "COVER",
    "MOST_NEEDS",
    "TIERS",
    "Cover",
    "DeviceProfile",
    "Everything",
    "InputSide",
    "OrderedDropout",
    "OutputSide",
    "Width",
    "ensure_coverage",
    "uncovered_layers",
]
