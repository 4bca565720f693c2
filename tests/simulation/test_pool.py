"""Pools: the same answers from any number of workers, in order; a worker that dies is named; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest

# ruff: noqa: E402
torch = pytest.importorskip("torch")

from federation.errors import InputError, MissingPackage
from simulation.pool import ArraySpec, LocalPool, WorkerError, WorkerSpec
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).resolve().parents[2]
SPEC = WorkerSpec(
    "tests.simulation.pool_work:build",
    {"add": 0.5},
    {"x": ArraySpec((3,)), "more": ArraySpec((2, 2), "int64")},
    {"out": ArraySpec((3,))},
)


def jobs(count: int) -> list[dict]:
    """The first ones take the longest, so that answers come in another order than jobs go out."""
    return [{"number": number, "sleep": 0.02 * (number % 3 == 0)} for number in range(count)]


def ray_pool(spec: WorkerSpec, workers: int):
    pytest.importorskip("ray")
    from simulation.ray_pool import RayPool

    return RayPool(spec, workers)


POOLS = [LocalPool, pytest.param(ray_pool, marks=pytest.mark.filterwarnings("ignore"))]


@pytest.mark.parametrize("make", POOLS)
def test_answers_and_slots_come_in_the_order_of_the_jobs(make):
    with make(SPEC, 2) as pool:
        for x in (np.array([1, 2, 3], np.float32), np.array([4, 5, 6], np.float32)):
            pool.share("x", x)
            answers = [(answer, slot["out"].copy()) for answer, slot in pool.map(jobs(11))]
            assert [answer["number"] for answer, _ in answers] == list(range(11))
            assert all(answer["exact"] == answer["number"] / 3 for answer, _ in answers)
            for answer, out in answers:
                assert np.array_equal(out, x * np.float32(answer["number"]) + np.float32(0.5))
        assert os.getpid() not in {answer["pid"] for answer, _ in answers}
        assert len({answer["pid"] for answer, _ in answers}) == 2
        assert list(pool.map([])) == []


@pytest.mark.parametrize("make", POOLS)
def test_an_error_in_a_worker_is_told_in_one_line(make):
    with make(SPEC, 2) as pool, pytest.raises(WorkerError, match=r"ValueError: job 1 is not to my taste$"):
        list(pool.map([{"number": 0}, {"number": 1, "raise": True}, {"number": 2}]))


@pytest.mark.parametrize("make", POOLS)
def test_a_worker_that_dies_is_an_error_and_not_a_wait(make):
    with make(SPEC, 2) as pool, pytest.raises(WorkerError, match=r"(signal 9|gone).*number"):
        list(pool.map([{"number": 0}, {"number": 7, "die": True}, {"number": 2}]))


def test_a_map_that_was_given_up_does_not_answer_the_next_one():
    with LocalPool(SPEC, 2) as pool:
        pool.share("x", np.ones(3, np.float32))
        given_up = pool.map([{"number": 0}, {"number": 1, "sleep": 0.5}, {"number": 2, "sleep": 0.5}])
        next(given_up)
        given_up.close()
        with pytest.raises(WorkerError, match="given up"):
            next(pool.map(jobs(2)))


def test_a_number_of_workers_that_makes_no_sense():
    with pytest.raises(InputError, match="workers"):
        LocalPool(SPEC, 0)


def test_ray_is_asked_for_by_its_extra(monkeypatch):
    from simulation.ray_pool import RayPool

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackage, match=r"embrace-fl\[ray\]"):
        RayPool(SPEC, 1)


def test_nothing_is_left_in_shared_memory():
    with LocalPool(SPEC, 1) as pool:
        names = [block.name for block in (pool._shared, *pool._slots)]
        list(pool.map(jobs(2)))
        assert len(set(names)) == 3
    for name in names:
        with pytest.raises(FileNotFoundError):
            SharedMemory(name)


INTERRUPTED = """
import signal
import sys
from simulation.pool import LocalPool
from tests.simulation.test_pool import SPEC
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts with & ignores it
    try:
        with LocalPool(SPEC, 2) as pool:
            for answer, _ in pool.map({"number": n, "sleep": 0.05} for n in range(10**6)):
                print(answer["pid"], flush=True)
    except KeyboardInterrupt:
        sys.exit(7)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_ctrl_c_ends_all_processes_and_says_nothing(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(INTERRUPTED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    workers = {int(process.stdout.readline()) for _ in range(6)}
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all processes hear it
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (7, "")
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
