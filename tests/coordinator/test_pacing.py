"""A fleet that is too large to wait in requests: who is told to come back, who counts, and who is drawn."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import presence
from coordinator.pacing import ComeBack
from federation.messages import TaskOffer
from federation.pace import Pace
from tests.coordinator.harness import World

DEVICES = 12
LONG_POLLS = 3


@pytest.fixture
def large(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A coordinator for which a dozen devices are a large fleet."""
    monkeypatch.setattr(presence, "COUNTED", 0.0)  # time stands still here
    world.pace = Pace(long_polls=LONG_POLLS, check_ins_per_second=0.5, longest_away=60.0)
    world.restart()
    return world


def check_in(world: World, devices: list[str]) -> dict[str, Any]:
    return dict(zip(devices, world.coordinator.next_tasks(devices)))


def of(kind: type, answers: dict[str, Any]) -> list[str]:
    return [device for device, answer in answers.items() if isinstance(answer, kind)]


def begin(world: World, seats: int = 2, **plan: Any) -> tuple[str, list[str], dict[str, Any]]:
    """A job whose first round has begun with the first devices that came; all others have checked in."""
    job = world.job(participate={"count": seats, "quorum": 1.0}, num_rounds=50, **plan)
    devices = world.fleet(*["strong"] * DEVICES)
    for device in devices:
        world.coordinator.presence.left(device)  # they have enrolled, and were not heard of since
    first = {device: world.poll(device) for device in devices}
    return job, devices, first | {device: world.poll(device) for device in devices if first[device] is None}


def finish_round(world: World, offers: dict[str, Any]) -> None:
    for device in of(TaskOffer, offers):
        world.send(device, offers[device])
    world.settle()


def test_those_that_are_needed_wait_and_the_others_are_told_to_come_back(large: World) -> None:
    _, _, answers = begin(large)
    assert len(of(TaskOffer, answers)) == 2
    waits = [device for device, answer in answers.items() if answer is None]
    told = of(ComeBack, answers)
    assert len(waits) == LONG_POLLS and len(told) == DEVICES - 2 - LONG_POLLS
    assert all(5.0 <= answers[device].seconds <= 60.0 for device in told)
    assert len({answers[device].seconds for device in told}) == len(told)
    states = {row["id"]: row["state"] for row in large.coordinator.devices()}
    assert {states[device] for device in told} == {"waiting"}


def test_a_device_that_is_away_is_not_drawn_and_holds_no_round_up(large: World) -> None:
    job, devices, answers = begin(large)
    for number in range(1, 5):
        here, away = [device for device, answer in answers.items() if answer is None], of(ComeBack, answers)
        finish_round(large, answers)
        assert large.state(job)["version"] == number
        here += of(TaskOffer, answers)
        check_in(large, here)
        answers |= check_in(large, here)
        seats = large.state(job)["round"]["body"]["slots"]
        assert {seat["member"]["device"] for seat in seats}.isdisjoint(away)
        assert len(of(TaskOffer, answers)) == 2, "the round did not wait for those that are away"
        # Those that are away come when it is time, and fill the places of those that were drawn.
        large.now += 20.0
        back = [device for device in devices if not isinstance(answers[device], TaskOffer)]
        answers |= check_in(large, back)


def test_those_that_are_away_count_for_the_size_of_the_fleet(large: World) -> None:
    _, _, answers = begin(large)
    away = len(of(ComeBack, answers))
    assert large.coordinator.census(large.now - 60.0)["devices_present"] == DEVICES
    large.now += 70.0  # beyond every time that was told
    with large.coordinator.repository.reading() as session:
        assert large.coordinator.presence.counts(session, large.now) == (0, 0)
    large.now -= 65.0
    with large.coordinator.repository.reading() as session:
        assert away == len(large.coordinator.repository.away(session, large.now))


def test_a_share_of_the_fleet_is_a_share_of_those_that_are_away_too(large: World) -> None:
    _, devices, answers = begin(large)
    half = large.job(participate={"fraction_train": 0.5, "quorum": 1.0})
    busy = len(of(TaskOffer, answers))
    waits = [device for device, answer in answers.items() if answer is None]
    check_in(large, waits)
    body = large.state(half)["round"]["body"]
    assert body["state"] == "selecting", f"half of {DEVICES - busy} devices are more than the {LONG_POLLS} that wait"
    large.now += 14.0
    check_in(large, [device for device in devices if not isinstance(answers[device], TaskOffer)])
    body = large.state(half)["round"]["body"]
    assert body["state"] == "collecting" and len(body["slots"]) == (DEVICES - busy) // 2


