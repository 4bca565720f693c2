"""Partial model averaging beside periodic averaging: accuracy and distance of local models at the same steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.papers.measures import best_accuracy, final_accuracy
from bench.papers.table import Claim, Column, Drawn, Measured, PaperRow, Setting, Table
from simulation.runs import Floats, Run

FINAL, BEST, MESSAGES = "accuracy at the end %", "best accuracy %", "messages"  # the paper reports the final one
HIGHEST, MEAN = "squared distance, highest of τ steps", "squared distance, mean"
# τ -> rate, periodic and partial averaging, IID: VGG-11 on Fashion-MNIST and ResNet20 on CIFAR-10
PUBLISHED: Mapping[int, tuple[str, float, float]] = {
    2: ("0.2", 92.33, 94.01),
    4: ("0.1", 91.80, 93.03),
    8: ("0.08", 90.48, 92.21),
}
CIFAR: Mapping[int, tuple[str, float, float]] = {
    2: ("1.2", 91.19, 91.89),
    4: ("1.2", 89.80, 90.58),
    8: ("1.2", 85.70, 88.17),
}
PERIODIC = "periodic"
KEPT = [{"rule": "weight_decay", "factor": 1e-4}, {"rule": "momentum", "factor": 0.9, "between": "keep"}]


def _interval(run: Run) -> int:
    """Steps in which everything is averaged once."""
    job = run.about["job"]
    sync = job.get("sync", {})
    return int(job["local"]["steps"] * (sync["parts"] if sync.get("rule") == "rotating" else 1))


def distances(run: Run) -> tuple[Floats, Floats]:
    """Steps, and (1/m)·Σ ‖u − x_i‖² of the whole model after each, before anything is averaged: figure 2."""
    found = np.array([value for row in run.rounds for value in row.get("apart", ())], np.float64)
    return np.arange(1, len(found) + 1, dtype=np.float64), found


def _late(run: Run) -> Floats:
    """The second half, as rows of so many steps as everything is averaged in."""
    found, interval = distances(run)[1], _interval(run)
    rows = found[: len(found) // interval * interval].reshape(-1, interval)
    return rows[len(rows) // 2 :]


def highest_distance(run: Run) -> float | None:
    """The highest distance of a row, on average over the second half."""
    rows = _late(run)
    return float(rows.max(1).mean()) if len(rows) else None


def _mean(run: Run) -> float | None:
    rows = _late(run)
    return float(rows.mean()) if len(rows) else None


def _messages(run: Run) -> float | None:
    return float(sum(row["messages"] for row in run.rounds))


@dataclass(frozen=True)
class Schedule:
    """A rate with its warm-up and its divisions by ten, counted in local steps."""

    rate: str
    warm_up: int = 0
    decays: tuple[int, ...] = ()

    def of_rounds(self, steps: int) -> str:
        """Write it as a job does, which counts rounds of so many steps."""
        decays = ",".join(str(decay // steps) for decay in self.decays)
        divided = f"{self.rate}/10@{decays}" if decays else self.rate
        return f"{divided} warmup {self.warm_up // steps}" if self.warm_up else divided


def _job(
    fleet: dict[str, Any], batch: int, schedule: Schedule, steps: int, tau: int, by: str, **local: Any
) -> dict[str, Any]:
    taken = tau if by == PERIODIC else 1
    job = {
        "algorithm": "fedavg" if by == PERIODIC else "partial_averaging",
        "num_rounds": steps // taken,
        "local": {"batch": batch, "rate": schedule.of_rounds(taken), "rules": KEPT, "steps": taken, **local},
        "simulate": fleet,
    }
    return job if by == PERIODIC else {**job, "sync": {"rule": "rotating", "parts": tau, "by": by}}


def _rows(
    model: str,
    layers: int,
    fleet: dict[str, Any],
    scored: int,
    batch: int,
    schedule: Schedule,
    steps: int,
    published: Mapping[int, tuple[str, float, float]] = PUBLISHED,
    own_rates: bool = False,
    prefix: str = "",
    **local: Any,
) -> list[PaperRow]:
    """Scores every so many steps. A model has to have as many layers as there are parts, if they are parts by layer."""
    rows = []
    for tau, (rate, periodic, partial) in published.items():
        for by in (PERIODIC, "layer", "channel"):
            if by == "layer" and tau > layers:
                continue
            label = by if by == PERIODIC else f"partial, by {by}"
            told = {FINAL: periodic if by == PERIODIC else partial}
            own = replace(schedule, rate=rate) if own_rates else schedule
            job, panel = _job(fleet, batch, own, steps, tau, by, **local), f"{prefix}τ = {tau}"
            every = {"evaluate_every": scored // tau if by == PERIODIC else scored}
            rows.append(PaperRow(f"{panel}, {label}", model, job, told, panel, label, every=every))
    return rows


EVERY = {"apart_every": 1}
PER_EPOCH = {"fashion_mnist": 60_000 / 128 / 32, "cifar10": 50_000 / 128 / 32}  # steps


def _scheduled(dataset: str, warm_up: int, *decays: int) -> Schedule:
    """Count the paper's epochs in steps."""
    of = PER_EPOCH[dataset]
    return Schedule("", round(of * warm_up), tuple(round(of * decay) for decay in decays))


