"""What the server tells devices and what it remembers: the engine's half of a round, without any driver."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from federation.algorithm import Algorithm, Facts
from federation.axes.cover import DeviceProfile
from federation.axes.local import ControlVariate, LocalRule, Momentum, ServerMomentum
from federation.axes.serve import Adam, Average, ServerHeavyBall
from federation.axes.sync import SyncFacts
from federation.capacity import predicted_peak
from federation.cohort import Member, Seat
from federation.engine import RoundEngine
from federation.errors import OutOfMemory
from federation.exchange import Exchange
from federation.identity import task_seed
from federation.job import plan_from
from federation.region import whole
from tests.federation.narrow_model import MODEL

SEAT = Seat(0, Member("device", "stem", 4))
DOMO = {
    "local": {"steps": 4, "rate": "0.1", "rules": [{"rule": "server_momentum", "beta": 0.9, "when": "before"}]},
    "serve": {"rule": "momentum", "factor": 0.9, "rate": 0.5},
}


def engine_of(**job: Any) -> RoundEngine:
    return RoundEngine(plan_from({"bundle": "none", "num_rounds": 100, **job}), MODEL)


def exchange(engine: RoundEngine, number: int, facts: Facts, last: tuple[int, str] | None = None) -> Exchange:
    return engine.task(SEAT, number, facts, last=last).exchange


def test_a_task_is_the_plans_with_the_boundary_and_the_seed_of_the_device() -> None:
    engine = engine_of(seed=3, local={"rate": "0.4/10@2", "steps": 7})
    task = engine.task(Seat(1, Member("b", "middle", 2)), 2, engine.first_facts)
    assert (task.boundary, task.steps, task.round, task.seed) == ("middle", 7, 2, task_seed(3, "b"))
    assert task.rate == pytest.approx(0.04) and task.exchange == Exchange()


def test_a_device_that_was_there_in_the_round_before_replaces_what_was_due_then() -> None:
    """Rotation over three parts, a device that takes part in every round."""
    engine = engine_of(sync={"rule": "rotating", "parts": 3})
    facts, last = engine.first_facts, None
    for number in range(7):
        told = exchange(engine, number, facts, last)
        due_before = (number % 3,) if number else (0, 1, 2)
        assert told.replaced == due_before and told.sent == ((number + 1) % 3,)
        facts = engine.next_facts(engine.sums(number, facts, 1))
        last = (number, f"job-{number}-0-1")


@pytest.mark.parametrize(
    ("rules", "serve", "tracks", "vectors", "keeps", "fuses"),
    [
        ((), Average(), (), (), False, False),
        ((Momentum(0.9),), Average(), (), (), False, False),
        ((Momentum(0.9, between="keep"),), Average(), (), (), True, False),
        ((Momentum(0.9, between="average"),), Average(), ("momentum",), ("momentum",), False, False),
        ((ControlVariate(),), Average(), ("control",), ("control",), True, False),
        ((ControlVariate("own"),), Average(), (), (), True, False),
        (
            (ControlVariate(), Momentum(0.9, between="average")),
            Adam(),
            ("control", "momentum"),
            ("first_moment", "second_moment", "control", "momentum"),
            True,
            False,
        ),
        ((ServerMomentum(0.9, "before"),), ServerHeavyBall(), (), ("server_momentum",), True, True),
        ((ServerMomentum(0.0, "before"),), ServerHeavyBall(), (), ("server_momentum",), False, False),
    ],
)
def test_what_a_choice_needs(
    rules: tuple[LocalRule, ...], serve: Any, tracks: Any, vectors: Any, keeps: bool, fuses: bool
) -> None:
    algorithm = Algorithm(rules, serve=serve)
    assert (algorithm.tracks, algorithm.vectors) == (tracks, vectors)
    assert (algorithm.keeps_state, algorithm.fuses) == (keeps, fuses)
    first = algorithm.first_vectors(3)
    assert first.keys() == set(vectors) and all(v.dtype == np.float32 for v in first.values())


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ({}, None),
        ({"local": {"rules": [{"rule": "momentum", "factor": 0.9, "between": "keep"}]}}, "t"),
        ({"algorithm": "scaffold"}, "t"),
        ({"algorithm": "vrl_sgd"}, "t"),
        (DOMO, "t"),
        ({"sync": {"rule": "rotating", "parts": 2}}, "t"),
        ({"sync": {"rule": "rotating", "parts": 1}}, None),  # of one unit, always due, nothing is kept
    ],
)
def test_a_device_is_told_its_last_task_where_it_keeps_something(job: dict[str, Any], told: str | None) -> None:
    engine = engine_of(**job)
    assert exchange(engine, 3, engine.first_facts, (2, "t")).last_task == told


def test_domo_is_told_the_scale_of_the_servers_last_move() -> None:
    """1/(αηP), with the η of the round before; before the first round there is no move."""
    engine = engine_of(**DOMO)
    assert exchange(engine, 0, engine.first_facts).fuse is None
    facts = Facts(engine.first_facts.sync, 0.1)
    assert exchange(engine, 1, facts).fuse == pytest.approx(1 / (0.5 * 0.1 * 4))


def test_fedlama_divides_by_interval_steps_and_size() -> None:
    space, steps, intervals = MODEL.space, 3, (2, 2, 1)
    engine = engine_of(sync={"rule": "fedlama", "factor": 2}, local={"steps": steps, "rate": "0.1"})
    rows = np.random.default_rng(0).normal(size=(4, space.size)).astype(np.float32)
    sums = engine.sums(1, Facts(SyncFacts((0,) * 3, intervals, (7.0,) * 3)), 4)
    total = sums.accumulator("model")
    for row in rows:
        squares = {p.name: float(np.square(row[space.slice_of(p.name)].astype(np.float64)).sum()) for p in space}
        total.fold(whole(space), zip(whole(space).runs, [row]), 1.0, squares, largest=float(np.abs(row).max()))
    sums.merge("model", total)
    after = engine.next_facts(sums)
    for unit, layer in enumerate((0, 2, 3)):  # the one between has no weights
        mine = rows[:, space.layer(layer)].astype(np.float64)
        distance = np.square(mine - mine.mean(axis=0)).sum() / 4
        expected = distance / (intervals[unit] * steps * mine.shape[1])
        assert after.sync.discrepancies[unit] == pytest.approx(expected, rel=1e-9)
    assert after.sync.changed == (2,) * 3 and after.rate == 0.1


def test_facts_are_those_that_were_stored_or_those_of_a_job_that_an_earlier_program_began() -> None:
    engine = engine_of(sync={"rule": "rotating", "parts": 3}, local={"rate": "0.4/10@2"})
    assert engine.facts_of(0, None) == engine.first_facts
    later = engine.next_facts(engine.sums(0, engine.first_facts, 1))
    stored = {"sync": {name: list(value) for name, value in asdict(later.sync).items()}, "rate": later.rate}
    assert engine.facts_of(1, stored) == later
    of_pieces = {"sync": {name: [1] * 4 for name in stored["sync"]}, "rate": 0.4}  # units were others
    for old in (engine.facts_of(3, None), engine.facts_of(3, of_pieces)):
        assert old.sync.changed == (3, 3, 3) and old.rate == pytest.approx(0.04)


def test_a_round_begins_with_local_models_where_a_window_ended() -> None:
    some = {"count": 2, "window": 20}
    handed_on = engine_of(sync={"rule": "rotating", "parts": 2}, participate=some)
    averaged = engine_of(sync={"rule": "rotating", "parts": 2, "redistribute": "averaged"}, participate=some)
    assert [n for n in range(45) if handed_on.inherits(n)] == [20, 40]
    assert not any(map(averaged.inherits, range(45))) and not any(map(engine_of().inherits, range(45)))


def test_cohorts_are_drawn_from_the_devices_that_are_there() -> None:
    engine = engine_of(participate={"count": 2})
    profiles = {str(number): DeviceProfile(tier="strong") for number in range(5)}
    first, again = (engine.assign(0, profiles, None) for _ in range(2))
    assert first == again and len(first.seats) == 2
    assert engine.member("x", DeviceProfile(tier="moderate")) == Member("x", "middle", 2)


def test_a_device_that_takes_few_samples_at_once_trains_more_layers_in_the_same_memory() -> None:
    engine = engine_of(local={"batch": 32})
    sizes = ((32, 1), (1, 2), (1, 1))
    needs = {(size, more): predicted_peak(MODEL, MODEL.boundary("stem"), size, more) for size, more in sizes}
    assert needs[1, 1] < needs[1, 2] < needs[32, 1]  # one vector more: the sum of the parts' gradients
    room = needs[1, 2]
    with pytest.raises(OutOfMemory):
        engine.member("a", DeviceProfile(memory=room))
    assert engine.member("a", DeviceProfile(memory=room, micro_batch=1)).boundary == "stem"
    assert engine.member("a", DeviceProfile(memory=room - 1, micro_batch=1)).boundary != "stem"
    drawn = engine.assign(0, {"a": DeviceProfile(memory=room, micro_batch=1)}, None)
    assert drawn.seats[0].member.boundary == "stem"


def test_a_summary_counts_what_devices_say_and_what_they_trained() -> None:
    engine = engine_of(sync={"rule": "fedlama", "factor": 2})
    sums = engine.sums(0, engine.first_facts, 2)
    region = engine.layout("middle", 0, engine.first_facts).tracks["model"]
    answers = [(3, 100, {"loss": 1.0, "lost_state": True}), (4, 50, {"loss": True}), (5, 1, {"loss": 2})]
    told = engine.summary(sums, [region, region, whole(MODEL.space)], answers)
    assert told == {
        "updates": 3,
        "samples": 12,
        "bytes_up": 151,
        "loss": 1.5,
        "lost_state": 1,
        "trainers": {"stem": 1, "pool": 0, "middle": 3, "head": 3},
        "parts": [0, 1, 2],
        "synchronised": ["stem", "middle", "head"],
    }
