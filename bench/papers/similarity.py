"""SVCCA between local models, layer by layer: EmbracingFL's figures 1 and 3."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.papers.embracing import PAPER
from bench.papers.measures import LAST
from bench.papers.table import Claim, Column, Drawn, Measured, PaperRow, Setting, Table
from simulation.runs import Floats, Run

ALONE, FIRST, SECOND, CHANNELS = "alone", "first half", "second half", "half of the channels"
PARTS = {ALONE: "none", FIRST: "first_half", SECOND: "second_half", CHANNELS: "half_of_channels"}
# Networks have as many layers as they have; five places of each are looked at, as in the paper.
PLACES = {"input side": 0.0, "a quarter in": 0.25, "middle": 0.5, "three quarters in": 0.75, "output": 1.0}


def _at(run: Run, place: float) -> Floats:
    """SVCCA over rounds at a place of the network; nan where it was not measured."""
    layers = run.layers("svcca")
    if not layers:
        return np.full(len(run.rounds), np.nan)
    found: Floats = run.by_layer("svcca", [layers[round(place * (len(layers) - 1))]])[0]
    return found


def _column(name: str, place: float) -> Column:
    def measure(run: Run) -> float | None:
        values = _at(run, place)
        seen = values[np.isfinite(values)]
        return float(seen[-LAST:].mean()) if len(seen) else None

    return Column(f"SVCCA, {name}", measure, 3)


def _drawn(name: str, place: float) -> Drawn:
    return Drawn(name, "SVCCA", lambda run: (run.progress("rounds"), _at(run, place)))


def _rows(model: str, job: dict[str, Any]) -> list[PaperRow]:
    return [
        PaperRow(label, model, {**job, "sync": {"rule": "one_part", "part": part}}) for label, part in PARTS.items()
    ]


def _job(dataset: str, devices: int, rounds: int, rate: str, steps: int, batch: int, **fleet: Any) -> dict[str, Any]:
    return {
        "algorithm": "embracing",
        "num_rounds": rounds,
        "local": {"steps": steps, "batch": batch, "rate": rate},
        "simulate": {
            "devices": devices,
            "dataset": dataset,
            "partitioner": "dirichlet",
            "partition": {"alpha": 0.1},
            **fleet,
        },
    }


def _full() -> Setting:
    job = _job("cifar10", 32, 100, "0.4", 10, 32)
    note = (
        "The paper's figures 1 and 3: ResNet20 on CIFAR-10, Dirichlet 0.1, rate 0.4, batch 32, 1,000 steps, a part "
        "synchronised every 10 of them, the largest similarity of any two models. 32 devices instead of 128, and 512 "
        "images of the test set instead of all of it."
    )
    every = {"evaluate_every": 0, "svcca_every": 5, "svcca_samples": 512}
    return Setting(note, _rows("resnet20", job), every=every)


def _short() -> Setting:
    job = _job("cifar10", 8, 12, "0.1", 10, 16, samples=4000, test_samples=1000)
    note = (
        "CIFAR-10, 4,000 training samples, ResNet8 with half of its channels (stem, three blocks, output), 8 devices, "
        "12 rounds of 10 steps of batch 16, Dirichlet 0.1, momentum 0.9, rate 0.1. Models are compared right after a "
        "synchronisation."
    )
    return Setting(note, _rows("resnet8@0.5", job), every={"evaluate_every": 0, "svcca_every": 3})


def _smoke() -> Setting:
    job = _job("digits", 4, 2, "0.05", 2, 8, samples=200, test_samples=100)
    return Setting(
        "scikit-learn's digits on 4 devices.",
        _rows("digits", job),
        every={
            "evaluate_every": 0,
            "svcca_every": 1,
        },
    )


def _values(measured: Measured, label: str) -> list[float] | None:
    found = [measured.get(label, {}).get(f"SVCCA, {name}") for name in PLACES]
    values = [value for value in found if value is not None]
    return values if len(values) == len(PLACES) else None


def _drifts(measured: Measured) -> bool | None:
    values = _values(measured, ALONE)
    return None if values is None else min(values[:2]) > max(values[3:])


def _everywhere_above(better: str, worse: str, places: slice) -> Any:
    def test(measured: Measured) -> bool | None:
        high, low = _values(measured, better), _values(measured, worse)
        if high is None or low is None:
            return None
        return all(a > b for a, b in zip(high[places], low[places]))

    return test


SVCCA = Table(
    "svcca",
    PAPER + ", figures 1 and 3",
    "Input-side layers of devices that train alone stay alike; synchronising the output side keeps the most alike.",
    {"smoke": _smoke, "short": _short, "full": _full},
    tuple(_column(name, place) for name, place in PLACES.items()),
    (
        Claim("alone: both places on the input side are more alike than both on the output side", _drifts),
        Claim(
            "the second half synchronised is above half of the channels at all five places",
            _everywhere_above(SECOND, CHANNELS, slice(0, 5)),
        ),
        Claim(
            "the second half synchronised is above the first half at both places on the output side",
            _everywhere_above(SECOND, FIRST, slice(3, 5)),
        ),
    ),
    drawn=tuple(_drawn(name, place) for name, place in PLACES.items()),
)
