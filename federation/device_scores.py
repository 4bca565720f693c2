"""Scores that devices claim of the version they received, on data that they hold out: bounds, weighted means, spread.

A device reports sums over its held-out labels, and nothing else of its data. What it may claim is bounded by what it
trained on: the held-out share of as many samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from federation.metrics import Score

MOST_LOSS = 1e6  # of one label
_QUARTILES = {"min": 0, "lower": 25, "median": 50, "upper": 75, "max": 100}


def most_labels(samples: int, holdout: float, per_sample: int) -> int:
    """Bound the labels that a device can hold out beside the samples that it trained on."""
    return per_sample * math.ceil((samples * holdout + 1) / (1 - holdout))


def read_claim(told: Any, most: int) -> Score | None:
    """Read what a device says about its score; None if that cannot be."""
    if not isinstance(told, Mapping):
        return None
    loss, correct, counted = told.get("loss"), told.get("correct"), told.get("counted")
    if type(correct) is not int or type(counted) is not int or not isinstance(loss, (int, float)):
        return None
    if not 1 <= counted <= most or not 0 <= correct <= counted or not 0 <= loss <= MOST_LOSS * counted:
        return None
    return Score(float(loss), correct, counted, told.get("classifies") is True)


def summarise(claims: Sequence[tuple[str, Score]]) -> dict[str, Any]:
    """Describe the scores of devices, each with what it trains: means by label, spread by device, all and by tier.

    >>> found = summarise([("weak", Score(3.0, 1, 2, True)), ("strong", Score(1.0, 2, 2, True))])
    >>> found["mean_loss"], found["accuracy"], found["tiers"]["weak"]["accuracy"]
    (1.0, 0.75, 0.5)
    """
    tiers = sorted({tier for tier, _ in claims})
    return {
        **_summary([score for _, score in claims]),
        "tiers": {name: _summary([score for tier, score in claims if tier == name]) for name in tiers},
    }


def _summary(scores: Sequence[Score]) -> dict[str, Any]:
    total = sum(scores, Score())
    found: dict[str, Any] = {"devices": len(scores), "counted": total.counted, "mean_loss": total.mean_loss}
    spread = {"mean_loss": _spread(score.mean_loss for score in scores)}
    if all(score.classifies for score in scores):
        found["accuracy"] = total.accuracy
        spread["accuracy"] = _spread(score.correct / score.counted for score in scores)
    return {**found, "spread": spread}


def _spread(values: Iterable[float]) -> dict[str, float]:
    """Every device counts once, however much data it has."""
    return dict(zip(_QUARTILES, np.percentile(list(values), list(_QUARTILES.values())).tolist()))
