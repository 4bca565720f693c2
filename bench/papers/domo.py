"""DOMO and its family: momentum of the server and of the devices, coordinated or not, on data of little similarity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.papers.measures import best_accuracy, final_accuracy
from bench.papers.table import Claim, Column, Measured, PaperRow, Setting, Table, above
from federation.job import plan_from, plan_to

METHODS: Mapping[str, str] = {
    "FedAvg": "fedavg",
    "FedAvgSM": "fedavg_sm",
    "FedAvgLM": "fedavg_lm",
    "FedAvgLM-Z": "fedavg_lm_z",
    "FedAvgSLM": "fedavg_slm",
    "FedAvgSLM-Z": "fedavg_slm_z",
    "DOMO": "domo",
    "DOMO-S": "domo_s",
}
# CIFAR-100 with VGG-16 at 40 %, SVHN with ResNet20 at 2 %: the paper has figures for these only.
PUBLISHED: Mapping[str, str] = {
    "FedAvg": "20.77 / 87.79",
    "FedAvgSM": "35.14 / 88.81",
    "FedAvgLM": "38.29 / 88.86",
    "FedAvgLM-Z": "35.45 / 87.93",
    "FedAvgSLM": "60.01 / 88.67",
    "FedAvgSLM-Z": "57.89 / 88.89",
    "DOMO": "62.47 / 90.34",
    "DOMO-S": "61.69 / 90.45",
}
SIMILARITIES = (5, 10, 20)
FINAL, BEST = "accuracy at the end %", "best accuracy %"
FUSED, BOTH, SERVER, LOCAL, NONE = (
    ("DOMO", "DOMO-S"),
    ("FedAvgSLM", "FedAvgSLM-Z"),
    ("FedAvgSM",),
    ("FedAvgLM", "FedAvgLM-Z"),
    ("FedAvg",),
)


def _label(similarity: int, method: str) -> str:
    return f"s = {similarity} %, {method}"


def _rules(preset: str, decay: float) -> list[dict[str, Any]]:
    """Put weight decay before the method's own rules."""
    own = plan_to(plan_from({"algorithm": preset, "bundle": "none"}))["local"]["rules"]
    return [{"rule": "weight_decay", "factor": decay}, *own] if decay else own


def _rows(
    model: str,
    steps: int,
    rounds: int,
    fleet: Mapping[str, Any],
    similarities: tuple[int, ...],
    decay: float = 0.0,
    prefix: str = "",
    **local: Any,
) -> list[PaperRow]:
    rows = []
    for similarity in similarities:
        for method, preset in METHODS.items():
            job = {
                "algorithm": preset,
                "num_rounds": rounds,
                "local": {"steps": steps, "batch": 32, "rules": _rules(preset, decay), **local},
                "simulate": {
                    **fleet,
                    "devices": 16,
                    "partitioner": "similarity",
                    "partition": {"similarity": similarity / 100},
                },
            }
            published = {FINAL: PUBLISHED[method]} if similarity == similarities[0] else {}
            panel, tuned = f"{prefix}similarity {similarity} %", f"{prefix}{method}"
            label = f"{prefix}{_label(similarity, method)}"
            rows.append(PaperRow(label, model, job, published, panel, method, tuned_as=tuned))
    return rows


_SHARED = (
    "16 devices, all of them in every round, one local epoch of batch 32, μ_s = 0.9, μ_l = 0.6, α = 1, β = 0.9. Every "
    "method has the rate that was best for it at s = 5 %, with a seed that does not count. "
)
_OTHER_DATA = "The paper's figures are of CIFAR-100 with VGG-16 at 40 % / SVHN with ResNet20 at 2 %."


