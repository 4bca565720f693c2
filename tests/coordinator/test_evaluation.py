"""Scores: in a process of their own, in order, and what was waiting when the process ended is not forgotten."""

from __future__ import annotations

import math
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator import evaluation, scoring
from coordinator.best_versions import BestVersions
from coordinator.evaluation import EvaluationLimits, Evaluations, Wanted
from coordinator.jobs import Units
from coordinator.scoring import Evaluation
from coordinator.store.blobs import DirectoryBlobs
from coordinator.store.bundles import Bundles
from coordinator.store.evaluation_data import EvaluationData
from coordinator.store.repository import Repository
from coordinator.store.versions import Versions
from federation.job import Evaluate
from federation.manifest import WEIGHTS_NAME
from simulation.datasets.digits import DIGITS
from tests.coordinator.harness import ROOT, World

SHIPPED = ROOT / "embrace" / "demo" / "digits"


@pytest.fixture
def evaluations(world: World) -> Iterator[Evaluations]:
    """Beside those of a world's coordinator, and on its directory."""
    blobs = DirectoryBlobs(world.root)
    repository, versions = Repository(world.sessions), Versions(blobs)
    units = Units(repository, lambda: world.now, lambda effect: None)
    data, best = EvaluationData(blobs, world.root / "operator"), BestVersions(repository, versions)
    found = Evaluations(units, Bundles(blobs), best, versions, data, EvaluationLimits(), lambda *_: None)
    yield found
    found.close()


def requests(world: World, job: str, count: int) -> list[Wanted]:
    for number in range(count):
        world.files.unscored(job, number).write_bytes(b"no weights")
    return [Wanted(job, number, world.bundle, Evaluate("coordinator:test.npz")) for number in range(count)]


def unscored(world: World) -> list[Path]:
    return list((world.root / "jobs").glob("*/versions/*.evaluated"))


def recorded(world: World, job: str, evaluations: Evaluations, request: Wanted) -> dict[str, Any]:
    """Score in a real process; return the body of the event."""
    evaluations.put(request)
    evaluations.close()
    event = world.coordinator.events(job, 0)[0][-1]
    assert event["kind"] == "Evaluated" and event["body"]["version"] == request.version
    assert not unscored(world)
    return dict(event["body"])


def test_a_score_that_cannot_be_had_is_an_error_in_words(world: World, evaluations: Evaluations) -> None:
    job = world.job()
    (request,) = requests(world, job, 1)
    assert "test.npz is no .npz file that can be read" in recorded(world, job, evaluations, request)["error"]
    assert world.coordinator.metrics(job) == []


def test_data_of_a_job_that_an_earlier_program_began_is_not_read(world: World, evaluations: Evaluations) -> None:
    """It could name any file of the machine, Python code too."""
    job, trace = world.job(), world.root / "trace"
    (world.root / "mine.py").write_text(f"def load():\n    open({str(trace)!r}, 'w')\n")
    requests(world, job, 1)
    request = Wanted(job, 0, world.bundle, Evaluate(f"{world.root / 'mine.py'}:load"))
    assert recorded(world, job, evaluations, request)["error"].startswith("evaluate.data: expected sha256:DIGEST")
    assert not trace.exists()


def digits_evaluation(**limits: Any) -> Evaluation:
    """The shipped model on its own data, as an operator's file."""
    places = (SHIPPED / "model", SHIPPED / "model" / WEIGHTS_NAME, DIGITS)
    return Evaluation("job", 1, *places, **{"statistics": "global", "memory": 4 << 30, "seconds": 600.0, **limits})


