"""A job that ran in simulation runs unchanged on the coordinator, and arrives at the same bits: every algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.algorithms import PUBLISHED
from tests.end_to_end.conftest import WriteJob
from tests.end_to_end.fleet import Fleet, job_text, read_weights, simulate


def check_both(text: str, write_job: WriteJob, fleet: Fleet, folder: Path) -> None:
    file = write_job(text)
    expected = simulate(file, folder / "run")
    found = fleet.run(file)
    first = read_weights(fleet.bundle, fleet.bundle / "weights.safetensors")
    assert (first != expected.weights).mean() > 0.5
    different = np.flatnonzero(found.view(np.uint32) != expected.weights.view(np.uint32))
    assert not different.size, f"{different.size} of {found.size} elements differ, the first at {different[0]}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_algorithm(name: str, write_job: WriteJob, fleet: Fleet, tmp_path: Path) -> None:
    local = {} if name == "partial_averaging" else {"steps": 3}
    check_both(job_text(name, rounds=5, **local), write_job, fleet, tmp_path)


DOMO = "[{ rule = 'momentum', factor = 0.6 }, { rule = 'server_momentum', beta = 0.9, when = 'before' }]"
# Three of five devices, drawn anew when the synchronisation allows it; each of them counts.
SOME = "[participate]\nquorum = 1.0\nmin_available = 5\ncount = 3\n"
COMBINATIONS = {
    "output side, FedLAMA, DOMO": job_text(
        "embracing", 6, "[sync]\nrule = 'fedlama'\n[serve]\nrule = 'momentum'\n", steps=3, rules=DOMO
    ),
    "output side, statistics of frozen layers": job_text(
        "embracing", 4, "[cover]\nfrozen_statistics = true\n", steps=3
    ),
    "statistics of frozen layers, FedLAMA, SCAFFOLD": job_text(
        "scaffold", 6, "[cover]\nfrozen_statistics = true\n[sync]\nrule = 'fedlama'\n", steps=3
    ),
    "rotating channels, SCAFFOLD": job_text(
        "scaffold", 7, "[sync]\nrule = 'rotating'\nparts = 3\nby = 'channel'\n", steps=2
    ),
    "widths, FedAdam": job_text("fedadam", 4, "[cover]\nrule = 'width'\n", steps=3),
    "output side, FedNova, epochs": job_text("embracing", 4, "[weigh]\nby = 'samples'\nnormalise = true\n", epochs=1),
    "FedLAMA, some take part, averaged momentum": job_text(
        "fedavg_slm", 7, f"[sync]\nrule = 'fedlama'\nfactor = 3\n{SOME}", steps=2
    ),
    "ordered dropout, DOMO-S": job_text("domo_s", 4, "[cover]\nrule = 'ordered_dropout'\n", steps=3),
    "SCAFFOLD, some take part, one of them twice": job_text("scaffold", 5, f"{SOME}replacement = true\n", steps=3),
    "VRL-SGD, input side, Yogi": job_text(
        "vrl_sgd", 4, "[cover]\nrule = 'input_side'\n[serve]\nrule = 'yogi'\n", steps=3
    ),
    "AdamW that is kept, clipped, in parts": job_text(
        "embracing",
        5,
        SOME,
        steps=3,
        rate='"0.003"',
        rules="[{ rule = 'adamw', between = 'keep' }]",
        clip_norm=0.5,
        micro_batch=5,
    ),
    "Adam behind weight decay, widths": job_text(
        "",
        3,
        "[cover]\nrule = 'width'\n",
        steps=2,
        rules="[{ rule = 'weight_decay', factor = 0.01 }, { rule = 'adam' }]",
    ),
    "DOMO, some take part": job_text("domo", 5, SOME, steps=3),
}
RESIDUAL = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.shortcut = nn.Conv2d(6, 6, 5, padding=2), nn.Conv2d(4, 6, 1)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).relu()) + self.shortcut(x)

def network():
    stem, dense, head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(6, 12), nn.Linear(12, 10)
    return nn.Sequential(stem, Block(), nn.ReLU(), nn.MaxPool2d(8), nn.Flatten(), dense, nn.ReLU(), head)
"""
LINEAR = """
from torch import nn

def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def test_fedlama_with_several_layers_in_a_piece(home: Path, write_job: WriteJob, fleet: Fleet, tmp_path: Path) -> None:
    """An interval belongs to a layer: some rounds synchronise a part of a piece of the bundle."""
    from model_export.bundle import Choices, export_bundle
    from model_export.source import load_source

    (tmp_path / "residual.py").write_text(RESIDUAL)
    source = load_source(f"{tmp_path / 'residual.py'}:network", input_shape=(1, 8, 8))
    choices = Choices(tiers={"moderate": 0.95, "weak": 0.5}, engines=("portable",))
    manifest = export_bundle(source, home / "residual", choices)
    assert {"1.first.weight", "1.shortcut.weight"} <= {p.name for p in manifest.layers[1].parameters}
    summaries = check_fedlama(home / "residual", write_job, fleet, tmp_path)
    told = [summary["synchronised"] for summary in summaries]
    assert told[0] == told[6] and {"1.first", "1.second", "1.shortcut"} < set(told[0])
    assert any(0 < len([name for name in names if name.startswith("1.")]) < 3 for names in told), told


HANDED_ON = {  # a window of partial averaging has ten rotations: the cohort changes after 20 rounds
    "local models are handed on": "local",
    "local models are averaged": "averaged",
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations(name: str, write_job: WriteJob, fleet: Fleet, tmp_path: Path) -> None:
    check_both(COMBINATIONS[name], write_job, fleet, tmp_path)


@pytest.mark.parametrize("name", HANDED_ON)
def test_partial_averaging_with_another_cohort(name: str, write_job: WriteJob, fleet: Fleet, tmp_path: Path) -> None:
    sync = f"[sync]\nrule = 'rotating'\nparts = 2\nredistribute = '{HANDED_ON[name]}'\n"
    check_both(job_text("partial_averaging", 22, SOME + sync), write_job, fleet, tmp_path)


def test_fedlama_with_a_single_layer(home: Path, write_job: WriteJob, fleet: Fleet, tmp_path: Path) -> None:
    """Some rounds synchronise nothing: updates are empty, and devices go on with what they have."""
    from model_export.bundle import Choices, export_bundle
    from model_export.source import load_source

    (tmp_path / "linear.py").write_text(LINEAR)
    source = load_source(f"{tmp_path / 'linear.py'}:network", input_shape=(1, 8, 8))
    choices = Choices(tiers={"moderate": 1.0, "weak": 1.0}, engines=("portable",))  # all of them train the layer
    export_bundle(source, home / "linear", choices)
    summaries = check_fedlama(home / "linear", write_job, fleet, tmp_path)
    sent = [summary["bytes_up"] for summary in summaries]
    assert [size > 4 * 650 for size in sent] == [True, True, True, False, False, True, True], sent


def check_fedlama(bundle: Path, write_job: WriteJob, fleet: Fleet, folder: Path) -> list[dict[str, Any]]:
    """Run FedLAMA on both, and return the summaries of the coordinator's rounds."""
    text = job_text("fedlama", 7, "[sync]\nfactor = 3\n", steps=3)
    file = write_job(text.replace('"digits"', f'"{bundle.name}"', 1))
    expected = simulate(file, folder / "run").weights
    job = fleet.admin.create(file)
    fleet.wait(lambda: fleet.job(job)["state"] == "done")
    fleet.admin.save_weights(job, 7, folder / "trained.safetensors")
    found = read_weights(bundle, folder / "trained.safetensors")
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    return [row["summary"] for row in fleet.admin.rounds(job)]
