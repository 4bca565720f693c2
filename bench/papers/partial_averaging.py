"""Partial model averaging beside periodic averaging: accuracy and distance of local models at the same steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.papers.measures import best_accuracy, final_accuracy
from bench.papers.table import Claim, Column, Drawn, Measured, PaperRow, Setting, Table
from simulation.runs import Floats, Run

FINAL, BEST, APART = "accuracy at the end %", "best accuracy %", "squared distance"
MESSAGES = "messages"
# τ -> periodic and partial averaging of VGG-11 on Fashion-MNIST, IID
PUBLISHED = {2: (92.33, 94.01), 4: (91.80, 93.03), 8: (90.48, 92.21)}
PERIODIC = "periodic"
KEPT = [{"rule": "weight_decay", "factor": 1e-4}, {"rule": "momentum", "factor": 0.9, "between": "keep"}]


def _parts(run: Run) -> int:
    """In how many rounds everything is averaged once."""
    sync = run.about["job"].get("sync", {})
    return int(sync["parts"]) if sync.get("rule") == "rotating" else 1


def distances(run: Run) -> tuple[Floats, Floats]:
    """Steps, and (1/m)·Σ ‖u − x_i‖² of the model, each part of it as it was just before it was averaged.

    A round of partial averaging measures one part of several; of the last so many rounds the parts add up. The
    last round of all averages everything, parts that are only a step old, and is left out.
    """
    parts, rows = _parts(run), run.rounds[:-1]
    each = [sum(row.get("per_layer", {}).get("discrepancy", {}).values()) for row in rows]
    sums = np.convolve(np.array(each, np.float64), np.ones(parts), "valid") if len(each) >= parts else np.zeros(0)
    return run.progress("steps")[:-1][parts - 1 :], sums


def _apart(run: Run) -> float | None:
    """The mean over the second half of the run."""
    found = distances(run)[1]
    return float(found[len(found) // 2 :].mean()) if len(found) else None


def _messages(run: Run) -> float | None:
    return float(sum(row["messages"] for row in run.rounds))


def _job(fleet: dict[str, Any], batch: int, rate: str, steps: int, tau: int, by: str) -> dict[str, Any]:
    local = {"batch": batch, "rate": rate, "rules": KEPT}
    if by == PERIODIC:
        return {
            "algorithm": "fedavg",
            "num_rounds": steps // tau,
            "local": {**local, "steps": tau},
            "simulate": fleet,
        }
    return {
        "algorithm": "partial_averaging",
        "num_rounds": steps,
        "local": {**local, "steps": 1},
        "sync": {"rule": "rotating", "parts": tau, "by": by},
        "simulate": fleet,
    }


def _rows(
    model: str, layers: int, fleet: dict[str, Any], scored: int, batch: int, rate: str, steps: int
) -> list[PaperRow]:
    """Scores every so many steps. A model has to have as many layers as there are parts, if they are parts by layer."""
    rows = []
    for tau, (periodic, partial) in PUBLISHED.items():
        for by in (PERIODIC, "layer", "channel"):
            if by == "layer" and tau > layers:
                continue
            label = by if by == PERIODIC else f"partial, by {by}"
            published = {BEST: periodic if by == PERIODIC else partial}
            job, panel = _job(fleet, batch, rate, steps, tau, by), f"τ = {tau}"
            every = {"evaluate_every": scored // tau if by == PERIODIC else scored}
            rows.append(PaperRow(f"{panel}, {label}", model, job, published, panel, label, every=every))
    return rows


EVERY = {"by_layer_every": 1}


def _full() -> Setting:
    fleet = {"devices": 128, "dataset": "fashion_mnist", "partitioner": "iid"}
    note = (
        "The paper's: VGG-11 on Fashion-MNIST, IID on 128 devices, momentum 0.9, weight decay 1e-4, 90 epochs; batch "
        "32, and the same rates for every row, which the paper tuned one by one."
    )
    return Setting(note, _rows("vgg11", 11, fleet, 40, 32, "0.1", 1320), every=EVERY)


def _short() -> Setting:
    fleet = {
        "devices": 16,
        "dataset": "fashion_mnist",
        "partitioner": "iid",
        "samples": 8000,
        "test_samples": 2000,
    }
    note = (
        "Fashion-MNIST, 8,000 training and 2,000 test samples, the MNIST CNN with a quarter of its channels (four "
        "layers, hence no eight parts by layer), IID on 16 devices, 240 steps of batch 16, momentum 0.9 that devices "
        "keep, weight decay 1e-4, rate 0.05 for every row. Published are VGG-11's figures, with a rate of its own for "
        "every row."
    )
    return Setting(note, _rows("mnist_cnn@0.25", 4, fleet, 24, 16, "0.05", 240), every=EVERY)


def _smoke() -> Setting:
    fleet = {"devices": 4, "dataset": "digits", "samples": 200, "test_samples": 64}
    return Setting(
        "scikit-learn's digits on 4 devices, 8 steps.", _rows("digits", 2, fleet, 8, 8, "0.05", 8), every=EVERY
    )


def _compared(column: str, larger: bool, kind: str) -> Any:
    """Of every τ: partial averaging beside periodic averaging."""

    def test(measured: Measured) -> bool | None:
        found = []
        for tau in PUBLISHED:
            periodic = measured.get(f"τ = {tau}, {PERIODIC}", {}).get(column)
            partial = measured.get(f"τ = {tau}, partial, by {kind}", {}).get(column)
            if periodic is not None and partial is not None:
                found.append((partial > periodic) == larger)
        return all(found) if found else None

    return test


PARTIAL = Table(
    "partial-averaging",
    "Lee, Sahu, He and Avestimehr, Partial Model Averaging in Federated Learning, 2022, table 1 and figure 2",
    "Averaging one of τ parts after every step keeps local models closer than averaging all of it every τ steps.",
    {"smoke": _smoke, "short": _short, "full": _full},
    (
        Column(FINAL, final_accuracy),
        Column(BEST, best_accuracy),
        Column(APART, _apart, 4),
        Column(MESSAGES, _messages, 0),
    ),
    (
        Claim("by layer: local models are closer together at every τ", _compared(APART, False, "layer")),
        Claim("by channel: local models are closer together at every τ", _compared(APART, False, "channel")),
        Claim("by layer: higher accuracy at every τ", _compared(FINAL, True, "layer")),
        Claim("by channel: higher accuracy at every τ", _compared(FINAL, True, "channel")),
    ),
    x="steps",
    drawn=(
        Drawn("", "test accuracy, %", lambda run: (run.progress("steps"), 100 * run.values("accuracy"))),
        Drawn("distance", "squared distance to the mean", distances),
    ),
)
