"""Who gets which task: jobs beside one another, cohorts, windows, seats that become free, devices that are unfit."""

from __future__ import annotations

import threading
from collections.abc import Callable

from federation.axes.cover import DeviceProfile
from tests.coordinator.harness import ALL_THREE, World, task_parts


def test_a_stopped_job_hands_out_nothing_and_keeps_nothing_on_the_spool(world: World) -> None:
    job = world.job(**ALL_THREE)
    devices = world.fleet("strong", "strong", "strong")
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    world.coordinator.set_state(job, "stopped")
    world.settle()
    assert world.state(job)["state"] == "stopped" and world.state(job)["round"]["state"] == "abandoned"
    assert world.poll(devices[1]) is None and world.spool() == []
    world.restart()
    assert world.poll(devices[1]) is None


def test_a_round_that_was_closing_when_the_job_was_stopped_is_brought_to_its_end(
    make_world: Callable[..., World],
) -> None:
    hold = threading.Event()
    world = make_world(reached=lambda point: point == "mid-commit" and hold.wait(30))
    job = world.job()
    device = world.device()
    offer = world.poll(device)
    assert offer is not None
    world.send(device, offer)
    world.coordinator.set_state(job, "stopped")
    hold.set()
    world.settle()
    found = world.state(job)
    assert (found["state"], found["version"], found["round"]["state"]) == ("stopped", 1, "committed")
    assert world.poll(device) is None


def test_jobs_run_beside_one_another(world: World) -> None:
    first, second = world.job(num_rounds=1), world.job(num_rounds=1, seed=9)
    device = world.device()
    one = world.poll(device)
    assert one is not None and one.job == first
    world.send(device, one)
    two = world.poll(device)
    assert two is not None and two.job == second and two.work["seed"] != one.work["seed"]
    world.send(device, two)
    world.settle()
    assert [row["state"] for row in world.coordinator.jobs()] == ["done", "done"]
    assert world.poll(device) is None


def test_a_device_that_can_train_nothing_stops_nobody(world: World) -> None:
    job = world.job(num_rounds=2, participate={"min_available": 1})
    unfit = [world.device(None, memory=1), world.device("no such tier"), world.device("strong", engines=("magic",))]
    assert all(world.poll(device) is None for device in unfit)
    able = world.device()
    world.round([able])
    assert all(world.poll(device) is None for device in unfit)
    assert world.state(job)["version"] == 1


def test_a_device_that_can_train_nothing_is_told_why(world: World) -> None:
    able, unfit = world.device(), world.device("no such tier")
    world.poll(unfit)
    assert world.coordinator.unfit(unfit) == "", "there is no job yet"
    job = world.job(num_rounds=3, participate={"min_available": 1})
    for _ in range(3):  # while devices are drawn, then while the round goes on
        assert world.poll(unfit) is None
        assert "no boundary or tier named 'no such tier'; this bundle has: strong" in world.coordinator.unfit(unfit)
        world.poll(able)
    assert world.coordinator.unfit(able) == ""
    assert list(world.state(job)["unfit"]) == [unfit]
    told = {row["id"]: row["unfit"] for row in world.coordinator.devices()}
    assert told[able] == "" and told[unfit].startswith(f"job {job}: no boundary")
    assert world.kinds(job).count("DeviceUnfit") == 1, "it asks again and again; watchers hear it once"


def test_a_device_that_one_job_cannot_use_waits_for_another(world: World) -> None:
    whole = world.job(num_rounds=1, cover={"rule": "everything"})
    weak = world.device("weak")
    assert world.poll(weak) is None
    assert "can train from 'head' on" in world.coordinator.unfit(weak)
    suits = world.job(num_rounds=1)
    offer = world.poll(weak)
    assert offer is not None and offer.job == suits and world.coordinator.unfit(weak) == ""
    world.send(weak, offer)
    world.settle()
    assert world.poll(weak) is None and world.coordinator.unfit(weak).startswith(f"job {whole}: ")
    world.registry.set_profile(weak, DeviceProfile(tier="strong"))
    offer = world.poll(weak)
    assert offer is not None and offer.job == whole and world.state(whole)["unfit"] == {}


def test_a_cohort_stays_for_its_window(world: World) -> None:
    job = world.job(num_rounds=6, seed=2, participate={"count": 2, "min_available": 6, "window": 3, "balance": False})
    devices = world.fleet(*["strong"] * 6)
    cohorts = [frozenset(world.round(devices)) for _ in range(6)]
    assert world.state(job)["state"] == "done"
    assert len(set(cohorts[:3])) == len(set(cohorts[3:])) == 1
    assert cohorts[0] != cohorts[3]


def test_a_window_outlives_a_restart(world: World) -> None:
    world.job(num_rounds=3, seed=2, participate={"count": 2, "min_available": 6, "window": 3, "balance": False})
    devices = world.fleet(*["strong"] * 6)
    first = frozenset(world.round(devices))
    world.restart()
    world.device("strong")  # whoever joins meanwhile waits for the next window
    assert frozenset(world.round(devices)) == first


def test_whoever_is_quick_counts_where_more_are_invited_than_wanted(world: World) -> None:
    job = world.job(participate={"count": 2, "over_select": 0.5, "min_available": 3})
    offers = world.offers(world.fleet("strong", "strong", "strong"))
    assert len(offers) == 3
    for device, offer in list(offers.items())[:2]:
        world.send(device, offer)
    world.settle()
    assert world.coordinator.rounds(job)[0]["summary"]["updates"] == 2


def test_a_failed_task_goes_to_another_and_rests_for_who_failed(world: World) -> None:
    job = world.job(bounds={"offer": 30})
    weak = world.device()
    offer = world.poll(weak)
    strong = world.device()
    assert offer is not None
    world.coordinator.fail_task(weak, offer.id, "out_of_memory", "no room")
    assert world.poll(weak) is None
    events = world.coordinator.events(job, 0)[0]
    told = next(event["body"] for event in events if event["kind"] == "TaskFailed")
    assert told == {"task": offer.id, "device": weak, "reason": "out_of_memory", "message": "no room"}
    second = world.poll(strong)
    assert second is not None and second.id != offer.id
    world.coordinator.fail_task(strong, second.id, "failed", "")
    world.later(30)
    third = world.poll(weak)
    assert third is not None and task_parts(third.id) == (0, 0, 3)


def test_a_device_that_asks_again_gets_the_same_task(world: World) -> None:
    world.job(bounds={"lease": 600})
    device = world.device()
    first = world.poll(device)
    world.now += 100
    assert world.poll(device) == first


def test_waiting_for_devices_is_said_once(world: World) -> None:
    job = world.job(**ALL_THREE)
    devices = world.fleet("strong", "strong")
    for _ in range(20):
        for device in devices:
            world.poll(device)
    waits = [
        event["body"]["count"] for event in world.coordinator.events(job, 0)[0] if event["kind"] == "WaitForDevices"
    ]
    assert waits == [1]
