"""A simulation gives the same bits from any number of processes, here or on Ray, and needs no file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# ruff: noqa: E402
torch = pytest.importorskip("torch")

from federation.decode import Resolve
from federation.errors import InputError
from federation.job import Plan, plan_from
from federation.manifest import Source
from simulation import simulate as module
from simulation.datasets import Dataset
from simulation.fleet import SimulatedFleet, open_fleet
from simulation.pool import InlinePool, LocalPool
from simulation.runs import read_run
from simulation.simulate import Options, Simulation, choose_engine, simulate
from tests.edge_runtime.conftest import Bundle
from tests.simulation.test_pool import ray_pool

LOCAL = {"steps": 3, "batch": 8, "rate": "0.05"}
JOBS: dict[str, dict[str, Any]] = {
    "a stack of all": {"participate": {"count": 16}},
    "a stack of all, control variates": {"participate": {"count": 16}, "algorithm": "scaffold"},
    "stacks of tiers": {"simulate": {"tiers": {"strong": 7, "moderate": 2, "weak": 11}}},
    "two stacks and a rest": {"simulate": {"devices": 38}},
    "momentum that devices keep": {
        "participate": {"count": 12},
        "local": {"rules": [{"rule": "momentum", "factor": 0.5, "between": "keep"}]},
    },
    "unequal batches": {"local": {"batch": 24, "steps": 2}},
    "too large to be stacked": {"local": {"batch": 80, "steps": 1}, "simulate": {"devices": 7}},
}


def fleet_of(bundle: Bundle, more: dict[str, Any], resolve: Resolve | None = None) -> SimulatedFleet:
    """Twenty devices with 8 to 60 random samples of the model's shape."""
    fleet = {"devices": 20, "partitioner": "dirichlet", "partition": {"alpha": 2.0, "min_partition_size": 8}}
    job: dict[str, Any] = {
        "bundle": "none",
        "num_rounds": 3,
        "seed": 5,
        **more,
        "local": {**LOCAL, **more.get("local", {})},
        "simulate": {**fleet, **more.get("simulate", {})},
    }
    plan, rng = plan_from(job, resolve), np.random.default_rng(0)
    count = 30 * int(job["simulate"]["devices"])
    x, y = rng.random((count, *bundle.manifest.input.shape), np.float32), rng.integers(0, 10, count)
    data = Dataset("random", x, y, x[:300], y[:300], 10)
    return open_fleet(plan, bundle.directory, data)


def result(fleet: SimulatedFleet, folder: Path, pool: Any, workers: int) -> tuple[bytes, list[dict[str, Any]]]:
    run = Simulation(fleet, folder, Options(workers=workers, pool=pool)).run()
    told = [{key: value for key, value in record.items() if key != "seconds"} for record in run.rounds]
    assert all(0.1 < record["test_loss"] < 10 for record in run.rounds)
    return (folder / "weights.safetensors").read_bytes(), told


def test_a_round_is_scored_with_both_kinds_of_statistics(bundle_of, tmp_path):
    found = {}
    for kind in ("global", "static"):
        fleet = fleet_of(bundle_of("fashion_resnet8@0.25"), {"num_rounds": 1, "evaluate": {"statistics": kind}})
        options = Options(workers=1, pool=InlinePool, both_statistics_every=1)
        found[kind] = Simulation(fleet, tmp_path / kind, options).run().rounds[0]
    assert found["global"]["by_statistics"] == {kind: record["accuracy"] for kind, record in found.items()}
    assert found["static"]["by_statistics"] == found["global"]["by_statistics"]
    assert found["static"]["test_loss"] != found["global"]["test_loss"]  # so early averages are far from the data's


@pytest.mark.parametrize("name", JOBS)
def test_the_number_of_processes_changes_nothing(bundle_of, tmp_path, name):
    fleet = fleet_of(bundle_of("digits"), JOBS[name])
    one = result(fleet, tmp_path / "1", InlinePool, 1)
    for workers in (2, 3, 5):  # divided as among so many, done in this process
        assert result(fleet, tmp_path / str(workers), InlinePool, workers) == one
    assert one[0] != (fleet.bundle / fleet.manifest.weights.name).read_bytes()


@pytest.mark.parametrize("name", ["stacks of tiers", "momentum that devices keep"])
def test_processes_of_their_own_change_nothing(bundle_of, tmp_path, name):
    fleet = fleet_of(bundle_of("digits"), JOBS[name])
    one = result(fleet, tmp_path / "1", InlinePool, 1)
    assert result(fleet, tmp_path / "3", LocalPool, 3) == one


