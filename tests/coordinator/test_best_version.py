"""The best version is kept beside the newest, and scores can end a job: over restarts, and whatever round is open."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import evaluation
from coordinator.errors import NotFound, Refused
from coordinator.scoring import Evaluation
from tests.coordinator.harness import World
from tests.waiting import wait_until

DATA = {"data": "coordinator:test.npz"}


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The accuracy of each version; a test fills it in."""
    found: dict[int, float] = {}
    monkeypatch.setattr(evaluation, "score", lambda request: _score(found, request))
    return found


def _score(found: dict[int, float], request: Evaluation) -> dict[str, Any]:
    value = found[request.version]
    return {"accuracy": value, "mean_loss": 1 - value, "counted": 3}


def run(world: World, job: str, devices: list[str], count: int) -> dict[int, bytes]:
    """Rounds, each of which ends with its score; returns the weights of every version."""
    found = {}
    for _ in range(count):
        world.round(devices)
        version = world.state(job)["version"]
        found[version] = world.files.version(job, version).read_bytes()
        wait_until(lambda: not world.coordinator._evaluations.unfinished(job))
        wait_until(lambda: not any(name.endswith(".evaluated") for name in kept(world, job)))  # its file goes last
    return found


def hold_back(world: World) -> tuple[Any, list[Any]]:
    """From now on scores wait in a list; also returns the function that lets one of them come."""
    evaluations, waiting = world.coordinator._evaluations, []
    put, evaluations.put = evaluations.put, waiting.append  # type: ignore[method-assign]
    return put, waiting


def kept(world: World, job: str) -> list[str]:
    """The files of versions; the sums that the newest was made of are another matter."""
    return sorted(path.name for path in world.files.version(job, 0).parent.iterdir() if path.suffix != ".sums")


def test_the_best_version_outlives_newer_ones_and_restarts(world: World, scores: dict[int, float]) -> None:
    scores |= {1: 0.2, 2: 0.9, 3: 0.9, 4: 0.1, 5: 0.3, 6: 0.95}
    job, device = world.job(num_rounds=6, evaluate=DATA), world.device()
    assert world.state(job)["best"] is None
    weights = run(world, job, [device], 5)
    best = {"version": 2, "metric": "accuracy", "value": 0.9}
    assert world.state(job)["best"] == best
    assert kept(world, job) == ["2.best", "4.safetensors", "5.safetensors"]
    world.restart()
    assert world.state(job)["best"] == best
    path, _ = world.coordinator.version_file(job, 2)
    assert path.read_bytes() == weights[2]
    weights |= run(world, job, [device], 1)
    assert world.state(job)["best"]["version"] == 6
    assert kept(world, job) == ["5.safetensors", "6.best", "6.safetensors"]
    with pytest.raises(NotFound, match="there is no version 2"):
        world.coordinator.version_file(job, 2)


def test_the_metric_is_the_jobs(world: World, scores: dict[int, float]) -> None:
    scores |= {1: 0.2, 2: 0.1}
    job, device = world.job(num_rounds=2, evaluate={**DATA, "metric": "mean_loss"}), world.device()
    run(world, job, [device], 2)
    assert world.state(job)["best"] == {"version": 1, "metric": "mean_loss", "value": 0.8}


def test_killed_between_the_weights_and_the_record(world: World, scores: dict[int, float]) -> None:
    """The weights of a best version were given their key, and then nothing was recorded; or the old ones are left."""
    scores |= {1: 0.2, 2: 0.1}
    job, device = world.job(num_rounds=2, evaluate=DATA), world.device()
    weights = run(world, job, [device], 2)
    world.end()
    world.files.version(job, 2).with_suffix(".best").hardlink_to(world.files.version(job, 2))
    world.interrupted(job)
    world.begin()
    assert kept(world, job) == ["1.best", "1.safetensors", "2.safetensors"]
    assert world.coordinator.version_file(job, 1)[0].read_bytes() == weights[1]


