"""One part of the model is synchronised and the rest never: what EmbracingFL's study of similarity compares.

Lee et al., Embracing Federated Learning, section 3.2: with the second half of the layers synchronised, local models
stay more alike than with the first half, or with half of the channels of every layer. `none` is training alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from federation.axes.sync.rule import Sync, SyncFacts, When
from federation.errors import FieldError
from federation.region import Region, channel_part, of_layers, whole
from federation.space import ParameterSpace

Which = Literal["first_half", "second_half", "half_of_channels", "none"]


@dataclass(frozen=True)
class OnePart(Sync):
    """Unit 0 is synchronised in every round, unit 1 in the last one of the job."""

    part: Which = "second_half"

    def __post_init__(self) -> None:
        if self.part not in get_args(Which):
            raise FieldError("part", f"expected {', '.join(get_args(Which))}, got {self.part!r}")

    def units(self, space: ParameterSpace) -> tuple[Region, ...]:
        if self.part == "none":
            return of_layers(space, ()), whole(space)
        if self.part == "half_of_channels":
            return channel_part(space, 0, 2), channel_part(space, 1, 2)
        half = range(len(space.layers) // 2)
        rest = range(half.stop, len(space.layers))
        first, second = of_layers(space, half), of_layers(space, rest)
        return (first, second) if self.part == "first_half" else (second, first)

    def due(self, when: When, facts: SyncFacts) -> tuple[int, ...]:
        return (0, 1) if when.is_last else (0,)
