"""A fleet that never stands still: heartbeats, lateness, presence, benches, and tasks that come back."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time

import numpy as np
import pytest

from coordinator.errors import NotFound, Refused
from coordinator.presence import STAYS
from coordinator.standings import FIRST_BENCH, LONGEST_BENCH
from coordinator.store.schema import StandingRecord
from federation.axes.cover import DeviceProfile
from federation.job import plan_from
from tests.coordinator.databases import about_sqlite
from tests.coordinator.harness import Offer, Site, World, body_of, only, report_header, task_parts
from tests.waiting import wait_until

LEASE = 30.0  # the default


def beat(world: World, device: str, task: str) -> float:
    return only(world.coordinator.heartbeats([(device, task)]))


def standing(world: World, device: str) -> dict[str, object]:
    with world.coordinator.repository.reading() as session:
        return vars(only(world.coordinator.repository.standings(session, device=device)))


# --- leases ----------------------------------------------------------------------------------------


def test_a_device_at_work_keeps_its_task_and_one_that_is_gone_loses_it(world: World) -> None:
    job = world.job(participate={"count": 2})
    works, gone = world.fleet("strong", "strong")
    offers = world.offers([works, gone])
    for _ in range(20):
        world.later(LEASE / 3)
        assert beat(world, works, offers[works].id) == LEASE
    with pytest.raises(Refused, match="no longer this device's: expired") as refusal:
        beat(world, gone, offers[gone].id)
    assert refusal.value.reason == "expired"
    world.send(works, offers[works])
    assert world.state(job)["round"]["body"]["slots"][task_parts(offers[works].id)[1]]["state"] == "arrived"


def test_a_heartbeat_for_what_is_not_ones_own(world: World) -> None:
    job = world.job(num_rounds=2, participate={"quorum": 1.0})
    owner, other = world.fleet("strong", "strong")
    offers = world.offers([owner, other])
    for device, task in ((other, offers[owner].id), (owner, "x"), (owner, f"{job}-0-9-1")):
        with pytest.raises(NotFound):
            beat(world, device, task)
    world.send(owner, offers[owner])
    with pytest.raises(Refused, match="duplicate"):
        beat(world, owner, offers[owner].id)
    world.send(other, offers[other])
    world.settle()
    with pytest.raises(Refused, match="round 0 is over"):
        beat(world, owner, offers[owner].id)


def test_renewals_that_a_kill_lost_cost_no_device_its_task(world: World) -> None:
    job = world.job(num_rounds=1, participate={"quorum": 1.0})
    device = world.device()
    offer = world.poll(device)
    assert offer is not None
    for _ in range(30):
        world.later(10)
        beat(world, device, offer.id)
    world.restart()
    world.later(LEASE - 1)  # the device has to find the coordinator again
    beat(world, device, offer.id)
    world.send(device, offer)
    world.settle()
    assert world.state(job)["state"] == "done"


# --- lateness --------------------------------------------------------------------------------------


def test_with_default_settings_one_dead_device_of_three_holds_nothing_up(world: World) -> None:
    job = world.job(num_rounds=2, participate={"min_available": 3})
    devices = world.fleet("strong", "strong", "strong")
    offers = world.offers(devices)
    world.now += 2
    for device in devices[:2]:
        world.send(device, offers[device])
    world.later(3.9)
    assert world.state(job)["version"] == 0
    world.later(0.1)  # three times the two seconds of the others
    assert world.state(job)["version"] == 1
    assert world.coordinator.rounds(job)[0]["summary"]["updates"] == 2
    assert standing(world, devices[2])["reason"] == "late"
    assert standing(world, devices[0])["seconds"] == 2.0


@pytest.mark.parametrize("goes", ["wrong data", "killed"])
def test_a_fleet_most_of_which_fails_at_once_goes_on_with_the_rest(world: World, goes: str) -> None:
    """Three of five devices have wrong data, or are killed, in the first round: its quorum can never come."""
    job = world.job(num_rounds=3, participate={"min_available": 2})
    devices = world.fleet(*["strong"] * 5)
    world.offers(devices)
    offers = world.offers(devices)
    works = devices[3:]
    for device in works:
        world.send(device, offers[device])
    if goes == "wrong data":
        for device in devices[:3]:
            world.coordinator.fail_task(device, offers[device].id, "data", "no samples")
    for _ in range(50):
        world.later(1)
        again = {device: offer for device in works if (offer := world.poll(device)) is not None}
        for device, offer in again.items():
            world.send(device, offer)
    assert world.state(job)["state"] == "done"
    assert [row["summary"]["updates"] for row in world.coordinator.rounds(job)] == [2, 2, 2]


def test_a_full_quorum_waits_for_every_device(world: World) -> None:
    job = world.job(participate={"min_available": 3, "quorum": 1.0})
    devices = world.fleet("strong", "strong", "strong")
    offers = world.offers(devices)
    for device in devices[:2]:
        world.send(device, offers[device])
    for _ in range(50):
        world.later(10)
        beat(world, devices[2], offers[devices[2]].id)
    assert world.state(job)["version"] == 0 and "WaitForUpdates" in world.kinds(job), "it says what it waits for"
    world.send(devices[2], offers[devices[2]])
    world.settle()
    assert world.state(job)["version"] == 1


def test_a_device_that_only_beats_loses_its_task_to_one_that_waits_and_is_late(world: World) -> None:
    job = world.job(num_rounds=1, participate={"count": 2, "min_available": 3, "quorum": 2})
    devices = world.fleet("strong", "strong", "strong")
    offers = world.offers(devices)
    (quick, hung), (spare,) = offers, set(devices) - offers.keys()
    world.send(quick, offers[quick])
    for _ in range(5):
        world.later(LEASE / 3)
        assert beat(world, hung, offers[hung].id) == LEASE
        assert world.poll(spare) is None
    world.later(LEASE / 3)  # a minute in all
    taken_over = world.poll(spare)
    assert taken_over is not None
    known = standing(world, hung)
    assert (known["reason"], known["seconds"]) == ("late", 60.0), "it is known to take at least so long"
    with pytest.raises(Refused) as refusal:
        beat(world, hung, offers[hung].id)
    assert refusal.value.reason == "late"
    world.send(spare, taken_over)
    world.settle()
    assert world.state(job)["state"] == "done"


def test_a_device_that_was_late_is_waited_for_longer_the_next_time(world: World) -> None:
    """Two take 10 seconds and one 45: it is late after 30 at first, and has up to 60 then."""
    job = world.job(num_rounds=2, participate={"min_available": 3})
    *quick, slow = world.fleet("strong", "strong", "strong")
    for version in (0, 1):
        offers = world.offers([*quick, slow])
        assert offers.keys() == {*quick, slow}
        world.later(10)
        for device in quick:
            world.send(device, offers[device])
        for _ in range(35 if version else 19):
            world.later(1)
            beat(world, slow, offers[slow].id)
        assert world.state(job)["version"] == version
        if not version:
            world.later(1)
            assert (world.state(job)["version"], standing(world, slow)["seconds"]) == (1, 30.0)
    world.send(slow, offers[slow])
    world.settle()
    assert world.coordinator.rounds(job)[1]["summary"]["updates"] == 3


@pytest.mark.parametrize(("quorum", "count", "rests"), [(0.5, 1, True), (0.5, 3, False), (1.0, 1, False)])
def test_a_device_that_held_its_round_up_counts_and_rests(world: World, quorum: float, count: int, rests: bool) -> None:
    """Two take 10 seconds, the others 25 and then 45. If these are the most, they are the fleet's measure."""
    devices = world.fleet(*["strong"] * (count + 2))
    world.offers(devices)  # none: so it is known that all are there
    job = world.job(num_rounds=4, participate={"quorum": quorum})
    slow = devices[:count]
    for number, seconds in enumerate((25, 45)):
        offers = world.offers(devices)
        assert offers.keys() == set(devices)
        world.later(10)
        for device in devices[count:]:
            world.send(device, offers[device])
        for _ in range(10, seconds, 5):
            world.later(5)
            assert not any(map(world.poll, devices[count:]))  # they wait
            for device in slow:
                beat(world, device, offers[device].id)
        for device in slow:
            world.send(device, offers[device])
        world.settle()
        assert world.coordinator.rounds(job)[number]["summary"]["updates"] == len(devices)
    known = standing(world, slow[0])
    assert (known["reason"], known["benched_until"]) == (("slow", world.now + 90) if rests else ("", None))
    invited = world.offers(devices).keys()
    assert invited == set(devices[count:] if rests else devices)
    if rests:
        told = "device is benched: slow: it took 45.0 s, the others 10.0 s"
        assert told in world.coordinator.job(job)["waiting"]["text"]