def _full() -> Setting:
    fleet = {"devices": 128, "partitioner": "iid"}
    fashion, cifar = ({**fleet, "dataset": name} for name in PER_EPOCH)
    note = (
        "The paper's table 1: IID on 128 devices, batch 32, momentum 0.9 that devices keep, weight decay 1e-4, a rate "
        "for every τ, reached over the first 5 epochs. VGG-11 on Fashion-MNIST: 90 epochs (1,320 steps), rates 0.2, "
        "0.1 and 0.08, a tenth after 50 and 75 epochs. ResNet20 on CIFAR-10: 300 epochs (3,664 steps), rate 1.2, a "
        "tenth after 150 and 225, crop and flip, which the paper does not mention but its reference for this network "
        "has. It counts 50,000 training samples of Fashion-MNIST; here they are the 60,000 that there are."
    )
    rows = _rows("vgg11", 9, fashion, 40, 32, _scheduled("fashion_mnist", 5, 50, 75), 1320, own_rates=True)
    rows += _rows(
        "resnet20",
        11,
        cifar,
        40,
        32,
        _scheduled("cifar10", 5, 150, 225),
        3664,
        CIFAR,
        True,
        "CIFAR-10, ",
        crop=4,
        flip=True,
    )
    return Setting(note, rows, every=EVERY)


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
    return Setting(note, _rows("mnist_cnn@0.25", 4, fleet, 24, 16, Schedule("0.05"), 240), every=EVERY)


def _smoke() -> Setting:
    fleet = {"devices": 4, "dataset": "digits", "samples": 200, "test_samples": 64}
    return Setting(
        "scikit-learn's digits on 4 devices, 8 steps.",
        _rows("digits", 2, fleet, 8, 8, Schedule("0.05"), 8),
        every=EVERY,
    )


def _compared(column: str, larger: bool, kind: str) -> Any:
    """Of every τ: partial averaging beside periodic averaging."""

    def test(measured: Measured) -> bool | None:
        found = []
        for label, row in measured.items():
            panel = label.removesuffix(f", {PERIODIC}")
            periodic, partial = row.get(column), measured.get(f"{panel}, partial, by {kind}", {}).get(column)
            if panel != label and periodic is not None and partial is not None:
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
        Column(HIGHEST, highest_distance, 4),
        Column(MEAN, _mean, 4),
        Column(MESSAGES, _messages, 0),
    ),
    (
        Claim("by layer: the highest distance between local models is lower", _compared(HIGHEST, False, "layer")),
        Claim("by channel: the highest distance between local models is lower", _compared(HIGHEST, False, "channel")),
        Claim("by layer: higher accuracy at every τ", _compared(FINAL, True, "layer")),
        Claim("by channel: higher accuracy at every τ", _compared(FINAL, True, "channel")),
    ),
    x="steps",
    drawn=(
        Drawn("", "test accuracy, %", lambda run: (run.progress("steps"), 100 * run.values("accuracy"))),
        Drawn("distance after each step", "squared distance of the whole model", distances),
    ),
)


# --- unequal data, some of the devices at a time ---------------------------------------------------------------------

# share of the devices, α -> periodic averaging every 10 steps, and partial averaging with τ = 11 whose local models are
# averaged before they are handed on, or handed on as they are: tables 3 and 4, ResNet20 on CIFAR-10
UNEQUAL: Mapping[tuple[int, str], tuple[float, float, float]] = {
    (100, "1"): (90.38, 90.74, 91.54),
    (100, "0.5"): (90.18, 90.53, 91.43),
    (100, "0.1"): (89.92, 90.39, 91.08),
    (50, "1"): (89.98, 90.69, 90.64),
    (50, "0.5"): (89.51, 90.23, 91.02),
    (50, "0.1"): (88.99, 89.89, 90.17),
    (25, "1"): (89.32, 89.64, 91.00),
    (25, "0.5"): (88.73, 89.39, 90.16),
    (25, "0.1"): (87.70, 88.32, 88.95),
}
DESIGNS = {"averaged first": "averaged", "handed on": "local"}


