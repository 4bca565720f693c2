"""The rounds of runs that ended, kept beside the results: a run of days is not done again on another machine."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.papers.editions import edition_of
from bench.papers.table import PaperRow
from simulation.runs import FACTS, METRICS, Run, read_run

ROW = "row"  # in run.json: what was run, in the table's own words


@dataclass(frozen=True)
class Logs:
    """A folder of run.json and metrics.jsonl for each row and seed of one table at one scale.

    A log counts while its row has the same model, job and edition; defaults that the job does not name may change.
    """

    folder: Path

    def read(self, row: PaperRow, seed: int) -> Run | None:
        """Return a row's run, if it was logged and the row is still the same."""
        place = self._place(row, seed)
        if not (place / METRICS).is_file():
            return None
        run = read_run(place)
        return run if run.about.get(ROW) == _described(row) else None

    def write(self, row: PaperRow, seed: int, run: Run) -> None:
        """Keep the rounds of a run that ended, without its weights."""
        place = self._place(row, seed)
        place.mkdir(parents=True, exist_ok=True)
        facts = {**run.about, ROW: _described(row)}
        (place / FACTS).write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        (place / METRICS).write_text("".join(json.dumps(record) + "\n" for record in run.rounds), "utf-8")

    def _place(self, row: PaperRow, seed: int) -> Path:
        return self.folder / f"{re.sub(r'[^a-z0-9]+', '-', row.label.lower()).strip('-')}-seed{seed}"


def _described(row: PaperRow) -> dict[str, Any]:
    """Describe a row as JSON would return it."""
    facts = {"label": row.label, "model": row.model, "edition": edition_of(row.model), "job": row.job}
    facts |= {"widths": row.widths, "stop_at": row.stop_at}
    described: dict[str, Any] = json.loads(json.dumps(facts))
    return described
