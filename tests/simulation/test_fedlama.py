"""FedLAMA on a model of one parameter layer: what devices compute between two synchronisations is not lost."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from simulation.pool import InlinePool
from simulation.simulate import Options, Simulation
from tests.edge_runtime.conftest import relative
from tests.simulation.test_simulate import fleet_of

# Whole batches and one step: a round of k steps from here is k steps of gradient descent.
FULL = {"local": {"steps": 1, "batch": 600, "rate": "0.1"}, "simulate": {"devices": 4}}


def weights(bundle, folder, engine, workers=1, **job):
    fleet = fleet_of(bundle, {**FULL, **job, "local": {**FULL["local"], **job.get("local", {})}})
    run = Simulation(fleet, folder, Options(engine, workers, InlinePool)).run()
    return bundle.manifest.space.flatten(run.weights)


@pytest.mark.parametrize("engine", ["torch", "portable"])
def test_steps_of_a_round_without_synchronisation_count(bundle_of, tmp_path, engine):
    """The only layer gets the interval φ after φ rounds; so its devices take φ steps and are averaged then."""
    bundle, phi = bundle_of("mnist_lr"), 3
    fedlama = {"sync": {"rule": "fedlama", "factor": phi}}
    alone = weights(bundle, tmp_path / "a", engine, num_rounds=phi, **fedlama)
    assert relative(alone, weights(bundle, tmp_path / "b", engine, num_rounds=phi)) < 1e-6  # at first as FedAvg
    twice = weights(bundle, tmp_path / "c", engine, num_rounds=2 * phi, **fedlama)
    # A device that begins at `alone` and takes φ steps, computed by the plain product of softmax and inputs.
    fleet = fleet_of(bundle, FULL)
    space, ends = bundle.manifest.space, []
    for device in fleet.devices:
        x, labels = fleet.train.batch(device.trained)
        own = {name: np.array(value, np.float64) for name, value in space.views(alone).items()}
        (matrix, bias) = sorted(own, key=lambda name: -own[name].ndim)
        flat, hot = x.reshape(len(x), -1).astype(np.float64), np.eye(10)[labels]
        for _ in range(phi):
            logits = flat @ own[matrix].T + own[bias]
            error = np.exp(logits - logits.max(1, keepdims=True))
            error = error / error.sum(1, keepdims=True) - hot
            own[matrix] -= 0.1 * error.T @ flat / len(x)
            own[bias] -= 0.1 * error.mean(0)
        ends.append(space.flatten({name: value.astype(np.float32) for name, value in own.items()}))
    expected = np.mean(ends, axis=0)
    assert relative(twice - alone, expected - alone) < 1e-4


def test_a_factor_of_one_is_fedavg_to_the_last_bit(bundle_of, tmp_path):
    rules = {"local": {"rules": [{"rule": "momentum", "factor": 0.9}]}}
    one = weights(bundle_of("mnist_lr"), tmp_path / "a", "torch", sync={"rule": "fedlama", "factor": 1}, **rules)
    assert (one == weights(bundle_of("mnist_lr"), tmp_path / "b", "torch", **rules)).all()
