"""Several coordinators on one PostgreSQL database: any answers any request; if one is killed, the bits are the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.coordinator import Coordinator
from coordinator.news import News, decode
from coordinator.registry import Registry
from coordinator.store.blobs import DirectoryBlobs
from coordinator.store.database import open_database, sqlite_url
from coordinator.store.repository import Repository
from federation.axes.cover import DeviceProfile
from tests.coordinator import harness
from tests.coordinator.databases import about_postgresql, database_url, query
from tests.coordinator.harness import (
    ALL_THREE,
    TIERS,
    Files,
    Offer,
    World,
    body_of,
    end_process,
    report_header,
    start_server,
)
from tests.waiting import PATIENCE, wait_until

ROUNDS = 3


class Second:
    """Another coordinator on the database and the blobs of a world, with the same clock."""

    def __init__(self, world: World) -> None:
        repository = Repository(open_database(database_url(world.root)))
        self.registry = Registry(repository, lambda: world.now)
        self.coordinator = Coordinator(repository, DirectoryBlobs(world.root), clock=lambda: world.now)
        self.coordinator.tell_registry = self.registry.heard
        self.coordinator.start()


@pytest.fixture
def second(world: World) -> Iterator[Second]:
    found = Second(world)
    yield found
    found.coordinator.stop()


# --- two coordinators in this process --------------------------------------------------------------------------------


@about_postgresql
def test_a_round_whose_requests_go_to_either_process(world: World, second: Second) -> None:
    """Tasks are given out by one, updates arrive at the other; the keeper of the job folds and closes the round."""
    first, other = world.coordinator, second.coordinator
    devices = world.fleet(*TIERS)
    job = world.job(num_rounds=2, **ALL_THREE)
    for number in range(2):
        for device in devices:
            harness.only(other.next_tasks([device]))
        offers = {device: harness.only(other.next_tasks([device])) for device in devices}
        assert all(offers.values()), "the one that did not create the job draws the cohort, too"
        for number_, (device, offer) in enumerate(offers.items()):
            beats = (first, other)[number_ % 2].heartbeats([(device, offer.id)])
            assert isinstance(beats[0], float)
            world.coordinator = (first, other)[number_ % 2]
            world.send(device, offer)
        world.coordinator = first
        wait_until(lambda number=number: world.state(job)["version"] == number + 1)  # type: ignore[misc]
    assert other.job(job)["state"] == first.job(job)["state"] == "done"
    wait_until(lambda: world.spool() == [])


@about_postgresql
def test_what_calls_for_nothing_is_read_with_the_next_look(world: World, second: Second) -> None:
    """An update of many changes nothing that the other process has to do; the last one does, and is read at once."""
    devices = world.fleet("weak", "weak")
    job = world.job(num_rounds=1, participate={"min_available": 2, "quorum": 1.0})
    offers = world.offers(devices)
    mine, theirs = world.coordinator._jobs[job], second.coordinator._jobs
    heard: list[News] = []
    second.coordinator._sharing._heard = heard.append  # type: ignore[union-attr]
    wait_until(lambda: job in theirs and theirs[job].state.round.state == "collecting")
    before = theirs[job].revision
    world.send(devices[0], offers[devices[0]])
    wait_until(lambda: bool(heard))
    assert theirs[job].revision == before < mine.revision and not any(news.jobs for news in heard)
    second.coordinator._sharing._looked = 0.0  # type: ignore[union-attr]
    second.coordinator.tick()
    assert theirs[job].revision == mine.revision and theirs[job].state.round.arrived == 1
    world.send(devices[1], offers[devices[1]])
    wait_until(lambda: world.state(job)["version"] == 1)
    wait_until(lambda: job not in theirs)


@about_postgresql
def test_a_process_that_waited_for_a_lock_reads_what_was_written_meanwhile(world: World, second: Second) -> None:
    """All of it: with the version of before, devices would train the weights of before."""
    job = world.job(num_rounds=9)
    mine, theirs = world.coordinator._jobs[job], second.coordinator._jobs
    wait_until(lambda: job in theirs)
    found: list[int] = []

    def wait() -> None:
        with second.coordinator._units.begin(job):
            found.append(theirs[job].state.version)

    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = current_setting"
    )
    thread = threading.Thread(target=wait)
    with world.coordinator._units.begin(job) as work:
        thread.start()
        wait_until(lambda: query(world.root, f"{waits}('application_name')") == [(1,)])
        world.coordinator.repository.change_job(work.session, job, version=7)
        work.change(mine, version=7)
    thread.join()
    assert found == [7] and theirs[job].revision == mine.revision


@about_postgresql
def test_what_one_process_refuses_the_other_refuses(world: World, second: Second) -> None:
    token = world.registry.invite(1, 60)
    device, own = second.registry.enrol(token, "a device", DeviceProfile(tier="strong"))
    world.registry.set_admin_token()
    opened = world.registry.sessions.open().token
    hashed = second.registry.sessions.find(opened)
    assert world.registry.device_of(own) == device
    world.coordinator.revoke(device)
    world.registry.sessions.end(hashed)
    wait_until(lambda: device in second.coordinator.shut_out)
    wait_until(lambda: second.registry.sessions.expires_at(hashed) is None)


@about_postgresql
def test_a_process_that_missed_news_trusts_no_token_that_it_knew(world: World, second: Second) -> None:
    device, own = second.registry.enrol(world.registry.invite(1, 60), "a device", DeviceProfile())
    listens = "query LIKE 'LISTEN%' OR query = 'SELECT 1'"
    mine = "application_name = current_setting('application_name') AND pid <> pg_backend_pid()"  # no other test's
    cut = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE ({listens}) AND {mine}"
    hashed = next(iter(second.registry._known))
    assert second.registry.known_device(hashed) == device and own
    assert (True,) in query(world.root, cut)
    wait_until(lambda: second.registry.known_device(hashed) is None)


@about_postgresql
def test_a_job_is_looked_after_by_another_process_if_its_keeper_ends(world: World, second: Second) -> None:
    """One update of two had arrived; the lease of the other device runs out at the one that is left."""
    devices = world.fleet("strong", "strong")
    job = world.job(num_rounds=1, participate={"min_available": 2, "quorum": 1.0}, bounds={"lease": 30, "offer": 30})
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    assert world.coordinator._keeps(job) and not second.coordinator._keeps(job)
    world.coordinator._sharing.stop()  # type: ignore[union-attr]

    def passes() -> bool:
        second.coordinator.tick()
        return second.coordinator._keeps(job)

    wait_until(passes)
    world.now += 31
    second.coordinator.tick()
    assert second.coordinator.job(job)["round"]["body"]["slots"][1]["state"] == "expired"
    world.coordinator = second.coordinator
    world.send(devices[1], world.offers(devices[1:])[devices[1]])
    wait_until(lambda: second.coordinator.job(job)["version"] == 1)


@about_postgresql
def test_a_stalled_keeper_that_wakes_up_closes_no_round_twice(world: World, second: Second) -> None:
    """It has folded everything, and another process has closed the round since: what it would write is out of date."""
    devices = world.fleet("strong")
    stalls, goes_on = threading.Event(), threading.Event()

    def reached(point: str) -> None:
        if point == "mid-commit" and not stalls.is_set():
            stalls.set()
            assert goes_on.wait(PATIENCE)

    world.coordinator._folding._reached = reached
    job = world.job(num_rounds=2)
    world.send(devices[0], world.offers(devices)[devices[0]])
    assert stalls.wait(PATIENCE)
    world.coordinator._sharing._locks.close()  # type: ignore[union-attr]
    wait_until(lambda: (second.coordinator.tick(), second.coordinator.job(job)["version"])[1] == 1)
    before = world.files.version(job, 1).read_bytes()
    goes_on.set()
    world.settle()
    assert world.state(job)["version"] == 1 and world.files.version(job, 1).read_bytes() == before
    kinds = [event["kind"] for event in second.coordinator.events(job, 0)[0]]
    assert kinds.count("RoundCommitted") == 1


def test_news_that_are_too_long_say_so() -> None:
    short = News("a", ("job",), True, ("device",))
    assert decode(short.encode()) == short
    assert decode(News("a", tuple(str(n) * 8 for n in range(9999))).encode()) == News("a", devices=True, lost=True)
    assert decode("[]") == decode("{}}") == decode('{"else": 1}') == News(devices=True, lost=True)


# --- processes of their own ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """A directory with enrolled devices and a job, before anything has happened."""

    root: Path
    world: World
    job: str
    tokens: tuple[str, ...]


def start_job(root: Path) -> Start:
    world = World(root)
    world.now = time.time()
    known = world.registry
    tokens = [known.enrol(known.invite(1, 600), tier, DeviceProfile(tier=tier))[1] for tier in TIERS]
    job = world.job(num_rounds=ROUNDS, **ALL_THREE)
    world.end()
    return Start(root, world, job, tuple(tokens))


def work(start: Start, number: int, urls: Sequence[str], errors: list[BaseException]) -> None:
    """A device whose requests go to one process after the other; one that does not answer is left out."""
    polls, until, token = count(number), time.monotonic() + PATIENCE, start.tokens[number]

    def ask(first: int, method: str, path: str, **given: Any) -> httpx.Response:
        for turn in count(first):
            assert time.monotonic() < until
            with suppress(httpx.TransportError):
                answer = client.request(method, f"{urls[turn % len(urls)]}{path}", **given)
                if answer.status_code < 500:
                    return answer
            time.sleep(0.05)
        raise AssertionError

    with httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE, verify=False) as client:
        try:
            done: set[int] = set()
            while len(done) < ROUNDS:
                found = ask(next(polls), "POST", "/v1/tasks/next?wait=1")
                if found.status_code == 200:
                    offer = Offer(found.json())
                    round, body = harness.task_parts(offer.id)[0], body_of(start.world.manifest, offer)
                    task = f"/v1/tasks/{offer.id}"
                    sent = ask(round + number, "PUT", f"{task}/update", content=body, headers=report_header())
                    assert sent.status_code in (201, 409), sent.text
                    done.add(round)
        except BaseException as error:
            errors.append(error)


@contextmanager
def fleet(start: Start, urls: Sequence[str]) -> Iterator[None]:
    """Devices at work; all of them have answered in every round when the block has ended."""
    errors: list[BaseException] = []
    given = [(start, number, urls, errors) for number in range(len(start.tokens))]
    threads = [threading.Thread(target=work, args=own, daemon=True) for own in given]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(PATIENCE)
    assert not errors and not any(thread.is_alive() for thread in threads)


def version_of(start: Start) -> int:
    return int(query(start.root, "SELECT version FROM jobs WHERE id = :job", job=start.job)[0][0])


def expected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What one process with SQLite makes of the same updates."""
    monkeypatch.setattr(harness, "database_url", sqlite_url)
    start = start_job(folder)
    process, url = start_server(start.root)
    try:
        with fleet(start, [url]):
            pass
        last = Files(start.root).version(start.job, ROUNDS)
        wait_until(last.is_file)
        return last.read_bytes()
    finally:
        end_process(process)
        monkeypatch.undo()