def test_relative_paths_are_seen_from_the_coordinators_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`embrace serve --data coordinator`: the process that scores has another folder."""
    shutil.copytree(SHIPPED / "model", tmp_path / "model")
    shutil.copyfile(SHIPPED / "model" / WEIGHTS_NAME, tmp_path / "1.evaluated")
    shutil.copyfile(DIGITS, tmp_path / "digits.npz")
    monkeypatch.chdir(tmp_path)
    names = {"bundle": Path("model"), "weights": Path("1.evaluated"), "data": Path("digits.npz")}
    found = scoring.score(replace(digits_evaluation(), **names))
    assert "error" not in found and 0 <= found["accuracy"] <= 1 and found["mean_loss"] > 0


def test_a_process_that_takes_too_long_is_ended() -> None:
    found = scoring.score(digits_evaluation(seconds=0.01))
    assert found == {"error": "scoring took more than the 0.01 s allowed (setting evaluation_seconds)"}


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts all memory on Linux alone")
def test_a_process_that_takes_too_much_memory_is_ended(tmp_path: Path) -> None:
    """A compressed archive of 4 GB of zeros takes 4 MB on the disk."""
    bomb = tmp_path / "bomb.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, shape in (("x", (1 << 22, 8, 8)), ("y", (1 << 22,))):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                kind = {"descr": "<f4" if name == "x" else "<i8", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, kind)
                for _ in range(256):
                    member.write(bytes(math.prod(shape) * (4 if name == "x" else 8) // 256))
    found = scoring.score(replace(digits_evaluation(), data=bomb, memory=1 << 30))
    assert list(found) == ["error"] and "does not fit memory" in found["error"], found


def test_a_process_that_is_killed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_START", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    error = scoring.score(digits_evaluation())["error"]
    assert error.startswith("the process that scores ended by SIGKILL") and "evaluation_memory" in error


def test_the_process_has_no_secret_and_no_folder_of_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EMBRACE_ADMIN_TOKEN", "EMBRACE_DATABASE", "AWS_SECRET_ACCESS_KEY", "PYTHONPATH", "PYTHONSTARTUP"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.chdir(tmp_path)
    told = "import json, os, sys; print(json.dumps({'here': os.getcwd(), 'path': sys.path, **os.environ}))"
    monkeypatch.setattr(scoring, "_START", told)
    found = scoring.score(digits_evaluation())
    assert "secret" not in found.values() and not any(name.startswith("EMBRACE") for name in found)
    assert found["here"] == found["TMPDIR"] and "" not in found["path"] and str(tmp_path) not in found["path"]
    assert not Path(found["here"]).exists()


def test_one_after_the_other_and_one_that_breaks_stops_no_other(
    world: World, evaluations: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "score", lambda request: {"accuracy": 1 / request.version})
    job = world.job()
    for request in requests(world, job, 3):
        evaluations.put(request)
    evaluations.close()
    assert [row["version"] for row in world.coordinator.metrics(job)] == [1, 2]  # one by zero
    assert not unscored(world)


def test_weights_that_cannot_be_removed_stop_no_other_score(
    world: World, evaluations: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Versions, job: str, version: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(evaluation, "score", lambda request: {"accuracy": 0.5})
    monkeypatch.setattr(Versions, "release_scored", refuse)
    job = world.job()
    for request in requests(world, job, 3):
        evaluations.put(request)
    evaluations.close()
    assert len(world.coordinator.metrics(job)) == 3
    assert not evaluations.unfinished(job)


def test_versions_are_scored_as_often_as_the_plan_says(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bytes]] = []

    def score(request: Evaluation) -> dict[str, Any]:
        seen.append((request.version, request.weights.read_bytes()))
        return {"accuracy": 0.5, "mean_loss": None, "count": 3}

    monkeypatch.setattr(evaluation, "score", score)
    job = world.job(num_rounds=4, evaluate={"data": "coordinator:test.npz", "every": 2})
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
    job = world.job(num_rounds=1, evaluate={"data": "coordinator:test.npz"})
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
    job = world.job(num_rounds=1, evaluate={"data": "coordinator:test.npz"})
    world.round([world.device()])
    world.end()
    left_over = world.files.unscored(job, 1)
    left_over.hardlink_to(world.files.version(job, 1))
    world.interrupted(job)
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
    job = world.job(num_rounds=1, evaluate={"data": "coordinator:test.npz"})
    world.round([world.device()])
    assert world.state(job)["state"] == "done"
    events, over = world.coordinator.events(job, 0)
    assert events[-1]["kind"] == "JobState" and not over
    go_on.set()
    until = time.monotonic() + 30
    while not over and time.monotonic() < until:
        events, over = world.coordinator.events(job, 0)
    assert over and events[-1]["kind"] == "Evaluated", "nothing is over before everything was told"
