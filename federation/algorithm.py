"""An algorithm is a choice on each axis. This one has the axes that device and server have to agree on.

Who takes part is in axes/participate.py, what a device trains in axes/cover; both combine with any of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from federation.axes.local import ControlVariate, LocalRule, Momentum, fuses
from federation.axes.serve import Average, RoundFacts, ServeRule
from federation.axes.sync import Sync, SyncFacts, When, WholeModel, after_round
from federation.axes.weigh import Weigh
from federation.exchange import Exchange, Inherit
from federation.layout import MODEL
from federation.server_step import (
    CONTROL,
    MOMENTUM,
    Change,
    Move,
    Sums,
    Vectors,
    control_step,
    momentum_step,
    server_step,
    spread,
)
from federation.space import ParameterSpace, Vector


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
        return self._rules_keep or not isinstance(self.sync, WholeModel)

    @property
    def _rules_keep(self) -> bool:
        own = any(isinstance(rule, ControlVariate) for rule in self.rules)
        kept = any(isinstance(rule, Momentum) and rule.between == "keep" for rule in self.rules)
        return own or kept or self.fuses

    @property
    def fuses(self) -> bool:
        """Whether devices use the server's last move (DOMO)."""
        return fuses(self.rules)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the server's state vectors."""
        return (*self.serve.vectors, *self.tracks)

    def first_vectors(self, size: int) -> dict[str, Vector]:
        """The server's state before the first round."""
        first = {name: self.serve.first(name) if name in self.serve.vectors else 0.0 for name in self.vectors}
        return {name: np.full(size, value, np.float32) for name, value in first.items()}

    def exchange(
        self,
        when: When,
        facts: Facts,
        *,
        steps: int,
        window_from: int = 0,
        last: tuple[int, str] | None = None,
        inherit: Inherit | None = None,
    ) -> Exchange:
        """What a device is told; `last` is its last successful round and task."""
        fuse = None
        if self.fuses and facts.rate:
            fuse = 1.0 / (getattr(self.serve, "rate", 1.0) * facts.rate * steps)
        keeps = self._rules_keep or len(facts.sync.changed) > 1  # of one unit, always due, nothing is kept
        known = last if keeps else None
        return Exchange(
            sync=self.sync,
            sent=self.sync.sent(when, facts.sync),
            changed=facts.sync.changed,
            window_from=window_from,
            last_round=known[0] if known else None,
            last_task=known[1] if known else None,
            inherit=inherit,
            tracks=self.tracks,
            fuse=fuse,
        )

    def changes(
        self, sums: Sums, moves: Iterable[Move], space: ParameterSpace, before: Vectors, facts: RoundFacts, devices: int
    ) -> Iterator[Change]:
        """Every new value of a round, block by block."""
        yield from server_step(self.serve, moves, before, facts)
        if CONTROL in sums:
            yield from control_step(sums[CONTROL], space, before, devices)
        if MOMENTUM in sums:
            yield from momentum_step(sums[MOMENTUM], space, before)

    def after(self, when: When, facts: Facts, sums: Sums, space: ParameterSpace, rate: float, steps: int) -> Facts:
        """The facts once a round is committed."""
        units = self.sync.units(space)
        sizes = tuple(unit.only("weight").size for unit in units)
        measured: dict[int, float] = {}
        if len(units) == len(space.layers) and MODEL in sums:
            for layer in self.sync.due(when, facts.sync):
                found = spread(sums[MODEL], space, layer)
                if found is not None and sizes[layer]:
                    measured[layer] = found / (facts.sync.intervals[layer] * steps * sizes[layer])
        return Facts(after_round(self.sync, when, facts.sync, sizes, measured), rate)