def test_a_target_ends_a_job_and_the_open_round_is_given_up(world: World, scores: dict[int, float]) -> None:
    scores |= {1: 0.2, 2: 0.9}
    job, device = world.job(num_rounds=9, evaluate={**DATA, "target": 0.8}), world.device()
    run(world, job, [device], 1)
    assert world.state(job)["state"] == "running"
    run(world, job, [device], 1)
    found = world.state(job)
    assert (found["state"], found["version"], found["round"]["state"]) == ("done", 2, "abandoned")
    assert found["message"] == "stopped early: accuracy 0.9 of version 2 reached the target 0.8"
    told = [event["body"] for event in world.coordinator.events(job, 0)[0] if event["kind"] == "JobState"]
    assert told == [{"state": "done", "message": found["message"]}]
    assert world.coordinator.events(job, 0)[1], "the stream of events ends"
    assert world.poll(device) is None and world.spool() == []
    world.restart()
    assert world.state(job)["state"] == "done" and world.poll(device) is None


def test_a_task_under_way_when_a_job_ends_is_refused(world: World, scores: dict[int, float]) -> None:
    """The score of version 1 comes while two devices work on round 1; one has answered."""
    scores |= {1: 0.9}
    job, devices = world.job(num_rounds=9, evaluate={**DATA, "target": 0.8}), world.fleet("strong", "strong")
    put, waiting = hold_back(world)
    world.round(devices)
    (first, second), offers = devices, world.offers(devices)
    world.send(first, offers[first])
    assert len(world.spool()) == 1
    put(waiting[0])
    wait_until(lambda: not world.coordinator._evaluations.unfinished(job))
    world.settle()
    with pytest.raises(Refused, match=f"job {job} is done"):
        world.send(second, offers[second])
    assert world.state(job)["version"] == 1 and world.offers(devices) == {} and world.spool() == []


def test_evaluations_without_a_better_version_end_a_job(world: World, scores: dict[int, float]) -> None:
    scores |= {1: 0.5, 2: 0.4, 3: 0.5, 4: 0.6}
    job, device = world.job(num_rounds=9, evaluate={**DATA, "stop_after": 2}), world.device()
    run(world, job, [device], 3)
    found = world.state(job)
    assert found["state"] == "done" and found["best"]["version"] == 1
    assert found["message"].endswith("not been better than 0.5 of version 1 for 2 evaluations")


def test_a_job_that_is_over_is_not_ended_again(world: World, scores: dict[int, float]) -> None:
    """The score of the last version reaches the target: the job is done by its rounds, and stays so."""
    scores |= {1: 0.9}
    job, device = world.job(num_rounds=1, evaluate={**DATA, "target": 0.8}), world.device()
    run(world, job, [device], 1)
    assert (world.state(job)["state"], world.state(job)["message"]) == ("done", "")


def test_a_round_that_is_closing_is_brought_to_its_end(make_world: Any, scores: dict[int, float]) -> None:
    """The score comes between the sums of a round and its record."""
    scores |= {1: 0.9, 2: 0.95}
    world: World
    at: list[str] = []

    def reached(point: str) -> None:
        at.append(point)
        if point == "mid-commit" and at.count(point) == 2:
            wait_until(lambda: world.coordinator.job_state(job) == "done")

    world = make_world(reached=reached)
    job, device = world.job(num_rounds=9, evaluate={**DATA, "target": 0.8}), world.device()
    evaluations = world.coordinator._evaluations
    put, waiting = hold_back(world)
    world.round([device])
    evaluations.put = put
    offer = world.offers([device])[device]
    world.send(device, offer)  # the fold worker closes the round, and waits in the middle of it
    wait_until(lambda: at.count("mid-commit") == 2)
    put(waiting[0])
    world.settle()
    wait_until(lambda: not evaluations.unfinished(job))
    found = world.state(job)
    assert (found["state"], found["version"], found["round"]["state"]) == ("done", 2, "committed")
    assert "reached the target" in found["message"] and found["best"]["version"] == 2
    with pytest.raises(Refused, match=f"job {job} is done"):
        world.coordinator.receive(device, f"{job}-2-0-1")


def test_a_paused_job_can_end(world: World, scores: dict[int, float]) -> None:
    scores |= {1: 0.9}
    job, device = world.job(num_rounds=9, evaluate={**DATA, "target": 0.8}), world.device()
    put, waiting = hold_back(world)
    world.round([device])
    world.coordinator.set_state(job, "paused")
    put(waiting[0])
    wait_until(lambda: not world.coordinator._evaluations.unfinished(job))
    assert world.state(job)["state"] == "done"


# --- scores of devices -----------------------------------------------------------------------------------------------

ON_DEVICES = {"on_devices": True, "holdout": 0.5}


