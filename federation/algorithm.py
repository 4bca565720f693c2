"""An algorithm is a choice on each axis. This one has the axes that device and server have to agree on.

Who takes part is in axes/participate.py, what a device trains in axes/cover.py; both combine with any of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from federation.axes.local import ControlVariate, LocalRule, Momentum, fuses
from federation.axes.serve import Average, ServeRule
from federation.axes.sync import FedLama, Rotating, Sync, SyncFacts, WholeModel
from federation.axes.weigh import Weigh
from federation.server_step import CONTROL, MOMENTUM
from federation.space import Vector


@dataclass(frozen=True)
class Facts:
    """What the server remembers from round to round beside its vectors; the defaults are a beginning."""

    sync: SyncFacts
    rate: float | None = None  # the local learning rate of the round before


@dataclass(frozen=True)
class Algorithm:
    """What is exchanged, and how it is combined. The defaults are FedAvg."""

    rules: tuple[LocalRule, ...] = ()
    sync: Sync = field(default_factory=WholeModel)
    weigh: Weigh = field(default_factory=Weigh)
    serve: ServeRule = field(default_factory=Average)

    @property
    def tracks(self) -> tuple[str, ...]:
        """What updates have beside the model."""
        control = any(isinstance(rule, ControlVariate) and rule.origin == "exchanged" for rule in self.rules)
        momentum = any(isinstance(rule, Momentum) and rule.between == "average" for rule in self.rules)
        return (CONTROL,) * control + (MOMENTUM,) * momentum

    @property
    def keeps_state(self) -> bool:
        """Whether devices keep something from one round to the next."""
        return self.rules_keep or not isinstance(self.sync, WholeModel)

    @property
    def rules_keep(self) -> bool:
        """Whether a local rule does."""
        own = any(isinstance(rule, ControlVariate) for rule in self.rules)
        kept = any(isinstance(rule, Momentum) and rule.between == "keep" for rule in self.rules)
        return own or kept or self.fuses

    @property
    def hands_on(self) -> bool:
        """Whether local models go on with the next cohort."""
        return isinstance(self.sync, Rotating) and self.sync.redistribute == "local"

    @property
    def adapts(self) -> bool:
        """Whether the intervals of layers follow from how far local models are apart."""
        return isinstance(self.sync, FedLama)

    @property
    def fuses(self) -> bool:
        """Whether devices use the server's last move (DOMO)."""
        return fuses(self.rules)

    def fuse(self, rate: float | None, steps: int) -> float | None:
        """The scale 1/(αηP) that turns the server's last move into its momentum; None: there is no move to use."""
        return 1.0 / (self.serve.rate * rate * steps) if self.fuses and rate else None

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the server's state vectors."""
        return (*self.serve.vectors, *self.tracks)

    def first_vectors(self, size: int) -> dict[str, Vector]:
        """The server's state before the first round."""
        first = {name: self.serve.first(name) if name in self.serve.vectors else 0.0 for name in self.vectors}
        return {name: np.full(size, value, np.float32) for name, value in first.items()}
