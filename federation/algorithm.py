"""An algorithm is a choice on each axis. This one has the axes that device and server have to agree on.

The cohort is drawn in axes/participate.py, what a device trains is in axes/cover; both combine with any of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from federation.axes.local import LocalRule, Track
from federation.axes.serve import Average, ServeRule
from federation.axes.sync import Sync, SyncFacts, WholeModel
from federation.axes.weigh import Weigh
from federation.errors import InputError
from federation.layout import MODEL
from federation.reuse import LayerChanges
from federation.space import Vector


@dataclass(frozen=True)
class Facts:
    """What the server remembers from round to round beside its vectors; the defaults are a beginning."""

    sync: SyncFacts
    rate: float | None = None  # the local learning rate of the round before
    changes: LayerChanges = field(default_factory=LayerChanges)  # where devices use activations again


@dataclass(frozen=True)
class Algorithm:
    """What is exchanged, and how it is combined. The defaults are FedAvg."""

    rules: tuple[LocalRule, ...] = ()
    sync: Sync = field(default_factory=WholeModel)
    weigh: Weigh = field(default_factory=Weigh)
    serve: ServeRule = field(default_factory=Average)

    def __post_init__(self) -> None:
        names = (MODEL, *self.vectors)
        if len(set(names)) != len(names):
            raise InputError(f"algorithm: expected every vector of the server at most once, got {', '.join(names)}")

    @property
    def tracks(self) -> tuple[str, ...]:
        """Names of what updates have beside the model."""
        return tuple(track.name for track, _ in self.track_rules)

    @property
    def track_rules(self) -> tuple[tuple[Track, LocalRule], ...]:
        """Every track and its rule; in the order of the names, whatever the order of the rules."""
        found = [(track, rule) for rule in self.rules for track in rule.tracks]
        return tuple(sorted(found, key=lambda pair: pair[0].name))

    @property
    def keeps_state(self) -> bool:
        """Whether devices keep something from one round to the next."""
        return self.rules_keep or self.sync.keeps_model

    @property
    def rules_keep(self) -> bool:
        """Whether a local rule does."""
        return any(rule.keeps for rule in self.rules)

    @property
    def fuses(self) -> bool:
        """Whether devices use the server's last move (DOMO)."""
        return any(rule.fuses for rule in self.rules)

    def fuse(self, rate: float | None, steps: int) -> float | None:
        """Compute the scale 1/(αηP) that makes the server's last move its momentum; None: no move is used."""
        return 1.0 / (self.serve.rate * rate * steps) if self.fuses and rate else None

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the server's state vectors."""
        return (*self.serve.vectors, *self.tracks)

    def first_vectors(self, size: int) -> dict[str, Vector]:
        """Make the server's state before the first round."""
        first = {name: self.serve.first(name) if name in self.serve.vectors else 0.0 for name in self.vectors}
        return {name: np.full(size, value, np.float32) for name, value in first.items()}
