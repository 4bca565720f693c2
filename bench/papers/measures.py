"""What is read from a run, for the columns of tables. Accuracies are percentages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from federation.traffic import Link, Traffic
from simulation.runs import Floats, Run

MEBIBYTE = 1 << 20  # what the papers call MB
LAST = 3  # scores over which the accuracy at the end is a mean: single rounds are noisy


def final_accuracy(run: Run) -> float | None:
    """The mean of the last scores."""
    scored = _scores(run)
    return 100 * float(np.mean(scored[-LAST:])) if len(scored) else None


def best_accuracy(run: Run) -> float | None:
    scored = _scores(run)
    return 100 * float(scored.max()) if len(scored) else None


def accuracies_by(statistics: str) -> Callable[[Run], tuple[Floats, Floats]]:
    """A curve over rounds with global or static statistics of batch norm, where runs are scored with both."""

    def curve(run: Run) -> tuple[Floats, Floats]:
        found = [line.get("by_statistics", {}).get(statistics, np.nan) for line in run.rounds]
        return run.progress("rounds"), 100 * np.array(found, np.float64)

    return curve


def final_accuracy_by(statistics: str) -> Callable[[Run], float | None]:
    """The mean of the last of these scores."""

    def measure(run: Run) -> float | None:
        _, scored = accuracies_by(statistics)(run)
        known = scored[np.isfinite(scored)]
        return float(np.mean(known[-LAST:])) if len(known) else None

    return measure


def swing(run: Run) -> float | None:
    """How much the accuracy goes up and down: the mean change from one score to the next, in the second half."""
    scored = _scores(run)
    late = scored[len(scored) // 2 :]
    return 100 * float(np.mean(np.abs(np.diff(late)))) if len(late) > 1 else None


def rounds_to(target: float) -> Callable[[Run], float | None]:
    """Rounds until an accuracy from 0 to 1; None if it was not reached."""

    def measure(run: Run) -> float | None:
        good = run.values("accuracy") >= target
        return float(run.progress("rounds")[good.argmax()]) if good.any() else None

    return measure


def mebibytes_per_worker_to(target: float) -> Callable[[Run], float | None]:
    """What one worker of each round has sent and received until an accuracy."""

    def measure(run: Run) -> float | None:
        good = run.values("accuracy") >= target
        if not good.any():
            return None
        rows = run.rounds[: int(good.argmax()) + 1]
        return _bytes_per_device(rows) / MEBIBYTE

    return measure


def seconds_to(target: float, link: Link) -> Callable[[Run], float | None]:
    """How long one worker of each round has exchanged over a link until an accuracy."""

    def measure(run: Run) -> float | None:
        good = run.values("accuracy") >= target
        if not good.any():
            return None
        rows = run.rounds[: int(good.argmax()) + 1]
        up, down = (sum(row[way] / row["devices"] for row in rows) for way in ("bytes_up", "bytes_down"))
        return link.seconds(Traffic({"": round(up)}, {"": round(down)}, 2 * len(rows)))

    return measure


def mebibytes_per_worker(run: Run) -> float | None:
    """What one worker sends and receives in a round."""
    return _bytes_per_device(run.rounds) / len(run.rounds) / MEBIBYTE


def _bytes_per_device(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(sum((row["bytes_up"] + row["bytes_down"]) / row["devices"] for row in rows))


def bytes_up(run: Run) -> float | None:
    return float(sum(row["bytes_up"] for row in run.rounds))


def _scores(run: Run) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    values = run.values("accuracy")
    return values[np.isfinite(values)]
