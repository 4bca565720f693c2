"""Which version of a job is the best so far, and whether a better one is still to be expected (early stopping).

Pure: scores go in, a decision comes out. The coordinator and simulations ask the same functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from federation.errors import FieldError

Metric = Literal["accuracy", "mean_loss", "device_accuracy", "device_mean_loss"]
# On the coordinator's data, then on what devices hold out: the first that there is decides, unless a job says which.
METRICS: Final[tuple[Metric, ...]] = get_args(Metric)
_HIGHER: Final = frozenset({"accuracy", "device_accuracy"})  # is better; of the others lower is

Score = tuple[int, float]  # a version and its value


@dataclass(frozen=True)
class Best:
    """The best version of a job by one metric."""

    version: int
    metric: str
    value: float


@dataclass(frozen=True)
class StopRule:
    """When to end a job early: a value that is good enough, or so many evaluations without a better one."""

    target: float | None = None
    stop_after: int | None = None  # evaluations; None: never
    min_delta: float = 0.0  # what counts as better has to be better by more than this

    def __post_init__(self) -> None:
        if self.stop_after is not None and not 1 <= self.stop_after <= 1_000_000:
            raise FieldError("stop_after", f"expected a number of evaluations from 1, got {self.stop_after}")
        if not 0 <= self.min_delta < 1e30:
            raise FieldError("min_delta", f"expected a number from 0, got {self.min_delta}")
        if self.target is not None and not abs(self.target) < 1e30:
            raise FieldError("target", f"expected a number, got {self.target}")


def deciding_metric(wanted: str | None, known: Collection[str]) -> str | None:
    """Choose the metric that decides: the one that was asked for, else the first that there is."""
    return next((name for name in ((wanted,) if wanted else METRICS) if name in known), None)


def best_version(metric: str, scores: Iterable[Score]) -> Best | None:
    """Find the best version; of equal ones the earliest.

    >>> best_version("accuracy", [(1, 0.5), (2, 0.8), (3, 0.8)])
    Best(version=2, metric='accuracy', value=0.8)
    """
    sign = _sign(metric)
    found = min(scores, key=lambda score: (-sign * score[1], score[0]), default=None)
    return None if found is None else Best(found[0], metric, found[1])


def find_best(wanted: str | None, scores: Mapping[str, Sequence[Score]]) -> Best | None:
    """Find the best version by the metric that decides; `scores` are by metric."""
    metric = deciding_metric(wanted, scores)
    return None if metric is None else best_version(metric, scores[metric])


def reason_to_stop(rule: StopRule, metric: str, scores: Sequence[Score]) -> str | None:
    """Say why a job should end now, in words; None if it should go on.

    >>> reason_to_stop(StopRule(stop_after=2), "mean_loss", [(1, 0.5), (2, 0.6), (3, 0.5)])
    'stopped early: mean_loss has not been better than 0.5 of version 1 for 2 evaluations'
    """
    ordered, sign = sorted(scores), _sign(metric)
    best = best_version(metric, ordered)
    if best is None:
        return None
    if rule.target is not None and sign * best.value >= sign * rule.target:
        return f"stopped early: {metric} {best.value:.6g} of version {best.version} reached the target {rule.target:g}"
    if rule.stop_after is None:
        return None
    (at, reference), since = ordered[0], 0
    for version, value in ordered[1:]:
        since += 1
        if sign * (value - reference) > rule.min_delta:
            at, reference, since = version, value, 0
    if since < rule.stop_after:
        return None
    by = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
    return (
        f"stopped early: {metric} has not been better than {reference:.6g} of version {at}{by} "
        f"for {since} evaluation{'s' if since != 1 else ''}"
    )


def _sign(metric: str) -> float:
    return 1.0 if metric in _HIGHER else -1.0
