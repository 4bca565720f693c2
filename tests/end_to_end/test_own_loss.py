"""A loss function of the user's own on a fleet: exported by the command line, trained and scored over HTTP in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.embrace.cli.conftest import run
from tests.end_to_end.conftest import WriteJob
from tests.end_to_end.fleet import Fleet, job_text, read_weights, simulate

MODEL = """
import torch.nn.functional as F
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10))

def without_zeros(outputs, labels):
    counts = (labels != 0).float()
    each = F.cross_entropy(outputs, labels, reduction="none") + 0.01 * outputs.square().sum(1)
    return (each * counts).sum(), counts.sum()
"""


def test_a_fleet_trains_by_a_function(home: Path, write_job: WriteJob, fleet: Fleet, tmp_path: Path) -> None:
    file, bundle = home / "own.py", home / "own"
    file.write_text(MODEL)
    chosen = ("--loss", f"{file}:without_zeros", "--labels", ":int64:10", "--tiers", "moderate=0.6,weak=0.3")
    for words in (("export", f"{file}:build", "--input", "1,8,8", *chosen, "--out", bundle), ("verify", bundle)):
        answer = run(*words)
        assert answer.code == 0, answer.err
    more = "[evaluate]\non_devices = true\nholdout = 0.2\n"
    text = job_text("embracing", 2, more, steps=4, rate='"0.05"', micro_batch=3)
    job_file = write_job(text.replace('bundle = "digits"', 'bundle = "own"'))
    expected = simulate(job_file, tmp_path / "run")
    job = fleet.admin.create(job_file)
    fleet.wait(lambda: fleet.job(job)["state"] == "done")
    weights = tmp_path / "found.safetensors"
    fleet.admin.save_weights(job, fleet.job(job)["version"], weights)
    assert read_weights(bundle, weights).tobytes() == expected.weights.tobytes()
    scored = expected.lines[-1]["evaluation"]
    assert scored["devices"] == 5 and 0 < scored["mean_loss"] < 5 and 0 <= scored["accuracy"] <= 1
