"""The sums of one round: every track of every update, folded in any order, in one process or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from federation.accumulate import Accumulator
from federation.algorithm import Facts
from federation.coverage import coverage
from federation.exchange import trained_region, units_region
from federation.job import Plan
from federation.layout import MODEL, Layout
from federation.manifest import Manifest
from federation.messages import MOST_STEPS
from federation.region import Region, Run
from federation.server_step import CONTROL
from federation.space import Vector
from federation.wire import BodyFile, CheckedTrack, CheckedUpdate, Limits, UpdateDecoder, read_blocks, within

MOST_LAYOUTS = 63
Reached = Callable[[str], None]  # told of points at which a test may end the process


class Layouts:
    """What an update of a boundary has to have: the same for all rounds that synchronise the same units."""

    def __init__(self, plan: Plan, manifest: Manifest) -> None:
        self.plan = plan
        self.manifest = manifest
        self.space = manifest.space
        self._known: dict[tuple[str, tuple[int, ...]], Layout] = {}  # those made last, first

    def layout(self, boundary: str, number: int, facts: Facts) -> Layout:
        algorithm = self.plan.choices
        sent = algorithm.sync.sent(self.plan.when(number), facts.sync)
        known = self._known.get((boundary, sent))
        if known is None:
            trained = trained_region(self.manifest, coverage(self.manifest, boundary))
            region = trained & units_region(algorithm.sync, self.space, sent)
            known = Layout(dict.fromkeys((MODEL, *algorithm.tracks), region))
            self._known = {(boundary, sent): known, **dict(list(self._known.items())[:MOST_LAYOUTS])}
        return known

    def decoder(self, layout: Layout) -> tuple[UpdateDecoder, int]:
        """What checks an update, and the most bytes that it can have."""
        room = 4 * len(layout.header) + 4096  # for another way of writing the same
        return UpdateDecoder(layout, replace(self.limits, max_header_bytes=room)), 8 + room + 4 * layout.space.size

    @cached_property
    def limits(self) -> Limits:
        """What the values of an update may be."""
        bounds = self.plan.bounds
        return Limits(max_norm=bounds.max_norm, max_value=bounds.max_value, max_other_value=bounds.max_other_value)


class RoundSums:
    """Totals by track; `merge` adds those of another process bit for bit."""

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        facts: Facts,
        number: int,
        draws: int,
        reached: Reached = lambda point: None,
    ) -> None:
        """`draws`: how many times updates can count at most, all together."""
        self.plan = plan
        self.space = manifest.space
        self.number = number
        self.draws = draws
        self._reached = reached
        self.due: Region = units_region(
            plan.choices.sync, self.space, plan.choices.sync.due(plan.when(number), facts.sync)
        )
        self.totals: dict[str, Accumulator] = {}

    def fold(self, checked: CheckedUpdate, body: BodyFile, weight: float, count: int, report: Any) -> None:
        """Add an update, in a body that was checked. The order makes no difference to a single bit."""
        for name, track in checked.tracks.items():
            # c is the sum of all c_i, so a change of c_i counts once, however often its device was drawn.
            times = 1 if name == CONTROL else count
            self._fold(name, within(track, self.due), body, weight if name == MODEL else 1.0, times, report)

    def _fold(self, name: str, track: CheckedTrack, body: BodyFile, weight: float, count: int, report: Any) -> None:
        if name not in self.totals:
            self.totals[name] = self._accumulator(name)
        blocks: Iterable[tuple[Run, Vector]] = read_blocks(body, track)
        length, squares = 1.0, track.squares
        if name == MODEL:
            shortening, length = self._shortening(track.norm), self._length(report)
            blocks = self._shortened(blocks, shortening)
            scale = (1.0 if shortening is None else float(shortening)) / length
            squares = tuple(square * scale**2 for square in squares)  # of what is summed
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

    def _accumulator(self, name: str) -> Accumulator:
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
        self, blocks: Iterable[tuple[Run, Vector]], factor: np.float32 | None
    ) -> Iterator[tuple[Run, Vector]]:
        for number, (at, values) in enumerate(blocks):
            yield at, values if factor is None else values * factor
            if number == 0:  # it is in the sums, what follows is not
                self._reached("mid-fold")
