"""Everything is synchronised in every round: FedAvg, and everything that does not say otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from federation.axes.sync.rule import Sync, SyncFacts, When
from federation.region import Region, whole
from federation.space import ParameterSpace


@dataclass(frozen=True)
class WholeModel(Sync):
    """One unit, always due: devices keep nothing."""

    @property
    def keeps_model(self) -> bool:
        return False

    def units(self, space: ParameterSpace) -> tuple[Region, ...]:
        return (whole(space),)

    def due(self, when: When, facts: SyncFacts) -> tuple[int, ...]:
        return (0,)