def test_a_round_begins_with_slow_devices_rather_than_with_too_few(world: World) -> None:
    world.job(num_rounds=4, participate={"min_available": 3})
    devices = world.fleet("strong", "strong", "strong")
    for seconds in (25, 45, 25):
        offers = world.offers(devices)
        assert offers.keys() == set(devices)
        world.later(10)
        for device in devices[1:]:
            world.send(device, offers[device])
        for _ in range(10, seconds, 5):
            world.later(5)
            beat(world, devices[0], offers[devices[0]].id)
        world.send(devices[0], offers[devices[0]])
        world.settle()


def test_a_heartbeat_drops_nothing_that_time_brings(world: World) -> None:
    """The clock goes on between two looks at it: what falls in between must still happen."""
    job = world.job(num_rounds=1, participate={"min_available": 3})
    *quick, slow = world.fleet("strong", "strong", "strong")
    offers = world.offers([*quick, slow])
    world.now += 5
    for device in quick:
        world.send(device, offers[device])
    world.settle()
    looks = iter([world.now + 9.9])  # late at 10
    world.coordinator.clock = world.coordinator._units.clock = lambda: next(looks, world.now + 10)
    beat(world, slow, offers[slow].id)
    world.coordinator.clock = world.coordinator._units.clock = lambda: world.now
    world.later(10)
    assert world.state(job)["state"] == "done"


