"""The unit of work: all or nothing, in memory too, and what follows a commit follows in order."""

from __future__ import annotations

from dataclasses import fields

import pytest

from coordinator.jobs import FinishRound, FoldUpdate, NotifyDevices, OpenJob, OpenJobState, ReachPoint, UnitOfWork
from federation import cohort, rounds
from tests.coordinator.harness import World


def open_job(world: World, job: str) -> OpenJob:
    found: OpenJob = world.coordinator._jobs[job]
    return found


def collecting(world: World, job: str, device: str) -> OpenJob:
    """A round with one seat, which is the device's."""
    found = open_job(world, job)
    with world.coordinator._units.begin() as work:
        seat = cohort.Seat(0, cohort.Member(device, "stem", 3))
        work.advance(found, rounds.DevicesAvailable(cohort=cohort.Cohort((seat,), 1, 1)))
    return found


def test_a_unit_that_fails_has_changed_nothing(world: World) -> None:
    job = open_job(world, world.job())
    device, before = world.device(), job.state
    events = world.kinds(job.id)
    with pytest.raises(RuntimeError), world.coordinator._units.begin() as work:
        seat = cohort.Seat(0, cohort.Member(device, "stem", 3))
        work.advance(job, rounds.DevicesAvailable(cohort=cohort.Cohort((seat,), 1, 1)))
        work.note_unfit(job, {"other": "too small"})
        assert work.state(job).round.state == "collecting" and work.state(job).unfit and work.outbox
        assert job.state is before, "the job has its state once the database has it"
        raise RuntimeError
    assert job.state is before and world.kinds(job.id) == events
    assert world.state(job.id)["round"]["state"] == "selecting" and world.state(job.id)["unfit"] == {}


def test_what_the_database_has_is_what_the_job_has(world: World) -> None:
    device = world.device()
    job = collecting(world, world.job(), device)
    with world.coordinator._units.begin() as work:
        work.advance(job, cohort.LeaseTaken(device, 0))
    assert job.state.round.slots[0].state == "leased"
    state = job.state
    world.restart()
    again = open_job(world, job.id).state
    same = {field.name for field in fields(OpenJobState)} - {"unfit", "waits_for"}  # of these devices remind it
    assert {name: getattr(again, name) for name in same} == {name: getattr(state, name) for name in same}


def test_the_last_update_of_a_round_is_folded_before_the_round_is_closed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.job()
    device = world.device()
    offer = world.poll(device)
    assert offer is not None
    handled = []
    handle = world.coordinator._units._handle
    monkeypatch.setattr(world.coordinator._units, "_handle", lambda effect: (handled.append(effect), handle(effect)))
    world.send(device, offer)
    world.settle()
    assert [type(effect) for effect in handled[:3]] == [ReachPoint, FoldUpdate, FinishRound]


def test_devices_are_notified_once_for_a_unit(world: World) -> None:
    work = UnitOfWork(world.coordinator.repository, world.sessions(), world.now)
    work.notify_devices()
    work.notify_devices()
    assert work.outbox == [NotifyDevices()]
