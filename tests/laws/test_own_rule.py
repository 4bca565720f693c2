"""A rule that is not shipped, with a track and a kept vector of its own, through the same interface: FedDyn.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021. A device minimises
L_i(x) − ⟨h_i, x⟩ + α/2·‖x − θ‖² and then has h_i ← h_i − α(x_i − θ); the server keeps h = Σ h_i / N, and the next
round begins at θ = mean x_i − h/α. Here the model that is stored is mean x_i, and devices subtract h/α themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.participant import begin, finish
from edge_runtime.trainer import Outcome
from federation.accumulate import Doubles
from federation.algorithm import Algorithm
from federation.axes.local import LocalRule, LocalStep, Plain, Running, ServerMomentum, Start, Track, TrackBlock, runs
from federation.axes.serve import ServerHeavyBall
from federation.cohort import Member, Seat
from federation.device_task import DeviceTask, Handover, Kept, LocalModel, LocalResult, Part
from federation.engine import RoundEngine
from federation.errors import InputError
from federation.job import Plan, plan_from
from federation.layout import MODEL
from federation.region import Region
from federation.space import Vector
from federation.wire import encode
from tests.laws.world import PROBLEM, START, manifest
from tests.oracles.model import flat

ALPHA, RATE, STEPS = 0.2, 0.1, 3
SHIFT, OWN = "feddyn_shift", "feddyn_own"
COHORTS = [{0: 1, 1: 1, 2: 1}, {1: 2, 3: 1}, {0: 1, 3: 3}, {0: 1, 1: 1, 2: 1, 3: 1}, {2: 1, 1: 1}]  # device -> count
MANIFEST = manifest()
SPACE = MANIFEST.space


@dataclass(frozen=True)
class FedDyn(LocalRule):
    """Both halves of the algorithm."""

    alpha: float

    @property
    def tracks(self) -> tuple[Track, ...]:
        return (Track("feddyn", counts_once=True),)

    @property
    def keeps(self) -> bool:
        return True

    def begin_task(self, task: DeviceTask, model: LocalModel) -> Mapping[str, Vector]:
        common = task.server.state("feddyn", task.everything)
        own = task.own.vectors[OWN] if task.own else np.zeros_like(common)
        return {SHIFT: common / np.float32(-self.alpha), OWN: own}

    def begin(self, start: Start) -> Running:
        np.add(start.x, start.brought[SHIFT], out=start.x)
        return _AtWork(self.alpha, start.x.copy(), start.brought[OWN])

    def finish_task(self, task: DeviceTask, result: LocalResult) -> Handover:
        moved = result.x - result.model.parameters - result.brought[SHIFT]
        change = np.float32(-self.alpha) * moved
        return Handover({"feddyn": change}, {OWN: result.brought[OWN] + change})

    def move_track(self, name: str, old: Vector, sent: TrackBlock) -> Doubles:
        return old + sent.sum / sent.devices


class _AtWork(Plain):
    def __init__(self, alpha: float, theta: Vector, own: Vector) -> None:
        self.alpha = alpha
        self.theta = theta
        self.own = own

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        np.subtract(x, self.theta[at], out=scratch)
        scratch *= self.alpha
        scratch -= self.own[at]
        g += scratch


@dataclass
class Values:
    """The vectors of the job, as its devices ask for them."""

    vectors: dict[str, Vector]

    def model(self, part: Part) -> Vector:
        return part.region.gather(self.vectors[MODEL])

    def state(self, name: str, part: Part) -> Vector:
        return part.region.gather(self.vectors[name])

    def before(self, part: Part) -> Vector:
        raise AssertionError("only DOMO asks for it")

    def inherited(self) -> tuple[Region, Vector]:
        raise AssertionError("no local model is handed on")


class Memory(dict[str, Kept]):
    def load(self, task: str) -> Kept | None:
        return self.get(task)


def own_plan(rule: LocalRule, **job: Any) -> Plan:
    """Make a plan with a rule that has no name."""
    local = {**job.pop("local", {}), "rules": [rule]}
    return plan_from({"bundle": "none", "num_rounds": 100, "local": local, **job})


def through_the_engine(tmp_path: Path) -> list[dict[str, Vector]]:
    """The vectors of every version: real tasks, real bodies, the real server's step."""
    local = {"steps": STEPS, "rate": str(RATE), "rules": []}
    engine = RoundEngine(own_plan(FedDyn(ALPHA), local=local, serve={"devices": 4}), MANIFEST)
    assert engine.vector_names == ("feddyn",) and engine.keeps_state
    start = np.random.default_rng(0).normal(0, 0.5, SPACE.size).astype(np.float32)
    vectors, facts, versions = {MODEL: start, **engine.first_vectors()}, engine.first_facts, []
    memory, last = Memory(), dict[int, tuple[int, str]]()
    for number, cohort in enumerate(COHORTS):
        sums = engine.sums(number, facts, sum(cohort.values()))
        for slot, (device, count) in enumerate(cohort.items()):
            seat, id = Seat(slot, Member(str(device), "first", 3), count), f"job-{number}-{slot}-1"
            task = engine.task(seat, number, facts, last=last.get(device))
            begun = begin(task, MANIFEST, Values(vectors), memory)
            contribution = finish(begun, trained(device, number, begun))
            memory[id], last[device] = Kept(id, "first", contribution.kept, contribution.walked), (number, id)
            decoder, most = engine.decoder("first", number, facts)
            body = tmp_path / id
            body.write_bytes(b"".join(map(bytes, encode(contribution.tracks))))
            decoder.feed(body.read_bytes())
            assert list(contribution.tracks) == [MODEL, "feddyn"] and body.stat().st_size <= most
            with body.open("rb") as file:
                sums.fold(decoder.finish(), file, engine.weight(1), count, {})
        vectors = {name: vector.copy() for name, vector in vectors.items()}
        for name, at, values in engine.changes(sums, vectors, len(last)):
            vectors[name][at] = values
        facts = engine.next_facts(sums)
        versions.append(vectors)
    return [{MODEL: start, **engine.first_vectors()}, *versions]


