"""A simulation gives the same bits from any number of processes, here or on Ray, however its devices are dealt."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from federation.job import plan_from
from simulation.datasets import Dataset
from simulation.fleet import Scene, fleet_table
from simulation.pool import InlinePool, LocalPool
from simulation.run import Options, Simulation
from simulation.torch_engine import one_thread
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


def scene_of(bundle: Bundle, more: dict[str, Any]) -> Scene:
    """Twenty devices with 8 to 60 random samples of the model's shape."""
    fleet = {"devices": 20, "partitioner": "dirichlet", "partition": {"alpha": 2.0, "min_partition_size": 8}}
    job = {
        "bundle": "none",
        "num_rounds": 3,
        "seed": 5,
        **more,
        "local": {**LOCAL, **more.get("local", {})},
        "simulate": {**fleet, **more.get("simulate", {})},
    }
    plan, rng = plan_from(job), np.random.default_rng(0)
    count = 30 * int(job["simulate"]["devices"])
    x, y = rng.random((count, *bundle.manifest.input.shape), np.float32), rng.integers(0, 10, count)
    data = Dataset("random", x, y, x[:300], y[:300], 10)
    return Scene(plan, fleet_table(plan, {}), bundle.directory, bundle.manifest, data)


def result(scene: Scene, folder: Path, pool: Any, workers: int) -> tuple[bytes, list[dict[str, Any]]]:
    with one_thread():
        lines = Simulation(scene, folder, Options(workers=workers, pool=pool)).run()
    told = [{key: value for key, value in line.items() if key not in ("seconds", "test_loss")} for line in lines]
    assert all(0.1 < line["test_loss"] < 10 for line in lines)
    return (folder / "weights.safetensors").read_bytes(), told


@pytest.mark.parametrize("name", JOBS)
def test_the_number_of_processes_changes_nothing(bundle_of, tmp_path, name):
    scene = scene_of(bundle_of("digits"), JOBS[name])
    one = result(scene, tmp_path / "1", InlinePool, 1)
    for workers in (2, 3, 5):  # dealt as to so many, done in this process
        assert result(scene, tmp_path / str(workers), InlinePool, workers) == one
    assert one[0] != (scene.bundle / scene.manifest.weights.name).read_bytes()


def test_processes_of_their_own_change_nothing(bundle_of, tmp_path):
    scene = scene_of(bundle_of("digits"), JOBS["stacks of tiers"])
    one = result(scene, tmp_path / "1", InlinePool, 1)
    assert result(scene, tmp_path / "2", LocalPool, 2) == one


@pytest.mark.filterwarnings("ignore")
def test_ray_changes_nothing(bundle_of, tmp_path):
    scene = scene_of(bundle_of("digits"), JOBS["stacks of tiers"])
    one = result(scene, tmp_path / "1", InlinePool, 1)
    assert result(scene, tmp_path / "ray", partial(ray_pool), 2) == one
