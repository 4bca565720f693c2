"""Everything is synchronised in every round: FedAvg, and everything that does not say otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from federation.axes.sync.rule import SyncFacts, When
from federation.region import Region, whole
from federation.space import ParameterSpace


@dataclass(frozen=True)
class WholeModel:
    """One unit, always due: devices keep nothing."""

    @property
    def window(self) -> int:
        return 1

    def units(self, space: ParameterSpace) -> tuple[Region, ...]:
        return (whole(space),)

    def intervals(self, units: int) -> tuple[int, ...]:
        return (1,) * units

    def due(self, when: When, facts: SyncFacts) -> tuple[int, ...]:
        return (0,)

    def sent(self, when: When, facts: SyncFacts) -> tuple[int, ...]:
        return (0,)

    def learn(self, when: When, facts: SyncFacts, sizes: tuple[int, ...]) -> SyncFacts:
        return facts
