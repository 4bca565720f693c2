"""Workers fold updates for coordinators on PostgreSQL: however many, and killed anywhere, they make the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from coordinator import folding, partial_sums
from coordinator.errors import Superseded
from coordinator.partial_sums import PartialSums
from coordinator.store import claims, database
from coordinator.store.bodies import Bodies
from coordinator.store.database import sqlite_url
from coordinator.store.schema import UpdateRecord
from coordinator.worker import Worker
from federation import rounds
from federation.errors import InputError
from tests.coordinator import harness
from tests.coordinator.databases import about_postgresql, database_url, query
from tests.coordinator.harness import ALL_THREE, ROOT, TIERS, Files, World, end_process, start_server
from tests.coordinator.test_takeover import ROUNDS, Second, Start, expected, fleet, second, start_job, version_of
from tests.coordinator.test_uploaded_updates import complete, put
from tests.waiting import PATIENCE, wait_until

__all__ = ["second"]  # a fixture
LEASE = "2s"  # after which a worker that stalls has lost its claim

_WORK = """
import os, signal, sys
from pathlib import Path
from coordinator import partial_sums, worker
from coordinator.store import database

database.STUCK = sys.argv[6]
partial_sums.MOST, worker.BATCH = 1, 1  # an update for each sum, so that there is work for all workers
point, times, number, seen = sys.argv[4], int(sys.argv[5]), getattr(signal, sys.argv[7]), 0

def reached(name):
    global seen
    seen += name == point
    if name == point and seen == times:
        os.kill(os.getpid(), number)

