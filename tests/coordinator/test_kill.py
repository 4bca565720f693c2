"""kill -9 at every named point, and of an agent: after a restart the job goes on, and ends with the same bits."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest

from edge_runtime.bundle_files import file_ref, map_weights, read_manifest
from edge_runtime.client import Declined, DeviceClient
from edge_runtime.data import load_samples
from federation.axes.cover import DeviceProfile
from federation.job import plan_from
from federation.manifest import MANIFEST_NAME, Manifest
from federation.messages import TaskOffer
from federation.wire import encode_layers
from simulation.datasets.digits import DIGITS
from tests.coordinator.databases import SERVER, copy_database, query
from tests.coordinator.harness import (
    ALL_THREE,
    ROOT,
    TIERS,
    Files,
    World,
    body_of,
    end_process,
    report_header,
    report_of,
    scripted,
    start_server,
    task_parts,
    upload,
)
from tests.waiting import PATIENCE, wait_until

ROUNDS = 3
WIDTH = 40_000  # the smallest body has 80,002 elements: two blocks, so that its folding has a middle


@dataclass(frozen=True)
class Prepared:
    """A directory with enrolled devices and a job, before anything has happened; and what it leads to."""

    directory: Path
    manifest: Manifest
    job: str
    tokens: tuple[str, ...]
    expected: bytes = field(default=b"", repr=False)

    def copy(self, to: Path) -> Path:
        copied = Path(shutil.copytree(self.directory, to))
        copy_database(self.directory, copied)
        return copied

    def result(self, directory: Path) -> bytes:
        return Files(directory).version(self.job, ROUNDS).read_bytes()


def work(manifest: Manifest, url: str, token: str, rounds: int, errors: list[BaseException]) -> None:
    """A scripted device: answers a task of every round, and rides out whatever happens to the server."""
    client = DeviceClient(url, token, patience=1e6, sleep=lambda seconds: time.sleep(min(seconds, 0.1)))
    done: set[int] = set()
    try:
        while len(done) < rounds:
            offer = client.next_task(2.0)
            if offer is not None:
                answer(client, manifest, offer)
                done.add(task_parts(offer.id)[0])
    except BaseException as error:
        errors.append(error)
    finally:
        client.close()


def answer(client: DeviceClient, manifest: Manifest, offer: TaskOffer) -> None:
    layer, vector = manifest.boundary(offer.work["boundary"]).layer, scripted(manifest, offer)
    body, direct = lambda: encode_layers(manifest.space, layer, vector), offer.storage is not None
    client.send_update(offer.id, body, report_of(offer), storage=direct)


def run_fleet(prepared: Prepared, url: str) -> tuple[list[threading.Thread], list[BaseException]]:
    errors: list[BaseException] = []
    threads = [
        threading.Thread(target=work, args=(prepared.manifest, url, token, ROUNDS, errors), daemon=True)
        for token in prepared.tokens
    ]
    for thread in threads:
        thread.start()
    return threads, errors


def enrol_all(world: World) -> list[str]:
    """The tokens of a device of every tier."""
    known = world.registry
    return [known.enrol(known.invite(1, 60), tier, DeviceProfile(tier=tier))[1] for tier in TIERS]


def finish(prepared: Prepared, directory: Path, threads: list[threading.Thread], errors: list[BaseException]) -> None:
    """Until every device has answered in every round, and the last version is there."""
    for thread in threads:
        thread.join(PATIENCE)
    assert not errors and not any(thread.is_alive() for thread in threads)
    wait_until(lambda: Files(directory).version(prepared.job, ROUNDS).is_file())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("kill")
    world = World(folder / "start", width=WIDTH)
    world.now = time.time()
    enrolled = enrol_all(world)
    job = world.job(num_rounds=ROUNDS, **ALL_THREE)
    world.end()
    start = Prepared(folder / "start", world.manifest, job, tuple(enrolled))
    undisturbed = start.copy(folder / "undisturbed")
    process, url = start_server(undisturbed)
    try:
        finish(start, undisturbed, *run_fleet(start, url))
    finally:
        end_process(process)
    expected = start.result(undisturbed)
    first = np.array(map_weights(Files(start.directory).version(job, 0), world.manifest.space))
    last = np.array(map_weights(Files(undisturbed).version(job, ROUNDS), world.manifest.space))
    assert (first != last).any()
    return Prepared(start.directory, start.manifest, job, start.tokens, expected)


@pytest.mark.parametrize(
    ("point", "times"),
    [
        ("after-spool", 2),
        ("after-record", 1),
        ("after-record", 3),  # the last of a round
        ("mid-fold", 1),
        ("mid-fold", 5),  # of the second round
        ("mid-commit", 2),
    ],
)
def test_killed_at_a_point(prepared: Prepared, tmp_path: Path, point: str, times: int) -> None:
    directory = prepared.copy(tmp_path / "disturbed")
    process, url = start_server(directory, point=point, times=times)
    try:
        threads, errors = run_fleet(prepared, url)
        assert process.wait(PATIENCE) == -signal.SIGKILL
        end_process(process)
        process, again = start_server(directory, port=httpx.URL(url).port or 0)
        assert again == url
        finish(prepared, directory, threads, errors)
        wait_until(lambda: not list((directory / "spool").iterdir()))
    finally:
        end_process(process)
    assert prepared.result(directory) == prepared.expected


def test_killed_in_the_middle_of_an_upload(prepared: Prepared, tmp_path: Path) -> None:
    directory = prepared.copy(tmp_path / "disturbed")
    process, url = start_server(directory)
    try:
        clients = [DeviceClient(url, token) for token in prepared.tokens]
        found = [client.next_task(0.0) for client in clients]
        offers = [offer or client.next_task(5.0) for client, offer in zip(clients, found)]
        offer = offers[0]
        assert offer is not None
        body = body_of(prepared.manifest, offer)
        headers = {**report_header(), "Authorization": f"Bearer {prepared.tokens[0]}", "Host": "x"}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as connection:
            start = f"PUT /v1/tasks/{offer.id}/update HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n"
            connection.sendall(start.encode() + body[: len(body) // 2])
            wait_until(lambda: any(path.stat().st_size > 10_000 for path in (directory / "spool").glob("*.part")))
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait(PATIENCE) == -signal.SIGKILL
        end_process(process)
        for client in clients:
            client.close()
        assert len(list((directory / "spool").glob("*.part"))) == 1
        process, _ = start_server(directory, port=httpx.URL(url).port or 0)
        if not SERVER:  # else another process might be writing it
            assert list((directory / "spool").iterdir()) == []
        threads, errors = run_fleet(prepared, url)
        finish(prepared, directory, threads, errors)
    finally:
        end_process(process)
    assert prepared.result(directory) == prepared.expected


def test_killed_again_and_again(prepared: Prepared, tmp_path: Path) -> None:
    """Three processes die at a different point each; the fourth finishes."""
    directory = prepared.copy(tmp_path / "disturbed")
    deaths = [("after-record", 2), ("mid-commit", 1), ("mid-fold", 2)]
    process, url = start_server(directory, point=deaths[0][0], times=deaths[0][1])
    try:
        threads, errors = run_fleet(prepared, url)
        for point, times in [*deaths[1:], ("", 0)]:
            assert process.wait(PATIENCE) == -signal.SIGKILL
            end_process(process)
            process, _ = start_server(directory, port=httpx.URL(url).port or 0, point=point, times=times)
        finish(prepared, directory, threads, errors)
    finally:
        end_process(process)
    assert prepared.result(directory) == prepared.expected


# --- between a version and its score ---------------------------------------------------------------

SHIPPED = ROOT / "embrace" / "demo" / "digits"


def scored_versions(directory: Path, job: str) -> list[tuple[int, str, float]]:
    """What is recorded of scores; the server may be at work."""
    return sorted(query(directory, "SELECT version, name, value FROM metrics WHERE job = :job", job=job))


@pytest.fixture(scope="module")
def to_be_scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Prepared, list[tuple[int, str, float]]]:
    """A job on a model that can be run, and its scores if nothing happens."""
    folder = tmp_path_factory.mktemp("scores")
    world = World(folder / "start")
    world.now = time.time()
    digest = file_ref(SHIPPED / "model", MANIFEST_NAME).sha256
    shutil.copytree(SHIPPED / "model", world.files.bundle(digest))
    enrolled = enrol_all(world)
    plan = {"bundle": "digits", "num_rounds": ROUNDS, **ALL_THREE}
    plan["evaluate"] = {"data": upload(world, load_samples(DIGITS, read_manifest(SHIPPED / "model")))}
    job = world.coordinator.create_job(plan_from(plan), digest)
    world.end()
    start = Prepared(folder / "start", read_manifest(SHIPPED / "model"), job, tuple(enrolled))
    directory = start.copy(folder / "undisturbed")
    process, url = start_server(directory)
    try:
        finish(start, directory, *run_fleet(start, url))
        wait_until(lambda: len(scored_versions(directory, job)) == 2 * ROUNDS)
    finally:
        end_process(process)
    return start, scored_versions(directory, job)


@pytest.mark.parametrize("version", [1, ROUNDS])
def test_killed_before_a_version_was_put_up_for_scoring(to_be_scored, tmp_path: Path, version: int) -> None:
    """Also if it is the last one, whose job is done then."""
    prepared, expected = to_be_scored
    directory = prepared.copy(tmp_path / "disturbed")
    process, url = start_server(directory, point="after-commit", times=version)
    try:
        threads, errors = run_fleet(prepared, url)
        assert process.wait(PATIENCE) == -signal.SIGKILL
        assert version not in {row[0] for row in scored_versions(directory, prepared.job)}
        end_process(process)
        process, _ = start_server(directory, port=httpx.URL(url).port or 0)
        finish(prepared, directory, threads, errors)
        wait_until(lambda: len(scored_versions(directory, prepared.job)) >= len(expected))
    finally:
        end_process(process)
    assert scored_versions(directory, prepared.job) == expected


# --- an agent --------------------------------------------------------------------------------------

_AGENT = """
import sys, time
from edge_runtime.client import DeviceClient

