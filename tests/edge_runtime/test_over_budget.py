"""The proof: a model of 302 MB is trained in 96 MB, under a hard limit, by a process that has stock onnxruntime only.

The limit is RLIMIT_DATA, which every kernel has and no process can pass: it counts private writable memory, reserved
or touched, and the runtime maps a layer's file as such. What it reserves and never touches is allowed on top; what it
touches is watched from outside.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.bundle_files import read_manifest
from federation.manifest import Manifest
from tests.embrace.cli.conftest import run
from tests.stock_python import ROOT, STOCK_PYTHON, needs_stock_python

pytestmark = needs_stock_python

BUDGET = 96_000_000
RESERVED = 52_000_000  # the arena's first region (16 MiB), one mapped layer (16 MiB), two threads' stacks
LAYERS, WIDTH = 18, 2048

MODEL = f"""
from torch import nn

def wide():
    hidden = [part for _ in range({LAYERS}) for part in (nn.Linear({WIDTH}, {WIDTH}), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear({WIDTH}, 10))
"""

CHILD = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
import embrace.cli.main, edge_runtime.fine_tune, edge_runtime.trained_bundle
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
data, anonymous = (int(status[key].split()[0]) * 1024 for key in ("VmData", "RssAnon"))
limit = data - anonymous + {BUDGET} + {RESERVED}
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
embrace.cli.main.main(sys.argv[1:])
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    anonymous: int  # peak bytes

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("over_budget")
    (folder / "models.py").write_text(MODEL)
    splits = ",".join(str(2 * layer) for layer in (*range(14, LAYERS), LAYERS))
    out = folder / "wide"
    done = run("export", f"{folder / 'models.py'}:wide", "--input", WIDTH, "--split", splits, "--out", out)
    assert done.code == 0, done.err
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 256)
    centres = rng.standard_normal((10, WIDTH)).astype(np.float32)
    np.savez(folder / "data.npz", x=centres[labels] + rng.standard_normal((256, WIDTH), np.float32), y=labels)
    return out


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return read_manifest(bundle)


def train(bundle: Path, work: Path, *options: object) -> Ended:
    """`embrace train` on a device under the hard limit; its anonymous memory is read from outside all the time."""
    command = [STOCK_PYTHON, "-c", CHILD, "train", bundle, "--data", bundle.parent / "data.npz", "--json"]
    command += ["--work", work / "work", "--out", work / "out", "--rounds", "2", *options]
    child = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=work
    )
    peak = 0
    while child.poll() is None:
        peak = max(peak, anonymous_memory(child.pid))
        time.sleep(0.001)
    out, err = child.communicate()
    return Ended(child.returncode, out, err, peak)


def anonymous_memory(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # it has just ended
    return 0


def test_a_round_of_a_model_three_times_the_budget(bundle: Path, manifest: Manifest, tmp_path: Path) -> None:
    assert manifest.weights.bytes > 3 * BUDGET
    ended = train(bundle, tmp_path, "--memory", BUDGET)
    assert ended.code == 0, ended.err
    one, two = ended.json["rounds"]  # two: nothing of a round may be held beside the next
    assert one["status"] == two["status"] == "done" and one["steps"] >= 7
    assert ended.json["boundary"] == str(2 * (LAYERS - 1))  # one hidden layer and the output fit
    assert len(one["seconds"]["forward"]) == LAYERS - 1
    assert 0 < ended.anonymous < BUDGET
    # What the device says about itself agrees with what was seen from outside.
    told = ended.json["memory"]["idle"] + max(one["memory"]["anonymous"], two["memory"]["anonymous"])
    assert abs(told - ended.anonymous) < 0.1 * BUDGET
    assert ended.json["after"]["mean_loss"] < ended.json["before"]["mean_loss"]


def test_training_everything_is_refused_with_the_boundary_that_fits(bundle: Path, tmp_path: Path) -> None:
    ended = train(bundle, tmp_path, "--memory", BUDGET, "--boundary", "strong")
    assert ended.code == 1
    assert ended.err.count("\n") == 1 and ended.err.endswith(f"--boundary {2 * (LAYERS - 1)}\n")
    assert ended.json["status"] == "out_of_memory"
    assert not (tmp_path / "out").exists()


def test_a_budget_that_is_not_there_ends_in_a_report_not_in_a_crash(bundle: Path, tmp_path: Path) -> None:
    """Told that there is plenty, the device runs into the hard limit itself."""
    ended = train(bundle, tmp_path, "--memory", "8GB", "--boundary", "strong")
    assert ended.code == 1
    assert ended.err.count("\n") == 1
    assert ended.json["status"] == "out_of_memory"
    assert "would fit" in ended.json["message"] or "next smaller boundary" in ended.json["message"]
    assert not (tmp_path / "out").exists()
