"""What devices may claim about a version, and what comes of their claims: against numpy over all labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from federation.device_scores import MOST_LOSS, most_labels, read_claim, summarise
from federation.metrics import Score

GOOD = {"loss": 3.5, "correct": 2, "counted": 4, "classifies": True}


def test_a_claim_is_read() -> None:
    assert read_claim(GOOD, 4) == Score(3.5, 2, 4, True)
    assert read_claim({"loss": 1, "correct": 0, "counted": 2}, 4) == Score(1.0, 0, 2, False)


@pytest.mark.parametrize(
    "change",
    [
        {"counted": 5},
        {"counted": 0},
        {"counted": -1},
        {"counted": True},
        {"counted": 2.0},
        {"correct": 5},
        {"correct": -1},
        {"correct": "2"},
        {"loss": -0.1},
        {"loss": 4.1 * MOST_LOSS},
        {"loss": 10**400},
        {"loss": float("nan")},
        {"loss": float("inf")},
        {"loss": None},
        {"loss": [1]},
    ],
)
def test_a_claim_that_cannot_be_is_none(change: dict[str, Any]) -> None:
    assert read_claim({**GOOD, **change}, 4) is None


@pytest.mark.parametrize("told", [None, {}, [], "0.9", 1])
def test_a_device_that_claims_nothing(told: Any) -> None:
    assert read_claim(told, 4) is None


@pytest.mark.parametrize("holdout", [0.01, 0.1, 0.5, 0.9])
def test_every_honest_device_is_within_the_bound(holdout: float) -> None:
    """As devices split: about the share is held out, and at least one sample."""
    for count in range(2, 500):
        held = min(round(count * holdout) or 1, count - 1)
        assert held <= most_labels(count - held, holdout, 1)
        assert 7 * held <= most_labels(count - held, holdout, 7)
    assert most_labels(90, 0.1, 1) <= 12, "and a device cannot claim much more than its share"


def test_means_weigh_labels_and_the_spread_counts_devices() -> None:
    rng = np.random.default_rng(0)
    tiers, claims, losses, rights = [], [], [], []
    for size in (3, 50, 7, 1, 20):
        loss, right = rng.exponential(size=size), rng.random(size) < 0.7
        tiers.append("weak" if size < 10 else "strong")
        losses.append(loss)
        rights.append(right)
        claims.append((tiers[-1], Score(float(loss.sum()), int(right.sum()), size, True)))
    found = summarise(claims)
    assert found["devices"] == 5 and found["counted"] == 81
    for name, values in (("mean_loss", losses), ("accuracy", rights)):
        assert found[name] == pytest.approx(np.concatenate(values).mean())
        own = [each.mean() for each in values]
        assert list(found["spread"][name].values()) == pytest.approx(np.quantile(own, [0, 0.25, 0.5, 0.75, 1]))
        weak = np.concatenate([each for each, tier in zip(values, tiers) if tier == "weak"])
        assert found["tiers"]["weak"][name] == pytest.approx(weak.mean()) and found["tiers"]["strong"]["devices"] == 2


def test_a_model_that_classifies_nothing_has_no_accuracy() -> None:
    found = summarise([("weak", Score(3.0, 0, 4))])
    assert "accuracy" not in found and "accuracy" not in found["spread"] and found["mean_loss"] == 0.75
