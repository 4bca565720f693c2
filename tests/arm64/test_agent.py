"""A device on aarch64 beside one on this machine, through the command line and over real sockets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np

from edge_runtime.bundle_files import map_weights
from federation.benchmark import Benchmark
from federation.decode import decode
from tests.stock_python import ROOT
from tests.two_devices import BUNDLE, EMBRACE, MANIFEST, PATIENCE, train, write_data

ROUNDS = 2
TOLERANCE = 1e-4  # of how far training moved the weights


def test_a_job_ends_where_it_ends_without_emulation(arm_python: Path, tmp_path: Path, record_property) -> None:
    write_data(tmp_path)
    emulated = (arm_python, "-m", "embrace")
    expected, _ = train(tmp_path / "x86", tmp_path, ROUNDS, {"desk": EMBRACE, "board": EMBRACE})
    found, reports = train(tmp_path / "arm", tmp_path, ROUNDS, {"desk": EMBRACE, "board": emulated})
    board = reports["board"]
    began = np.array(map_weights(BUNDLE / MANIFEST.weights.name, MANIFEST.space))
    trained = MANIFEST.space.suffix(MANIFEST.boundary(MANIFEST.tiers["weak"]).layer)
    move, apart = np.linalg.norm((expected - began)[trained]), np.linalg.norm((found - expected)[trained])
    record_property("difference", f"{apart / move:.1e} of the move")
    record_property("seconds of a round", [round(report["seconds"]["wall"], 1) for report in board])
    assert [report["boundary"] for report in board] == [MANIFEST.tiers["weak"]] * ROUNDS
    assert apart <= TOLERANCE * move
    assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected - began)


def test_a_budget_is_held_by_a_trial_step(arm_python: Path, tmp_path: Path) -> None:
    write_data(tmp_path)
    command = [arm_python, "-m", "embrace", "train", BUNDLE, "--data", tmp_path / "board.npz", "--memory", "1GB"]
    command += ["--rounds", "1", "--steps", "1", "--batch", "8", "--out", tmp_path / "trained", "--json"]
    told = json.loads(run(*command, "--work", tmp_path / "work"))
    assert told["memory"]["measured"], "no trial step ran"


def test_a_device_is_measured_in_processes_of_their_own(arm_python: Path) -> None:
    """Which are `sys.executable`: the emulated interpreter again."""
    quick = ("--batch", "2", "--iterations", "1", "--json")
    found = decode(
        Benchmark, json.loads(run(arm_python, "-m", "embrace", "device", "bench", BUNDLE, *quick)), defaults=True
    )
    found.check_bundle(MANIFEST)
    assert "aarch64" in found.system
    assert [tier for cost in found.costs for tier in cost.tiers] == list(MANIFEST.tiers)
    assert all(cost.seconds is not None and cost.seconds.training > 0 for cost in found.costs)


def run(*command: str | Path) -> str:
    """Run a command to its end; return what it printed."""
    words = [str(part) for part in command]
    answer = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout
