"""Scores: in a process of their own, in order, and what was waiting when the process ended is not forgotten."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator import evaluation
from coordinator.evaluation import Evaluation, Evaluations
from federation.manifest import WEIGHTS_NAME
from simulation.datasets.digits import DIGITS
from tests.coordinator.harness import ROOT, World

SHIPPED = ROOT / "embrace" / "demo" / "digits"


def requests(folder: Path, count: int) -> list[Evaluation]:
    found = []
    for number in range(count):
        weights = folder / f"{number}.evaluated"
        weights.write_bytes(b"no weights")
        found.append(Evaluation("job", number, folder, weights, "nothing.npz"))
    return found


def unscored(world: World) -> list[Path]:
    return list((world.root / "jobs").glob("*/versions/*.evaluated"))


def test_a_score_that_cannot_be_had_is_an_error_in_words(tmp_path: Path) -> None:
    """A real process; there is no bundle."""
    found: list[tuple[Evaluation, dict[str, Any]]] = []
    evaluations = Evaluations(lambda request, score: found.append((request, score)))
    (request,) = requests(tmp_path, 1)
    evaluations.put(request)
    evaluations.close()
    assert found[0][0] == request and "is not a bundle" in found[0][1]["error"]
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
    found: list[dict[str, Any]] = []
    evaluations = Evaluations(lambda request, score: found.append(score))
    evaluations.put(Evaluation("job", 1, Path("model"), Path("1.evaluated"), data))
    evaluations.close()
    assert "error" not in found[0] and 0 <= found[0]["accuracy"] <= 1 and found[0]["mean_loss"] > 0


def test_one_after_the_other_and_one_that_breaks_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluations, "_score", staticmethod(lambda request: {"accuracy": 1 / request.version}))
    found: list[int] = []
    evaluations = Evaluations(lambda request, score: found.append(request.version))
    wanted = requests(tmp_path, 3)
    for request in wanted:
        evaluations.put(request)
    evaluations.close()
    assert found == [1, 2]  # one by zero
    assert not any(request.weights.exists() for request in wanted)


def test_versions_are_scored_as_often_as_the_plan_says(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bytes]] = []

    def score(request: Evaluation) -> dict[str, Any]:
        seen.append((request.version, request.weights.read_bytes()))
        return {"accuracy": 0.5, "mean_loss": None, "count": 3}

    monkeypatch.setattr(evaluation.Evaluations, "_score", staticmethod(score))
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
    monkeypatch.setattr(evaluation.Evaluations, "put", lambda self, request: None)  # killed before its turn came
    world.round([device])
    assert unscored(world) == [world.files.unscored(job, 1)]
    monkeypatch.undo()
    done = threading.Event()

    def score(request: Evaluation) -> dict[str, Any]:
        done.set()
        return {"accuracy": 0.25}

    monkeypatch.setattr(evaluation.Evaluations, "_score", staticmethod(score))
    world.restart()
    assert done.wait(30)
    world.restart()
    assert [row["value"] for row in world.coordinator.metrics(job)] == [0.25] and unscored(world) == []


def test_a_score_that_was_recorded_is_not_computed_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the record and the removal of the file."""
    monkeypatch.setattr(evaluation.Evaluations, "_score", staticmethod(lambda request: {"accuracy": 0.25}))
    job = world.job(num_rounds=1, evaluate={"data": "test.npz"})
    world.round([world.device()])
    world.end()
    left_over = world.files.unscored(job, 1)
    left_over.hardlink_to(world.files.version(job, 1))
    world.begin()
    assert not left_over.exists()
    world.restart()
    assert [row["value"] for row in world.coordinator.metrics(job)] == [0.25]


def test_a_job_is_over_for_whoever_watches_when_its_last_version_is_scored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def score(request: Evaluation) -> dict[str, Any]:
        assert go_on.wait(30)
        return {"accuracy": 0.25}

    monkeypatch.setattr(evaluation.Evaluations, "_score", staticmethod(score))
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
