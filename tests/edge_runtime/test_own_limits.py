"""What a device gives to a task at most: steps, time, disk; and a coordinator that sends without end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import embrace
from edge_runtime.client import DeviceClient, NotUnderstood
from edge_runtime.own_limits import Deadline, DiskRoom, OwnLimits
from federation.errors import DiskFull, InputError, OverLimit
from tests.edge_runtime.test_client import little
from tests.hostile_bundles import DEMO
from tests.live_server import LiveServer, live_server

CHUNK = b"x" * 65536


# --- disk ------------------------------------------------------------------------------------------


def write(path: Path, size: int, age: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_what_can_be_fetched_again_goes_the_oldest_first(tmp_path: Path) -> None:
    old = write(tmp_path / "graphs" / "old", 100_000, age=3)
    new = write(tmp_path / "graphs" / "new", 100_000, age=1)
    used = write(tmp_path / "graphs" / "used", 100_000, age=9)
    kept = write(tmp_path / "kept" / "job" / "state", 100_000, age=9)
    room = DiskRoom(tmp_path, 500_000)
    room.in_use = {used}
    room.take(150_000)
    assert not old.exists() and new.exists() and used.exists() and kept.exists()
    with pytest.raises(DiskFull, match="--max-disk"):
        room.take(400_000)
    assert not new.exists() and used.exists() and kept.exists()


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    first = write(tmp_path / "graphs" / "a", 100_000)
    (tmp_path / "jobs" / "b").mkdir(parents=True)
    os.link(first, tmp_path / "jobs" / "b" / "a")
    assert 390_000 < DiskRoom(tmp_path, 500_000).left <= 400_000


# --- time and steps --------------------------------------------------------------------------------


def test_time_is_checked_while_a_task_is_under_way() -> None:
    now = [0.0]
    deadline = Deadline(lambda: now[0])
    deadline.check()
    deadline.begin(10.0)
    now[0] = 10.0
    deadline.check()
    now[0] = 10.5
    with pytest.raises(OverLimit, match=r"more than 10 seconds.*--max-task-time"):
        deadline.check()
    deadline.end()
    deadline.check()


@pytest.mark.parametrize("wrong", [{"disk": 0}, {"task_seconds": 0.0}, {"task_seconds": float("nan")}, {"steps": 0}])
def test_limits_are_numbers_above_zero(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="above 0"):
        OwnLimits(**wrong)  # type: ignore[arg-type]


# --- a coordinator without measure -----------------------------------------------------------------


def test_streams_without_end_are_refused_early(tmp_path: Path) -> None:
    """Each answer goes on until the device hangs up: what it takes of it is bounded."""
    sent = []

    def answer(request: object, number: int) -> None:
        path = request.path  # type: ignore[attr-defined]
        request.send_response(206 if "weights" in path else 200)  # type: ignore[attr-defined]
        request.send_header("Transfer-Encoding", "chunked")  # type: ignore[attr-defined]
        request.end_headers()  # type: ignore[attr-defined]
        count = 0
        try:
            while count < 1 << 30:
                request.wfile.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))  # type: ignore[attr-defined]
                count += len(CHUNK)
        except OSError:
            pass
        sent.append(count)
        request.close_connection = True  # type: ignore[attr-defined]

    with little(answer) as server, DeviceClient(server.url, "token") as client:
        for ask in (
            lambda: client.next_task(0.0),
            lambda: client.signature("0" * 64),
            lambda: client.manifest("0" * 64),
            lambda: client.save_graph("0" * 64, tmp_path / "graph", 1000),
            lambda: list(client.weights("job", 0, 0, 1000)),
        ):
            with pytest.raises(NotUnderstood, match="goes on after"):
                ask()
    assert len(sent) == 5 and max(sent) < 1 << 28
    assert list(tmp_path.iterdir()) == []


# --- an agent --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("limits")) as running:
        yield running


@pytest.mark.parametrize(
    ("limits", "reason", "said"),
    [
        (OwnLimits(steps=9), "over_limit", "the task has 10 steps, and this device does at most 9 (--max-steps)"),
        (OwnLimits(task_seconds=1e-9), "over_limit", "(--max-task-time)"),
        (OwnLimits(disk=50_000), "disk_full", "(--max-disk)"),
    ],
    ids=["steps", "time", "disk"],
)
def test_a_device_keeps_its_own_limits(
    server: LiveServer, tmp_path: Path, limits: OwnLimits, reason: str, said: str
) -> None:
    rng = np.random.default_rng(0)
    data = rng.random((8, 1, 8, 8), np.float32), np.arange(8)
    plan = {"num_rounds": 1, "local": {"steps": 10, "batch": 4, "rate": "0.1"}, "participate": {"min_available": 1}}
    job = server.create_job(DEMO, **plan)
    joined = embrace.Agent.join(
        server.url, data, token=server.enrolment, tier="strong", work=tmp_path / "work", limits=limits
    )
    with joined as agent:
        offer = agent.client.next_task(30.0)
        assert offer is not None and not agent.answer(offer)
    with embrace.Client(server.url, server.admin) as client:
        client.stop(job)
        told = [json.dumps(event) for event in client.watch(job)]
    server.retire_devices()
    assert any(f'"{reason}"' in event and said in event for event in told), told
