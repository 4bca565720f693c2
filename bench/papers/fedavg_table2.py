"""FedAvg beside SCAFFOLD on MNIST: rounds and megabytes to an accuracy; and what moves FedAvg's curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from bench.papers.measures import (
    MEBIBYTE,
    best_accuracy,
    final_accuracy,
    mebibytes_per_worker,
    mebibytes_per_worker_to,
    rounds_to,
    seconds_to,
    swing,
)
from bench.papers.table import Claim, Column, Measured, PaperRow, Setting, Table, above
from federation.schedule import two_sided_rates
from federation.traffic import Link

PAPER = "Yang, Fang and Liu, Achieving Linear Speedup with Partial Worker Participation in Non-IID Federated Learning"
ALGORITHMS = {"SCAFFOLD": "scaffold", "FedAvg": "fedavg"}
MODELS = {"LR": "mnist_lr", "2NN": "mnist_2nn", "CNN": "mnist_cnn"}
# (digits per worker, workers of a round, model) -> rounds, mebibytes and seconds, of SCAFFOLD and of FedAvg each.
PUBLISHED: Mapping[tuple[int, int, str], tuple[tuple[int, int], tuple[float, float], tuple[float, float]]] = {
    (10, 10, "LR"): ((3, 3), (0.36, 0.18), (0.32, 0.22)),
    (10, 10, "2NN"): ((3, 3), (9.12, 4.56), (0.88, 0.56)),
    (10, 10, "CNN"): ((3, 3), (26.64, 13.32), (2.23, 1.57)),
    (10, 100, "LR"): ((5, 5), (0.60, 0.30), (0.53, 0.42)),
    (10, 100, "2NN"): ((5, 8), (15.20, 12.16), (1.51, 1.49)),
    (10, 100, "CNN"): ((1, 1), (8.88, 4.44), (0.79, 0.50)),
    (2, 10, "LR"): ((14, 14), (1.68, 0.84), (1.48, 1.16)),
    (2, 10, "2NN"): ((14, 14), (42.55, 21.28), (4.23, 2.46)),
    (2, 10, "CNN"): ((14, 10), (124.34, 44.41), (11.12, 4.92)),
    (2, 100, "LR"): ((7, 11), (0.84, 0.66), (0.72, 0.91)),
    (2, 100, "2NN"): ((7, 17), (21.28, 25.84), (2.11, 3.16)),
    (2, 100, "CNN"): ((17, 7), (150.98, 31.08), (13.50, 3.51)),
}
LINK = Link(8 * 20 * MEBIBYTE, 8 * 20 * MEBIBYTE)  # the paper's 20 MB/s each way
ROUNDS, MEBIBYTES = "rounds to 95 %", "MiB per worker to 95 %"
SECONDS = "seconds to 95 %, 20 MB/s"  # of exchange; those of the paper have the computation on a V100 in them
EASIER, EASIEST, BEST = "rounds to 90 %", "rounds to 80 %", "best accuracy %"
EASIER_MEBIBYTES, EASIER_SECONDS = "MiB per worker to 90 %", "seconds to 90 %, 20 MB/s"
PER_ROUND = "MiB per worker and round"
FINAL, SWING = "accuracy at the end %", "change per round %"


def job_of(
    algorithm: str,
    digits: int,
    workers: int,
    rounds: int,
    *,
    epochs: int = 5,
    batch: int = 10,
    devices: int = 100,
    dataset: str = "mnist",
    samples: int | None = None,
) -> dict[str, Any]:
    """The tables of a job: so many digits on each device, so many of the devices in a round."""
    fleet: dict[str, Any] = {
        "devices": devices,
        "dataset": dataset,
        "partitioner": "digits",
        "partition": {"labels_per_partition": digits},
    }
    return {
        "algorithm": algorithm,
        "num_rounds": rounds,
        "participate": {"count": workers},
        "local": {"epochs": epochs, "batch": batch, "rate": "0.1"},
        "serve": {"devices": devices} if algorithm == "scaffold" else {},
        "simulate": fleet if samples is None else {**fleet, "samples": samples},
    }


def _row(
    case: tuple[int, int, str], algorithm: str, model: str, stop_at: float | None, job: dict[str, Any]
) -> PaperRow:
    digits, workers, name = case
    which = list(ALGORITHMS).index(algorithm)
    published = dict(zip((ROUNDS, MEBIBYTES, SECONDS), (figures[which] for figures in PUBLISHED[case])))
    place = f"{'IID' if digits == 10 else f'{digits} digits'}, n = {workers}"
    label = f"{place}, {name}, {algorithm}"
    return PaperRow(label, model, job, published, f"{name}, {place}", algorithm, stop_at=stop_at)


def _full() -> Setting:
    rows = [
        _row(case, algorithm, MODELS[case[2]], 0.95, job_of(preset, case[0], case[1], 100))
        for case in PUBLISHED
        for algorithm, preset in ALGORITHMS.items()
    ]
    return Setting(
        "The paper's table 2 on MNIST, 100 workers, its rates 0.1 and 1, 5 local epochs, at most 100 rounds. It does "
        "not say its batch size; ours is 10. A run ends when its model has 95 % of the whole test set right. Seconds "
        "are those of the exchange over 20 MB/s; the paper's have the computation on a V100 in them. Its ResNet18 on "
        "CIFAR-10 is not here.",
        rows,
    )


def _short() -> Setting:
    rows = []
    for case in sorted(PUBLISHED, key=lambda case: case[1]):
        digits, workers, name = case
        if name == "CNN" and workers == 100 and digits == 2:
            continue
        rounds = 15 if workers == 100 or (name == "CNN" and digits == 2) else 30
        model = MODELS[name] if name == "LR" else f"{MODELS[name]}@0.25"
        for algorithm, preset in ALGORITHMS.items():
            job = job_of(preset, digits, workers, rounds, samples=20_000)
            rows.append(_row(case, algorithm, model, 0.90, job))
    return Setting(
        "20,000 samples of MNIST, 100 workers, the paper's rates 0.1 and 1, 5 local epochs, batch 10, at most 30 "
        "rounds with n = 10 and 15 with n = 100. A run ends at 90 % of the whole test set. 2NN and CNN have a quarter "
        "of their units and channels; the CNN with 2 digits runs for 15 rounds, and with n = 10 only.",
        rows,
    )


def _smoke() -> Setting:
    rows = []
    for algorithm, preset in ALGORITHMS.items():
        job = job_of(preset, 2, 10, 2, epochs=1, devices=20, dataset="digits", samples=800)
        rows.append(_row((2, 10, "2NN"), algorithm, "digits", 0.95, job))
    return Setting("scikit-learn's digits on 20 devices, two rounds: whether it runs, nothing else.", rows)


def _twice_the_bytes(measured: Measured) -> bool | None:
    ratios = [
        more / less
        for _, ours, theirs in _beside_scaffold(measured)
        if (less := ours[PER_ROUND]) and (more := theirs[PER_ROUND])
    ]
    return all(1.95 < ratio < 2.05 for ratio in ratios) if ratios else None


def _beside_scaffold(measured: Measured) -> list[tuple[str, Mapping[str, float | None], Mapping[str, float | None]]]:
    """Every case with FedAvg's figures and SCAFFOLD's."""
    cases = [label.removesuffix("FedAvg") for label in measured if label.endswith("FedAvg")]
    return [(case, measured[case + "FedAvg"], measured[case + "SCAFFOLD"]) for case in cases]


def _cheaper_than_scaffold(data: str, column: str) -> Claim:
    """A run that did not get there took more."""

    def test(measured: Measured) -> bool | None:
        found = [
            (ours.get(column) or math.inf) < cost
            for case, ours, theirs in _beside_scaffold(measured)
            if case.startswith(data) and (cost := theirs.get(column)) is not None
        ]
        return all(found) if found else None

    return Claim(f"{data}: FedAvg takes fewer {column} than SCAFFOLD", test)


def _slower_with_two_digits(measured: Measured) -> bool | None:
    found = []
    for label, row in measured.items():
        iid = measured.get(label.replace("2 digits", "IID"), {}).get(EASIER)
        if label.startswith("2 digits") and iid is not None:
            rounds = row.get(EASIER)
            found.append(rounds is None or rounds > iid)
    return all(found) if found else None


def _workers_help(measured: Measured) -> bool | None:
    found = []
    for label, row in measured.items():
        many = measured.get(label.replace("n = 10,", "n = 100,"), {}).get(EASIEST)
        few = row.get(EASIEST)
        if label.startswith("2 digits, n = 10,") and many is not None:
            found.append(few is None or many < few)
    return all(found) if found else None


TABLE2 = Table(
    "fedavg-table2",
    PAPER + ", ICLR 2021, table 2",
    "FedAvg gets to an accuracy with fewer bytes than SCAFFOLD, and in fewer seconds over links of 20 MB/s.",
    {"smoke": _smoke, "short": _short, "full": _full},
    (
        Column(ROUNDS, rounds_to(0.95), 1),
        Column(MEBIBYTES, mebibytes_per_worker_to(0.95)),
        Column(SECONDS, seconds_to(0.95, LINK), 3),
        Column(EASIER, rounds_to(0.90), 1),
        Column(EASIER_MEBIBYTES, mebibytes_per_worker_to(0.90)),
        Column(EASIER_SECONDS, seconds_to(0.90, LINK), 3),
        Column(EASIEST, rounds_to(0.80), 1),
        Column(PER_ROUND, mebibytes_per_worker, 3),
        Column(BEST, best_accuracy),
    ),
    (
        Claim("SCAFFOLD moves twice FedAvg's bytes in a round", _twice_the_bytes),
        *(
            _cheaper_than_scaffold(data, column)
            for column in (MEBIBYTES, SECONDS, EASIER_MEBIBYTES, EASIER_SECONDS)
            for data in ("IID", "2 digits")
        ),
        Claim("two digits per worker take more rounds than all ten, everywhere", _slower_with_two_digits),
        Claim("with two digits, 100 workers take fewer rounds to 80 % than 10, everywhere", _workers_help),
    ),
)


def _effect(label: str, panel: str, model: str, job: dict[str, Any]) -> PaperRow:
    return PaperRow(f"{panel}: {label}", model, job, panel=panel, curve=label)


def _effects(rounds: int, samples: int | None, many: int, model: str, **other: Any) -> list[PaperRow]:
    """The paper's figure 1: digits per worker, workers of a round, local epochs."""
    rows = []
    for digits in (1, 2, 5, 10):
        job = job_of("fedavg", digits, 10, rounds, samples=samples, **other)
        rows.append(_effect(f"{digits} digits", "digits per worker", model, job))
    for workers in (10, 50, many):
        job = job_of("fedavg", 2, workers, rounds, samples=samples, **other)
        rows.append(_effect(f"n = {workers}", "workers of a round", model, job))
    for epochs in (1, 5, 10):
        job = job_of("fedavg", 5, 10, rounds, samples=samples, **{**other, "epochs": epochs})
        rows.append(_effect(f"{epochs} epochs", "local epochs", model, job))
    return rows


