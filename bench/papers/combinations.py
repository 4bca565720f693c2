"""What no paper has: EmbracingFL, FedLAMA, DOMO and others together; accuracy, bytes, a device's work and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.papers.measures import LAST, best_accuracy, final_accuracy
from bench.papers.run_cell import bundle_of
from bench.papers.table import Claim, Column, Measured, PaperRow, Setting, Table
from edge_runtime.bundle_files import read_manifest
from federation.capacity import FLOAT_BYTES, forward_macs, predicted_memory, training_macs
from federation.manifest import Manifest
from simulation.runs import Run

JOINING = 0.25  # of the fleet, in each round
SHARE, SMALL_SHARE = 0.4, 0.15  # of the bytes of rounds in which so many send and receive the whole model
FINAL, BEST = "accuracy at the end %", "best accuracy %"
BUDGET, SMALL_BUDGET = (f"accuracy at {share:.0%} of the bytes" for share in (SHARE, SMALL_SHARE))
MARGIN = 1.0  # points that count as a lead
WINS = "a combination is more than a point above every published algorithm"
BYTES, WORK, MEMORY = "MB up and down", "million MACs per device and round", "memory of the smallest, MB"
ALL_STRONG = "FedAvg, if all were strong"
_EXTRA = {"server_momentum": 1, "control_variate": 2}  # vectors beside weights, gradients and momentum

MOMENTUM = [{"rule": "weight_decay", "factor": 1e-4}, {"rule": "momentum", "factor": 0.9}]
DECAYED = {"rule": "weight_decay", "factor": 1e-4}
DOMO = [
    DECAYED,
    {"rule": "momentum", "factor": 0.6},
    {"rule": "server_momentum", "beta": 0.9, "when": "before"},
]
SERVER = {"rule": "momentum", "factor": 0.9}
LAMA = {"sync": {"rule": "fedlama", "factor": 2}}
COORDINATED = {"local": {"rules": DOMO}, "serve": SERVER}
CONTROL = {"local": {"rules": [DECAYED, {"rule": "control_variate"}]}}
# name -> whether weak devices take part, and the tables that differ from FedAvg with local momentum
PUBLISHED: Mapping[str, tuple[bool, Mapping[str, Any]]] = {
    "FedAvg": (False, {}),
    "FedLAMA": (False, LAMA),
    "DOMO": (False, COORDINATED),
    "EmbracingFL": (True, {}),
}
COMBINED: Mapping[str, tuple[bool, Mapping[str, Any]]] = {
    "FedLAMA × DOMO": (False, {**LAMA, **COORDINATED}),
    "EmbracingFL × FedLAMA": (True, LAMA),
    "EmbracingFL × DOMO": (True, COORDINATED),
    "EmbracingFL × FedLAMA × DOMO": (True, {**LAMA, **COORDINATED}),
    "EmbracingFL × SCAFFOLD": (True, CONTROL),
    "EmbracingFL × FedNova": (True, {"weigh": {"by": "samples", "normalise": True}}),
}


@lru_cache
def _manifest(runs: Path, model: str) -> Manifest:
    return read_manifest(bundle_of(model, (), runs / "bundles"))


def _about(run: Run) -> tuple[Manifest, dict[str, Any], dict[str, int]]:
    """The model, the job, and how many devices of each tier take part."""
    assert run.path is not None
    job = run.about["job"]
    tiers = job["simulate"]["tiers"]
    if job["cover"]["rule"] == "everything":
        tiers = {name: count for name, count in tiers.items() if name == "strong"}
    return _manifest(run.path.parent, job["bundle"]), job, tiers


def megabytes(run: Run) -> float | None:
    return float(run.progress("bytes")[-1] / 1e6)


def accuracy_at(share: float) -> Callable[[Run], float | None]:
    """The mean of the last scores until so many bytes were sent and received."""

    def measure(run: Run) -> float | None:
        manifest, job, _ = _about(run)
        everything = 2 * FLOAT_BYTES * manifest.space.size * JOINING * job["simulate"]["devices"] * job["num_rounds"]
        scores = run.values("accuracy")[run.progress("bytes") <= share * everything]
        scored = scores[np.isfinite(scores)]
        return 100 * float(scored[-LAST:].mean()) if len(scored) else None

    return measure


def work(run: Run) -> float | None:
    """Predicted, a mean over the fleet: local steps, and the frozen layers once over a device's own samples."""
    manifest, job, tiers = _about(run)
    samples = job["simulate"]["samples"] / job["simulate"]["devices"]
    total = 0.0
    for tier, count in tiers.items():
        start = manifest.boundary(tier)
        steps = job["local"]["steps"] * job["local"]["batch"] * training_macs(manifest, start)
        total += count * (steps + samples * forward_macs(manifest, start))
    return total / sum(tiers.values()) / 1e6


def memory(run: Run) -> float | None:
    """Predicted for the smallest device that takes part; what it keeps between rounds lies in files."""
    manifest, job, tiers = _about(run)
    extra = sum(_EXTRA.get(rule["rule"], 0) for rule in job["local"]["rules"])
    found = []
    for tier in tiers:
        start = manifest.boundary(tier)
        needed = predicted_memory(manifest, start, job["local"]["batch"]).total
        found.append(needed + extra * FLOAT_BYTES * manifest.weights_of(start))
    return min(found) / 1e6


