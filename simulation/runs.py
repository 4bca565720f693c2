"""What a simulation left behind: `run.json` and `metrics.jsonl`, one line per round. Read even while it is written.

Steps and bytes of a line are those of its round; curves add them up. A last line without its end is passed over. Any
other line that cannot be read is skipped and counted: a run that was killed and resumed may have one. A round that
stands there twice counts as it was written last.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import DataError

Floats = NDArray[np.float64]
Row = dict[str, Any]

PER_LAYER = ("discrepancy", "svcca", "interval")
QUANTITIES = ("accuracy", "loss", "test_loss", *PER_LAYER)
AXES = ("rounds", "steps", "bytes")
_SEED_ENDING = re.compile(r"[-_. ]*seed[-_= ]*\d+$", re.IGNORECASE)
_SEEDS = frozenset({"seed", "seeds"})


@dataclass(frozen=True)
class Run:
    """One run; `setting` is the same text for runs that differ only in the seed."""

    path: Path
    name: str
    setting: str
    rows: Sequence[Row]  # by rounds
    skipped: int = 0  # lines that could not be read

    def progress(self, axis: str) -> Floats:
        """Rounds, steps or bytes (both directions) until the end of each row."""
        if axis == "rounds":
            return np.array([row["round"] + 1 for row in self.rows], np.float64)
        keys = ("steps",) if axis == "steps" else ("bytes_up", "bytes_down")
        each = [[_number(row.get(key)) for key in keys] for row in self.rows]
        if all(math.isnan(value) for values in each for value in values):
            raise DataError(f"{self.path}: no line has {' or '.join(keys)}, expected it for --x {axis}")
        return np.cumsum(np.nansum(np.array(each, np.float64), axis=1))

    def values(self, quantity: str) -> Floats:
        """One number per row, nan where there is none; the mean over the layers of what every layer has."""
        if quantity not in PER_LAYER:
            return np.array([_number(row.get(quantity)) for row in self.rows], np.float64)
        layers = self.layers(quantity)
        found = self.by_layer(quantity, layers) if layers else np.full((1, len(self.rows)), np.nan)
        counts = np.isfinite(found).sum(0)
        return np.where(counts, np.nansum(found, 0) / np.maximum(counts, 1), np.nan).astype(np.float64)

    def layers(self, quantity: str) -> list[str]:
        """Layers in the order in which they appear, input side first."""
        return list(dict.fromkeys(layer for row in self.rows for layer in _of_layers(row, quantity)))

    def by_layer(self, quantity: str, layers: Sequence[str]) -> Floats:
        """Layers × rows."""
        columns = [[_number(_of_layers(row, quantity).get(layer)) for layer in layers] for row in self.rows]
        return np.transpose(np.array(columns, np.float64).reshape(len(self.rows), len(layers)))


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed."""

    name: str
    runs: Sequence[Run]

    def curve(self, quantity: str, axis: str) -> tuple[Floats, Floats, Floats]:
        """Places, means and standard deviations, at the rounds that all runs have a value for."""
        places: dict[int, list[tuple[float, float]]] = {}
        for run in self.runs:
            for row, x, y in zip(run.rows, run.progress(axis), run.values(quantity)):
                if math.isfinite(y):
                    places.setdefault(row["round"], []).append((x, y))
        whole = [points for _, points in sorted(places.items()) if len(points) == len(self.runs)]
        x = np.array([np.mean([x for x, _ in points]) for points in whole], np.float64)
        y = np.array([np.mean([y for _, y in points]) for points in whole], np.float64)
        return x, y, np.array([deviation([y for _, y in points]) for points in whole], np.float64)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; 0 for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def read_run(path: Path) -> Run:
    """A run's folder."""
    metrics = path / "metrics.jsonl"
    try:
        lines = metrics.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {metrics}: {error.strerror}; expected the folder of a run") from None
    rows = [row for line in lines if line.strip() and (row := _parse(line)) is not None]
    if not rows:
        raise DataError(f"{metrics} has no line with a round")
    by_round = {row["round"]: row for row in rows}
    facts = _facts(path / "run.json")
    job = facts.get("job")
    name = facts.get("name") or (job.get("name") if isinstance(job, dict) else None) or path.resolve().name
    setting = _without_seeds(job) if job is not None else _SEED_ENDING.sub("", str(name))
    finished = [line for line in lines[:-1] if line.strip()]  # what has no end yet is still being written
    skipped = sum(_parse(line) is None for line in finished)
    ordered = [by_round[number] for number in sorted(by_round)]
    return Run(path, str(name), json.dumps(setting, sort_keys=True), ordered, skipped)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """In the order of first appearance; a name that two groups share gets the folder behind it."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in {run.path.resolve(): run for run in runs}.values():
        groups.setdefault((_SEED_ENDING.sub("", run.name) or run.name, run.setting), []).append(run)
    names = [name for name, _ in groups]
    return [
        Group(name if names.count(name) == 1 else f"{name} ({members[0].path.resolve().name})", members)
        for (name, _), members in groups.items()
    ]


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    number = row.get("round") if isinstance(row, dict) else None
    return row if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no JSON that can be read: {str(error).splitlines()[0]}") from None
    if not isinstance(facts, dict):
        raise DataError(f"{path}: expected an object, got {type(facts).__name__}")
    return facts


def _without_seeds(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_seeds(item) for key, item in value.items() if key not in _SEEDS}
        return {**kept, "name": _SEED_ENDING.sub("", str(kept["name"]))} if "name" in kept else kept
    return [_without_seeds(item) for item in value] if isinstance(value, list) else value


def _of_layers(row: Row, quantity: str) -> dict[str, Any]:
    found = row.get("per_layer")
    layers = found.get(quantity) if isinstance(found, dict) else None
    return layers if isinstance(layers, dict) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
