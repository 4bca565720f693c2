"""Runs as they lie on disk, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simulation.runs import RunGroup, group_runs, read_run

LAYERS = [
    {"round": 0, "per_layer": {"svcca": {"in": 1.0, "out": 0.8}, "discrepancy": {"in": 1e-6, "out": 1e-2}}},
    {"round": 1},
    {"round": 2, "per_layer": {"svcca": {"in": 0.9, "middle": None}, "interval": {"in": 10, "out": 20}}},
    {"round": 3, "per_layer": None},
]


def write(folder: Path, rows: list[dict[str, Any]], run: Any = None, ending: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + ending)
    if run is not None:
        (folder / "run.json").write_text(json.dumps(run))
    return folder


def scored(*accuracies: float | None, **more: Any) -> list[dict[str, Any]]:
    return [
        {"round": number, "steps": 10, "bytes_up": 1_000_000, "bytes_down": 2_000_000, "accuracy": value, **more}
        for number, value in enumerate(accuracies)
    ]


def job(name: str, seed: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "job": {"rounds": 3, "simulate": {"seed": seed, "devices": 4}, **more}, "seeds": [seed]}


def three(tmp_path: Path) -> RunGroup:
    values = ([0.10, None, 0.30, 0.60], [0.20, 0.25, 0.20], [0.30, None, 0.70, 0.65])
    runs = [
        read_run(write(tmp_path / f"{seed}", scored(*accuracies, loss=1.0), job("m", seed)))
        for seed, accuracies in enumerate(values)
    ]
    (group,) = group_runs(runs)
    return group
