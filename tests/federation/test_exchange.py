"""What is replaced, what is kept, what is sent: the agreement of a task, and the regions of a coverage."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.accumulate import Accumulator
from federation.algorithm import Algorithm, Facts
from federation.axes.local import ControlVariate, LocalRule, Momentum, ServerMomentum
from federation.axes.serve import Adam, Average, ServerHeavyBall
from federation.axes.sync import FedLama, Rotating, SyncFacts, When, first_facts
from federation.coverage import coverage
from federation.errors import InputError
from federation.exchange import Exchange, Inherit, graph_region, trained_region
from federation.messages import Task, decode_task, encode_task
from federation.region import whole
from tests.federation.narrow_model import MODEL
from tests.federation.regions import vector_of

ROTATING = Rotating(3)


def test_the_default_is_fedavg() -> None:
    exchange = Exchange()
    assert (exchange.sent, exchange.replaced, exchange.tracks, exchange.keeps_model) == ((0,), (0,), (), False)


@given(
    changed=st.lists(st.integers(0, 30), min_size=3, max_size=3),
    last=st.none() | st.integers(0, 30),
    window=st.integers(0, 30),
)
def test_replaced_is_what_the_device_has_not_seen(changed: list[int], last: int | None, window: int) -> None:
    """Version n + 1 is what round n made; a device of round n began with version n and may have sent to n + 1."""
    exchange = Exchange(ROTATING, (0,), tuple(changed), window, last, None if last is None else "task")
    seen = last if last is not None and last >= window else -1
    assert exchange.replaced == tuple(unit for unit in range(3) if seen < 0 or changed[unit] > seen)


def test_a_device_that_was_there_in_the_round_before_replaces_what_was_due_then() -> None:
    """Rotation over three parts, a device that takes part in every round."""
    rule, facts = Rotating(3), SyncFacts((0, 0, 0), (3, 3, 3), (0.0,) * 3)
    algorithm, known = Algorithm(sync=rule), Facts(facts)
    last = None
    for number in range(7):
        exchange = algorithm.exchange(When(number), known, steps=1, last=last)
        due_before = (number % 3,) if number else (0, 1, 2)
        assert exchange.replaced == due_before and exchange.sent == ((number + 1) % 3,)
        changed = tuple(number + 1 if u in exchange.sent else v for u, v in enumerate(known.sync.changed))
        known = Facts(SyncFacts(changed, facts.intervals, facts.discrepancies))
        last = (number, f"job-{number}-0-1")


def test_a_device_that_was_away_replaces_everything_that_changed_meanwhile() -> None:
    exchange = Exchange(ROTATING, (0,), (9, 7, 8), 0, 7, "task")
    assert exchange.replaced == (0, 2)
    assert Exchange(ROTATING, (0,), (9, 7, 8), 8, 7, "task").replaced == (0, 1, 2)  # of an earlier window


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sent": (3,)}, "^sent: expected units among 3, each once"),
        ({"sent": (-1,)}, "^sent: expected units among 3, each once"),
        ({"sent": (1, 1)}, "^sent: expected units among 3, each once"),
        ({"changed": ()}, "^sent: expected units among 0"),
        ({"tracks": ("control", "other")}, "^tracks: expected the tracks control and momentum"),
    ],
)
def test_an_exchange_that_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Exchange(**{"sync": ROTATING, "sent": (0,), "changed": (0, 0, 0), **change})


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        ({"rule": "magic"}, r"^task\.exchange\.sync\.rule: expected all, rotating"),
        ({"rule": "rotating", "parts": 0}, r"^task\.exchange\.sync\.parts: expected a number"),
        ({"rule": "mine.py:Mine"}, r"^task\.exchange\.sync\.rule: .* a coordinator and its devices run no code"),
    ],
)
def test_an_exchange_that_comes_with_another_rule_is_refused(sync: dict[str, Any], message: str) -> None:
    told = encode_task(Task("stem", 1, 8, 0.1))
    with pytest.raises(InputError, match=message):
        decode_task({**told, "exchange": {**told["exchange"], "sync": sync}})


def test_an_exchange_survives_the_way_to_the_device_and_an_old_task_has_the_default() -> None:
    exchange = Exchange(ROTATING, (2, 0), (3, 1, 2), 0, 2, "job-2-0-1", Inherit("job-1-0-1", "stem"), ("control",), 0.5)
    task = Task("stem", 1, 8, 0.1, exchange=exchange)
    text = json.loads(json.dumps(encode_task(task)))
    assert decode_task(text) == task
    del text["exchange"], text["epochs"]
    assert decode_task(text).exchange == Exchange()


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
    assert (
        not keeps
        or algorithm.exchange(
            When(3), Facts(first_facts(algorithm.sync, MODEL.space)), steps=1, last=(2, "t")
        ).last_task
        == "t"
    )


def test_domo_is_told_the_scale_of_the_servers_last_move() -> None:
    """1/(αηP), with the η of the round before; before the first round there is no move."""
    algorithm = Algorithm((ServerMomentum(0.9, "before"),), serve=ServerHeavyBall(0.9, 0.5))
    facts = first_facts(algorithm.sync, MODEL.space)
    assert algorithm.exchange(When(0), Facts(facts), steps=4).fuse is None
    assert algorithm.exchange(When(1), Facts(facts, 0.1), steps=4).fuse == pytest.approx(1 / (0.5 * 0.1 * 4))


def test_fedlama_divides_by_interval_steps_and_size() -> None:
    space, steps, intervals = MODEL.space, 3, (2, 1, 2, 1)
    rows = np.random.default_rng(0).normal(size=(4, space.size)).astype(np.float32)
    total = Accumulator(space, max_value=10, max_weight=4)
    for row in rows:
        squares = [float(np.square(row[space.layer(i)].astype(np.float64)).sum()) for i in range(4)]
        total.fold(whole(space), zip(whole(space).runs, [row]), 1.0, squares, largest=float(np.abs(row).max()))
    before = Facts(SyncFacts((0,) * 4, intervals, (7.0,) * 4))
    after = Algorithm(sync=FedLama(2)).after(When(1), before, {"model": total}, space, 0.1, steps)
    for layer in (0, 2, 3):
        mine = rows[:, space.layer(layer)].astype(np.float64)
        distance = np.square(mine - mine.mean(axis=0)).sum() / 4
        expected = distance / (intervals[layer] * steps * mine.shape[1])
        assert after.sync.discrepancies[layer] == pytest.approx(expected, rel=1e-9)
    assert after.sync.discrepancies[1] == 7.0  # it has no weights
    assert after.sync.changed == (2,) * 4 and after.rate == 0.1


# --- regions of a coverage -------------------------------------------------------------------------

LAYERS = {"stem": range(4), "middle": range(2, 4), "head": range(3, 4), "weak": range(3, 4)}


@pytest.mark.parametrize("boundary", LAYERS)
def test_the_output_side_is_a_suffix(boundary: str) -> None:
    space, covered = MODEL.space, coverage(MODEL, boundary)
    expected = vector_of(space)[space.suffix(LAYERS[boundary].start)]
    for region in (graph_region(MODEL, covered), trained_region(MODEL, covered)):
        np.testing.assert_array_equal(region.gather(vector_of(space)), expected)


def test_the_input_side_is_trained_with_the_graph_of_everything() -> None:
    space, covered = MODEL.space, coverage(MODEL, "..middle")
    assert graph_region(MODEL, covered).size == space.size
    np.testing.assert_array_equal(trained_region(MODEL, covered).gather(vector_of(space)), vector_of(space)[:1000])


def test_a_narrow_boundary_is_a_box() -> None:
    space, covered = MODEL.space, coverage(MODEL, "stem@0.5")
    views = space.views(vector_of(space))
    expected = [views["stem.0"][:20], views["middle.0"][:6, :20], views["middle.1"][:10], views["head.0"][:, :6]]
    found = trained_region(MODEL, covered).gather(vector_of(space))
    np.testing.assert_array_equal(found, np.concatenate([part.ravel() for part in expected]))
