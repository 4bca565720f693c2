"""The updates of a round as they are summed, and the version that comes of them: where a job meets its algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.aggregate import stored_version, write_version
from coordinator.store.files import Files
from coordinator.store.schema import UpdateRow
from federation.algorithm import Facts
from federation.axes.serve import RoundFacts
from federation.axes.sync import first_facts
from federation.decode import decode
from federation.exchange import units_region
from federation.job import Plan
from federation.layout import MODEL
from federation.manifest import Manifest
from federation.robust import robust_moves
from federation.round_sums import Layouts, Reached, RoundSums
from federation.server_step import Move, mean_moves
from federation.wire import CheckedTrack, CheckedUpdate, UpdateDecoder, within


class Summing:
    """One round's sums after the other. `fold` and `write_next` are called by one thread."""

    def __init__(self, job: str, plan: Plan, manifest: Manifest, files: Files, reached: Reached) -> None:
        self.job = job
        self.plan = plan
        self.manifest = manifest
        self.files = files
        self._reached = reached
        self.space = manifest.space
        self._layouts = Layouts(plan, manifest)
        self.facts = Facts(first_facts(plan.choices.sync, self.space))
        self.folded: dict[str, CheckedUpdate] = {}  # by task
        self._sums: RoundSums | None = None

    def forget(self) -> None:
        """Begin the sums anew."""
        self._sums, self.folded = None, {}

    def resume(self, number: int, summary: Mapping[str, Any] | None) -> None:
        """The facts at the beginning of a round, from the summary of the round before."""
        if summary is not None and "facts" in summary:
            self.facts = decode(Facts, summary["facts"], "facts")
        elif number:  # a job that an earlier program began
            sync = replace(self.facts.sync, changed=(number,) * len(self.facts.sync.changed))
            self.facts = Facts(sync, self.plan.local.schedule.at(number - 1))

    def go_on(self, facts: Facts) -> None:
        """The next round has begun."""
        self.facts = facts

    def decoder(self, boundary: str, number: int) -> tuple[UpdateDecoder, int]:
        """What checks an update of this round, and the most bytes that it can have."""
        return self._layouts.decoder(self._layouts.layout(boundary, number, self.facts))

    def fold(self, row: UpdateRow, checked: CheckedUpdate, body: Path, count: int, draws: int) -> None:
        """Add a body. The order of arrival makes no difference to a single bit."""
        if self._sums is None:
            self._sums = RoundSums(self.plan, self.manifest, self.facts, row.round, draws, self._reached)
        if self.plan.serve.combine == "mean":
            with body.open("rb") as file:
                self._sums.fold(checked, file, row.weight, count, row.report)
        last = next(reversed(self.folded.values()), checked)
        self.folded[row.task] = CheckedUpdate(
            {name: _sharing(track, last.tracks[name]) for name, track in checked.tracks.items()}, checked.size
        )

    def write_next(self, version: int, updates: list[UpdateRow], devices: int) -> None:
        """The weights and the state after a round, in which `devices` have taken part in the job so far."""
        assert self._sums is not None
        algorithm = self.plan.choices
        before = stored_version(self.files, self.job, version, self.space, algorithm.vectors)
        rates = RoundFacts(self.plan.local.schedule.at(updates[0].round))
        changes = algorithm.changes(
            self._sums.totals, self._moves(updates), self.space, before, rates, self.plan.serve.devices or devices
        )
        write_version(self.files, self.job, version, self.space, algorithm.vectors, changes)

    def _moves(self, updates: list[UpdateRow]) -> Iterator[Move]:
        assert self._sums is not None
        serve, due = self.plan.serve, self._sums.due
        if serve.combine == "mean":
            return mean_moves(self._sums.totals[MODEL], self.space)
        bodies = [(within(self.folded[u.task].model, due), self.files.arrived(u.task, u.sha256)) for u in updates]
        return robust_moves(bodies, serve.combine, serve.trim)

    def next_facts(self, number: int) -> Facts:
        """The facts after a round."""
        assert self._sums is not None
        rate, steps = self.plan.local.schedule.at(number), self.plan.local.steps
        when = self.plan.when(number)
        return self.plan.choices.after(when, self.facts, self._sums.totals, self.space, rate, steps)

    def summary(self, updates: list[UpdateRow]) -> dict[str, Any]:
        """What the round came to."""
        regions = [checked.model.region for checked in self.folded.values()]
        names = [layer.name for layer in self.manifest.layers]
        return {
            "updates": len(updates),
            "samples": sum(row.samples for row in updates),
            "bytes_up": sum(row.bytes for row in updates),
            "loss": _mean([row.report.get("loss") for row in updates]),
            "lost_state": sum(row.report.get("lost_state") is True for row in updates),
            "trainers": {name: sum(bool(r.layers[i]) for r in regions) for i, name in enumerate(names)},
            **self._synchronised(updates[0].round, names),
        }

    def _synchronised(self, number: int, names: list[str]) -> dict[str, Any]:
        """Of a model that is synchronised in parts: which of them, by number, and the layers in which they lie."""
        sync, known = self.plan.choices.sync, self.facts.sync
        if len(known.changed) == 1:
            return {}
        due = sync.due(self.plan.when(number), known)
        region = units_region(sync, self.space, due)
        return {"parts": list(due), "synchronised": [name for i, name in enumerate(names) if region.layers[i]]}


def _sharing(track: CheckedTrack, last: CheckedTrack) -> CheckedTrack:
    """Most devices write the same header: it is kept once."""
    return replace(track, places=last.places) if track.places == last.places else track


def _mean(values: list[Any]) -> float | None:
    """Of what devices say: any number of any size may be among it."""
    kinds = (value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool))
    known = [float(value) for value in kinds if abs(value) < 1e30]
    return sum(known) / len(known) if known else None
