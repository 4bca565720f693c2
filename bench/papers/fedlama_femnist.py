"""FedLAMA on FEMNIST: the accuracy of averaging often at the cost of averaging seldom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.papers.measures import best_accuracy, bytes_up, final_accuracy
from bench.papers.table import Claim, Column, Measured, PaperRow, Setting, Table, above

ACCURACY, COST, BEST = "accuracy at the end %", "communication cost %", "best accuracy %"
PUBLISHED: Mapping[str, tuple[float, float]] = {
    "FedAvg(10)": (86.04, 100),
    "FedAvg(20)": (85.38, 50),
    "FedLAMA(10, 2)": (86.01, 52.83),
    "FedAvg(40)": (83.97, 25),
    "FedLAMA(10, 4)": (85.61, 29.97),
}
MOMENTUM = [{"rule": "momentum", "factor": 0.9, "between": "keep"}]
# label -> algorithm, τ', φ; and how many rounds are φ = 4 times ten steps, after which everything is synchronised.
METHODS: Mapping[str, tuple[str, int, int, int]] = {
    "FedAvg(10)": ("fedavg", 10, 1, 4),
    "FedAvg(20)": ("fedavg", 20, 1, 2),
    "FedLAMA(10, 2)": ("fedlama", 10, 2, 4),
    "FedAvg(40)": ("fedavg", 40, 1, 1),
    "FedLAMA(10, 4)": ("fedlama", 10, 4, 4),
}


def _rows(
    model: str, iterations: int, rate: str, fleet: Mapping[str, Any], active: float, batch: int, warm_up: int = 0
) -> list[PaperRow]:
    """Make rows with equally many local steps, scored after the same ones."""
    rows = []
    for label, (algorithm, steps, factor, every) in METHODS.items():
        job = {
            "algorithm": algorithm,
            "num_rounds": iterations // steps,
            "participate": {"fraction_train": active},
            "local": {
                "steps": steps,
                "batch": batch,
                "rate": f"{rate} warmup {warm_up // steps}" if warm_up else rate,
                "rules": MOMENTUM,
            },
            "sync": {"factor": factor} if algorithm == "fedlama" else {},
            "simulate": dict(fleet),
        }
        accuracy, cost = PUBLISHED[label]
        measured = {"evaluate_every": every, "by_layer_every": 1 if algorithm == "fedlama" else 0}
        rows.append(PaperRow(label, model, job, {ACCURACY: accuracy, COST: cost}, every=measured))
    return rows


def _full() -> Setting:
    fleet = {"devices": 128, "dataset": "femnist", "partitioner": "natural", "partition": {"groups_per_partition": 2}}
    return Setting(
        "The paper's table 3, its rows of 25 %: FEMNIST, 128 devices, a quarter of them in every window of φτ' steps, "
        "batch 32, rate 0.04 reached over the first 10 epochs (about 100 steps), 2,000 local steps; an interval for "
        "each of the network's four layers. The paper does not name its optimiser: momentum 0.9 that devices keep, as "
        "in the authors' other papers. It does not say either who has which of the writers' samples; here a "
        "device has two writers, as in EmbracingFL.",
        _rows("femnist_cnn", 2000, "0.04", fleet, 0.25, 32, warm_up=100),
    )


def _short() -> Setting:
    fleet = {
        "devices": 32,
        "dataset": "femnist",
        "partitioner": "natural",
        "partition": {"groups_per_partition": 2},
        "test_samples": 1000,
    }
    return Setting(
        "FEMNIST, 32 devices of two writers, 8 of them in every window, batch 16, the CNN with an eighth of its "
        "channels, 1,000 local steps with momentum 0.9 and rate 0.04 for every row, reached over the first 240 of "
        "them; every row is scored after each 40.",
        _rows("femnist_cnn@0.125", 1000, "0.04", fleet, 0.25, 16, warm_up=240),
    )


def _smoke() -> Setting:
    fleet = {"devices": 8, "dataset": "digits", "samples": 400, "test_samples": 200}
    return Setting(
        "scikit-learn's digits, 80 local steps: whether it runs.", _rows("digits", 80, "0.05", fleet, 0.5, 8)
    )


def _close(few: str, many: str, share: float) -> Claim:
    """FedLAMA loses only a part of the accuracy that averaging seldom loses."""

    def test(measured: Measured) -> bool | None:
        often, seldom, ours = (measured.get(label, {}).get(ACCURACY) for label in ("FedAvg(10)", many, few))
        if often is None or seldom is None or ours is None:
            return None
        return often - ours < share * (often - seldom)

    return Claim(f"{few} loses less than half of what {many} loses", test)


def _cost(label: str, seldom: str, most: float) -> Claim:
    def test(measured: Measured) -> bool | None:
        ours, least = (measured.get(name, {}).get(COST) for name in (label, seldom))
        return None if ours is None or least is None else least < ours < least + most

    return Claim(f"{label} costs at most {most:g} points more than {seldom}", test)


FEDLAMA = Table(
    "fedlama-femnist",
    "Lee, Zhang and Avestimehr, Layer-wise Adaptive Model Aggregation for Scalable Federated Learning, AAAI 2023, "
    "table 3",
    "FedLAMA has about the accuracy of FedAvg with the short interval and about the cost of FedAvg with the long one.",
    {"smoke": _smoke, "short": _short, "full": _full},
    (Column(ACCURACY, final_accuracy), Column(COST, bytes_up, relative=True), Column(BEST, best_accuracy)),
    (
        Claim("FedAvg(10) above FedAvg(20)", above(ACCURACY, ["FedAvg(10)"], ["FedAvg(20)"])),
        Claim("FedAvg(20) above FedAvg(40)", above(ACCURACY, ["FedAvg(20)"], ["FedAvg(40)"])),
        Claim("FedLAMA(10, 2) above FedAvg(20)", above(ACCURACY, ["FedLAMA(10, 2)"], ["FedAvg(20)"])),
        Claim("FedLAMA(10, 4) above FedAvg(40)", above(ACCURACY, ["FedLAMA(10, 4)"], ["FedAvg(40)"])),
        _close("FedLAMA(10, 2)", "FedAvg(20)", 0.5),
        _close("FedLAMA(10, 4)", "FedAvg(40)", 0.5),
        _cost("FedLAMA(10, 2)", "FedAvg(20)", 10),
        _cost("FedLAMA(10, 4)", "FedAvg(40)", 10),
    ),
    x="steps",
    maps=(("FedLAMA(10, 2)", "interval"), ("FedLAMA(10, 4)", "interval")),
)