def _full() -> Setting:
    rates = ("0.4", "0.2", "0.1", "0.05", "0.01", "0.005")
    fleet: dict[str, Any] = {"dataset": "cifar10"}
    given: dict[str, Any] = {"decay": 5e-4, "crop": 4, "flip": True}
    note = (
        "The paper's CIFAR-10: VGG-16 without batch norm, and at s = 10 % ResNet56 with group norm of 8 groups. "
        f"{_SHARED}An epoch is 98 steps; weight decay 5e-4, crop and flip, 200 epochs, the rate divided by 10 after "
        "120 and 160. "
        "Not the paper's: pixels are from 0 to 1 and not standardised, the output of VGG-16 has the 100 units of "
        "CIFAR-100, of which ten are used, and μ_s, μ_l, α and β are those that were best for the authors, where they "
        "tried them for every method. The paper has curves of CIFAR-10 and no table. "
    )
    rows = _rows("vgg16", 98, 200, fleet, SIMILARITIES, **given)
    rows += _rows("resnet56_gn", 98, 200, fleet, (10,), prefix="ResNet56, ", **given)
    return Setting(note + _OTHER_DATA, rows, tuple(f"{rate}/10@120,160" for rate in rates))


def _medium() -> Setting:
    fleet = {"dataset": "cifar10", "samples": 8000, "test_samples": 4000}
    rows = _rows("resnet8_gn@0.5", 16, 40, fleet, SIMILARITIES, decay=5e-4, crop=4, flip=True)
    note = (
        "8,000 training and 4,000 test images of CIFAR-10, ResNet8 with group norm of 8 groups and 8, 16 and 32 "
        f"channels (so the first stage normalises each channel by itself), {_SHARED}"
        f"An epoch is 16 steps; 40 rounds, weight decay 5e-4, crop and flip, the rate divided by 10 "
        f"after 24 and 32, as in the paper after 60 and 80 %. "
    )
    rates = tuple(f"{rate}/10@24,32" for rate in ("0.4", "0.2", "0.1", "0.05", "0.02"))
    return Setting(note + _OTHER_DATA, rows, rates, every={"evaluate_every": 4})


def _short() -> Setting:
    fleet = {"dataset": "fashion_mnist", "samples": 4000, "test_samples": 2000}
    return Setting(
        f"4,000 samples of Fashion-MNIST, two hidden layers of 50, {_SHARED}30 rounds of 8 steps, a constant rate. "
        + _OTHER_DATA,
        _rows("mnist_2nn@0.25", 8, 30, fleet, SIMILARITIES),
        ("0.4", "0.1", "0.03", "0.01"),
    )


def _smoke() -> Setting:
    fleet = {"dataset": "digits", "samples": 800, "test_samples": 200}
    return Setting(
        f"scikit-learn's digits, two rounds: whether it runs. {_OTHER_DATA}",
        _rows("digits", 2, 2, fleet, (10,)),
        ("0.1",),
    )


def _above(similarity: int, better: tuple[str, ...], worse: tuple[str, ...]) -> Claim:
    high, low = ([_label(similarity, method) for method in methods] for methods in (better, worse))
    return Claim(f"s = {similarity} %: {' or '.join(better)} above {' and '.join(worse)}", above(FINAL, high, low))


def _gap(measured: Measured, similarity: int) -> float | None:
    """By how much the better of DOMO and DOMO-S is above the best of the others."""
    at = {method: measured.get(_label(similarity, method), {}).get(FINAL) for method in METHODS}
    found = {method: value for method, value in at.items() if value is not None}
    fused = [value for method, value in found.items() if method in FUSED]
    others = [value for method, value in found.items() if method not in FUSED]
    return max(fused) - max(others) if fused and others else None


def _widens(measured: Measured) -> bool | None:
    gaps = [_gap(measured, similarity) for similarity in SIMILARITIES]
    found = [gap for gap in gaps if gap is not None]
    return found == sorted(found, reverse=True) if len(found) == len(gaps) else None


DOMO = Table(
    "domo",
    "Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022, figure 1 and tables 2 and 3",
    "DOMO(-S) is above FedAvgSLM(-Z), that above FedAvgSM, that above FedAvgLM(-Z), that above FedAvg; the less "
    "similar the data, the more.",
    {"smoke": _smoke, "short": _short, "medium": _medium, "full": _full},
    (Column(FINAL, final_accuracy), Column(BEST, best_accuracy)),
    (
        *(
            _above(similarity, better, worse)
            for similarity in SIMILARITIES
            for better, worse in ((FUSED, BOTH), (BOTH, SERVER), (SERVER, LOCAL), (LOCAL, NONE))
        ),
        Claim("DOMO's lead over the best of the others grows from 20 to 10 to 5 %", _widens),
    ),
)
