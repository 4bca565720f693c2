"""The updates of a round as they are summed, and the version that comes of them: where a job meets its algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.aggregate import open_version, write_version
from coordinator.plan import Plan
from coordinator.robust import robust_moves
from coordinator.store.files import Files
from coordinator.store.schema import UpdateRow
from federation.accumulate import Accumulator
from federation.algorithm import Facts
from federation.axes.serve import RoundFacts
from federation.axes.sync import first_facts
from federation.coverage import coverage
from federation.decode import decode
from federation.exchange import trained_region, units_region
from federation.manifest import Manifest
from federation.messages import MOST_STEPS
from federation.region import Region, Run
from federation.server_step import Move, mean_moves
from federation.space import Vector
from federation.wire import MODEL, CheckedTrack, CheckedUpdate, Layout, Limits, UpdateDecoder, read_blocks, within

MOST_LAYOUTS = 63
Reached = Callable[[str], None]  # told of points at which a test may end the process


class Summing:
    """One round's sums after the other. `fold` and `write_next` are called by one thread."""

    def __init__(self, job: str, plan: Plan, manifest: Manifest, files: Files, reached: Reached) -> None:
        self.job, self.plan, self.manifest, self.files, self._reached = job, plan, manifest, files, reached
        self.algorithm, self.space = plan.choices, manifest.space
        self.facts = Facts(first_facts(self.algorithm.sync, self.space))
        self.folded: dict[str, CheckedUpdate] = {}  # by task
        self._totals: dict[str, Accumulator] = {}  # by track
        self._layouts: dict[tuple[str, tuple[int, ...]], Layout] = {}  # those used last, first

    def forget(self) -> None:
        """Begin the sums anew."""
        self._totals, self.folded = {}, {}

    def resume(self, number: int, summary: Mapping[str, Any] | None) -> None:
        """The facts at the beginning of a round, from the summary of the round before."""
        if summary is not None and "facts" in summary:
            self.facts = decode(Facts, summary["facts"], "facts")
        elif number:  # a job that an earlier program began
            changed = tuple(number for _ in self.facts.sync.changed)
            sync = type(self.facts.sync)(changed, self.facts.sync.intervals, self.facts.sync.discrepancies)
            self.facts = Facts(sync, self.plan.local.schedule.at(number - 1))

    def go_on(self, facts: Facts) -> None:
        """The next round has begun."""
        self.facts = facts

    def layout(self, boundary: str, number: int) -> Layout:
        """What an update of this round has to have."""
        sent = self.algorithm.sync.sent(self.plan.when(number), self.facts.sync)
        known = self._layouts.get((boundary, sent))
        if known is None:
            trained = trained_region(self.manifest, coverage(self.manifest, boundary))
            region = trained & units_region(self.algorithm.sync, self.space, sent)
            known = Layout(dict.fromkeys((MODEL, *self.algorithm.tracks), region))
            self._layouts = {(boundary, sent): known, **dict(list(self._layouts.items())[:MOST_LAYOUTS])}
        return known

    def decoder(self, boundary: str, number: int) -> tuple[UpdateDecoder, int]:
        """What checks an update of this round, and the most bytes that it can have."""
        layout, bounds = self.layout(boundary, number), self.plan.bounds
        room = 4 * len(layout.header) + 4096  # for another way of writing the same
        limits = Limits(
            max_header_bytes=room, max_norm=bounds.max_norm, max_value=bounds.max_value,
            max_other_value=bounds.max_other_value,
        )  # fmt: skip
        return UpdateDecoder(layout, limits), 8 + room + 4 * layout.space.size

    def fold(self, row: UpdateRow, checked: CheckedUpdate, body: Path, count: int, draws: int) -> None:
        """Add a body. The order of arrival makes no difference to a single bit."""
        if self.plan.combining.combine == "mean":
            due = self._due(row.round)
            for name, track in checked.tracks.items():
                self._fold(name, within(track, due), row, body, count, draws)
        self.folded[row.task] = checked

    def _fold(self, name: str, track: CheckedTrack, row: UpdateRow, body: Path, count: int, draws: int) -> None:
        if name not in self._totals:
            self._totals[name] = self._accumulator(name, draws)
        is_model = name == MODEL
        rate = self.plan.local.schedule.at(row.round)
        length = self.algorithm.weigh.length(self.algorithm.rules, self._steps(row), rate) if is_model else 1.0
        with body.open("rb") as file:
            blocks = read_blocks(file, track)
            self._totals[name].fold(
                track.region, self._clipped(blocks, track.norm) if is_model else blocks,
                (row.weight if is_model else 1.0) * count, track.squares, largest=track.largest, length=length,
            )  # fmt: skip

    def _steps(self, row: UpdateRow) -> int:
        """How many steps a device took: what it was told, or what it says where its data decides."""
        told = row.report.get("steps")
        if self.plan.local.epochs is None or not isinstance(told, int) or isinstance(told, bool):
            return self.plan.local.steps
        return min(max(told, 1), MOST_STEPS)

    def _accumulator(self, name: str, draws: int) -> Accumulator:
        bounds = self.plan.bounds
        if name != MODEL:
            return Accumulator(self.space, max_value=bounds.max_other_value, max_weight=max(draws, 1.0))
        most = draws * self.plan.weigh.weight(bounds.max_samples)
        return Accumulator(self.space, max_value=bounds.max_value, max_weight=max(most, 1.0))

    def _clipped(self, blocks: Iterable[tuple[Run, Vector]], norm: float) -> Iterator[tuple[Run, Vector]]:
        """The blocks of an update, shortened if it is too long."""
        most = self.plan.combining.clip_norm
        factor = np.float32(most / norm) if most is not None and norm > most else None
        for number, (at, values) in enumerate(blocks):
            if number == 1:
                self._reached("mid-fold")
            yield at, values if factor is None else values * factor

    def write_next(self, version: int, updates: list[UpdateRow], devices: int) -> None:
        """The weights and the state after a round, in which `devices` have taken part in the job so far."""
        number = updates[0].round
        before = open_version(self.files, self.job, version, self.space, self.algorithm.vectors)
        rates = RoundFacts(self.plan.local.schedule.at(number), self.facts.rate)
        changes = self.algorithm.changes(
            self._totals, self._moves(updates), self.space, before, rates, self.plan.combining.devices or devices
        )
        write_version(self.files, self.job, version, self.space, self.algorithm.vectors, changes)

    def _moves(self, updates: list[UpdateRow]) -> Iterator[Move]:
        combining = self.plan.combining
        if combining.combine == "mean":
            return mean_moves(self._totals[MODEL], self.space)
        due = self._due(updates[0].round)
        bodies = [(within(self.folded[u.task].model, due), self.files.arrived(u.task, u.sha256)) for u in updates]
        return robust_moves(bodies, combining.combine, combining.trim)

    def next_facts(self, number: int) -> Facts:
        """The facts after a round."""
        rate, steps = self.plan.local.schedule.at(number), self.plan.local.steps
        return self.algorithm.after(self.plan.when(number), self.facts, self._totals, self.space, rate, steps)

    def summary(self, updates: list[UpdateRow]) -> dict[str, Any]:
        """What the round came to."""
        regions = [checked.model.region for checked in self.folded.values()]
        names = [layer.name for layer in self.manifest.layers]
        return {
            "updates": len(updates),
            "samples": sum(row.samples for row in updates),
            "bytes_up": sum(row.bytes for row in updates),
            "loss": _mean([row.report.get("loss") for row in updates]),
            "trainers": {name: sum(bool(r.layers[i]) for r in regions) for i, name in enumerate(names)},
        }

    def _due(self, number: int) -> Region:
        due = self.algorithm.sync.due(self.plan.when(number), self.facts.sync)
        return units_region(self.algorithm.sync, self.space, due)


def _mean(values: list[Any]) -> float | None:
    """Of what devices say: any number of any size may be among it."""
    kinds = (value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool))
    known = [float(value) for value in kinds if abs(value) < 1e30]
    return sum(known) / len(known) if known else None
