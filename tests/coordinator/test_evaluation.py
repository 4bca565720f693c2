"""Scores: in a process of their own, in order, and what was waiting when the process ended is not forgotten."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import evaluation, scoring
from coordinator.evaluation import Evaluations
from coordinator.scoring import Evaluation
from coordinator.store.blobs import DirectoryBlobs
from coordinator.store.bundles import Bundles
from coordinator.store.repository import Repository
from coordinator.store.versions import Versions
from federation.manifest import WEIGHTS_NAME
from simulation.datasets.digits import DIGITS
from tests.coordinator.harness import ROOT, World

SHIPPED = ROOT / "embrace" / "demo" / "digits"


@pytest.fixture
def evaluations(world: World) -> Iterator[Evaluations]:
    """Beside those of a world's coordinator, and on its directory."""
    blobs = DirectoryBlobs(world.root)
    found = Evaluations(Repository(world.sessions), Bundles(blobs), Versions(blobs), lambda: world.now)
    yield found
    found.close()


def requests(world: World, job: str, count: int) -> list[Evaluation]:
    found = []
    for number in range(count):
        weights = world.files.unscored(job, number)
        weights.write_bytes(b"no weights")
        found.append(Evaluation(job, number, world.root, weights, "nothing.npz"))
    return found


def unscored(world: World) -> list[Path]:
    return list((world.root / "jobs").glob("*/versions/*.evaluated"))


def test_a_score_that_cannot_be_had_is_an_error_in_words(world: World, evaluations: Evaluations) -> None:
    """A real process; there is no bundle."""
    job = world.job()
    (request,) = requests(world, job, 1)
    evaluations.put(request)
    evaluations.close()
    event = world.coordinator.events(job, 0)[0][-1]
    assert event["kind"] == "Evaluated" and event["body"]["version"] == 0
    assert "is not a bundle" in event["body"]["error"] and world.coordinator.metrics(job) == []
    assert not request.weights.exists()


@pytest.mark.parametrize("data", ["digits.npz", "mine.py:load"])
def test_relative_paths_are_seen_from_the_coordinators_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    """`embrace serve --data coordinator`: the process that scores has another folder."""
    shutil.copytree(SHIPPED / "model", tmp_path / "model")
    shutil.copyfile(SHIPPED / "model" / WEIGHTS_NAME, tmp_path / "1.evaluated")
    shutil.copyfile(DIGITS, tmp_path / "digits.npz")
    loads = f"dict(np.load({str(DIGITS)!r}))"
    (tmp_path / "mine.py").write_text(f"import numpy as np\n\ndef load():\n    return {loads}\n")
    monkeypatch.chdir(tmp_path)
    found = scoring.score(Evaluation("job", 1, Path("model"), Path("1.evaluated"), data))
    assert "error" not in found and 0 <= found["accuracy"] <= 1 and found["mean_loss"] > 0


def test_a_process_that_takes_too_long_is_ended(
    world: World, evaluations: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "LONGEST", 0.01)
    job = world.job()
    (request,) = requests(world, job, 1)
    evaluations.put(request)
    evaluations.close()
    assert "Evaluated" not in world.kinds(job) and not request.weights.exists()


def test_one_after_the_other_and_one_that_breaks_stops_no_other(
    world: World, evaluations: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "score", lambda request: {"accuracy": 1 / request.version})
    job = world.job()
    wanted = requests(world, job, 3)
    for request in wanted:
        evaluations.put(request)
    evaluations.close()
    assert [row["version"] for row in world.coordinator.metrics(job)] == [1, 2]  # one by zero
    assert not any(request.weights.exists() for request in wanted)


def test_versions_are_scored_as_often_as_the_plan_says(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bytes]] = []

    def score(request: Evaluation) -> dict[str, Any]:
        seen.append((request.version, request.weights.read_bytes()))
        return {"accuracy": 0.5, "mean_loss": None, "count": 3}

    monkeypatch.setattr(evaluation, "score", score)
    job = world.job(num_rounds=4, evaluate={"data": "test.npz", "every": 2})
    device = world.device()
    for _ in range(4):
        world.round([device])
    last = world.files.version(job, 4).read_bytes()
    world.restart()  # which waits for what is being scored
    assert [version for version, _ in seen] == [2, 4] and seen[1][1] == last
    found = world.coordinator.metrics(job)
    assert [(row["version"], row["name"], row["value"]) for row in found] == [
        (2, "accuracy", 0.5),
        (4, "accuracy", 0.5),
    ]
    assert [kind for kind in world.kinds(job) if kind == "Evaluated"] == ["Evaluated"] * 2
    assert unscored(world) == []


def test_what_was_waiting_when_the_process_ended_is_scored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.job(num_rounds=1, evaluate={"data": "test.npz"})
    device = world.device()
    monkeypatch.setattr(Evaluations, "put", lambda self, request: None)  # killed before its turn came
    world.round([device])
    assert unscored(world) == [world.files.unscored(job, 1)]
    monkeypatch.undo()
    done = threading.Event()

    def score(request: Evaluation) -> dict[str, Any]:
        done.set()
        return {"accuracy": 0.25}

    monkeypatch.setattr(evaluation, "score", score)
    world.restart()
    assert done.wait(30)
    world.restart()
    assert [row["value"] for row in world.coordinator.metrics(job)] == [0.25] and unscored(world) == []


def test_a_score_that_was_recorded_is_not_computed_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the record and the removal of the file."""
    monkeypatch.setattr(evaluation, "score", lambda request: {"accuracy": 0.25})
    job = world.job(num_rounds=1, evaluate={"data": "test.npz"})
    world.round([world.device()])
    world.end()
    left_over = world.files.unscored(job, 1)
    left_over.hardlink_to(world.files.version(job, 1))
    world.begin()
    assert not left_over.exists()
    world.restart()
    assert [row["value"] for row in world.coordinator.metrics(job)] == [0.25]


def test_a_job_is_over_for_clients_when_its_last_version_is_scored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def score(request: Evaluation) -> dict[str, Any]:
        assert go_on.wait(30)
        return {"accuracy": 0.25}

    monkeypatch.setattr(evaluation, "score", score)
    job = world.job(num_rounds=1, evaluate={"data": "test.npz"})
    world.round([world.device()])
    assert world.state(job)["state"] == "done"
    events, over = world.coordinator.events(job, 0)
    assert events[-1]["kind"] == "JobState" and not over
    go_on.set()
    until = time.monotonic() + 30
    while not over and time.monotonic() < until:
        events, over = world.coordinator.events(job, 0)
    assert over and events[-1]["kind"] == "Evaluated", "nothing is over before everything was told"