found = worker.Worker(sys.argv[1], sys.argv[2], Path(sys.argv[3]), reached=reached)
signal.signal(signal.SIGTERM, lambda *_: found.end())
found.run(lambda: print("ready", flush=True))
"""


@contextmanager
def working(start: Start, number: int, point: str = "", times: int = 0, kind: str = "SIGKILL") -> Iterator[Any]:
    """A worker in a process of its own that sends itself a signal when it reaches a point for the n-th time."""
    given = [database_url(start.root), str(start.root), str(start.root / f"worker{number}"), point, str(times)]
    command = [sys.executable, "-c", _WORK, *given, LEASE, kind]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        end_process(process)
        assert process.stderr is not None
        process.stderr.close()


@contextmanager
def coordinator(start: Start) -> Iterator[str]:
    """The URL of a server that leaves folding to others."""
    shared = {"database": database_url(start.root), "blobs": str(start.root)}
    process, url = start_server(start.root / "process", workers=0, **shared)  # type: ignore[arg-type]
    try:
        yield url
    finally:
        end_process(process)


def is_over(start: Start) -> bool:
    return version_of(start) == ROUNDS


def check(start: Start, alone: bytes) -> None:
    """The weights are those of one process, every update was in one sum, and nothing is left behind."""
    wait_until(lambda: is_over(start))
    assert Files(start.root).version(start.job, ROUNDS).read_bytes() == alone
    held = query(start.root, "SELECT count(*), count(DISTINCT sum) FROM updates WHERE sum <> ''")
    assert held == [(3 * ROUNDS, 3 * ROUNDS)]
    assert query(start.root, "SELECT count(*) FROM sums") == [(0,)]
    wait_until(lambda: not list((start.root / "spool").iterdir()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        return expected(tmp_path_factory.mktemp("alone") / "start", patch)


# --- processes of their own ------------------------------------------------------------------------------------------


@about_postgresql
@pytest.mark.parametrize("count", [1, 2, 3])
def test_workers_fold_what_coordinators_receive(tmp_path: Path, alone: bytes, count: int) -> None:
    start = start_job(tmp_path / "shared")
    with ExitStack() as stack:
        url = stack.enter_context(coordinator(start))
        workers = [stack.enter_context(working(start, number)) for number in range(count)]
        with fleet(start, [url]):
            pass
        check(start, alone)
        for worker in workers:
            worker.terminate()
            assert worker.wait(PATIENCE) == 0, "SIGTERM ends it after its batch"


@about_postgresql
@pytest.mark.parametrize(
    ("point", "times"),
    [("after-claim", 1), ("mid-fold", 2), ("after-sum", 1), ("after-sum", 3), ("after-sum-recorded", 2)],
)
def test_workers_that_are_killed(tmp_path: Path, alone: bytes, point: str, times: int) -> None:
    """Two of three are killed; the third does their work."""
    start = start_job(tmp_path / "shared")
    with ExitStack() as stack:
        url = stack.enter_context(coordinator(start))
        killed = [stack.enter_context(working(start, number, point, times)) for number in range(2)]
        with fleet(start, [url]):
            for worker in killed:
                wait_until(lambda worker=worker: worker.poll() is not None or is_over(start))  # type: ignore[misc]
            assert killed[0].poll() == -signal.SIGKILL or killed[1].poll() == -signal.SIGKILL
            stack.enter_context(working(start, 2))
        check(start, alone)


@about_postgresql
@pytest.mark.parametrize("point", ["after-claim", "after-sum"])
def test_a_worker_that_stalls_and_wakes_up_records_nothing(tmp_path: Path, alone: bytes, point: str) -> None:
    """It is stopped with a claim; the database takes the claim, another worker folds, and then it goes on."""
    start = start_job(tmp_path / "shared")
    with ExitStack() as stack:
        url = stack.enter_context(coordinator(start))
        stalled = stack.enter_context(working(start, 0, point, 1, "SIGSTOP"))
        with fleet(start, [url]):
            wait_until(lambda: _state_of(stalled.pid) == "T")
            stack.enter_context(working(start, 1))
            wait_until(lambda: version_of(start) >= 1)
            os.kill(stalled.pid, signal.SIGCONT)
        check(start, alone)
        stalled.terminate()
        assert stalled.wait(PATIENCE) == 0
        assert "tried again" in stalled.stderr.read()


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# --- in this process -------------------------------------------------------------------------------------------------


def final(world: World, rounds: int = 3, **plan: Any) -> tuple[dict[str, bytes], list[Any]]:
    """The files of the last version of a job, and what its rounds came to. Samples and steps differ by device."""
    job, devices = world.job(num_rounds=rounds, **{**ALL_THREE, **plan}), world.fleet(*TIERS)
    for number in range(rounds):
        for device, offer in world.offers(devices).items():
            samples = 1 + harness.task_parts(offer.id)[1]
            world.send_all(device, offer, samples=samples, steps=2 * samples, loss=0.5 * samples)
        wait_until(lambda number=number: world.state(job)["version"] == number + 1)  # type: ignore[misc]
    world.settle()
    told = [row["summary"] for row in world.coordinator.rounds(job)]
    files = [world.files.version(job, rounds), world.files.state(job, rounds)]
    return {path.suffix: path.read_bytes() for path in files if path.exists()}, told


PLANS = {
    "fedavg": {},
    "scaffold": {"algorithm": "scaffold"},
    "fednova": {"algorithm": "fednova", "local": {"epochs": 1}},
    "fedlama": {"algorithm": "fedlama"},
    "momentum": {"algorithm": "fedavg_lm"},
    "clipped": {"serve": {"clip_norm": 0.01}},
    "median": {"serve": {"combine": "median"}},
}


@about_postgresql
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_algorithm_comes_to_what_one_process_on_sqlite_does(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any]
) -> None:
    """Weights, the server's state and the summaries; every update is in a partial sum of its own."""
    monkeypatch.setattr(partial_sums, "MOST", 1)
    found = final(make_world(), **plan)
    monkeypatch.setattr(harness, "database_url", sqlite_url)
    assert found == final(make_world(), **plan)


@about_postgresql
def test_batches(make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum is made of a batch as soon as so many are there; the rest when the round closes."""
    monkeypatch.setattr(folding, "BATCH", 3)
    world = make_world()
    devices = world.fleet(*["weak"] * 8)
    job = world.job(participate={"min_available": 8, "quorum": 1.0})
    offers = world.offers(devices)
    for device in devices[:7]:
        world.send(device, offers[device])
    world.settle()
    assert query(world.root, "SELECT updates FROM sums") == [(3,), (3,)]
    world.send(devices[7], offers[devices[7]])
    world.settle()
    assert world.state(job)["version"] == 1 and world.spool() == []


@about_postgresql
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_what_a_worker_has_claimed_of_what_a_coordinator_has_folded_counts_once(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """The coordinator's own sum is given up then, and the rest is folded anew."""
    monkeypatch.setattr(partial_sums, "MOST", 1)
    results = []
    for count in (0, taken):
        world = make_world()
        devices = world.fleet("weak", "weak", "weak")
        job = world.job(participate={"min_available": 3, "quorum": 1.0}, num_rounds=1)
        offers = world.offers(devices)
        for number, device in enumerate(devices[:2]):
            world.send(device, offers[device], samples=1 + number)
        world.settle()
        coordinator, bodies = world.coordinator, Bodies(world.open_blobs())
        other = PartialSums(coordinator._units, bodies, lambda job: None, lambda *_: None, lambda point: None)
        for _ in range(count):
            assert len(other.fold(coordinator._jobs[job], {})) == 1
        monkeypatch.setattr(partial_sums, "MOST", 64)
        world.send(devices[2], offers[devices[2]], samples=3)
        wait_until(lambda world=world, job=job: world.state(job)["version"] == 1)  # type: ignore[misc]
        monkeypatch.setattr(partial_sums, "MOST", 1)
        results.append(world.weights(job).tobytes())
    assert results[0] == results[1]


@about_postgresql
def test_a_few_updates_are_folded_when_no_other_comes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "PAUSE", 0.05)
    devices = world.fleet("weak", "weak")
    world.job(participate={"min_available": 2, "quorum": 1.0})
    world.send(devices[0], world.offers(devices)[devices[0]])
    wait_until(lambda: query(world.root, "SELECT updates FROM sums") == [(1,)])