def _unequal(
    model: str,
    fleet: dict[str, Any],
    cases: Collection[tuple[int, str]],
    intervals: tuple[int, int],
    steps: int,
    batch: int,
    schedule: Schedule,
    every: int,
    **local: Any,
) -> list[PaperRow]:
    """Make rows of all cases: periodic averaging, and both ways of handing local models on."""
    rows, (tau, longer) = [], intervals
    for share, alpha in cases:
        given = {**fleet, "partitioner": "dirichlet", "partition": {"alpha": float(alpha)}}
        own = replace(schedule, rate="0.2") if (share, alpha) == (25, "0.1") and schedule.rate == "0.4" else schedule
        panel, figures = f"{share} %, Dirichlet {alpha}", UNEQUAL[share, alpha]
        for place, name in enumerate((PERIODIC, *DESIGNS)):
            job = _job(given, batch, own, steps, *((longer, "channel") if place else (tau, PERIODIC)), **local)
            if place:
                job["sync"]["redistribute"] = DESIGNS[name]
            job["participate"] = {"fraction_train": share / 100}
            scored = {"evaluate_every": every // job["local"]["steps"]}
            label = f"{panel}, {name}"
            rows.append(PaperRow(label, model, job, {FINAL: figures[place]}, panel, name, every=scored))
    return rows


def _unequal_full() -> Setting:
    note = (
        "The paper's tables 3 and 4 on CIFAR-10: ResNet20, 128 devices, 10,000 steps of batch 32, momentum 0.9 that "
        "devices keep, weight decay 1e-4, rate 0.4 (0.2 for 25 % with Dirichlet 0.1), reached over the first 5 epochs, "
        "a tenth after 5,000 and 7,500 steps; periodic averaging every 10 steps, partial averaging by channel with "
        "τ = 11 and a new cohort after 110 steps. Crop and flip, which the paper does not mention but its reference "
        "for this network has."
    )
    schedule = Schedule("0.4", round(5 * PER_EPOCH["cifar10"]), (5000, 7500))
    fleet = {"devices": 128, "dataset": "cifar10"}
    rows = _unequal("resnet20", fleet, UNEQUAL, (10, 11), 10_000, 32, schedule, 100, crop=4, flip=True)
    return Setting(note, rows)


def _unequal_short() -> Setting:
    note = (
        "Fashion-MNIST, 4,000 training and 1,000 test samples, the MNIST CNN with a quarter of its channels, 16 "
        "devices, 440 steps of batch 16, momentum 0.9 that devices keep, weight decay 1e-4, rate 0.05; intervals of 10 "
        "and 11 steps."
    )
    fleet = {"devices": 16, "dataset": "fashion_mnist", "samples": 4000, "test_samples": 1000}
    cases = [(100, "0.1"), (25, "0.5")]
    return Setting(note, _unequal("mnist_cnn@0.25", fleet, cases, (10, 11), 440, 16, Schedule("0.05"), 40))


def _unequal_smoke() -> Setting:
    fleet = {"devices": 8, "dataset": "digits", "samples": 400, "test_samples": 64}
    rows = _unequal("digits", fleet, [(50, "1")], (2, 2), 44, 8, Schedule("0.05"), 22)
    return Setting("scikit-learn's digits on 8 devices, 44 steps.", rows)


def _better(first: str, second: str) -> Claim:
    def test(measured: Measured) -> bool | None:
        found = []
        for label, row in measured.items():
            panel = label.removesuffix(f", {first}")
            ours, theirs = row.get(FINAL), measured.get(f"{panel}, {second}", {}).get(FINAL)
            if panel != label and ours is not None and theirs is not None:
                found.append(ours > theirs)
        return all(found) if found else None

    return Claim(f"{first}: higher accuracy than {second} everywhere", test)


UNEQUAL_TABLE = Table(
    "partial-averaging-unequal",
    "Lee, Sahu, He and Avestimehr, Partial Model Averaging in Federated Learning, 2022, tables 3 and 4",
    "With unequal data and some of the devices at a time, averaging parts is better than averaging all.",
    {"smoke": _unequal_smoke, "short": _unequal_short, "full": _unequal_full},
    (Column(FINAL, final_accuracy), Column(BEST, best_accuracy), Column(MESSAGES, _messages, 0)),
    (_better("averaged first", PERIODIC), _better("handed on", PERIODIC)),
    x="steps",
)