def _row(name: str, weak: bool, tables: Mapping[str, Any], model: str, base: dict[str, Any]) -> PaperRow:
    """Deal data to the whole fleet; devices that cannot train everything take part only in EmbracingFL.

    Strong devices are few: without the others all of them take part in every round.
    """
    local = {**base["local"], "rules": MOMENTUM, **tables.get("local", {})}
    cover = {"rule": "output_side" if weak else "everything"}
    joining = {"fraction_train": JOINING if weak or name == ALL_STRONG else 1.0}
    job = {"algorithm": "fedavg", **base, **tables, "participate": joining, "local": local, "cover": cover}
    return PaperRow(name, model, job, panel="with weak devices" if weak else "strong devices alone")


def _rows(model: str, base: dict[str, Any]) -> list[PaperRow]:
    named = {**PUBLISHED, **COMBINED}
    rows = [_row(name, weak, tables, model, base) for name, (weak, tables) in named.items()]
    simulate = base["simulate"]
    all_strong = {**base, "simulate": {**simulate, "tiers": {"strong": simulate["devices"]}}}
    return [*rows, _row(ALL_STRONG, False, {}, model, all_strong)]


def _base(
    dataset: str, devices: int, tiers: dict[str, int], rounds: int, steps: int, batch: int, samples: int, **other: Any
) -> dict[str, Any]:
    return {
        "num_rounds": rounds,
        "local": {"steps": steps, "batch": batch, "rate": "0.05"},
        "simulate": {
            "devices": devices,
            "dataset": dataset,
            "partitioner": "dirichlet",
            "partition": {"alpha": 0.1},
            "tiers": tiers,
            "samples": samples,
            **other,
        },
    }


NOTE = (
    "A quarter of the fleet in each round, Dirichlet 0.1; weak devices train the dense layers. Without EmbracingFL "
    "only strong devices take part, all of them in each round. Weight decay 1e-4; local momentum 0.9, with DOMO 0.6, "
    "with SCAFFOLD none; FedLAMA with φ = 2."
)
RATES = ("0.01", "0.03", "0.1")


def _full() -> Setting:
    base = _base("fashion_mnist", 128, {"strong": 16, "moderate": 112}, 300, 10, 32, 60_000)
    note = f"Fashion-MNIST, the MNIST CNN, 16 strong and 112 weak devices, 300 rounds of 10 steps of batch 32. {NOTE}"
    return Setting(note, _rows("mnist_cnn", base), RATES, 0.4, {"evaluate_every": 5})


def _short() -> Setting:
    tiers = {"strong": 4, "moderate": 28}
    base = _base("fashion_mnist", 32, tiers, 80, 10, 16, 8000, test_samples=1000)
    note = (
        "Fashion-MNIST, 8,000 training and 1,000 test samples, the MNIST CNN with a quarter of its channels, 4 strong "
        f"and 28 weak devices, 80 rounds of 10 steps of batch 16; rates are tried for 40. {NOTE}"
    )
    return Setting(note, _rows("mnist_cnn@0.25", base), RATES, 0.5, {"evaluate_every": 2})


def _smoke() -> Setting:
    base = _base("digits", 16, {"strong": 8, "moderate": 8}, 2, 2, 8, 400, test_samples=64)
    rows = _rows("digits", base)
    return Setting("scikit-learn's digits on 16 devices, two rounds.", [rows[0], rows[3], rows[7], rows[8]])


def _best_of(measured: Measured, names: Mapping[str, Any], column: str) -> float | None:
    found = [measured.get(name, {}).get(column) for name in names]
    return max((value for value in found if value is not None), default=None)


def _combination_wins(column: str) -> Any:
    def test(measured: Measured) -> bool | None:
        ours, theirs = _best_of(measured, COMBINED, column), _best_of(measured, PUBLISHED, column)
        return None if ours is None or theirs is None else ours > theirs + MARGIN

    return test


COMBINATIONS = Table(
    "combinations",
    "none: the papers name combinations as future work",
    "Is a combination better than every published algorithm at the same bytes?",
    {"smoke": _smoke, "short": _short, "full": _full},
    (
        Column(FINAL, final_accuracy),
        Column(BEST, best_accuracy),
        Column(BUDGET, accuracy_at(SHARE)),
        Column(SMALL_BUDGET, accuracy_at(SMALL_SHARE)),
        Column(BYTES, megabytes, 1),
        Column(WORK, work, 1),
        Column(MEMORY, memory, 2),
    ),
    (
        Claim(f"{WINS} after the same rounds", _combination_wins(FINAL)),
        Claim(f"{WINS} at {SHARE:.0%} of the bytes", _combination_wins(BUDGET)),
        Claim(f"{WINS} at {SMALL_SHARE:.0%} of the bytes", _combination_wins(SMALL_BUDGET)),
    ),
    x="bytes",
    balance=True,
)
