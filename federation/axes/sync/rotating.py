"""Partial model averaging: one of τ parts is averaged in every round, in turn.

Lee, Sahu, He and Avestimehr, Partial Model Averaging in Federated Learning: Performance Guarantees and Benefits, 2022.
With rounds of one local step each part is synchronised once in τ steps: as many bytes as full averaging every τ steps,
in τ times as many messages, and local models that stay closer together. One part is synchronous averaging.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from federation.axes.sync.rule import Sync, SyncFacts, When
from federation.errors import FieldError, InputError
from federation.region import Region, channel_part, of_layers
from federation.space import ParameterSpace

By = Literal["layer", "channel"]
Redistribute = Literal["local", "averaged"]
PERIODS = 10  # full rotations after which the paper changes the cohort


@dataclass(frozen=True)
class Rotating(Sync):
    """Step k averages part k mod `parts`; the last round of a job averages everything.

    When the cohort changes, the local models are handed on as they are (`local`, the better one), or are averaged
    first (`averaged`).
    """

    parts: int = 4
    by: By = "layer"
    redistribute: Redistribute = "local"

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= 10_000:
            raise FieldError("parts", f"expected a number from 1 to 10000, got {self.parts}")
        if self.by not in get_args(By):
            raise FieldError("by", f"expected 'layer' or 'channel', got {self.by!r}")
        if self.redistribute not in get_args(Redistribute):
            raise FieldError("redistribute", f"expected 'local' or 'averaged', got {self.redistribute!r}")

    @property
    def window(self) -> int:
        return PERIODS * self.parts

    @property
    def hands_on(self) -> bool:
        return self.redistribute == "local"

    def units(self, space: ParameterSpace) -> tuple[Region, ...]:
        if self.by == "channel":
            return tuple(channel_part(space, part, self.parts) for part in range(self.parts))
        return tuple(of_layers(space, layers) for layers in _even(space, self.parts))

    def intervals(self, units: int) -> tuple[int, ...]:
        return (self.parts,) * units

    def due(self, when: When, facts: SyncFacts) -> tuple[int, ...]:
        if when.is_last or (when.ends_window and not self.hands_on):
            return tuple(range(self.parts))
        return ((when.round + 1) % self.parts,)

    def sent(self, when: When, facts: SyncFacts) -> tuple[int, ...]:
        return tuple(range(self.parts)) if when.ends_window and self.hands_on else self.due(when, facts)


def _even(space: ParameterSpace, parts: int) -> list[list[int]]:
    """Consecutive layers in so many groups of about the same number of elements, none of them empty."""
    filled = [index for index, layer in enumerate(space.layers) if any(p.size for p in layer)]
    if parts > len(filled):
        raise InputError(f"sync.parts: expected at most {len(filled)}, the number of layers, got {parts}")
    sizes = [space.layer(index).stop - space.layer(index).start for index in filled]
    total = sum(sizes)
    groups: list[list[int]] = [[]]
    for place, (index, end) in enumerate(zip(filled, accumulate(sizes))):
        groups[-1].append(index)
        left, open_groups = len(filled) - place - 1, parts - len(groups)
        # The next group begins when this one has its share, and in time for every group to get a layer.
        if open_groups and (left == open_groups or end * parts >= total * len(groups)):
            groups.append([])
    return groups