def test_a_device_that_has_gone_is_not_drawn(world: World) -> None:
    world.job(num_rounds=2)
    stays, leaves = world.fleet("strong", "strong")
    world.round([stays, leaves])
    world.later(STAYS + 1)
    assert world.poll(stays) is not None
    assert world.poll(leaves) is None, "the round began without it"


def test_a_device_that_does_not_come_for_its_task_costs_one_round_and_not_each(world: World) -> None:
    """Killed between its update and its next request, it is neither late nor lost: it has no task."""
    job = world.job(num_rounds=9)
    stays, killed = world.fleet("strong", "strong")
    world.round([stays, killed])
    for version, waits in ((2, True), (3, False)):
        offer = world.poll(stays)
        assert offer is not None
        drawn = {slot["member"]["device"] for slot in world.state(job)["round"]["body"]["slots"]}
        assert drawn == ({stays, killed} if waits else {stays})
        world.send(stays, offer)
        world.later(5.0 if waits else 0.0)  # the grace
        assert world.state(job)["version"] == version
    assert world.offers([killed, stays]).keys() == {killed, stays}, "it is there again once it is heard of"


def test_a_job_says_the_same_as_its_devices_hear(world: World) -> None:
    """A device that went a moment ago is missing for both, and one that works for another job."""
    job = world.job(participate={"min_available": 3})
    stays, leaves = world.fleet("strong", "strong")
    for device in (leaves, stays):
        assert world.poll(device) is None
    assert world.state(job)["waiting"]["count"] == world.coordinator.figures()["missing"][job] == 1
    world.later(STAYS + 1)
    assert world.poll(stays) is None
    assert "needs 2 more devices" in world.coordinator.waiting(stays)
    assert world.state(job)["waiting"]["count"] == world.coordinator.figures()["missing"][job] == 2