def test_a_device_that_a_round_is_short_of_is_never_sent_away(large: World) -> None:
    large.job(participate={"count": DEVICES, "quorum": 1.0})
    devices = large.fleet(*["strong"] * DEVICES)
    for device in devices:
        large.coordinator.presence.left(device)
    assert [large.poll(device) for device in devices[:-1]] == [None] * (DEVICES - 1)
    assert isinstance(large.poll(devices[-1]), TaskOffer)


def test_a_cohort_that_stays_for_a_window_is_not_sent_away(large: World) -> None:
    job = large.job(participate={"count": 2, "window": 10, "quorum": 1.0}, num_rounds=10)
    devices = large.fleet(*["strong"] * DEVICES)
    answers = check_in(large, devices)
    answers |= check_in(large, devices)
    cohort = set(of(TaskOffer, answers))
    first, second = cohort
    large.send(first, answers[first])
    assert large.poll(first) is None, "it waits for the next round of the window"
    large.send(second, answers[second])
    large.settle()
    check_in(large, [first, second])
    assert set(of(TaskOffer, check_in(large, [first, second]))) == cohort
    assert large.state(job)["version"] == 1


def test_a_device_that_does_not_heed_its_time_is_let_wait(large: World) -> None:
    _, _, answers = begin(large)
    hasty = max(of(ComeBack, answers), key=lambda device: answers[device].seconds)
    large.now += 1.5
    assert large.poll(hasty) is None, "it would only ask again at once"
    assert isinstance(large.poll(hasty), ComeBack), "when it has waited it is told again"


def test_who_is_away_is_known_after_a_restart(large: World) -> None:
    _, _, answers = begin(large)
    told = of(ComeBack, answers)
    large.now += 1.0
    large.restart()
    with large.coordinator.repository.reading() as session:
        here, away = set(large.coordinator.presence.here(session, large.now)), len(told)
        assert here.isdisjoint(told), "no round is offered to those that will not come"
        assert large.coordinator.presence.counts(session, large.now)[1] == away


def test_a_device_that_no_job_can_use_is_sent_away_first(large: World) -> None:
    _, devices, _ = begin(large)
    odd = large.device("no such tier")
    for device in devices:
        large.coordinator.presence.left(device)
    with large.coordinator.repository.begin() as session:
        large.coordinator.presence.sent_away(session, dict.fromkeys(devices, 60.0), large.now)
    assert isinstance(large.poll(odd), ComeBack), "although no device waits"
    assert large.poll(large.device()) is None


def go_on(world: World, devices: list[str], seconds: float) -> None:
    """Let time pass in which every device comes when it was told to, and does its tasks."""
    back, end = dict.fromkeys(devices, world.now), world.now + seconds
    while world.now < end:
        answers = check_in(world, [device for device in devices if back[device] <= world.now])
        back |= {device: world.now + answers[device].seconds for device in of(ComeBack, answers)}
        finish_round(world, answers)
        world.later(1.0)


def test_a_round_does_not_wait_for_devices_that_its_job_cannot_use(large: World) -> None:
    """They are sent away again whenever they come, so that some of them are always away."""
    job = large.job(num_rounds=5, participate={"quorum": 1.0})
    devices = large.fleet(*["strong"] * 5, *["no such tier"] * 7)
    go_on(large, devices, 300.0)
    assert (large.state(job)["version"], large.state(job)["state"]) == (5, "done")


def test_a_round_does_not_wait_for_benched_devices_that_are_away(large: World) -> None:
    job = large.job(num_rounds=50, participate={"count": DEVICES, "quorum": 1.0})
    devices = large.fleet(*["strong"] * DEVICES)
    with large.coordinator._units.begin() as work:
        for device in devices[5:] * 5:
            work.failed(large.coordinator._jobs[job], device, "crashed", "a test")
    assert large.state(job)["benched"].keys() == set(devices[5:])
    with large.coordinator.repository.begin() as session:
        large.coordinator.presence.sent_away(session, dict.fromkeys(devices[5:], 60.0), large.now)
    go_on(large, devices[:5], 3.0)
    assert large.state(job)["version"] >= 1


def test_a_round_waits_for_devices_that_are_away_no_longer_than_they_may_be(large: World) -> None:
    """Another process sends devices away again and again, and knows that no job can use them; this one does not."""
    job, devices = large.job(num_rounds=50), large.fleet(*["strong"] * DEVICES)
    here, others = devices[:2], devices[2:]
    for _ in range(20):
        with large.coordinator.repository.begin() as session:
            large.coordinator.presence.sent_away(session, dict.fromkeys(others, 30.0), large.now)
        go_on(large, here, 5.0)
    assert large.state(job)["version"] >= 1
    assert {row["device"] for row in large.coordinator.timings(job, 0)} == set(here)
