"""`embrace agent --frozen int8`: a real agent, in a device's environment, trains for a real coordinator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.live_server import LiveServer, live_server
from tests.stock_python import ROOT, STOCK_PYTHON

datasets = pytest.importorskip("sklearn.datasets")
PYTHON = STOCK_PYTHON if STOCK_PYTHON.exists() else Path(sys.executable)
ROUNDS = 6
LOCAL = {"steps": 12, "batch": 32, "rate": "0.1", "rules": [{"rule": "momentum", "factor": 0.9}]}
# The command line, with the log that a service would keep.
COMMAND = "import logging, sys; logging.basicConfig(level=20); from embrace.cli.main import main; main(sys.argv[1:])"


def run_agent(server: LiveServer, folder: Path, frozen: str) -> subprocess.CompletedProcess[str]:
    digits, data = datasets.load_digits(), folder / "data.npz"
    np.savez(data, x=(digits.images[:400, None] / 16).astype(np.float32), y=digits.target[:400])
    told = ["--server", server.url, "--token", server.enrolment, "--data", data, "--work", folder / "device", "--json"]
    command = [PYTHON, "-c", COMMAND, "agent", *told, "--tier", "moderate", "--tasks", ROUNDS, "--frozen", frozen]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)


def test_an_agent_trains_behind_layers_of_bytes(home: Path, tmp_path: Path) -> None:
    with live_server(tmp_path / "server") as server:
        server.create_job(home / "digits", num_rounds=ROUNDS, local=LOCAL)
        ended = run_agent(server, tmp_path, "int8")
    assert ended.returncode == 0, ended.stderr
    told = [line for line in ended.stderr.splitlines() if "frozen layers" in line]
    assert told and all("run in int8" in line for line in told)
    losses = [json.loads(line)["loss"] for line in ended.stdout.splitlines()]
    assert len(losses) == ROUNDS and losses[-1] < 0.5 * losses[0]


def test_another_type_is_refused_in_one_line(tmp_path: Path) -> None:
    with live_server(tmp_path / "server") as server:
        ended = run_agent(server, tmp_path, "int4")
    assert ended.returncode == 2 and "frozen: expected float32 or int8, got 'int4'" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
