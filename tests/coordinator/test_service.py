"""The use cases of devices and jobs, without HTTP: who gets which task, what counts, what is refused and why."""

from __future__ import annotations

import errno
import hashlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sqlalchemy.orm import Session

from coordinator import keeper, summing
from coordinator.errors import NotAllowed, NotFound, Refused
from coordinator.plan import plan_from
from coordinator.summing import Summing
from federation.axes.cover import DeviceProfile
from federation.errors import InputError
from federation.wire import WireError
from tests.coordinator.harness import TIERS, World, body_of, mean_oracle, scripted, task_parts

ALL_THREE = {"participate": {"min_available": 3}}


# --- credentials -----------------------------------------------------------------------------------


def test_an_invitation_ends_after_its_uses_and_after_its_time(world: World) -> None:
    token = world.registry.invite(2, 100)
    first, second = (world.registry.enrol(token, "d", DeviceProfile())[0] for _ in range(2))
    assert first != second
    with pytest.raises(NotAllowed, match="used up"):
        world.registry.enrol(token, "d", DeviceProfile())
    late = world.registry.invite(2, 100)
    world.now += 100
    with pytest.raises(NotAllowed, match="expired"):
        world.registry.enrol(late, "d", DeviceProfile())
    assert len(world.coordinator.devices()) == 2


def test_of_many_who_come_at_once_with_the_last_use_one_gets_it(world: World) -> None:
    token, gate = world.registry.invite(1, 100), threading.Barrier(8)

    def come(_: int) -> bool:
        gate.wait()
        try:
            world.registry.enrol(token, "d", DeviceProfile())
        except NotAllowed:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(come, range(8))) == 1


@pytest.mark.parametrize(("uses", "seconds"), [(0, 60), (1, 0), (1, 1e9), (10**7, 60), (1, float("nan"))])
def test_an_invitation_has_bounds(world: World, uses: int, seconds: float) -> None:
    with pytest.raises(InputError, match="uses"):
        world.registry.invite(uses, seconds)


def test_no_token_is_in_the_files(world: World) -> None:
    admin, invitation = world.registry.set_admin_token(), world.registry.invite(2, 60)
    device, token = world.registry.enrol(invitation, "kitchen", DeviceProfile())
    assert admin and world.registry.device_of(token) == device
    files = [path for path in world.root.iterdir() if path.is_file()]
    everything = b"".join(path.read_bytes() for path in files)
    assert b"kitchen" in everything  # it is the right place to look, and not compressed
    for secret in (admin, invitation, token):
        assert secret.encode() not in everything
        assert secret.rpartition("_")[2].encode() not in everything


def test_the_administrators_token_is_made_once(world: World) -> None:
    token = world.registry.set_admin_token()
    assert token and world.registry.set_admin_token() is None
    world.registry.check_admin(token)
    with pytest.raises(NotAllowed):
        world.registry.check_admin(token + "x")


def test_a_revoked_device_is_shut_out_and_its_seat_goes_to_another(world: World) -> None:
    job = world.job()
    invitation = world.registry.invite(1, 60)
    gone, token = world.registry.enrol(invitation, "d", DeviceProfile(tier="strong"))
    offer = world.poll(gone)
    assert offer is not None
    world.coordinator.revoke(gone)
    with pytest.raises(NotAllowed):
        world.registry.device_of(token)
    with pytest.raises(NotAllowed):
        world.poll(gone)
    heir = world.device()
    second = world.poll(heir)
    assert second is not None and task_parts(second.id) == (0, 0, 2)
    with pytest.raises(Refused) as refusal:
        world.send(gone, offer)
    assert refusal.value.reason == "late"
    world.send(heir, second)
    world.settle()
    assert world.state(job)["version"] == 1
    with pytest.raises(NotFound):
        world.coordinator.revoke("nobody")


# --- a round, against numpy ------------------------------------------------------------------------