def _effects_full() -> Setting:
    return Setting(
        "MNIST, 2NN, 100 workers, n = 10 where nothing else is said, 2 digits for the workers of a round and 5 for the "
        "epochs, rates 0.1 and 1, batch 10, 100 rounds.",
        _effects(100, None, 100, "mnist_2nn"),
    )


def _effects_short() -> Setting:
    return Setting(
        "10,000 samples of MNIST, 2NN with half of its units, 100 workers, n = 10 where nothing else is said, 2 digits "
        "for the workers of a round and 5 for the epochs, rates 0.1 and 1, batch 10, 25 rounds.",
        _effects(25, 10_000, 100, "mnist_2nn@0.5"),
    )


def _effects_smoke() -> Setting:
    rows = _effects(2, 800, 20, "digits", devices=50, dataset="digits")
    return Setting("scikit-learn's digits on 50 devices, two rounds.", rows[2:4] + rows[7:9])


def _ordered(panel: str, column: str, labels: tuple[str, ...]) -> Claim:
    """Claim that each row is above the one before it."""

    def test(measured: Measured) -> bool | None:
        names = [f"{panel}: {label}" for label in labels]
        steps = [above(column, [high], [low])(measured) for low, high in pairwise(names)]
        return None if None in steps else all(steps)

    return Claim(f"{panel}, {column}: {' < '.join(labels)}", test)