# --- benches ---------------------------------------------------------------------------------------


def fail(world: World, device: str, reason: str) -> None:
    offer = world.poll(device)
    assert offer is not None
    world.coordinator.fail_task(device, offer.id, reason, "in words")


@pytest.mark.parametrize("reason", ["data", "out_of_memory", "non_finite_loss", "disk_full", "failed", "anything"])
def test_a_device_that_fails_rests_longer_each_time_and_a_success_forgives_it(world: World, reason: str) -> None:
    job = world.job()
    device = world.device()
    expected = FIRST_BENCH
    for _ in range(8):
        fail(world, device, reason)
        assert world.poll(device) is None
        why = f"benched for {expected:.0f} s: {reason}: in words"
        assert world.coordinator.unfit(device) == f"job {job}: {why}"
        assert world.state(job)["benched"] == {device: why}
        world.restart()
        world.later(expected - 1)
        assert world.poll(device) is None
        world.later(1)
        expected = min(2 * expected, LONGEST_BENCH)
    assert world.kinds(job).count("DeviceBenched") == 8
    world.round([device])
    world.round([device])
    known = standing(world, device)
    assert (known["failures"], known["in_a_row"], known["successes"], known["benched_until"]) == (8, 0, 2, None)
    fail(world, device, reason)
    assert world.coordinator.unfit(device).startswith(f"job {job}: benched for {FIRST_BENCH:.0f} s")


def test_refused_is_excused_only_where_it_was_counted(world: World) -> None:
    job = world.job()
    device = world.device()
    fail(world, device, "refused")
    assert "refused: in words" in world.state(job)["benched"][device]
    world.later(FIRST_BENCH)
    offer = world.poll(device)
    assert offer is not None
    world.coordinator.refuse_update(device, offer.id, "a NaN")
    world.coordinator.fail_task(device, offer.id, "refused", "a NaN")
    assert standing(world, device)["failures"] == 2, "once for each task"


def test_what_a_device_repeats_makes_no_events(world: World) -> None:
    job = world.job(participate={"count": 1})
    device = world.device()
    offer = world.poll(device)
    assert offer is not None
    for _ in range(50):
        world.coordinator.refuse_update(device, offer.id, "a NaN")
    slot = only(world.state(job)["round"]["body"]["slots"])
    assert slot["state"] == "failed", "a few were enough"
    for _ in range(50):
        world.coordinator.fail_task(device, offer.id, "data", "again")
    assert world.kinds(job).count("TaskFailed") == 2 and world.kinds(job).count("DeviceBenched") == 1
    assert standing(world, device)["failures"] == 1


def test_what_was_excused_makes_no_bench_longer(world: World) -> None:
    job = world.job()
    device = world.device()
    for _ in range(3):
        fail(world, device, "stopped")
    fail(world, device, "data")
    assert world.state(job)["benched"][device].startswith(f"benched for {FIRST_BENCH:.0f} s")
    known = standing(world, device)
    assert (known["failures"], known["in_a_row"]) == (4, 1)


@about_sqlite
@pytest.mark.skipif(sys.version_info < (3, 11), reason="its sqlite3 cannot lower the limit")
def test_more_devices_than_a_database_binds_values_have_a_standing(world: World) -> None:
    """Some databases bind 32,766 values at once; here it is 50, for as many devices."""
    job = world.job()
    devices = [world.device() for _ in range(50)]
    repository = world.coordinator.repository
    for successes in (1, 2):
        with repository.begin() as session:
            connection = session.connection().connection.driver_connection
            assert isinstance(connection, sqlite3.Connection)
            before = connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 50)
            try:
                repository.write_standings(session, [StandingRecord(job, device, successes) for device in devices])
            finally:
                connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, before)
    with repository.reading() as session:
        assert [known.successes for known in repository.standings(session, job=job)] == [2] * 50