def test_a_round_of_unequal_devices_is_a_mean_layer_by_layer(world: World) -> None:
    job = world.job(num_rounds=2, **ALL_THREE)
    devices = world.fleet(*TIERS)
    before = world.weights(job)
    offers = world.round(devices)
    layers = {
        offer.work["boundary"]: world.manifest.boundary(offer.work["boundary"]).layer for offer in offers.values()
    }
    assert sorted(layers.values()) == [0, 1, 2]
    updates = [(layers[o.work["boundary"]], 1.0, scripted(world.manifest, o)) for o in offers.values()]
    mean, trained = mean_oracle(world.manifest, updates)
    assert trained.all()
    np.testing.assert_array_max_ulp(world.weights(job), (before + mean).astype(np.float32), maxulp=1)
    statistic = world.manifest.space.slice_of("stem.mean")
    assert (world.weights(job)[statistic] != before[statistic]).all()
    summary = world.coordinator.rounds(job)[0]["summary"]
    assert summary["trainers"] == {"stem": 1, "body": 2, "head": 3} and summary["updates"] == 3
    assert world.spool() == []


def test_what_nobody_trains_keeps_every_bit_and_is_warned_about(world: World) -> None:
    job = world.job(participate={"min_available": 2})
    devices = world.fleet("weak", "moderate")
    before = world.weights(job)
    world.round(devices)
    stem = world.manifest.space.layer(0)
    after = world.weights(job)
    assert after[stem].tobytes() == before[stem].tobytes()
    assert (after[stem.stop :] != before[stem.stop :]).all()
    assert "WarnLayerUncovered" in world.kinds(job)


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_updates_are_weighed_by_samples_and_the_server_has_a_rate(world: World, rate: float) -> None:
    job = world.job(weigh={"by": "samples"}, serve={"rate": rate}, **ALL_THREE)
    devices = world.fleet("strong", "strong", "weak")
    before = world.weights(job)
    offers = world.offers(devices)
    updates = []
    for samples, (device, offer) in zip((1, 50, 999), offers.items()):
        world.send(device, offer, samples=samples)
        layer = world.manifest.boundary(offer.work["boundary"]).layer
        updates.append((layer, samples, scripted(world.manifest, offer)))
    world.settle()
    mean, _ = mean_oracle(world.manifest, updates)
    statistics = world.manifest.space.slice_of("stem.mean")
    expected = before + rate * mean
    expected[statistics] = (before + mean)[statistics]  # a mean of what devices saw, whatever the rate
    np.testing.assert_allclose(world.weights(job), expected, rtol=0, atol=3e-7)
    assert world.coordinator.rounds(job)[0]["summary"]["samples"] == 1050


def test_a_device_that_was_drawn_three_times_counts_three_times(world: World) -> None:
    job = world.job(seed=3, participate={"replacement": True, "count": 5})
    devices = world.fleet("strong", "strong")
    before = world.weights(job)
    offers = world.offers(devices)
    seats = world.state(job)["round"]["body"]["slots"]
    counts = {seat["member"]["device"]: seat["count"] for seat in seats}
    assert sum(counts.values()) == 5 and len(set(counts.values())) == 2
    for device, offer in offers.items():
        world.send(device, offer)
    world.settle()
    updates = [(0, counts[device], scripted(world.manifest, offer)) for device, offer in offers.items()]
    mean, _ = mean_oracle(world.manifest, updates)
    np.testing.assert_array_max_ulp(world.weights(job), (before + mean).astype(np.float32), maxulp=1)


def test_long_updates_are_shortened(world: World) -> None:
    job = world.job(serve={"clip_norm": 0.5}, participate={"min_available": 2})
    devices = world.fleet("strong", "strong")
    before, size = world.weights(job), world.manifest.space.size
    offers = world.offers(devices)
    long, short = np.full(size, 2.0, np.float32), np.full(size, 0.01, np.float32)
    for (device, offer), vector in zip(offers.items(), (long, short)):
        world.send(device, offer, vector)
    world.settle()
    clipped = long * (0.5 / np.linalg.norm(long.astype(np.float64)))
    np.testing.assert_allclose(world.weights(job), before + (clipped + short) / 2, rtol=0, atol=3e-7)


