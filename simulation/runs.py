"""The result of a simulation: a record of every round and the model that came of it, in memory or in a folder.

A folder has `run.json` (the job, the engine, the machine), `metrics.jsonl` (one line per round) and
`weights.safetensors`, and can be read while it is written. Steps and bytes of a record are those of its round; curves
add them up. A last line without its end is passed over. Any other line that cannot be read is skipped and counted: a
run that was killed and resumed may have one. A round that stands there twice counts as it was written last.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import DataError, EmbraceError, InputError
from federation.safetensors_codec import PREFIX, decode_header, header_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Record = dict[str, Any]  # of one round

FACTS, METRICS, WEIGHTS, CHECKPOINT = "run.json", "metrics.jsonl", "weights.safetensors", "checkpoint"
PER_LAYER = ("discrepancy", "svcca", "interval")
QUANTITIES = ("accuracy", "loss", "test_loss", *PER_LAYER)
AXES = ("rounds", "steps", "bytes")
SHOWN = 20  # rounds of a table
COLUMNS = ("round", "accuracy", "training loss", "devices", "failed", "MB sent so far", "seconds")
_SEED_ENDING = re.compile(r"[-_. ]*seed[-_= ]*\d+$", re.IGNORECASE)
_SEEDS = frozenset({"seed", "seeds"})


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """One run. `run.rounds` are its records, `run.weights` the trained model.

    A record is a dictionary: round, loss, accuracy and test_loss (where the round was scored), devices, failures,
    samples, steps, bytes_up, bytes_down, messages, seconds; per_layer where that was measured.

    >>> run = embrace.simulate(embrace.Job(bundle, num_rounds=2, local={"steps": 2}), (x, y), devices=4, workers=1)
    >>> run.rounds[-1]["round"], sorted(run.weights) == sorted(bundle.state_dict())
    (1, True)
    >>> figure = run.plot()
    """

    name: str
    rounds: Sequence[Record]
    about: Mapping[str, Any] = field(default_factory=dict)  # run.json
    path: Path | None = None  # its folder; None: it is in memory only
    skipped: int = 0  # lines that could not be read
    weights_file: bytes | None = None  # of a run in memory

    @property
    def accuracy(self) -> float | None:
        """The last accuracy on the test data, from 0 to 1."""
        return float(self._accuracies[-1]) if len(self._accuracies) else None

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy on the test data, from 0 to 1."""
        return float(self._accuracies.max()) if len(self._accuracies) else None

    @property
    def loss(self) -> float | None:
        """The mean training loss of the last round."""
        return self.rounds[-1].get("loss") if self.rounds else None

    @property
    def stopped(self) -> str | None:
        """Why the run ended before its last round, if the job's [evaluate] ended it."""
        return self.rounds[-1].get("stopped") if self.rounds else None

    @property
    def _accuracies(self) -> Floats:
        values = self.values("accuracy")
        return values[np.isfinite(values)]

    def place_of(self, accuracy: float) -> int | None:
        """Find the place in `rounds` at which an accuracy is first reached."""
        good = self.values("accuracy") >= accuracy  # nan is not
        return int(good.argmax()) if good.any() else None

    @cached_property
    def setting(self) -> str:
        """The same text for runs that differ only in the seed."""
        job = self.about.get("job")
        told = _without_seeds(job) if job is not None else _SEED_ENDING.sub("", self.name)
        return json.dumps(told, sort_keys=True)

    @property
    def counts_bytes(self) -> bool:
        return any("bytes_up" in record or "bytes_down" in record for record in self.rounds)

    def progress(self, axis: str) -> Floats:
        """Return rounds, steps or bytes (both directions) until the end of each record."""
        if axis == "rounds":
            return np.array([record["round"] + 1 for record in self.rounds], np.float64)
        keys = ("steps",) if axis == "steps" else ("bytes_up", "bytes_down")
        each = [[_number(record.get(key)) for key in keys] for record in self.rounds]
        if all(math.isnan(value) for values in each for value in values):
            raise DataError(f"{self.path or self.name}: no line has {' or '.join(keys)}, expected it for --x {axis}")
        return np.cumsum(np.nansum(np.array(each, np.float64), axis=1))

    def values(self, quantity: str) -> Floats:
        """Return one number per record, nan where there is none; the mean over the layers of what every layer has."""
        if quantity not in PER_LAYER:
            return np.array([_number(record.get(quantity)) for record in self.rounds], np.float64)
        layers = self.layers(quantity)
        found = self.by_layer(quantity, layers) if layers else np.full((1, len(self.rounds)), np.nan)
        counts = np.isfinite(found).sum(0)
        return np.where(counts, np.nansum(found, 0) / np.maximum(counts, 1), np.nan).astype(np.float64)

    def layers(self, quantity: str) -> list[str]:
        """List the layers in the order in which they appear, input side first."""
        return list(dict.fromkeys(layer for record in self.rounds for layer in _of_layers(record, quantity)))

    def by_layer(self, quantity: str, layers: Sequence[str]) -> Floats:
        """Return layers × records."""
        columns = [[_number(_of_layers(record, quantity).get(layer)) for layer in layers] for record in self.rounds]
        return np.transpose(np.array(columns, np.float64).reshape(len(self.rounds), len(layers)))

    # --- the model ---------------------------------------------------------------------------------------------------

    @cached_property
    def weights(self) -> dict[str, NDArray[np.float32]]:
        """The trained parameters and statistics by name, as PyTorch's `load_state_dict` takes them as tensors."""
        content = memoryview(self._weights_bytes())
        start = PREFIX + header_length(content[:PREFIX], len(content))
        header = decode_header(content[PREFIX:start])
        return {
            name: np.frombuffer(content, "<f4", math.prod(shape), start + header.offsets[name]).reshape(shape).copy()
            for name, shape in header.shapes.items()
        }

    def _weights_bytes(self) -> bytes:
        if self.weights_file is not None:
            return self.weights_file
        if self.path is None:
            raise DataError(f"{self.name} has no weights")
        try:
            return (self.path / WEIGHTS).read_bytes()
        except OSError as error:
            raise DataError(f"{self.path} has no weights yet: {error.strerror}") from None

    def in_memory(self) -> Run:
        """Return the run without its folder, weights included."""
        return replace(self, path=None, weights_file=self._weights_bytes())

    def save(self, folder: Path | str) -> Path:
        """Write the run into a new folder, as `embrace plot` and `read_run` take it."""
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise InputError(f"{path} is not empty; choose another folder")
            (path / FACTS).write_text(json.dumps({"name": self.name, **self.about}, indent=1) + "\n")
            (path / METRICS).write_text("".join(json.dumps(record) + "\n" for record in self.rounds))
            (path / WEIGHTS).write_bytes(self._weights_bytes())
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None
        return path

    # --- to look at --------------------------------------------------------------------------------------------------

    def plot(self, y: str = "accuracy", x: str = "rounds", file: Path | str | None = None) -> Figure:
        """Draw a curve, or for what is measured by layer a map; `file` saves it, too."""
        from simulation.plots import plot_curves, plot_layers, save

        check_axes(x, y)
        figure = plot_layers(self, y, x) if y in PER_LAYER else plot_curves([RunGroup(self.name, [self])], x, y)
        if file is not None:
            save(figure, Path(file))
        return figure

    def to_pandas(self) -> Any:
        """Return the records as a pandas DataFrame, by round; what is measured by layer has a column for each."""
        try:
            import pandas  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise EmbraceError("the package 'pandas' is not installed: pip install pandas") from None
        return pandas.json_normalize(list(self.rounds)).set_index("round")

    def table(self) -> list[list[str]]:
        """Return cells under COLUMNS of the rounds that were scored, at most about twenty of them, and of the last."""
        last = self.rounds[-1]["round"] if self.rounds else None
        scored = [row for row in self.rounds if row.get("accuracy") is not None or row["round"] == last]
        shown = scored[:: max(1, len(scored) // SHOWN)]
        shown += [] if not scored or shown[-1] is scored[-1] else [scored[-1]]
        sent = np.cumsum([record.get("bytes_up", 0) for record in self.rounds])
        total = {record["round"]: up for record, up in zip(self.rounds, sent)}
        return [
            [
                str(row["round"] + 1),
                _cell(row.get("accuracy"), ".1%"),
                _cell(row.get("loss"), ".4f"),
                _cell(row.get("devices"), "d"),
                _cell(row.get("failures") or None, "d"),
                f"{total[row['round']] / 1e6:,.2f}",
                _cell(row.get("seconds"), ".2f"),
            ]
            for row in shown
        ]

    def __repr__(self) -> str:
        scored = "" if self.accuracy is None else f", accuracy {self.accuracy:.1%}"
        return f"Run({self.name!r}, {len(self.rounds)} rounds{scored})"

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

        rows = "".join(line(cells, "td") for cells in self.table())
        return f"<table><caption>{html.escape(repr(self))}</caption>{line(COLUMNS, 'th')}{rows}</table>"


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in the seed."""

    name: str
    runs: Sequence[Run]

    def curve(self, quantity: str, axis: str) -> tuple[Floats, Floats, Floats]:
        """Return places, means and standard deviations, at the rounds that all runs have a value for."""
        places: dict[int, list[tuple[float, float]]] = {}
        for run in self.runs:
            for record, x, y in zip(run.rounds, run.progress(axis), run.values(quantity)):
                if math.isfinite(y):
                    places.setdefault(record["round"], []).append((x, y))
        whole = [points for _, points in sorted(places.items()) if len(points) == len(self.runs)]
        x = np.array([np.mean([x for x, _ in points]) for points in whole], np.float64)
        y = np.array([np.mean([y for _, y in points]) for points in whole], np.float64)
        return x, y, np.array([deviation([y for _, y in points]) for points in whole], np.float64)


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; 0 for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def check_axes(x: str, y: str, prefix: str = "") -> None:
    """Refuse what is no axis or no quantity of a run."""
    for name, value, known in (("x", x, AXES), ("y", y, QUANTITIES)):
        if value not in known:
            raise InputError(f"{prefix}{name} {value}: expected one of {', '.join(known)}")


def read_run(path: Path) -> Run:
    """Read a run's folder."""
    metrics = path / METRICS
    try:
        lines = metrics.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {metrics}: {error.strerror}; expected the folder of a run") from None
    records = [record for line in lines if line.strip() and (record := _parse(line)) is not None]
    if not records:
        raise DataError(f"{metrics} has no line with a round")
    by_round = {record["round"]: record for record in records}
    facts = _facts(path / FACTS)
    job = facts.get("job")
    name = facts.get("name") or (job.get("name") if isinstance(job, dict) else None) or path.resolve().name
    finished = [line for line in lines[:-1] if line.strip()]  # what has no end yet is still being written
    skipped = sum(_parse(line) is None for line in finished)
    return Run(str(name), [by_round[number] for number in sorted(by_round)], facts, path, skipped)


def group_runs(runs: Sequence[Run]) -> list[RunGroup]:
    """Group in the order of first appearance; a name that two groups share gets the folder behind it."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in {run.path.resolve() if run.path else id(run): run for run in runs}.values():
        groups.setdefault((_SEED_ENDING.sub("", run.name) or run.name, run.setting), []).append(run)
    names = [name for name, _ in groups]
    found = []
    for number, ((name, _), members) in enumerate(groups.items(), 1):
        place = members[0].path.resolve().name if members[0].path else number
        found.append(RunGroup(name if names.count(name) == 1 else f"{name} ({place})", members))
    return found


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    number = record.get("round") if isinstance(record, dict) else None
    return record if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None


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


def _of_layers(record: Record, quantity: str) -> dict[str, Any]:
    found = record.get("per_layer")
    layers = found.get(quantity) if isinstance(found, dict) else None
    return layers if isinstance(layers, dict) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _cell(value: float | None, layout: str) -> str:
    return "–" if value is None else format(value, layout)
