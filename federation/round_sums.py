"""The sums of one round: every track of every update, folded in any order, in one process or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from federation.accumulate import Accumulator
from federation.algorithm import Facts
from federation.exchange import units_region
from federation.job import Plan
from federation.layout import MODEL
from federation.messages import MOST_STEPS
from federation.region import Region, Span
from federation.reuse import ChangeMeter
from federation.space import ParameterSpace, Vector
from federation.wire import BodyFile, CheckedTrack, CheckedUpdate, read_blocks, within

Reached = Callable[[str], None]  # told of points at which a test may end the process


class RoundSums:
    """Totals by track; `merge` adds those of another process bit for bit."""

    def __init__(
        self,
        plan: Plan,
        space: ParameterSpace,
        number: int,
        facts: Facts,
        draws: int,
        reached: Reached,
    ) -> None:
        """`draws`: how many times updates can count at most, all together."""
        self.plan = plan
        self.space = space
        self.number = number
        self.facts = facts
        self.draws = draws
        self._reached = reached
        sync = plan.choices.sync
        self.due: Region = units_region(sync, space, sync.due(plan.when(number), facts.sync))
        self.totals: dict[str, Accumulator] = {}
        self.meter = ChangeMeter(space)  # of what the server makes of them
        self._once = {track.name for track, _ in plan.choices.track_rules if track.counts_once}

    def fold(self, checked: CheckedUpdate, body: BodyFile, weight: float, count: int, report: Any) -> None:
        """Add an update, in a body that was checked. The order makes no difference to a single bit.

        A robust rule sums nothing: it reads all bodies when the round closes.
        """
        if self.plan.serve.combine != "mean":
            return
        for name, track in checked.tracks.items():
            times = 1 if name in self._once else count
            self._fold(name, within(track, self.due), body, weight if name == MODEL else 1.0, times, report)

    def _fold(self, name: str, track: CheckedTrack, body: BodyFile, weight: float, count: int, report: Any) -> None:
        if name not in self.totals:
            self.totals[name] = self.accumulator(name)
        blocks: Iterable[tuple[Span, Vector]] = read_blocks(body, track)
        length, squares = 1.0, track.squares
        if name == MODEL:
            shortening, length = self._shortening(track.norm), self._length(report)
            blocks = self._shortened(blocks, shortening)
            scale = (1.0 if shortening is None else float(shortening)) / length
            squares = {name: square * scale**2 for name, square in squares.items()}  # of what is summed
        self.totals[name].fold(track.region, blocks, weight * count, squares, largest=track.largest, length=length)

    def merge(self, name: str, total: Accumulator) -> None:
        """Add what another process has folded of a track."""
        if name in self.totals:
            self.totals[name].merge(total)
        else:
            self.totals[name] = total

    def _length(self, report: Any) -> float:
        """FedNova's divisor: as many steps as the device says, where its data decides. Equal lengths are none."""
        local, told = self.plan.local, report.get("steps")
        if local.epochs is None:
            return 1.0
        known = isinstance(told, int) and not isinstance(told, bool)
        steps = min(max(told, 1), MOST_STEPS) if known else local.steps
        return self.plan.weigh.length(self.plan.choices.rules, steps, local.schedule.at(self.number))

    def accumulator(self, name: str) -> Accumulator:
        """Make empty sums of a track, with the bounds of the round."""
        bounds = self.plan.bounds
        if name != MODEL:
            return Accumulator(self.space, max_value=bounds.max_other_value, max_weight=max(self.draws, 1.0))
        most = self.draws * self.plan.weigh.weight(bounds.max_samples)
        return Accumulator(self.space, max_value=bounds.max_value, max_weight=max(most, 1.0))

    def _shortening(self, norm: float) -> np.float32 | None:
        """The factor for an update that is too long."""
        most = self.plan.serve.clip_norm
        return np.float32(most / norm) if most is not None and norm > most else None

    def _shortened(
        self, blocks: Iterable[tuple[Span, Vector]], factor: np.float32 | None
    ) -> Iterator[tuple[Span, Vector]]:
        for number, (at, values) in enumerate(blocks):
            yield at, values if factor is None else values * factor
            if number == 0:  # it is in the sums, what follows is not
                self._reached("mid-fold")