@about_postgresql
def test_updates_of_a_process_that_ended_are_folded_by_the_keeper(world: World, second: Second) -> None:
    """It had recorded them and not folded them; another process closes the round a moment later."""
    first, devices = world.coordinator, world.fleet("weak", "weak")
    job = world.job(participate={"min_available": 2, "quorum": 1.0}, num_rounds=1)
    offers = world.offers(devices)
    second.coordinator._folding.put(None)  # type: ignore[arg-type]  # its thread ends
    world.coordinator = second.coordinator
    world.send(devices[0], offers[devices[0]])
    world.coordinator = first
    world.send(devices[1], offers[devices[1]])
    wait_until(lambda: world.state(job)["version"] == 1)
    assert query(world.root, "SELECT count(*) FROM updates WHERE sum <> ''") == [(2,)]


@about_postgresql
@pytest.mark.parametrize("harm", ["lost", "harmed"])
def test_a_partial_sum_whose_bytes_are_lost_is_folded_again(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setattr(folding, "BATCH", 1)
    results = []
    for harmed in (False, True):
        world = make_world()
        devices = world.fleet("weak", "weak")
        job = world.job(participate={"min_available": 2, "quorum": 1.0}, num_rounds=1)
        offers = world.offers(devices)
        world.send(devices[0], offers[devices[0]])
        world.settle()
        (stored,) = [world.root / "spool" / name for name in world.spool() if name.endswith(".sums")]
        if harmed and harm == "lost":
            stored.unlink()
        elif harmed:
            stored.write_bytes(stored.read_bytes()[:-1])
        world.send(devices[1], offers[devices[1]])
        wait_until(lambda world=world, job=job: world.state(job)["version"] == 1)  # type: ignore[misc]
        results.append(world.weights(job).tobytes())
    assert results[0] == results[1]


@about_postgresql
def test_an_update_is_in_one_sum_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is claimed is passed over; if the claim were lost, what would be recorded twice is refused."""
    monkeypatch.setattr(folding, "BATCH", 99)
    devices = world.fleet("weak", "weak")
    job = world.job(participate={"min_available": 2, "quorum": 1.0})
    world.send(devices[0], world.offers(devices)[devices[0]])
    world.settle()
    opened, repository = world.coordinator._jobs[job], world.coordinator.repository
    other = PartialSums(
        world.coordinator._units, Bodies(world.open_blobs()), lambda job: None, lambda *_: None, lambda point: None
    )
    with repository.begin() as session:
        assert len(claims.claim_updates(session, job, 0, 16)) == 1
        assert other.fold(opened, {}) == []

    def without_lock(session: Session, job: str, number: int, *_: object) -> list[UpdateRecord]:
        return [update for update in repository.updates(session, job, [number]) if not update.sum]

    points: list[str] = []

    def reached(point: str) -> None:
        points.append(point)
        if points == ["after-claim"]:
            assert len(other.fold(opened, {})) == 1

    monkeypatch.setattr(claims, "claim_updates", without_lock)
    monkeypatch.setattr(other, "_reached", reached)
    with pytest.raises(Superseded):
        other.fold(opened, {})
    assert query(world.root, "SELECT updates FROM sums") == [(1,)]


@pytest.fixture
def hasty(make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> World:
    """A coordinator from which the database takes a transaction in which nothing happens for a second."""
    monkeypatch.setattr(database, "STUCK", "1s")
    monkeypatch.setattr(claims, "SAYS", 0.2)
    return make_world()


def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*given: Any) -> Any:
        time.sleep(2.5)
        return call(*given)

    return slow


@about_postgresql
@pytest.mark.parametrize("what", ["keep_sum", "file"])
def test_slow_storage_takes_no_claim(hasty: World, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(Bodies, what, slowly(getattr(Bodies, what)))
    (device,), job = hasty.fleet("strong"), hasty.job(num_rounds=1)
    hasty.send(device, hasty.offers([device])[device])
    hasty.settle()
    assert hasty.state(job)["version"] == 1 and "CloseFailed" not in hasty.kinds(job)


@about_postgresql
def test_slow_storage_takes_no_claim_of_what_is_checked(hasty: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bodies, "take_upload", slowly(Bodies.take_upload))
    (device,), job = hasty.fleet("strong"), hasty.job(num_rounds=1)
    offer = hasty.offers([device])[device]
    body = harness.body_of(hasty.manifest, offer)
    put(hasty, offer.id, body)
    complete(hasty, device, offer, body)
    hasty.settle()
    assert hasty.state(job)["version"] == 1


@contextmanager
def worker_of(world: World) -> Iterator[Worker]:
    """A worker in this process; the coordinator leaves folding to it."""
    world.coordinator._folding._folds = False
    found = Worker(database_url(world.root), str(world.root), world.root / "worker")
    thread = threading.Thread(target=found.run)
    thread.start()
    try:
        yield found
    finally:
        found.end()
        thread.join()


def lose_body(world: World) -> tuple[str, str]:
    """A job whose round closes with an update whose body is lost before it is folded; and the device."""
    world.coordinator._folding._folds = False
    (device,), job = world.fleet("strong"), world.job(num_rounds=1)
    world.send(device, world.offers([device])[device])
    world.settle()
    (body,) = (world.root / "spool").glob(f"{job}-*.body")
    body.unlink()
    return job, device


@about_postgresql
def test_a_job_that_cannot_be_folded_holds_up_no_other_and_those_that_are_over_are_forgotten(world: World) -> None:
    lost, device = lose_body(world)
    sound = world.job(num_rounds=1)
    world.send(device, world.offers([device])[device])
    with worker_of(world) as worker:
        wait_until(lambda: world.state(sound)["version"] == 1)
        wait_until(lambda: list(worker._notes) == [lost])


@about_postgresql
def test_a_lost_body_ends_its_job_in_time_though_others_fold(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "LONG", 0.0)
    monkeypatch.setattr(folding, "GRACE", 0.02)
    job, _ = lose_body(world)

    def fails() -> bool:
        world.later(1000)
        return bool(world.state(job)["state"] == "failed")

    with worker_of(world):
        wait_until(fails)
    assert world.kinds(job).count("CloseFailed") == rounds.MOST_TRIES


@about_postgresql
def test_the_keeper_folds_in_the_end_what_no_worker_does(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "LONG", 0.0)
    world.coordinator._folding._folds = False
    (device,), job = world.fleet("strong"), world.job(num_rounds=1)
    world.send(device, world.offers([device])[device])
    wait_until(lambda: world.state(job)["version"] == 1)


# --- what cannot be started ------------------------------------------------------------------------------------------


def run(*given: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "embrace", "worker", *given], cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE
    )
    return done.returncode, done.stderr


def test_a_worker_on_sqlite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"postgresql.*folds by itself and needs no worker"):
        Worker(f"sqlite:///{tmp_path}/x.db", str(tmp_path), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("blobs", ["here", "/not/there", "gs://bucket"])
def test_blobs_that_no_coordinator_has_are_refused(tmp_path: Path, blobs: str) -> None:
    with pytest.raises(InputError, match="--blobs: expected what the coordinators were given"):
        Worker("postgresql+psycopg://x@/x", blobs, tmp_path)


def test_a_database_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """Without psycopg the line says what to install."""
    code, told = run("--database", f"postgresql+psycopg://x@/x?host={tmp_path}", "--blobs", str(tmp_path))
    assert code in (2, 3) and len(told.splitlines()) == 1, told
    assert "cannot open the database" in told or "pip install 'embrace-fl[scale]'" in told


def test_help_has_an_example() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "embrace", "worker", "--help"], cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert "Example: embrace worker --database postgresql+psycopg://" in done.stdout