@contextmanager
def two_processes(start: Start, blobs: str, point: str = "", times: int = 0) -> Iterator[list[tuple[Any, str]]]:
    """(process, URL) of two servers with directories of their own; the first is the keeper of the job."""
    shared = {"database": database_url(start.root), "blobs": blobs}
    with ExitStack() as stack:
        found = []
        for number, own in enumerate([{"point": point, "times": times}, {}]):
            found.append(start_server(start.root / f"process{number}", **shared, **own))  # type: ignore[arg-type]
            stack.callback(end_process, found[-1][0])
        yield found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        return expected(tmp_path_factory.mktemp("alone") / "start", patch)


@about_postgresql
@pytest.mark.parametrize(
    ("killed", "point", "times"),
    [
        ("none", "", 0),
        ("other", "", 0),
        ("keeper", "after-record", 1),
        ("keeper", "mid-fold", 2),
        ("keeper", "mid-commit", 2),
        ("keeper", "after-commit", 1),
    ],
)
def test_two_processes_and_one_is_killed(tmp_path: Path, alone: bytes, killed: str, point: str, times: int) -> None:
    """Devices ask one process after the other, and their updates go to either."""
    start = start_job(tmp_path / "shared")
    with two_processes(start, str(start.root), point, times) as ((keeper, one), (other, two)):
        with fleet(start, [one, two]):
            if killed == "keeper":
                assert keeper.wait(PATIENCE) == -signal.SIGKILL
            elif killed == "other":
                wait_until(lambda: version_of(start) >= 1)
                os.kill(other.pid, signal.SIGKILL)
        wait_until(lambda: version_of(start) == ROUNDS)
        assert Files(start.root).version(start.job, ROUNDS).read_bytes() == alone
