"""For how many rounds stored activations are good: measured against a plain computation, and followed by tasks."""

from __future__ import annotations

import io
from dataclasses import asdict

import numpy as np
import pytest

from federation.algorithm import Facts
from federation.decode import decode
from federation.engine import RoundEngine
from federation.errors import FieldError
from federation.job import LocalWork, parse_plan
from federation.layout import MODEL
from federation.reuse import MOST_CHANGE, ChangeMeter, LayerChanges
from federation.wire import check_data
from tests import tiny_bundle
from tests.tiny_bundle import weight

MANIFEST = tiny_bundle.manifest(
    [tiny_bundle.layer(name, weight(f"{name}.w", 5)) for name in ("a", "b", "c")], [tiny_bundle.boundary("a", 0)]
)
SPACE = MANIFEST.space


def measured(before, after, blocks):
    meter = ChangeMeter(SPACE)
    changes = [(MODEL, at, after[at]) for at in blocks]
    assert list(meter.watch(iter(changes), before)) == changes
    return meter.changes()


def test_the_change_of_a_layer_is_relative_to_what_it_was():
    rng = np.random.default_rng(0)
    before, after = rng.random((2, SPACE.size)).astype(np.float32)
    after[5:10] = before[5:10]
    blocks = [slice(0, 2), slice(2, 5), slice(5, 10), slice(10, 15)]
    found = measured(before, after, blocks)
    layers = [slice(0, 5), slice(5, 10), slice(10, 15)]
    expected = [np.linalg.norm(after[at] - before[at]) / np.linalg.norm(before[at]) for at in layers]
    assert found == pytest.approx(expected, rel=1e-5) and found[1] == 0.0
    assert measured(before, after, blocks[:2])[2] == 0.0, "what no device trained has not changed"
    assert measured(np.zeros_like(before), after, blocks)[0] == MOST_CHANGE


def test_changes_add_up_from_round_to_round():
    known = LayerChanges((-1, -1, -1))
    for number, changes in enumerate([(0.5, 0.1, 0.0), (0.0, 0.1, 0.0), (0.0, 0.125, 0.3)]):
        known = known.after(number, changes, 3)
    assert known.last == (0, 2, 2)
    assert known.unchanged_for(3, 1) == 3 and known.unchanged_for(3, 2) == 1
    assert known.within(0.2, 1) == 3, "of the two rounds before, not of the first"
    assert known.within(0.6, 1) == 4 and known.within(0.3, 2) == 3 and known.within(0.1, 2) == 1
    assert known.within(0.4, 3) == 3 and known.within(1.0, 3) == 4
    assert decode(Facts, {"sync": asdict_sync(), "rate": None, "changes": asdict(known)}, "facts").changes == known


def asdict_sync():
    from federation.axes.sync import WholeModel, first_facts

    return asdict(first_facts(WholeModel(), SPACE))


def test_what_an_earlier_program_did_not_measure_counts_as_changed():
    facts = decode(Facts, {"sync": asdict_sync(), "rate": 0.1}, "facts", defaults=True)
    assert facts.changes.unchanged_for(7, 2) == 1 and facts.changes.within(0.5, 2) == 1
    assert facts.changes.after(7, (0.0, 0.0, 0.5), 4).unchanged_for(8, 2) == 1
    assert facts.changes.after(7, (0.0, 0.0, 0.5), 4).after(8, (0.0, 0.0, 0.5), 4).unchanged_for(9, 2) == 2


def test_a_step_that_is_made_again_is_measured_once():
    plan = parse_plan("bundle = 'b'\n[local]\nrefresh_every = 3\n")
    engine = RoundEngine(plan, MANIFEST)
    sums = engine.sums(0, engine.first_facts, 1)
    layout = engine.layout("a", 0, sums.facts)
    data = np.linspace(-1, 1, SPACE.size, dtype="<f4").tobytes()
    sums.fold(check_data(layout, engine.limits, data), io.BytesIO(data), 1.0, 1, {})
    before = {MODEL: np.linspace(2, 1, SPACE.size, dtype=np.float32)}
    next(engine.changes(sums, before, 1))  # and no further: the disk is full
    list(engine.changes(sums, before, 1))
    layers = [slice(5 * layer, 5 * layer + 5) for layer in range(3)]
    moves = np.linspace(-1, 1, SPACE.size)
    expected = [np.linalg.norm(moves[at]) / np.linalg.norm(before[MODEL][at]) for at in layers]
    assert engine.next_facts(sums).changes.recent == (pytest.approx(expected, rel=1e-5),)
    told = engine.reuse(sums, [{"activations_age": 2}, {"activations_age": 0}, {"activations_age": "old"}])
    assert told["reused"] == 1 and list(told["changes"].values()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("local", "expected"),
    [({"refresh_change": 0.0}, "a change such as 0.05, got 0.0"), ({"refresh_change": 0.1}, "refresh_every > 1")],
)
def test_a_bound_without_sense_is_refused(local, expected):
    with pytest.raises(FieldError, match=expected):
        LocalWork(**({"refresh_every": 3} if "0.0" in expected else {}), **local)
