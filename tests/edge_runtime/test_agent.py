"""The agent against a real coordinator: what it sends is what training gives, and no task is the end of it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from coordinator import standings
from edge_runtime.agent import Agent, Device
from edge_runtime.bundle_files import map_weights
from edge_runtime.client import Declined, DeviceClient
from edge_runtime.data import from_arrays
from edge_runtime.device_state import KeptFiles
from edge_runtime.layers import BundleSource
from edge_runtime.participant import Contribution
from edge_runtime.remote import RemoteBundle
from edge_runtime.trainer import Received, Trainer
from federation.errors import OutOfMemory
from federation.messages import Report, Task, TaskOffer, decode_task
from tests.coordinator.harness import Files, Site
from tests.edge_runtime.conftest import failures


class Recording(DeviceClient):
    """Remembers what it sends."""

    def send_update(
        self, task: str, body: Callable[[], Iterable[bytes | memoryview]], report: Report, **options: bool
    ) -> TaskOffer | None:
        self.sent = b"".join(bytes(part) for part in body())
        self.offer = task
        return super().send_update(task, body, report, **options)

    def next_task(self, wait: float = 30.0) -> Any:
        found = super().next_task(wait)
        self.work = found.work if found else None
        return found


@pytest.mark.parametrize(("tier", "micro_batch"), [("strong", None), ("moderate", None), ("weak", None), ("strong", 6)])
def test_what_is_sent_is_what_training_gives(
    site: Site, make_job, connect, data: Path, digits, images, tmp_path, tier, micro_batch
) -> None:
    job = make_job(num_rounds=2)
    client = connect(Recording, site.enrol(tier)[1])
    device = Device(str(data), tmp_path / "work", tier=tier, engine="portable", micro_batch=micro_batch)
    agent = Agent(client, device)
    samples = from_arrays(images[0][:100], images[1][:100], digits.manifest)
    space, before = digits.manifest.space, np.array(digits.weights)
    for number in range(2):  # the second time with what was kept from the first
        assert agent.run(most_tasks=1, wait=5.0) == 1
        site.settle()
        task = decode_task(client.work)
        assert task.round == number and digits.manifest.boundary(task.boundary) == digits.manifest.boundary(tier)
        layer = digits.manifest.boundary(tier).layer
        work = tmp_path / f"oracle{number}"
        shutil.copytree(digits.directory, work)
        where = space.suffix(layer)
        (work / digits.manifest.weights.name).write_bytes(Files(site.directory).version(job, number).read_bytes())
        trainer = Trainer(work, BundleSource(work, digits.manifest), samples)
        assert task.micro_batch is None  # the device's own choice
        outcome = trainer.run(replace(task, micro_batch=micro_batch), Received(before[where]))
        expected = np.array(outcome.local.update())
        trainer.close()
        views = space.views(expected, start=where.start)
        sent = load(client.sent)
        assert sent.keys() == views.keys()
        for name, view in views.items():
            assert sent[name].tobytes() == np.ascontiguousarray(view).tobytes(), name
        assert np.abs(expected).max() > 0
        after = np.array(map_weights(Files(site.directory).version(job, number + 1), space))
        moved = before.astype(np.float64)
        moved[where] += expected
        np.testing.assert_array_max_ulp(after, moved.astype(np.float32), maxulp=1)
        before = after
    assert site.server.coordinator.job(job)["state"] == "done"


@pytest.mark.parametrize(
    ("micro_batch", "taken", "said"),
    [  # 9 samples are 8 + 1, and one at a time is too few for batch norm
        (8, 7, []),
        (1, 3, ["--micro-batch 1: 2 samples go through at once, for the sake of the model's loss or batch norm"]),
    ],
)
def test_an_agent_with_few_samples_leaves_no_part_of_one(
    site: Site, make_job, connect, images, tmp_path: Path, monkeypatch, micro_batch: int, taken: int, said: list[str]
) -> None:
    np.savez(tmp_path / "few.npz", x=images[0][:9], y=images[1][:9])
    job, told, sizes = make_job(num_rounds=1), list[str](), set[int]()
    trained = Trainer.run

    def watched(trainer: Trainer, task: Task, *rest: Any) -> Any:
        sizes.add(task.at_once)
        return trained(trainer, task, *rest)

    monkeypatch.setattr(Trainer, "run", watched)
    device = Device(str(tmp_path / "few.npz"), tmp_path / "work", tier="strong", micro_batch=micro_batch)
    agent = Agent(connect(DeviceClient, site.enrol()[1]), device, on_notice=told.append)
    assert agent.run(most_tasks=1, wait=5.0) == 1
    site.settle()
    assert site.server.coordinator.job(job)["state"] == "done" and not failures(site, job)
    assert sizes == {taken} and told == said


def out_of_memory(*_: object, **__: object) -> None:
    raise OutOfMemory("training from 'conv1': not enough memory")


def disk_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("where", "what", "reason"),
    [
        (None, None, "data"),
        (Trainer, out_of_memory, "out_of_memory"),
        (Trainer, no_memory, "out_of_memory"),
        (RemoteBundle, disk_full, "disk_full"),
    ],
)
def test_a_task_that_fails_is_reported_and_the_agent_lives(
    site: Site, make_job, connect, data: Path, tmp_path: Path, monkeypatch, where: Any, what: Any, reason: str
) -> None:
    job = make_job(num_rounds=1)
    client = connect(DeviceClient, site.enrol()[1])
    kept = data.with_suffix(".kept")
    monkeypatch.setattr(standings, "FIRST_BENCH", 0.2)
    if where is None:
        data.rename(kept)
    else:
        monkeypatch.setattr(where, "run" if where is Trainer else "fetch_weights", what)
    agent = Agent(client, Device(str(data), tmp_path / "work", tier="strong"))
    asked = iter([False, True])
    assert agent.run(wait=5.0, until=lambda: next(asked)) == 0
    assert [told["reason"] for told in failures(site, job)] == [reason]
    assert failures(site, job)[0]["message"]
    monkeypatch.undo()
    if where is None:
        kept.rename(data)
    assert agent.run(most_tasks=1, wait=0.3) == 1  # the same agent, when what was wrong is mended
    site.settle()
    assert site.server.coordinator.job(job)["state"] == "done" and len(failures(site, job)) == 1


def test_an_update_that_comes_too_late_is_not_worth_dying_for(
    site: Site, make_job, connect, data: Path, tmp_path: Path
) -> None:
    job = make_job(num_rounds=1)
    client = connect(DeviceClient, site.enrol()[1])
    agent = Agent(client, Device(str(data), tmp_path / "work", tier="weak"))
    offer = client.next_task(5.0)
    assert offer is not None
    site.server.coordinator.set_state(job, "stopped")
    assert agent.answer(offer) is False
    second = make_job(num_rounds=1)
    assert agent.run(most_tasks=1, wait=5.0) == 1
    site.settle()
    assert site.server.coordinator.job(second)["state"] == "done" and failures(site, job) == []


def test_a_device_that_no_job_can_use_is_told_why_and_waits_for_one_that_can(
    site: Site, make_job, connect, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(num_rounds=1, cover={"rule": "everything"})
    agent = Agent(connect(DeviceClient, site.enrol("weak")[1]), Device(str(data), tmp_path / "work", tier="weak"))
    asked = iter([False, False, False, True])
    assert agent.run(wait=0.1, until=lambda: next(asked)) == 0
    why = "everything is to be trained, and the device can train from 'dense' on"
    assert caplog.messages == [f"no job can use this device: job {job}: {why}; waiting for one that can"]
    suits = make_job(num_rounds=1)
    assert agent.run(most_tasks=1, wait=5.0) == 1
    site.settle()
    assert site.server.coordinator.job(suits)["state"] == "done" and len(caplog.messages) == 1


def test_the_task_that_came_with_an_answer_is_done_without_asking_again(
    site: Site, make_job, connect, data: Path, tmp_path: Path
) -> None:
    class Counting(DeviceClient):
        asked = 0

        def next_task(self, wait: float = 30.0) -> Any:
            self.asked += 1
            return super().next_task(wait)

    jobs = [make_job(num_rounds=1, bounds={"offer": 60.0}) for _ in range(2)]
    client = connect(Counting, site.enrol()[1])
    agent = Agent(client, Device(str(data), tmp_path / "work", engine="portable"))
    assert agent.run(most_tasks=2, wait=5.0) == 2
    site.settle()
    assert client.asked == 1
    assert [site.server.coordinator.job(job)["state"] for job in jobs] == ["done", "done"]


def test_a_task_that_an_agent_has_no_time_for_goes_to_another(
    site: Site, make_job, connect, data: Path, tmp_path: Path
) -> None:
    jobs = [make_job(num_rounds=1, bounds={"offer": 60.0}) for _ in range(2)]
    agent = Agent(connect(DeviceClient, site.enrol()[1]), Device(str(data), tmp_path / "work", engine="portable"))
    stop: list[bool] = []
    agent.on_report = lambda report: stop.append(True)
    assert agent.run(wait=5.0, until=lambda: bool(stop)) == 1
    kinds = [event["kind"] for job in jobs for event in site.server.coordinator.events(job, 0)[0]]
    assert "TaskFailed" in kinds


def test_a_device_that_was_shut_out_ends(site: Site, connect, data: Path, tmp_path: Path) -> None:
    device, token = site.enrol()
    client = connect(DeviceClient, token)
    site.server.coordinator.revoke(device)
    with pytest.raises(Declined) as refusal:
        Agent(client, Device(str(data), tmp_path / "work")).run(wait=0.0)
    assert refusal.value.answer == 401


def test_what_was_kept_of_a_deleted_job_goes_and_another_coordinators_stays(
    site: Site, make_job, connect, data: Path, tmp_path: Path
) -> None:
    client, kept = connect(DeviceClient, site.enrol()[1]), tmp_path / "work" / "kept"
    agent = Agent(client, Device(str(data), tmp_path / "work", engine="portable"))
    job = make_job(algorithm="scaffold", num_rounds=9)
    assert agent.run(most_tasks=1, wait=5.0) == 1
    site.settle()
    site.server.coordinator.set_state(job, "paused")
    shutil.copytree(kept / job, kept / "unknown")  # says that it is of this coordinator
    KeptFiles(kept / "elsewhere", server="https://other/").save("t", "stem", _kept())
    KeptFiles(kept / "earlier").save("t", "stem", _kept())  # a program that did not write down where from
    (kept / "damaged").mkdir()
    (kept / "damaged" / "t.kept").write_text("no state")
    asked = iter([False, True])
    assert agent.run(wait=0.1, until=lambda: next(asked)) == 0
    assert {path.name for path in kept.iterdir()} == {job, "elsewhere", "earlier", "damaged"}, "it is only paused"
    site.server.coordinator.delete_job(job, force=True)
    again = Agent(client, Device(str(data), tmp_path / "work", engine="portable"))
    asked = iter([False, True])
    assert again.run(wait=0.1, until=lambda: next(asked)) == 0
    assert {path.name for path in kept.iterdir()} == {"elsewhere", "earlier", "damaged"}


def _kept() -> Contribution:
    return Contribution({}, {"model": np.zeros(5, np.float32)}, ())