def claim(accuracy: float, counted: int = 10) -> dict[str, Any]:
    return {
        "loss": (1 - accuracy) * counted,
        "correct": round(accuracy * counted),
        "counted": counted,
        "classifies": True,
    }


def device_round(world: World, claims: dict[str, Any]) -> None:
    offers = world.offers(list(claims))
    for device, offer in offers.items():
        assert (offer.work["holdout"], offer.work["evaluate"]) == (0.5, True)
        world.send(device, offer, samples=10, evaluation=claims[device])
    world.settle()


def test_claims_of_devices_are_weighed_bounded_and_recorded(world: World) -> None:
    devices = world.fleet("strong", "weak", "weak", "weak")
    job = world.job(num_rounds=2, evaluate=ON_DEVICES, participate={"min_available": 4})
    lies: list[Any] = [claim(1.0, 10_000_000), {**claim(1.0), "loss": 1e300}]
    device_round(world, dict(zip(devices, [claim(0.2), claim(0.6, 5), *lies])))
    world.restart()
    (first, _), metrics = world.coordinator.rounds(job), world.coordinator.metrics(job)
    told = first["summary"]["evaluation"]
    assert (told["version"], told["devices"], told["counted"]) == (0, 2, 15), "what cannot be does not count"
    assert told["accuracy"] == pytest.approx(5 / 15) and told["mean_loss"] == pytest.approx((8 + 2) / 15)
    assert told["tiers"]["weak"]["accuracy"] == 0.6 and told["spread"]["accuracy"]["max"] == 0.6
    assert {row["name"]: row["value"] for row in metrics} == {
        "device_accuracy": told["accuracy"],
        "device_mean_loss": told["mean_loss"],
    }
    assert first["summary"]["updates"] == 4, "the updates of those devices count all the same"
    (event,) = [row["body"] for row in world.coordinator.events(job, 0)[0] if row["kind"] == "RoundCommitted"]
    assert event["evaluation"] == told


def test_devices_decide_what_is_best_and_when_to_end(world: World) -> None:
    device = world.device()
    job = world.job(num_rounds=9, evaluate={**ON_DEVICES, "stop_after": 2})
    weights = {}
    for number, accuracy in enumerate((0.1, 0.8, 0.3, 0.8)):
        weights[number] = world.files.version(job, number).read_bytes()
        assert world.state(job)["state"] == "running"
        device_round(world, {device: claim(accuracy)})
    found = world.state(job)
    assert found["best"] == {"version": 1, "metric": "device_accuracy", "value": 0.8}
    assert (found["state"], found["version"], found["round"]["state"]) == ("done", 4, "committed")
    assert found["message"].endswith("device_accuracy has not been better than 0.8 of version 1 for 2 evaluations")
    assert kept(world, job) == ["1.best", "3.safetensors", "4.safetensors"]
    world.restart()
    assert world.coordinator.version_file(job, 1)[0].read_bytes() == weights[1]
    assert world.state(job)["message"] == found["message"] and world.poll(device) is None


def test_devices_score_as_often_as_the_plan_says_and_hold_out_always(world: World) -> None:
    device = world.device()
    world.job(num_rounds=4, evaluate={**ON_DEVICES, "every": 2})
    seen = []
    for _ in range(4):
        offer = world.offers([device])[device]
        seen.append((offer.work["holdout"], offer.work.get("evaluate", False)))
        world.send(device, offer)
        world.settle()
    assert seen == [(0.5, True), (0.5, False), (0.5, True), (0.5, False)]


def test_the_coordinators_own_data_decides_where_there_is_some(world: World, scores: dict[int, float]) -> None:
    scores |= {1: 0.2, 2: 0.1}
    device, job = world.device(), world.job(num_rounds=2, evaluate={**DATA, **ON_DEVICES})
    for accuracy in (0.9, 0.8):
        device_round(world, {device: claim(accuracy)})
        wait_until(lambda: not world.coordinator._evaluations.unfinished(job))
    assert world.state(job)["best"] == {"version": 1, "metric": "accuracy", "value": 0.2}
    assert kept(world, job) == ["1.best", "1.safetensors", "2.safetensors"]


def test_tasks_of_other_jobs_have_nothing_that_older_agents_do_not_know(world: World) -> None:
    device = world.device()
    world.job()
    assert {"holdout", "evaluate"}.isdisjoint(world.offers([device])[device].work)