@pytest.mark.parametrize("combine", ["median", "trimmed_mean"])
def test_robust_rules_against_numpy(world: World, combine: str) -> None:
    job = world.job(serve={"combine": combine, "trim": 0.25}, participate={"min_available": 5})
    devices = world.fleet("strong", "strong", "strong", "strong", "weak")
    before, space = world.weights(job), world.manifest.space
    offers = world.offers(devices)
    rows = np.full((5, space.size), np.nan)
    for row, (device, offer) in zip(rows, offers.items()):
        vector = scripted(world.manifest, offer)
        if offer is next(iter(offers.values())):
            vector = np.full_like(vector, 60.0)  # one lies
        row[space.size - vector.size :] = vector
        world.send(device, offer, vector)
    world.settle()
    expected = np.empty(space.size)
    for column in range(space.size):
        values = np.sort(rows[:, column][~np.isnan(rows[:, column])])
        cut = len(values) // 4
        expected[column] = np.median(values) if combine == "median" else values[cut : len(values) - cut].mean()
    np.testing.assert_allclose(world.weights(job), before + expected, rtol=0, atol=3e-7)
    assert np.abs(world.weights(job) - before).max() < 1
    assert world.spool() == []


def test_any_order_of_arrival_gives_the_same_bits(make_world: Callable[..., World]) -> None:
    world = make_world()
    devices = world.fleet(*TIERS)
    found = set()
    for order in itertools.permutations(range(3)):
        job = world.job(num_rounds=1, seed=5, weigh={"by": "samples"}, **ALL_THREE)
        offers = world.offers(devices)
        rng = np.random.default_rng(8)
        vectors = {d: rng.normal(size=scripted(world.manifest, offers[d]).size).astype(np.float32) for d in devices}
        for index in order:
            device = devices[index]
            world.send(device, offers[device], vectors[device], samples=7 + 100 * index)
        world.settle()
        assert world.state(job)["state"] == "done"
        found.add(world.weights(job).tobytes())
    assert len(found) == 1


# --- what is refused -------------------------------------------------------------------------------


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
        world.coordinator.accept(slow, receiving, receiving.decoder.finish(), "0" * 64, {"samples": 1})
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
        "nonsense", "", f"{job}-0-0", f"{job}-0-99-1", f"{job}-0--1-1", f"{job}-0-0-01", f"{job}-0-0-+1",
        f"{job}-0-0-{'9' * 5000}", f"{job}-0-0-١", "../../etc-0-0-1",
    ):  # fmt: skip
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


# --- time ------------------------------------------------------------------------------------------


def test_a_deadline_with_a_quorum_closes_without_the_straggler(world: World) -> None:
    job = world.job(participate={"min_available": 3, "quorum": 2, "deadline": 60})
    devices = world.fleet("strong", "strong", "strong")
    before = world.weights(job)
    offers = world.offers(devices)
    sent = list(offers.items())[:2]
    for device, offer in sent:
        world.send(device, offer)
    world.later(59)
    assert world.state(job)["version"] == 0
    world.later(1)
    assert world.state(job)["version"] == 1
    mean, _ = mean_oracle(world.manifest, [(0, 1, scripted(world.manifest, offer)) for _, offer in sent])
    np.testing.assert_array_max_ulp(world.weights(job), (before + mean).astype(np.float32), maxulp=1)


@pytest.mark.parametrize("what", ["poll", "fail", "revoke", "late update"])
def test_a_round_that_is_due_closes_whoever_looks_at_the_clock_first(world: World, what: str) -> None:
    """Not only a tick lets time pass."""
    job = world.job(participate={"min_available": 3, "quorum": 1, "deadline": 60}, bounds={"lease": 50})
    devices = world.fleet("strong", "strong", "strong")
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    world.now += 60
    if what == "poll":
        assert world.poll(devices[1]) is None
    elif what == "fail":
        world.coordinator.fail_task(devices[1], offers[devices[1]].id, "failed", "")
    elif what == "revoke":
        world.coordinator.revoke(devices[1])
    else:
        with pytest.raises(Refused):
            world.send(devices[1], offers[devices[1]])
    world.settle()
    assert world.state(job)["version"] == 1 and world.spool() == []


