"""Rules of combining (docs/reference/algorithms.md) against their one-element-at-a-time transcription."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation.coverage import coverage
from federation.exchange import trained_region
from federation.layout import MODEL
from tests.laws.world import PROBLEM, START, TIERS, Fleet, assert_close
from tests.oracles import combined
from tests.oracles.heterofl import Shapes, box, cut
from tests.oracles.model import Gradient, Model, times, zeros
from tests.oracles.problem import narrow_shapes

RATE, ROUNDS = 0.1, 4
SAMPLES = {i: float(count) for i, count in enumerate(PROBLEM.samples)}
TIER = st.sampled_from(["strong", "moderate", "weak"])
SERVE = {
    "momentum": {"rule": "momentum", "factor": 0.7, "rate": 0.9},
    "adam": {"rule": "adam", "rate": 0.03, "beta1": 0.8, "beta2": 0.9, "tau": 0.01},
    "yogi": {"rule": "yogi", "rate": 0.03, "beta1": 0.8, "beta2": 0.9, "tau": 0.01},
    "adagrad": {"rule": "adagrad", "rate": 0.03, "beta1": 0.8, "tau": 0.01},
}


def narrow_gradient(shapes: dict[int, Shapes]) -> Gradient:
    """What a narrow model's gradient is in the whole one: zero wherever the device has nothing."""

    def gradient(device: int, model: Model, step: int) -> Model:
        found, inner = zeros(model), PROBLEM.gradient(device, cut(model, shapes[device]), step)
        for layer, of_layer in zip(found, inner):
            for name, value in of_layer.items():
                layer[name][box(value.shape)] = value
        return found

    return gradient


@st.composite
def jobs(draw):
    control = draw(st.booleans())
    weigh = draw(st.sampled_from(["uniform", "samples", "fednova"]))
    # The transcription normalises by the number of steps; with a pull-back FedNova's divisor is less.
    rules = [{"rule": "proximal", "mu": 0.4}] if weigh != "fednova" and draw(st.booleans()) else []
    serve = draw(st.sampled_from(list(SERVE)))
    local = {"rate": str(RATE), "batch": 4, "rules": [*rules, *([{"rule": "control_variate"}] if control else [])]}
    return {
        "num_rounds": ROUNDS,
        "seed": draw(st.integers(0, 1000)),
        "local": {**local, **(draw(st.sampled_from([{"epochs": 1}, {"steps": 3}])))},
        "weigh": {"by": "uniform" if weigh == "uniform" else "samples", "normalise": weigh == "fednova"},
        "serve": {**SERVE[serve], "devices": PROBLEM.devices},
        "cover": {"rule": draw(st.sampled_from(["output_side", "width"])), "tiers": TIERS},
        "participate": {"count": draw(st.integers(1, 4)), "balance": False},
    }


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(job=jobs(), tiers=st.tuples(TIER, TIER, TIER, TIER))
def test_combined_rules_on_what_a_device_did_not_train(job, tiers):
    epochs = job["local"].get("epochs")
    steps = {i: epochs * (count // 4) if epochs else 3 for i, count in enumerate(PROBLEM.samples)}
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(job, Path(folder), dict(enumerate(tiers)), most=max(steps.values()))
        rounds = fleet.rounds()
    trained: dict[int, Model] = {i: zeros(START) for i in SAMPLES}
    for seat in (seat for each in rounds for seat in each.seats):
        mask = np.zeros(fleet.space.size, np.float32)
        region = trained_region(fleet.manifest, coverage(fleet.manifest, seat.task.boundary))
        region.scatter(np.ones(region.size, np.float32), mask)
        trained[int(seat.device)] = fleet.model(mask)
    serve, rules = job["serve"], {rule["rule"]: rule for rule in job["local"]["rules"]}
    of = combined.Rules(
        weigh="fednova" if job["weigh"]["normalise"] else job["weigh"]["by"],
        serve=serve["rule"],
        control="control_variate" in rules,
        proximal=rules.get("proximal", {}).get("mu", 0.0),
        local_rate=RATE,
        server_rate=serve["rate"],
        momentum=serve.get("factor", 0.0),
        beta1=serve.get("beta1", 0.0),
        beta2=serve.get("beta2", 0.0),
        tau=serve.get("tau", 0.0),
    )
    gradient = PROBLEM.gradient
    if job["cover"]["rule"] == "width":
        gradient = narrow_gradient({i: narrow_shapes(TIERS.get(tier, 1.0)) for i, tier in enumerate(tiers)})
    drawn = [each.drawn for each in rounds]
    expected = combined.run(START, gradient, drawn, PROBLEM.devices, trained, steps, SAMPLES, of)
    for mine, theirs in zip(rounds, expected):
        assert_close(fleet.model(mine.vectors[MODEL]), theirs.model, 2e-5)
        first = "server_momentum" if serve["rule"] == "momentum" else "first_moment"
        unit = 1 / RATE if first == "server_momentum" else 1.0  # kept without the local rate
        assert_close(fleet.model(mine.vectors[first]), times(unit, theirs.first), 2e-5)
        if serve["rule"] != "momentum":
            assert_close(fleet.model(mine.vectors["second_moment"]), theirs.second, 1e-5)
        if of.control:
            assert_close(fleet.model(mine.vectors["control"]), theirs.control, 5e-5)
