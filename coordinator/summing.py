"""The updates of a round as they are summed, and the version that comes of them: a job's RoundEngine over files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.aggregate import BodyOnDisk, stored_version, write_version
from coordinator.store.files import Files
from coordinator.store.schema import UpdateRow
from federation.algorithm import Facts
from federation.engine import RoundEngine
from federation.round_sums import Reached, RoundSums
from federation.wire import CheckedTrack, CheckedUpdate, UpdateDecoder


class Summing:
    """One round's sums after the other. `fold` and `write_next` are called by one thread."""

    def __init__(self, job: str, engine: RoundEngine, files: Files, reached: Reached) -> None:
        self.job = job
        self.engine = engine
        self.files = files
        self._reached = reached
        self.facts = engine.first_facts
        self.folded: dict[str, CheckedUpdate] = {}  # by task
        self._sums: RoundSums | None = None

    def forget(self) -> None:
        """Begin the sums anew."""
        self._sums = None
        self.folded = {}

    def resume(self, number: int, summary: Mapping[str, Any] | None) -> None:
        """Take the facts at the beginning of a round from the summary of the round before."""
        self.facts = self.engine.facts_of(number, (summary or {}).get("facts"))

    def go_on(self, facts: Facts) -> None:
        """Begin the next round with these facts."""
        self.facts = facts

    def decoder(self, boundary: str, number: int) -> tuple[UpdateDecoder, int]:
        """Make the check of an update of this round; also returns the most bytes that it can have."""
        return self.engine.decoder(boundary, number, self.facts)

    def fold(self, row: UpdateRow, checked: CheckedUpdate, body: Path, count: int, draws: int) -> None:
        """Add a body. The order of arrival makes no difference to a single bit."""
        if self._sums is None:
            self._sums = self.engine.sums(row.round, self.facts, draws, self._reached)
        with body.open("rb") as file:
            self._sums.fold(checked, file, row.weight, count, row.report)
        last = next(reversed(self.folded.values()), checked)
        self.folded[row.task] = CheckedUpdate(
            {name: _sharing(track, last.tracks[name]) for name, track in checked.tracks.items()}, checked.size
        )

    def write_next(self, version: int, updates: list[UpdateRow], devices: int) -> None:
        """Write the weights and the state after a round, in which `devices` have taken part in the job so far."""
        assert self._sums is not None
        engine, space = self.engine, self.engine.space
        before = stored_version(self.files, self.job, version, space, engine.vector_names)
        bodies = [(self.folded[u.task].model, BodyOnDisk(self.files.arrived(u.task, u.sha256))) for u in updates]
        changes = engine.changes(self._sums, before, devices, bodies)
        write_version(self.files, self.job, version, space, engine.vector_names, changes)

    def next_facts(self) -> Facts:
        """The facts after the round."""
        assert self._sums is not None
        return self.engine.next_facts(self._sums)

    def summary(self, updates: list[UpdateRow]) -> dict[str, Any]:
        """Describe the round in numbers."""
        assert self._sums is not None
        regions = [checked.model.region for checked in self.folded.values()]
        return self.engine.summary(self._sums, regions, [(row.samples, row.bytes, row.report) for row in updates])


def _sharing(track: CheckedTrack, last: CheckedTrack) -> CheckedTrack:
    """Most devices write the same header: it is kept once."""
    return replace(track, places=last.places) if track.places == last.places else track
