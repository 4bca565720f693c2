"""The vocabulary of synchronisation: the model is divided into units, and a round synchronises those that are due."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from federation.region import Region
from federation.space import ParameterSpace


@dataclass(frozen=True)
class SyncFacts:
    """What the server remembers about the units of a job; saved with every version."""

    changed: tuple[int, ...]  # the version in which each unit got its present value
    intervals: tuple[int, ...]  # rounds between two synchronisations of each unit
    discrepancies: tuple[float, ...]  # as measured when it was last synchronised


@dataclass(frozen=True)
class When:
    """What a rule may know about a round."""

    round: int
    ends_window: bool = False  # the next round has another cohort
    is_last: bool = False  # of the job


class Sync(ABC):
    """Which part of the model is exchanged in a round: a frozen dataclass. What is not exchanged, devices keep."""

    @property
    def window(self) -> int:
        """Rounds for which a cohort has to stay, at least."""
        return 1

    @property
    def keeps_model(self) -> bool:
        """Whether devices keep weights of their own."""
        return True

    @property
    def skips_rounds(self) -> bool:
        """Whether a round may synchronise nothing at all: then devices keep even the only unit of a model."""
        return False

    @property
    def hands_on(self) -> bool:
        """Whether the next cohort goes on with the local models of the one before."""
        return False

    @property
    def measures(self) -> bool:
        """Whether a unit is a parameter layer, and `learn` needs to know how far its local copies are apart."""
        return False

    @abstractmethod
    def units(self, space: ParameterSpace) -> tuple[Region, ...]:
        """The parts that are synchronised together; every element belongs to one."""

    def intervals(self, units: int) -> tuple[int, ...]:
        """Rounds between two synchronisations of each unit, to begin with."""
        return (1,) * units

    @abstractmethod
    def due(self, when: When, facts: SyncFacts) -> tuple[int, ...]:
        """The units that are averaged at the end of a round."""

    def sent(self, when: When, facts: SyncFacts) -> tuple[int, ...]:
        """The units that devices send: those that are due, and more where another device goes on with them."""
        return self.due(when, facts)

    def learn(self, when: When, facts: SyncFacts, sizes: tuple[int, ...]) -> SyncFacts:
        """What a round's discrepancies lead to; `sizes` are the numbers of weights of the units."""
        return facts


def first_facts(sync: Sync, space: ParameterSpace) -> SyncFacts:
    """Before the first round."""
    count = len(sync.units(space))
    return SyncFacts((0,) * count, sync.intervals(count), (0.0,) * count)


def after_round(
    sync: Sync, when: When, facts: SyncFacts, sizes: tuple[int, ...], measured: Mapping[int, float]
) -> SyncFacts:
    """The facts once a round is committed; `measured` has the discrepancies of units that a device trained."""
    due = sync.due(when, facts)
    changed = tuple(when.round + 1 if unit in due else version for unit, version in enumerate(facts.changed))
    seen = tuple(measured.get(unit, known) for unit, known in enumerate(facts.discrepancies))
    return sync.learn(when, SyncFacts(changed, facts.intervals, seen), sizes)
