"""When the disk or the database refuses: nothing has happened, and what has is tried again."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from sqlalchemy.orm import Session

from coordinator.store import blobs
from coordinator.store.versions import Versions
from federation.errors import InputError
from federation.job import plan_from
from federation.round_sums import RoundSums
from tests.coordinator.databases import about_sqlite
from tests.coordinator.harness import ALL_THREE, World, mean_oracle, scripted


def test_a_round_that_cannot_be_written_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.job()
    device = world.device()
    write, full = Versions.write_next, [True]

    def fail_once(*arguments: object) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Versions, "write_next", fail_once)
    before = world.weights(job)
    offers = world.round([device])
    world.later(60)
    assert world.state(job)["version"] == 0 and world.state(job)["round"]["state"] == "closing"
    full[0] = False
    world.later(60)
    assert world.state(job)["version"] == 1
    expected = (before.astype(np.float64) + scripted(world.manifest, offers[device])).astype(np.float32)
    np.testing.assert_array_max_ulp(world.weights(job), expected, maxulp=1)
    assert world.spool() == []


def test_a_body_that_could_not_be_folded_is_folded_when_the_round_closes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was acknowledged is never left out."""
    job = world.job(participate={"min_available": 2})
    devices = world.fleet("strong", "strong")
    before, offers = world.weights(job), world.offers(devices)
    fold = RoundSums.fold

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(RoundSums, "fold", fail)
    world.send(devices[0], offers[devices[0]])
    world.settle()
    monkeypatch.setattr(RoundSums, "fold", fold)
    world.send(devices[1], offers[devices[1]])
    world.settle()
    mean, _ = mean_oracle(world.manifest, [(0, 1, scripted(world.manifest, offer)) for offer in offers.values()])
    np.testing.assert_array_max_ulp(world.weights(job), (before + mean).astype(np.float32), maxulp=1)


def test_when_the_database_refuses_nothing_has_happened(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.job()
    device = world.device()
    offer = world.poll(device)
    assert offer is not None
    commit = Session.commit

    def refuse(self: Session) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Session, "commit", refuse)
    monkeypatch.setattr(Session, "flush", lambda self, objects=None: refuse(self))
    with pytest.raises(OSError):
        world.send(device, offer)
    monkeypatch.undo()
    assert Session.commit is commit and world.spool() == []
    world.send(device, offer)
    world.settle()
    assert world.state(job)["version"] == 1


def test_a_job_that_cannot_be_made_leaves_no_files(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(blobs, "publish", full)
    with pytest.raises(OSError):
        world.job()
    assert list((world.root / "jobs").iterdir()) == [] and world.coordinator.jobs() == []
    with pytest.raises(InputError, match="not a bundle"):
        world.coordinator.create_job(plan_from({"bundle": "x"}), "f" * 64)


@about_sqlite  # else another process may be about to record it
def test_after_a_restart_the_spool_has_what_is_needed_and_no_more(world: World) -> None:
    job = world.job(**ALL_THREE)
    devices = world.fleet("strong", "strong", "strong")
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    needed = world.spool()
    assert len(needed) == 1
    spool = world.root / "spool"
    (spool / f"{offers[devices[1]].id}.abc.part").write_bytes(b"half")
    (spool / f"{offers[devices[1]].id}.{'0' * 64}.body").write_bytes(b"never acknowledged")
    world.restart()
    assert world.spool() == needed
    for device in devices[1:]:
        world.send(device, offers[device])
    world.settle()
    assert world.state(job)["version"] == 1 and world.spool() == []
