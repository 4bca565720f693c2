"""The laws of combining: where everyone trains everything they are the published rules, elsewhere nothing moves."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles import combined, embracing, fednova, fedopt, heterofl, scaffold
from tests.oracles.model import Model, flat
from tests.oracles.problem import narrow_shapes
from tests.oracles.setting import DEVICES, PROBLEM, RATE, SOME, START, STEPS, assert_same

SAMPLES = {i: float(count) for i, count in enumerate(PROBLEM.samples)}


def from_layer(first: int) -> Model:
    """1 in the layers from `first` on, 0 in front of them."""
    return [
        {name: np.full(value.shape, float(index >= first)) for name, value in layer.items()}
        for index, layer in enumerate(START)
    ]


def run(rules: combined.Rules, trained: dict[int, Model], steps: dict[int, int] | None = None) -> list[combined.State]:
    steps = steps or dict.fromkeys(DEVICES, STEPS)
    return combined.run(START, PROBLEM.gradient, SOME, len(DEVICES), trained, steps, SAMPLES, rules)


EVERYTHING = {i: from_layer(0) for i in DEVICES}
OUTPUT_SIDE = {0: from_layer(0), 1: from_layer(1), 2: from_layer(2), 3: from_layer(1)}
UNEQUAL = {0: 1, 1: 4, 2: 2, 3: 3}


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
def test_everything_trained_is_fedopt(kind):
    rules = combined.Rules(serve=kind, local_rate=RATE, server_rate=0.1)
    for mine, theirs in zip(run(rules, EVERYTHING), fedopt.run(kind, START, PROBLEM.gradient, SOME, STEPS, RATE, 0.1)):
        for one, other in [(mine.model, theirs.model), (mine.first, theirs.first), (mine.second, theirs.second)]:
            assert_same(one, other)


def test_everything_trained_is_scaffold():
    rules = combined.Rules(control=True, local_rate=RATE, server_rate=0.7)
    published = scaffold.run(START, PROBLEM.gradient, SOME, len(DEVICES), STEPS, RATE, 0.7)
    for mine, theirs in zip(run(rules, EVERYTHING), published):
        assert_same(mine.model, theirs.model)
        assert_same(mine.control, theirs.control)
        for i in DEVICES:
            assert_same(mine.controls[i], theirs.controls[i])


def test_the_output_side_alone_is_embracing():
    first = {0: 0, 1: 1, 2: 2, 3: 1}
    published = embracing.run(START, PROBLEM.gradient, SOME, first, STEPS, RATE)
    for mine, theirs in zip(run(combined.Rules(local_rate=RATE), OUTPUT_SIDE), published):
        assert_same(mine.model, theirs.model)


def test_fednova_is_of_the_devices_that_trained_the_layer():
    trained = {0: [0, 1, 2], 1: [1, 2], 2: [2], 3: [1, 2]}
    published = fednova.run(START, PROBLEM.gradient, SOME, UNEQUAL, RATE, SAMPLES, trained=trained)
    for mine, theirs in zip(run(combined.Rules(weigh="fednova", local_rate=RATE), OUTPUT_SIDE, UNEQUAL), published):
        assert_same(mine.model, theirs.model)


def test_a_box_of_the_width_is_heterofl():
    """A narrow device's gradient is that of its narrow model, put into the box."""
    shapes = {i: narrow_shapes(1.0 if i == 0 else 0.5) for i in DEVICES}
    trained = {i: boxed(heterofl.cut(from_layer(0), shapes[i])) for i in DEVICES}

    def gradient(device: int, model: Model, step: int) -> Model:
        return boxed(PROBLEM.gradient(device, heterofl.cut(model, shapes[device]), step))

    steps = dict.fromkeys(DEVICES, STEPS)
    rules = combined.Rules(weigh="samples", local_rate=RATE)
    states = combined.run(START, gradient, SOME, len(DEVICES), trained, steps, SAMPLES, rules)
    for mine, theirs in zip(states, heterofl.run(START, PROBLEM.gradient, SOME, shapes, STEPS, RATE, SAMPLES)):
        assert_same(mine.model, theirs.model)


def boxed(narrow: Model) -> Model:
    """The values of a narrow model in their places in the wide one, 0 elsewhere."""
    wide = [{name: np.zeros(value.shape) for name, value in layer.items()} for layer in START]
    for layer, values in zip(wide, narrow):
        for name, value in values.items():
            layer[name][heterofl.box(value.shape)] = value
    return wide


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("serve", ["momentum", "adam", "yogi", "adagrad"])
def test_a_layer_nobody_trained_keeps_its_value_and_its_state(serve, control):
    rules = combined.Rules("fednova", serve, control, proximal=0.1, momentum=0.9, local_rate=RATE)
    states = run(rules, OUTPUT_SIDE, UNEQUAL)
    before, after = states[1], states[2]  # in round 2 only device 1 takes part, which does not train the first layer
    parts = [(s.model, s.first, s.second, s.control, *s.controls.values()) for s in (before, after)]
    for old, new in zip(*parts):
        np.testing.assert_array_equal(flat(old[:1]), flat(new[:1]))
    assert np.abs(flat(before.first[:1])).min() > 0  # and not because there was nothing to keep
    assert (flat(before.model[1:]) != flat(after.model[1:])).all()
    if control:
        total = np.mean([flat(c) for c in after.controls.values()], axis=0)
        np.testing.assert_allclose(flat(after.control), total, atol=1e-12)