EFFECTS = Table(
    "fedavg-effects",
    PAPER + ", ICLR 2021, figure 1",
    "Fewer digits per worker slow FedAvg down and make it swing; more workers and more local epochs help.",
    {"smoke": _effects_smoke, "short": _effects_short, "full": _effects_full},
    (Column(FINAL, final_accuracy), Column(BEST, best_accuracy), Column(SWING, swing)),
    (
        _ordered("digits per worker", FINAL, ("1 digits", "2 digits", "5 digits", "10 digits")),
        _ordered("digits per worker", SWING, ("10 digits", "5 digits", "2 digits", "1 digits")),
        _ordered("workers of a round", FINAL, ("n = 10", "n = 50", "n = 100")),
        _ordered("workers of a round", SWING, ("n = 100", "n = 50", "n = 10")),
        _ordered("local epochs", FINAL, ("1 epochs", "5 epochs", "10 epochs")),
    ),
)


# --- two-sided rates, and as many workers as there are ---------------------------------------------------------------

WORKERS = (1, 2, 5, 10, 20, 50, 100)
SMOOTHNESS = 1.0  # the L of the theory


def _two_sided(
    rounds: int,
    steps: int,
    counts: tuple[int, ...],
    model: str,
    every: int,
    shared: tuple[int, ...],
    stop_at: float | None = None,
    **fleet: Any,
) -> Setting:
    """Take the rates of the paper's corollary 2: η_l = 1/(√T·K·L) and η = √(K·n).

    `counts` have T rounds each. `shared` divide them: n workers have T/n rounds, and the rates of so many, which is
    what the corollary promises to reach the same error.
    """

    def row(label: str, workers: int, rounds: int, stop_at: float | None, panel: str) -> PaperRow:
        local, server = two_sided_rates(rounds, steps, workers, SMOOTHNESS)
        job = job_of("fedavg", 2, workers, rounds, **fleet)
        job |= {"serve": {"rate": server}, "local": {"steps": steps, "batch": 10, "rate": f"{local:.6g}"}}
        return PaperRow(label, model, job, panel=panel, curve=f"n = {workers}", stop_at=stop_at)

    rows = [row(f"n = {workers}", workers, rounds, stop_at, "rates of the same T") for workers in counts]
    rows += [
        row(_divided(workers), workers, rounds // workers, None, "T/n rounds and their rates") for workers in shared
    ]
    note = (
        f"MNIST, 100 workers with two digits each, 2NN, T = {rounds:,} rounds of K = {steps} steps of batch 10, local "
        f"rate 1/(√T·K·L), server's rate √(K·n); in rows with T/n rounds these have the rates of T/n. Theorem 1 asks "
        f"for a product of both of at most 1/(K·L), that is T ≥ K·n. L = {SMOOTHNESS:g} is ours: the paper has no "
        "figure for it, and ran its own experiments with the rates 0.1 and 1."
    )
    note += f" A run of T rounds ends at {stop_at:.0%}." if stop_at else ""
    return Setting(note, rows, every={"evaluate_every": every})


def _divided(workers: int) -> str:
    return f"n = {workers} for T/n rounds" if workers > 1 else "n = 1 for T rounds"


def _speedup(few: int, many: int) -> Claim:
    """Linear would be many / few; half of that counts."""

    def test(measured: Measured) -> bool | None:
        rounds = [measured.get(f"n = {n}", {}).get(EASIEST) for n in (few, many)]
        return None if rounds[0] is None or rounds[1] is None else rounds[0] / rounds[1] >= many / few / 2

    text = f"{many} workers of a round are at least {many // few // 2} times as quick to 80 % as {few}"
    return Claim(f"{text}, with rates for the same T", test)


def _as_far(many: int, margin: float = 2.0) -> Claim:
    def test(measured: Measured) -> bool | None:
        one, found = (measured.get(_divided(n), {}).get(FINAL) for n in (1, many))
        return None if one is None or found is None else found > one - margin

    return Claim(
        f"{many} workers get as far in T/{many} rounds as one in T, or less than {margin:g} points below", test
    )


SPEEDUP = Table(
    "fedavg-speedup",
    PAPER + ", ICLR 2021, corollary 2 and remark 6",
    "With two-sided rates, n times as many workers of a round take an n-th of the rounds.",
    {
        "smoke": lambda: _two_sided(2, 2, (2, 10), "digits", 1, (), devices=20, dataset="digits", samples=800),
        "short": lambda: _two_sided(200, 2, (1, 10, 100), "mnist_2nn@0.25", 5, (1, 2, 5, 10), samples=10_000),
        "full": lambda: _two_sided(1000, 10, WORKERS, "mnist_2nn", 1, (1, 2, 5, 10), stop_at=0.90),
    },
    (
        Column(EASIEST, rounds_to(0.80), 1),
        Column(EASIER, rounds_to(0.90), 1),
        Column(FINAL, final_accuracy),
        Column(BEST, best_accuracy),
    ),
    (_as_far(2), _as_far(5), _as_far(10), _speedup(1, 10), _speedup(10, 100)),
)
