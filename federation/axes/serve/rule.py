"""The vocabulary of the server's step: a rule is a frozen value, its state vectors are saved with every version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from federation.errors import FieldError

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class RoundFacts:
    """What a rule may know about a round beside the updates."""

    rate: float  # the local learning rate of the round


class ServeRule(ABC):
    """The constants of the server's step: a frozen dataclass."""

    rate: float  # the factor of every move

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the state vectors; they begin at zero unless `first` says otherwise."""
        return ()

    def first(self, name: str) -> float:
        """Where the elements of a state vector begin."""
        return 0.0

    @abstractmethod
    def step(self, move: Doubles, state: Mapping[str, Doubles], facts: RoundFacts) -> Doubles:
        """How far a block of the model moves, given the mean of the updates; `state` is changed in place."""


def check_rate(rate: float) -> None:
    if not 0 < rate <= 1000:
        raise FieldError("rate", f"expected a number in (0, 1000], got {rate}")
