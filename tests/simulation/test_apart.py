"""The distance of local models after every step, against two passes over the models themselves."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from federation.errors import InputError
from federation.job import plan_from
from simulation import devices
from simulation.apart import StepSums
from simulation.pool import InlinePool
from simulation.simulate import Options, Simulation
from tests.simulation.test_simulate import fleet_of

PERIODIC = {"num_rounds": 2}
PARTIAL = {
    "algorithm": "partial_averaging",
    "num_rounds": 5,
    "local": {"steps": 1},
    "sync": {"rule": "rotating", "parts": 3, "by": "channel"},
}


def two_passes(models: list[np.ndarray], weights: np.ndarray) -> float:
    found = np.stack(models).astype(np.float64)[:, weights]
    return float(((found - found.mean(0)) ** 2).sum(1).mean())


def weights_of(space) -> np.ndarray:
    kinds = [[parameter.kind == "weight"] * parameter.size for layer in space.layers for parameter in layer]
    return np.concatenate([np.array(kind) for kind in kinds])


@pytest.fixture
def local_models(monkeypatch):
    """Every local model at the end of its task, by round."""
    seen: dict[int, list[np.ndarray]] = {}

    def finish(begun, outcome):
        seen.setdefault(begun.task.round, []).append(np.array(outcome.parameters))
        return true_finish(begun, outcome)

    true_finish = devices.finish
    monkeypatch.setattr(devices, "finish", finish)
    return seen


def run(bundle, job, folder, engine="torch", workers=1):
    options = Options(engine, workers, InlinePool, apart_every=1)
    return Simulation(fleet_of(bundle, job), folder, options).run()


@pytest.mark.parametrize("engine", ["torch", "portable"])
def test_partial_averaging_is_measured_over_the_whole_model_at_every_step(bundle_of, tmp_path, local_models, engine):
    bundle = bundle_of("digits")
    records = run(bundle, PARTIAL, tmp_path, engine).rounds
    weights = weights_of(bundle.manifest.space)
    for record in records:
        expected = two_passes(local_models[record["round"]], weights)
        assert expected > 0 and record["apart"] == pytest.approx([expected], rel=1e-4)


def test_steps_between_synchronisations_are_measured_too(bundle_of, tmp_path, local_models):
    """Three steps of a round end, after one and two of them, where rounds of one and of two steps end."""
    bundle, expected = bundle_of("digits"), []
    for steps in (1, 2, 3):
        local_models.clear()
        records = run(bundle, {**PERIODIC, "local": {"steps": steps}}, tmp_path / str(steps)).rounds
        expected.append(two_passes(local_models[0], weights_of(bundle.manifest.space)))
    assert records[0]["apart"] == pytest.approx(expected, rel=1e-4)
    assert records[0]["apart"] == sorted(records[0]["apart"])


def test_processes_change_no_bit_of_it(bundle_of, tmp_path):
    bundle = bundle_of("digits")
    found = [
        [record["apart"] for record in run(bundle, PARTIAL, tmp_path / str(n), workers=n).rounds] for n in (1, 2, 5)
    ]
    assert found[0] == found[1] == found[2]


def test_sums_are_those_of_two_passes(bundle_of):
    space = bundle_of("digits").manifest.space
    plan, rng = plan_from({"bundle": "none", "local": {"steps": 2}}), np.random.default_rng(1)
    origin = rng.normal(size=space.size).astype(np.float32)
    paths = [[origin + rng.normal(0, 1e-3, space.size).astype(np.float32) for _ in range(2)] for _ in range(7)]
    first, second = StepSums(plan, space, 7), StepSums(plan, space, 7)
    for number, path in enumerate(paths):
        (first if number < 3 else second).add(path, origin)
    memory = np.zeros((2, space.size), np.int64)
    first.merge(second.dump(memory), memory)
    expected = [two_passes([path[step] for path in paths], weights_of(space)) for step in range(2)]
    assert first.distances() == pytest.approx(expected, rel=1e-4)


def test_epochs_differ_between_devices(bundle_of, tmp_path):
    with pytest.raises(InputError, match=r"apart_every: expected a job with local.steps"):
        run(bundle_of("digits"), {"local": {"steps": 1, "epochs": 1}}, tmp_path)
