"""A cluster of two Ray nodes that share no folder: the same bits as in processes of this machine.

Both nodes run on this machine. What they do not share is below /proc/self/cwd, another folder for each of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

from federation.errors import EmbraceError
from simulation.pool import InlinePool, WorkerSpec
from simulation.ray_pool import RayPool
from simulation.simulate import Options, Simulation
from tests.simulation.test_simulate import JOBS, fleet_of, result

OWN = Path("/proc/self/cwd")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not OWN.exists(), reason="needs /proc/self/cwd"),
]
KEPT = {
    "momentum that devices keep": JOBS["momentum that devices keep"],
    "control variates": JOBS["a stack of all, control variates"],
    "local models that are handed on": {
        "num_rounds": 12,
        "participate": {"count": 4, "window": 10},
        "sync": {"rule": "rotating", "parts": 1},
    },
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of this process while a cluster runs whose nodes have others, and one processor each."""
    before, cluster = Path.cwd(), Cluster()
    os.environ["PYTHONPATH"] = str(before)  # where the nodes find the project
    try:
        for name in ("first", "second"):
            os.chdir(tmp_path_factory.mktemp(name))
            cluster.add_node(num_cpus=1)
        os.chdir(tmp_path_factory.mktemp("driver"))
        ray.init(address=cluster.address, log_to_driver=False)
        yield Path.cwd()
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.chdir(before)
        del os.environ["PYTHONPATH"]


def two_nodes(spec: WorkerSpec, workers: int) -> RayPool:
    return RayPool(spec, workers)


def test_every_node_has_a_worker_and_a_folder_of_its_own(here: Path) -> None:
    @ray.remote(num_cpus=1)
    class Looker:
        def look(self) -> tuple[str, str]:
            return ray.get_runtime_context().get_node_id(), os.getcwd()

    lookers = [Looker.remote() for _ in range(2)]
    nodes, folders = zip(*ray.get([looker.look.remote() for looker in lookers]), strict=True)
    for looker in lookers:
        ray.kill(looker)
    assert len(set(nodes)) == 2 and len({*folders, str(here)}) == 3


@pytest.mark.parametrize("name", KEPT)
def test_a_cluster_that_shares_no_folder_changes_nothing(bundle_of: Any, here: Path, name: str) -> None:
    fleet = fleet_of(bundle_of("digits"), KEPT[name])
    expected = result(fleet, here / f"{name}, one process", InlinePool, 1)
    shutil.copytree(fleet.bundle, here / "bundle", dirs_exist_ok=True)
    elsewhere = replace(fleet, bundle=OWN / "bundle")
    assert result(elsewhere, OWN / f"{name}, cluster", two_nodes, 2) == expected


def test_a_run_of_a_cluster_goes_on_from_its_folder(bundle_of: Any, here: Path) -> None:
    """What devices kept came back: half of the rounds on the cluster, the rest in a process of this machine."""
    fleet, job = fleet_of(bundle_of("digits"), KEPT["momentum that devices keep"]), "goes on"
    expected = result(fleet, here / f"{job}, whole", InlinePool, 1)
    stopped = Simulation(fleet, here / job, Options(workers=2, pool=two_nodes))
    (here / job).mkdir()
    pool = stopped._open_pool()
    about = stopped._describe()
    stopped._record(stopped._round(pool))
    stopped._save()
    pool.close()
    assert about["engine"] == "torch"
    assert result(fleet, here / job, InlinePool, 1) == expected


def test_state_that_is_lost_is_an_error(bundle_of: Any, tmp_path: Path) -> None:
    fleet = fleet_of(bundle_of("digits"), KEPT["momentum that devices keep"])
    simulation = Simulation(fleet, tmp_path, Options(workers=1, pool=InlinePool))
    pool = simulation._open_pool()
    simulation._round(pool)
    shutil.rmtree(tmp_path / "kept")
    with pytest.raises(EmbraceError, match=r"round 2: \d+ of 12 devices lost what they had kept"):
        simulation._round(pool)