@pytest.mark.parametrize("reason", ["too_large", "stopped", "coordinator"])
def test_what_is_no_fault_of_a_device_is_not_held_against_it(world: World, reason: str) -> None:
    job = world.job()
    device = world.device()
    for _ in range(3):
        fail(world, device, reason)
        assert world.state(job)["benched"] == {}
    assert world.poll(device) is not None, "at once"


def test_a_task_that_is_too_large_comes_back_at_once_with_the_new_boundary(world: World) -> None:
    job = world.job(num_rounds=1)
    device = world.device("strong")
    first = world.poll(device)
    assert first is not None and first.work["boundary"] == "stem"
    world.registry.set_profile(device, DeviceProfile(boundary="head"))
    world.coordinator.fail_task(device, first.id, "too_large", "it takes more than was predicted")
    second = world.poll(device)
    assert second is not None and second.work["boundary"] == "head"
    assert task_parts(second.id) == (0, task_parts(first.id)[1], 2), "the same seat"
    world.send(device, second)
    world.settle()
    assert world.state(job)["state"] == "done"


def test_a_failed_task_goes_to_another_device_at_once(world: World) -> None:
    world.job(participate={"count": 1})
    devices = world.fleet("strong", "strong")
    (first, offer) = next(iter(world.offers(devices).items()))
    other = next(device for device in devices if device != first)
    assert world.poll(other) is None
    world.coordinator.fail_task(first, offer.id, "data", "no such file")
    again = world.poll(other)
    assert again is not None and task_parts(again.id) == (0, 0, 2)


def test_benched_devices_do_not_keep_a_round_from_beginning_nor_are_they_drawn(world: World) -> None:
    job = world.job(num_rounds=2, participate={"count": 3})
    *good, bad = world.fleet("strong", "strong", "strong")
    offers = world.offers([*good, bad])
    world.coordinator.fail_task(bad, offers[bad].id, "data", "")
    for device in good:
        world.send(device, offers[device])
    world.later(5)
    assert world.state(job)["version"] == 1
    offers = world.offers([*good, bad])
    assert sorted(offers) == sorted(good), "three are there, one rests"
    for device in good:
        world.send(device, offers[device])
    world.settle()
    assert world.state(job)["state"] == "done"


def test_a_round_waits_until_as_many_as_it_needs_are_fit(world: World) -> None:
    job = world.job(num_rounds=2, participate={"min_available": 3})
    *good, bad = world.fleet("strong", "strong", "strong")
    offers = world.offers([*good, bad])
    world.coordinator.fail_task(bad, offers[bad].id, "data", "")
    for device in good:
        world.send(device, offers[device])
    world.later(5)
    assert world.state(job)["version"] == 1
    assert world.offers([*good, bad]) == {}, "one of the three rests"
    assert "WaitForDevices" in world.kinds(job)
    world.later(FIRST_BENCH)
    assert world.offers([*good, bad]).keys() == {*good, bad}


def test_a_device_that_is_at_work_is_not_drawn_again_before_it_comes_back(world: World) -> None:
    """It is slow and alive: the round closed without it, and it does not know that yet."""
    job = world.job(num_rounds=3)
    quick, other, slow = world.fleet("strong", "strong", "strong")
    offers = world.offers([quick, other, slow])
    for device in (quick, other):
        world.send(device, offers[device])
    world.later(2)
    assert sorted(world.offers([quick, other])) == sorted([quick, other])
    assert len(world.state(job)["round"]["body"]["slots"]) == 2
    with pytest.raises(Refused, match="round 0 is over"):
        beat(world, slow, offers[slow].id)
    assert world.poll(slow) is None
    for device, offer in world.offers([quick, other]).items():
        world.send(device, offer)
    world.settle()
    assert slow in world.offers([quick, other, slow]), "once is forgiven"