@pytest.mark.filterwarnings("ignore")
def test_ray_changes_nothing(bundle_of, tmp_path):
    fleet = fleet_of(bundle_of("digits"), JOBS["stacks of tiers"])
    one = result(fleet, tmp_path / "1", InlinePool, 1)
    assert result(fleet, tmp_path / "ray", ray_pool, 2) == one


# --- the function that notebooks call ---------------------------------------------------------------------------------


def arrays(bundle: Bundle, count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.random((count, *bundle.manifest.input.shape), np.float32), rng.integers(0, 10, count)


def plan_of(**more: Any) -> Plan:
    return plan_from({"bundle": "none", "num_rounds": 2, "local": LOCAL, **more})


def test_arrays_are_all_that_a_simulation_needs(bundle_of, tmp_path, monkeypatch):
    bundle, before = bundle_of("digits"), torch.get_num_threads()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []
    run = simulate(
        plan_of(),
        bundle.directory,
        arrays(bundle),
        devices=6,
        workers=1,
        pool=InlinePool,
        on_progress=lambda what, done, total: seen.append(what),
    )
    assert [record["round"] for record in run.rounds] == [0, 1] and run.rounds[1]["devices"] == 6
    assert run.path is None and not list(tmp_path.iterdir()), "nothing is left behind"
    assert seen == ["read the data", "round 1", "round 2", "done"]
    assert set(run.weights) == {parameter.name for parameter in bundle.manifest.space}
    first = bundle.manifest.space.views(np.array(bundle.weights))
    assert any(not np.array_equal(run.weights[name], value) for name, value in first.items())
    assert run.about["engine"] == "torch" and torch.get_num_threads() == before
    again = simulate(plan_of(), bundle.directory, arrays(bundle), devices=6, workers=1, folder=tmp_path / "run")
    assert read_run(tmp_path / "run").weights.keys() == run.weights.keys()
    assert all(np.array_equal(again.weights[name], value) for name, value in run.weights.items())


def test_a_folder_goes_on_with_its_own_run_only(bundle_of, tmp_path):
    bundle = bundle_of("digits")
    known = {"devices": 4, "pool": InlinePool, "folder": tmp_path}
    first = simulate(plan_of(), bundle.directory, arrays(bundle), **known)
    assert simulate(plan_of(), bundle.directory, arrays(bundle), **known).rounds == first.rounds
    with pytest.raises(InputError, match="another run"):
        simulate(plan_of(), bundle.directory, arrays(bundle, 199), **known)


def test_tiers_and_partitions_are_given_beside_the_job(bundle_of, tmp_path):
    bundle = bundle_of("digits")
    job = {"simulate": {"devices": 8, "tiers": {"strong": 8}}}
    run = simulate(
        plan_of(**job),
        bundle.directory,
        arrays(bundle),
        tiers={"strong": 2, "weak": 3},
        partition="dirichlet",
        partition_constants={"alpha": 0.5},
        engine="portable",
        pool=InlinePool,
        evaluate_every=0,
    )
    table = run.about["job"]["simulate"]
    assert table["devices"] == 5 and table["tiers"] == {"strong": 2, "weak": 3}
    assert table["partitioner"] == "dirichlet" and table["partition"] == {"alpha": 0.5}
    assert run.rounds[0]["devices"] == 5 and run.accuracy is None


def test_the_engine_follows_from_where_the_model_came_from(bundle_of, tmp_path, monkeypatch):
    manifest = bundle_of("digits").manifest
    assert choose_engine(manifest) == "torch"
    file = tmp_path / "model.py"
    here, gone = (replace(manifest, source=Source("torch", f"{path}:build")) for path in (file, tmp_path / "other.py"))
    file.touch()
    assert choose_engine(here) == "torch" and choose_engine(gone) == "portable"
    assert choose_engine(replace(manifest, source=Source("onnx", "model.onnx"))) == "portable"
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert choose_engine(manifest) == "portable"


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from federation.job import plan_from
from simulation.simulate import simulate

rng = np.random.default_rng(0)
data = rng.random((60, 1, 8, 8), np.float32), rng.integers(0, 10, 60)
plan = plan_from({"bundle": "none", "num_rounds": 1, "local": {"steps": 1, "batch": 4}})
print(simulate(plan, Path(sys.argv[1]), data, devices=4, workers=2, engine="portable"))
"""


def test_a_script_needs_no_guard_around_its_calls(bundle_of, tmp_path):
    """Worker processes do not run the script again."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(script), str(bundle_of("digits").directory)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"Run\('[^']+', 1 rounds, accuracy \d+\.\d%\)\n", done.stdout)
