"""A device that no job can use: it, and whoever looks at the fleet, is told why; and it goes on waiting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.embrace.cli.conftest import Embrace
from tests.live_server import live_server
from tests.stock_python import ROOT

WHY = "no boundary or tier named 'giant'; this bundle has: strong, weak, first, second"


def test_everybody_is_told(embrace: Embrace, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 4), np.float32), y=np.arange(2))
    with live_server(tmp_path / "server") as server:
        job = server.create_job(tmp_path / "bundle", num_rounds=1)
        command = ["agent", "--server", server.url, "--token", server.enrolment, "--name", "attic"]
        command += ["--data", str(tmp_path / "data.npz"), "--work", str(tmp_path / "work"), "--tier", "giant"]
        agent = subprocess.Popen(
            [sys.executable, "-m", "embrace", *command], cwd=ROOT, text=True, stderr=subprocess.PIPE
        )
        try:
            assert agent.stderr is not None
            said = agent.stderr.readline()
            assert said.endswith(f"no job can use this device: job {job}: {WHY}; waiting for one that can\n"), said
            admin = ("--server", server.url, "--token", server.admin)
            assert f"no job can use attic: job {job}: {WHY}" in embrace("device", "list", *admin).out.splitlines()
            assert f"attic cannot take part: {WHY}" in embrace("job", "show", job, *admin).out.splitlines()
            assert agent.poll() is None, "a later job may suit it"
            embrace("job", "stop", job, *admin)
            watched = embrace("job", "watch", job, *admin).out.splitlines()
            assert watched.count(f"round 0: attic cannot take part: {WHY}") == 1
            assert "cannot" not in embrace("device", "list", *admin).out
        finally:
            agent.kill()
            agent.wait()
            if agent.stderr is not None:
                agent.stderr.close()