offer = DeviceClient(sys.argv[1], sys.argv[2]).next_task(30.0)
print(offer.id, flush=True)
time.sleep(600)  # training
"""


def killed_agent(url: str, token: str) -> str:
    """The task that an agent had taken when it was killed."""
    process = subprocess.Popen([sys.executable, "-c", _AGENT, url, token], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    task = process.stdout.readline().strip()
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(PATIENCE) == -signal.SIGKILL
    process.stdout.close()
    return task


def is_done(directory: Path, job: str) -> bool:
    return query(directory, "SELECT state FROM jobs WHERE id = :job", job=job) == [("done",)]


@pytest.mark.parametrize("closes", ["with another device", "by the deadline"])
def test_a_killed_agent_does_not_hold_up_the_round(tmp_path: Path, closes: str) -> None:
    world = World(tmp_path / "served")
    world.now = time.time()
    tokens = [world.registry.enrol(world.registry.invite(1, 60), "d", DeviceProfile(tier="strong"))[1] for _ in "ab"]
    rule: dict[str, object] = {"min_available": 2, "quorum": 1, "deadline": 8.0}
    rule = {"count": 1} if closes == "with another device" else rule
    lease = 6.0 if closes == "with another device" else 600.0  # then only the deadline ends the wait
    job = world.job(num_rounds=1, participate=rule, bounds={"lease": lease, "offer": 60})
    world.end()
    process, url = start_server(world.root)
    clients = [DeviceClient(url, token) for token in tokens]
    try:
        if closes == "by the deadline":
            survivor = clients[1]
            offer = survivor.next_task(0)
            assert killed_agent(url, tokens[0]).startswith(job)
        else:  # the one that was drawn is killed
            first = [client.next_task(0) for client in clients]
            drawn = next(number for number, found in enumerate(first) if found is not None)
            task = killed_agent(url, tokens[drawn])
            survivor = clients[1 - drawn]
            offer = survivor.next_task(30.0)  # until the lease has run out
            assert offer is not None and task_parts(offer.id)[2] == task_parts(task)[2] + 1
        offer = offer or survivor.next_task(30.0)
        assert offer is not None
        answer(survivor, world.manifest, offer)
        wait_until(lambda: is_done(world.root, job))  # the weights are there before that
        before = map_weights(Files(world.root).version(job, 0), world.manifest.space)
        after = np.array(map_weights(Files(world.root).version(job, 1), world.manifest.space))
        sent = scripted(world.manifest, offer)
        np.testing.assert_array_max_ulp(after, (before.astype(np.float64) + sent).astype(np.float32), maxulp=1)
        with pytest.raises(Declined):
            survivor.fail(f"{job}-0-0-1", "failed", "")
    finally:
        for client in clients:
            client.close()
        end_process(process)
