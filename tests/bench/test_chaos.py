"""`python -m bench.server.chaos` for a moment: processes are killed, and the bits are the same."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.coordinator.harness import ROOT
from tests.coordinator.on_postgresql import DEBIAN

PLACES = f"{Path(sys.executable).parent}{os.pathsep}{DEBIAN}{os.pathsep}{os.environ.get('PATH', '')}"
MISSING = [name for name in ("psycopg", "boto3") if importlib.util.find_spec(name) is None]
MISSING += [name for name in ("initdb", "rclone") if shutil.which(name, path=PLACES) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)} (make test-scale)")
def test_a_minute_of_kills_leaves_the_bits_alone(tmp_path: Path) -> None:
    place = ["--folder", str(tmp_path / "chaos"), "--out", str(tmp_path / "found.json")]
    command = [sys.executable, "-m", "bench.server.chaos", "--minutes", "0.3", "--agents", "4", *place]
    tmp_path.chmod(0o755)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["same_bits"] and not found["lost"] and sum(found["killed"].values()) >= 1
