"""Which updates count: each once, from the device that holds the task, in time, and sound."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from coordinator.errors import NotFound, Refused
from federation.errors import InputError
from federation.wire import WireError
from tests.coordinator.harness import World, body_of, mean_oracle, scripted, task_parts


def test_a_second_update_is_a_duplicate_even_after_the_round_and_the_job(world: World) -> None:
    job = world.job(num_rounds=2)
    device = world.device()
    first = world.poll(device)
    assert first is not None
    world.send(device, first)
    for _ in range(2):
        with pytest.raises(Refused) as refusal:
            world.send(device, first, np.ones_like(scripted(world.manifest, first)))
        assert refusal.value.reason == "duplicate"
        world.settle()
    world.round([device])
    assert world.state(job)["state"] == "done"
    with pytest.raises(Refused) as refusal:
        world.send(device, first)
    assert refusal.value.reason == "duplicate"
    assert world.spool() == []


def test_an_update_after_its_round_is_told_so(world: World) -> None:
    job = world.job(num_rounds=2, participate={"count": 1, "over_select": 1.0, "min_available": 2})
    devices = world.fleet("strong", "strong")
    (quick, first), (slow, second) = world.offers(devices).items()
    world.send(quick, first)
    world.settle()
    before = world.weights(job)
    with pytest.raises(Refused, match="round 0 is over") as refusal:
        world.send(slow, second)
    assert refusal.value.reason == "round_closed"
    world.coordinator.set_state(job, "stopped")
    with pytest.raises(Refused, match="stopped") as refusal:
        world.send(slow, second)
    assert refusal.value.reason == "round_closed"
    assert world.weights(job).tobytes() == before.tobytes() and world.spool() == []


def test_an_update_that_passes_the_closing_of_its_round_does_not_count(world: World) -> None:
    """It began to arrive while the round was open."""
    job = world.job(participate={"count": 1, "over_select": 1.0, "min_available": 2})
    (quick, first), (slow, second) = world.offers(world.fleet("strong", "strong")).items()
    receiving = world.coordinator.receive(slow, second.id)
    world.send(quick, first)
    world.settle()
    body = body_of(world.manifest, second)
    receiving.path.write_bytes(body)
    receiving.decoder.feed(body)
    with pytest.raises(Refused) as refusal:
        world.accept(slow, receiving, receiving.decoder.finish(), "0" * 64, {"samples": 1})
    assert refusal.value.reason == "round_closed"
    assert world.spool() == [] and world.state(job)["version"] == 1


def test_a_foreign_task_does_not_exist(world: World) -> None:
    job = world.job()
    owner, other = world.fleet("strong", "strong")
    offer = world.poll(owner)
    assert offer is not None
    with pytest.raises(NotFound):
        world.send(other, offer)
    with pytest.raises(NotFound):
        world.coordinator.fail_task(other, offer.id, "failed", "")
    for task in (
        "nonsense",
        "",
        f"{job}-0-0",
        f"{job}-0-99-1",
        f"{job}-0--1-1",
        f"{job}-0-0-01",
        f"{job}-0-0-+1",
        f"{job}-0-0-{'9' * 5000}",
        f"{job}-0-0-١",
        "../../etc-0-0-1",
    ):
        with pytest.raises(NotFound):
            world.coordinator.receive(owner, task)
    assert world.spool() == []


def test_a_lease_that_ran_out_goes_to_another_and_the_first_is_late(world: World) -> None:
    job = world.job(participate={"count": 1}, bounds={"lease": 10, "offer": 5})
    slow = world.device()
    first = world.poll(slow)
    quick = world.device()
    assert first is not None
    world.later(10)
    with pytest.raises(Refused) as refusal:
        world.send(slow, first)
    assert refusal.value.reason == "expired"
    second = world.poll(quick)
    assert second is not None and task_parts(second.id) == (0, 0, 2)
    with pytest.raises(Refused) as refusal:
        world.send(slow, first)
    assert refusal.value.reason == "late"
    assert world.spool() == [] and world.state(job)["version"] == 0
    world.send(quick, second)
    world.settle()
    assert world.state(job)["version"] == 1


@pytest.mark.parametrize("samples", [0, -1, 1.5, True, None, "7", 2**40])
def test_a_report_without_a_number_of_samples_leaves_no_trace(world: World, samples: object) -> None:
    world.job()
    device = world.device()
    offer = world.poll(device)
    assert offer is not None
    with pytest.raises(InputError, match=r"report\.samples"):
        world.send(device, offer, samples=samples)
    assert world.spool() == []
    world.send(device, offer)  # the device may send a good one


@pytest.mark.parametrize("loss", [10**400, 1e308, float("nan"), True, "low", [1], None])
def test_whatever_a_device_says_about_its_loss_the_round_is_closed(world: World, loss: object) -> None:
    job = world.job()
    device = world.device()
    world.round([device], loss=loss)
    assert world.coordinator.rounds(job)[0]["summary"]["loss"] is None
    assert world.state(job)["version"] == 1


def test_values_and_norms_have_bounds(world: World) -> None:
    world.job(bounds={"max_value": 1.0, "max_norm": 2.0})
    device = world.device()
    offer = world.poll(device)
    assert offer is not None
    size = world.manifest.space.size
    with pytest.raises(WireError, match="magnitudes up to 1"):
        world.send(device, offer, np.full(size, 1.5, np.float32))
    with pytest.raises(WireError, match="norm"):
        world.send(device, offer, np.full(size, 0.9, np.float32))
    world.send(device, offer, np.full(size, 0.1, np.float32))


def test_two_uploads_of_one_task_at_once_count_once_and_do_not_mix(world: World) -> None:
    """A client that lost patience sends again while the first body still arrives."""
    job = world.job()
    device = world.device()
    offer = world.poll(device)
    assert offer is not None
    before = world.weights(job)
    good = body_of(world.manifest, offer)
    first, second = world.coordinator.receive(device, offer.id), world.coordinator.receive(device, offer.id)
    assert first.path != second.path
    with first.path.open("wb") as one:
        one.write(good[:100])
        with second.path.open("wb") as two:
            two.write(good)
        one.write(good[100:])
    for receiving in (first, second):
        receiving.decoder.feed(good)
    sha256 = hashlib.sha256(good).hexdigest()
    world.accept(device, first, first.decoder.finish(), sha256, {"samples": 1})
    with pytest.raises(Refused) as refusal:
        world.accept(device, second, second.decoder.finish(), sha256, {"samples": 1})
    assert refusal.value.reason in ("duplicate", "round_closed")
    world.settle()
    expected = (before.astype(np.float64) + scripted(world.manifest, offer)).astype(np.float32)
    np.testing.assert_array_max_ulp(world.weights(job), expected, maxulp=1)
    assert world.spool() == []


def test_updates_that_race_all_count_once(world: World) -> None:
    job = world.job(num_rounds=1, participate={"min_available": 8})
    devices = world.fleet(*["strong"] * 8)
    before, offers, gate = world.weights(job), world.offers(devices), threading.Barrier(16)

    def send(device: str) -> bool:
        gate.wait()
        try:
            world.send(device, offers[device])
        except Refused as refusal:
            assert refusal.reason in ("duplicate", "round_closed")
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(send, devices * 2)) == 8
    world.settle()
    mean, _ = mean_oracle(world.manifest, [(0, 1, scripted(world.manifest, offer)) for offer in offers.values()])
    np.testing.assert_array_max_ulp(world.weights(job), (before + mean).astype(np.float32), maxulp=1)
    assert world.coordinator.rounds(job)[0]["summary"]["updates"] == 8 and world.spool() == []
