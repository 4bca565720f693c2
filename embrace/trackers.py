"""Trackers: the curves of a run in TensorBoard, MLflow or Weights & Biases, through their own libraries.

A tracker has three functions; anything that has them is one, and can be given instead of a name:

    start(config)         once, with what is run
    log(step, metrics)    after a round; `step` counts the rounds that are done
    end()                 once, whatever happened
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from edge_runtime.user_module import one_line
from federation.errors import EmbraceError, InputError, MissingPackage
from federation.printable import printable

Metrics = Mapping[str, float]
Record = Mapping[str, Any]  # of one round: `round`, and what is known about it
OnRound = Callable[[Record], None]
PROJECT = "embrace"  # what a run belongs to, unless the library's own variables say otherwise
_MOST_PARAMETERS = 100  # that MLflow takes at once
_LONGEST_PARAMETER = 500


class Tracker(Protocol):
    """Keeps the metrics of one run."""

    def start(self, config: Mapping[str, Any]) -> None: ...

    def log(self, step: int, metrics: Metrics) -> None: ...

    def end(self) -> None: ...


class TensorBoard:
    """Writes event files into the run's folder: `tensorboard --logdir runs`."""

    def __init__(self, name: str, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.plugins.scalar.summary_v2 import scalar_pb
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError:
            raise MissingPackage("tensorboard", "tensorboard") from None
        self._event = Event
        self._scalar = scalar_pb
        self._text = text_pb
        self._open: Callable[[str], Any] = EventFileWriter
        self._folder = folder

    def start(self, config: Mapping[str, Any]) -> None:
        self._writer = self._open(str(self._folder))
        text = json.dumps(config, indent=1, default=str)
        self._write(0, self._text("config", "\n".join(f"    {line}" for line in text.splitlines())))

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._write(step, self._scalar(name, value))
        self._writer.flush()  # curves are looked at while they grow

    def _write(self, step: int, summary: Any) -> None:
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))

    def end(self) -> None:
        self._writer.close()


class MLflow:
    """Logs to where MLFLOW_TRACKING_URI leads, or where the library decides."""

    def __init__(self, name: str, folder: Path) -> None:
        try:
            import mlflow
        except ModuleNotFoundError:
            raise MissingPackage("mlflow", "mlflow") from None
        self._mlflow = mlflow
        self._name = name

    def start(self, config: Mapping[str, Any]) -> None:
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
            self._mlflow.set_experiment(PROJECT)
        self._mlflow.start_run(run_name=self._name, nested=True)
        flat = [(key, str(value)[:_LONGEST_PARAMETER]) for key, value in _flat(config)]
        for first in range(0, len(flat), _MOST_PARAMETERS):
            self._mlflow.log_params(dict(flat[first : first + _MOST_PARAMETERS]))

    def log(self, step: int, metrics: Metrics) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def end(self) -> None:
        self._mlflow.end_run()


class WandB:
    """Logs a run of Weights & Biases; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, name: str, folder: Path) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise MissingPackage("wandb", "wandb") from None
        self._wandb = wandb
        self._name = name

    def start(self, config: Mapping[str, Any]) -> None:
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = self._wandb.init(project=project, name=self._name, config=dict(config))

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def end(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, Callable[[str, Path], Tracker]] = MappingProxyType(
    {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
)


@contextmanager
def tracked(
    track: str | Tracker | None, name: str, config: Mapping[str, Any], folder: Path | str | None = None
) -> Iterator[OnRound]:
    """Keep what the records of rounds say while this is open. `folder` is the run's; without it runs/NAME.

    Training does not end with its tracker: one that fails is left out from then on, with a warning.
    """
    if track is None:
        yield lambda record: None
        return
    place = Path(folder) if folder is not None else Path("runs") / (re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run")
    keeper = _Keeper(_open(track, name, place, config))
    try:
        yield keeper.log
    finally:
        keeper.end()


class _Keeper:
    """Passes records on to a tracker until that fails."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._works = True

    def log(self, record: Record) -> None:
        if self._works:
            self._try(lambda: self._tracker.log(int(record["round"]) + 1, metrics_of(record)))

    def end(self) -> None:
        self._try(self._tracker.end)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # any library, and any way in which a server can be gone
            self._works = False
            told = f"{type(self._tracker).__name__} stopped: {printable(one_line(error))}; the run goes on without it"
            warnings.warn(told, stacklevel=2)


def _open(track: str | Tracker, name: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    if not isinstance(track, str):
        track.start(config)
        return track
    if track not in TRACKERS:
        raise InputError(f"track: expected {', '.join(TRACKERS)}, got {track!r}")
    tracker = TRACKERS[track](name, folder)
    try:
        tracker.start(config)
    except EmbraceError:
        raise
    except Exception as error:  # no account, no server, no room
        raise EmbraceError(f"{track} cannot begin: {one_line(error)}") from error
    return tracker


def metrics_of(record: Record) -> dict[str, float]:
    """Return every finite number of a record by its name, `per_layer/discrepancy/conv1`; the round's own left out."""
    return {
        re.sub(r"[^\w./ -]", "_", name): float(value)
        for name, value in _flat(record)
        if name not in ("round", "version")
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