def test_without_a_quorum_the_round_waits_visibly(world: World) -> None:
    job = world.job(participate={"min_available": 2, "deadline": 60})
    devices = world.fleet("strong", "strong")
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    world.later(1000)
    assert world.state(job)["state"] == "running" and world.state(job)["version"] == 0
    assert "WaitForUpdates" in world.kinds(job)
    world.send(devices[1], offers[devices[1]])
    world.settle()
    assert world.state(job)["version"] == 1


def test_without_a_quorum_the_job_fails_visibly(world: World) -> None:
    job = world.job(participate={"min_available": 2, "deadline": 60, "on_missing_quorum": "fail"})
    devices = world.fleet("strong", "strong")
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    before = world.weights(job)
    world.later(60)
    found = world.state(job)
    assert found["state"] == "failed" and found["message"] == "1 of 2 at the deadline" and found["version"] == 0
    assert world.kinds(job)[-2:] == ["RoundAbandoned", "JobState"]
    assert world.weights(job).tobytes() == before.tobytes() and world.spool() == []
    assert world.poll(devices[1]) is None
    with pytest.raises(Refused, match="failed"):
        world.coordinator.set_state(job, "running")


def test_a_pause_is_held_against_nobody(world: World) -> None:
    job = world.job(participate={"min_available": 2, "deadline": 60, "on_missing_quorum": "fail"}, bounds={"lease": 50})
    devices = world.fleet("strong", "strong")
    offers = world.offers(devices)
    world.now += 10
    world.coordinator.set_state(job, "paused")
    world.later(1000)
    world.send(devices[0], offers[devices[0]])  # what is under way still counts
    world.restart()
    world.later(1000)
    assert world.state(job)["state"] == "paused" and world.poll(devices[1]) is None
    world.coordinator.set_state(job, "running")
    world.later(39)  # 49 of the lease's 50 seconds have passed
    again = world.poll(devices[1])
    assert again is not None and again.id == offers[devices[1]].id
    world.send(devices[1], again)
    world.settle()
    assert world.state(job)["version"] == 1


def test_an_outage_is_held_against_nobody(world: World) -> None:
    job = world.job(participate={"min_available": 2, "deadline": 60, "on_missing_quorum": "fail"}, bounds={"lease": 50})
    devices = world.fleet("strong", "strong")
    offers = world.offers(devices)
    world.send(devices[0], offers[devices[0]])
    world.end()
    world.now += 10_000
    world.begin()
    world.later(49)
    world.send(devices[1], offers[devices[1]])
    world.settle()
    assert world.state(job)["version"] == 1


# --- jobs ------------------------------------------------------------------------------------------


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
    world.job()
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
    world.coordinator.accept(device, first, first.decoder.finish(), sha256, {"samples": 1})
    with pytest.raises(Refused) as refusal:
        world.coordinator.accept(device, second, second.decoder.finish(), sha256, {"samples": 1})
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


# --- when the disk or the database refuses ---------------------------------------------------------


def test_a_round_that_cannot_be_written_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.job()
    device = world.device()
    write, full = summing.write_version, [True]

    def fail_once(*arguments: object) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(summing, "write_version", fail_once)
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
    fold = Summing.fold

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Summing, "fold", fail)
    world.send(devices[0], offers[devices[0]])
    world.settle()
    monkeypatch.setattr(Summing, "fold", fold)
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

    monkeypatch.setattr(keeper, "publish", full)
    with pytest.raises(OSError):
        world.job()
    assert list((world.root / "jobs").iterdir()) == [] and world.coordinator.jobs() == []
    with pytest.raises(InputError, match="not a bundle"):
        world.coordinator.create_job(plan_from({"bundle": "x"}), "f" * 64)


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