def gradient(device: int, x: Vector, step: int) -> Vector:
    """Of a flat vector, in whatever precision it is."""
    done, model = 0, list[dict[str, Vector]]()
    for layer in START:
        model.append({})
        for name, like in layer.items():
            model[-1][name] = x[done : done + like.size].reshape(like.shape)
            done += like.size
    return flat(PROBLEM.gradient(device, model, step))


def trained(device: int, number: int, begun: Any) -> Outcome:
    received, task = begun.received, begun.task
    x = np.array(received.parameters)
    local = LocalStep(
        task.rules, Start(x, task.steps, task.rate, received.origin, received.brought), *runs(SPACE, 0, range(3))
    )
    for step in range(task.steps):
        local.step(gradient(device, x, number * STEPS + step).astype(np.float32), task.rate)
    return Outcome(x, local, None)  # type: ignore[arg-type]


def test_a_rule_of_a_users_own_runs_on_both_halves(tmp_path: Path) -> None:
    """Against the paper in a few lines of float64; a device that is drawn twice counts twice in the mean, once in h."""
    versions = through_the_engine(tmp_path)
    theta = versions[0][MODEL].astype(np.float64)
    h, own = np.zeros_like(theta), {device: np.zeros_like(theta) for device in range(4)}
    for number, cohort in enumerate(COHORTS):
        local = {}
        for device in cohort:
            x = theta.copy()
            for step in range(STEPS):
                g = gradient(device, x, number * STEPS + step)
                x -= RATE * (g - own[device] + ALPHA * (x - theta))
            local[device] = x
            own[device] = own[device] - ALPHA * (x - theta)
        h = h - ALPHA / 4 * sum(local[device] - theta for device in cohort)
        mean = sum(count * local[device] for device, count in cohort.items()) / sum(cohort.values())
        theta = mean - h / ALPHA
        np.testing.assert_allclose(versions[number + 1]["feddyn"], h, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(versions[number + 1][MODEL], mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(h, sum(own.values()) / 4, atol=1e-12)  # the law that makes it converge
    assert np.abs(h).max() > 0.01


def test_names_of_vectors_may_not_meet() -> None:
    class Taken(FedDyn):
        @property
        def tracks(self) -> tuple[Track, ...]:
            return (Track("server_momentum"),)

    with pytest.raises(InputError, match="expected every vector of the server at most once, got model, server_mom"):
        Algorithm((Taken(1.0),), serve=ServerHeavyBall())
    with pytest.raises(InputError, match="expected every track at most once, got feddyn, feddyn"):
        LocalStep([FedDyn(1.0), type("Other", (FedDyn,), {})(2.0)], Start(np.zeros(1, np.float32), 1, 0.1), [], [])
    with pytest.raises(InputError, match="expected ServerMomentum to stand last, got ServerMomentum, FedDyn"):
        LocalStep([ServerMomentum(1.0, "before"), FedDyn(1.0)], Start(np.zeros(1, np.float32), 1, 0.1), [], [])
