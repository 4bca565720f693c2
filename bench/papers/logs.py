"""The rounds of runs, kept beside the results: a run of days is not done again, and goes on on another machine."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.papers.editions import edition_of
from bench.papers.table import PaperRow
from simulation.devices import KEPT
from simulation.runs import CHECKPOINT, FACTS, METRICS, Run, read_run

ROW = "row"  # in run.json: what was run, in the table's own words
MOST_CHECKPOINT_BYTES = 4 << 20  # of a run that is kept to go on elsewhere; ResNet20's has 1.1 MB


@dataclass(frozen=True)
class Logs:
    """A folder of run.json and metrics.jsonl for each row and seed of one table at one scale.

    A run with rounds to go has its checkpoint, too, where that is small and devices keep nothing of their own. A log
    counts while its row has the same model, job and edition; defaults that the job does not name may change.
    """

    folder: Path

    def read(self, row: PaperRow, seed: int) -> Run | None:
        """Return a row's run, if it ended and the row is still the same."""
        place = self._place(row, seed)
        return None if (place / CHECKPOINT).is_file() else self._same(place, row)

    def write(self, row: PaperRow, seed: int, run: Run, checkpoint: Path | None = None) -> None:
        """Keep the rounds of a run, without its weights; `checkpoint` is that of a run with rounds to go."""
        place = self._place(row, seed)
        if checkpoint is not None and not _can_travel(checkpoint):
            return
        place.mkdir(parents=True, exist_ok=True)
        facts = {**run.about, ROW: _described(row)}
        (place / FACTS).write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        (place / METRICS).write_text("".join(json.dumps(record) + "\n" for record in run.rounds), "utf-8")
        (place / CHECKPOINT).unlink(missing_ok=True)
        if checkpoint is not None:
            shutil.copyfile(checkpoint, place / CHECKPOINT)

    def restore(self, row: PaperRow, seed: int, folder: Path) -> None:
        """Put a run with rounds to go where it can go on, if that place has none."""
        place = self._place(row, seed)
        if folder.exists() or not (place / CHECKPOINT).is_file() or self._same(place, row) is None:
            return
        folder.mkdir(parents=True)
        for name in (FACTS, METRICS, CHECKPOINT):
            shutil.copyfile(place / name, folder / name)

    def _same(self, place: Path, row: PaperRow) -> Run | None:
        if not (place / METRICS).is_file():
            return None
        run = read_run(place)
        return run if run.about.get(ROW) == _described(row) else None

    def _place(self, row: PaperRow, seed: int) -> Path:
        return self.folder / f"{re.sub(r'[^a-z0-9]+', '-', row.label.lower()).strip('-')}-seed{seed}"


def _can_travel(checkpoint: Path) -> bool:
    small = checkpoint.is_file() and checkpoint.stat().st_size <= MOST_CHECKPOINT_BYTES
    return small and not checkpoint.with_name(KEPT).exists()


def _described(row: PaperRow) -> dict[str, Any]:
    """Describe a row as JSON would return it."""
    facts = {"label": row.label, "model": row.model, "edition": edition_of(row.model), "job": row.job}
    facts |= {"widths": row.widths, "stop_at": row.stop_at}
    described: dict[str, Any] = json.loads(json.dumps(facts))
    return described