def test_where_tasks_take_long_a_bench_does_too(world: World) -> None:
    world.job(num_rounds=3)
    device = world.device()
    offer = world.poll(device)
    assert offer is not None
    for _ in range(60):
        world.later(10)
        beat(world, device, offer.id)
    world.send(device, offer)
    world.settle()
    pauses = []
    for _ in range(6):
        fail(world, device, "data")
        pauses.append(float(standing(world, device)["benched_until"]) - world.now)  # type: ignore[arg-type]
        world.later(pauses[-1])
    assert pauses == [1200.0, 2400.0, 3600.0, 3600.0, 3600.0, 3600.0]


def test_a_device_that_vanishes_again_and_again_is_benched(world: World) -> None:
    job = world.job()
    device = world.device()
    for number in range(2):
        assert world.poll(device) is not None
        world.later(LEASE)
        assert bool(world.state(job)["benched"]) == (number == 1), "once may happen to any"
    assert "lost: it was not heard of during its task" in world.coordinator.unfit(device)


# --- over the network ------------------------------------------------------------------------------


def test_heartbeats_over_the_network(site: Site, held: tuple) -> None:
    client, offer = held
    answer = client.post(f"/v1/tasks/{offer.id}/heartbeat")
    assert (answer.status_code, answer.json()) == (200, {"seconds": LEASE})
    assert client.post("/v1/tasks/x-0-0-1/heartbeat").status_code == 404
    assert client.post("/v1/tasks/next?wait=0").headers["Embrace-Lease"] == "30"
    client.put(f"/v1/tasks/{offer.id}/update", content=body_of(site.manifest, offer), headers=report_header())  # type: ignore[attr-defined]
    site.settle()
    gone = client.post(f"/v1/tasks/{offer.id}/heartbeat")
    assert gone.status_code == 409 and gone.json()["reason"] in ("duplicate", "round_closed")


def test_a_body_that_is_unsound_benches_its_device(site: Site, held: tuple) -> None:
    client, offer = held
    poisoned = body_of(site.manifest, offer, np.full(site.manifest.space.size, np.nan, np.float32))  # type: ignore[attr-defined]
    answer = client.put(f"/v1/tasks/{offer.id}/update", content=poisoned, headers=report_header())
    assert answer.status_code == 400
    told = site.server.coordinator.job(offer.job)["benched"]
    assert next(iter(told.values())).startswith(f"benched for {FIRST_BENCH:.0f} s: refused: ")
    client.post(f"/v1/tasks/{offer.id}/failure", json={"reason": "refused"})
    waits = client.post("/v1/tasks/next?wait=0")
    assert waits.status_code == 204 and "benched" in waits.headers["Embrace-Unfit"]


def test_a_device_that_hangs_up_while_it_waits_is_gone_at_once(site: Site) -> None:
    service = site.server.coordinator
    device, token = site.enrol()
    left = threading.Event()
    service.presence.left, known = lambda gone: (known(gone), left.set()), service.presence.left  # type: ignore[method-assign, assignment]
    with pytest.raises(Exception, match="timed out"), site.http(token) as client:
        client.post("/v1/tasks/next?wait=60", timeout=0.3)
    wait_until(left.is_set)
    service.presence.left = known  # type: ignore[method-assign]
    with service.repository.reading() as session:
        assert device not in service.presence.here(session, time.time())
    job = service.create_job(plan_from({"bundle": "x"}), site.bundle)  # type: ignore[attr-defined]
    with site.http(site.enrol()[1]) as other:
        offer = Offer(other.post("/v1/tasks/next?wait=5").json())
    slots = service.job(job)["round"]["body"]["slots"]
    assert device not in {slot["member"]["device"] for slot in slots} and offer.job == job
    service.set_state(job, "stopped")
