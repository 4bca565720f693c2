"""Frozen layers that are run less often than every round, in a simulation: as devices do it that keep activations."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest

pytest.importorskip("torch")

from edge_runtime.layers import TrainedSource
from edge_runtime.trainer import Trainer
from federation.errors import InputError
from federation.job import plan_from
from federation.layout import MODEL
from simulation import worker
from simulation.datasets import Dataset
from simulation.fleet import open_fleet
from simulation.pool import InlinePool
from simulation.simulate import Options, Simulation
from simulation.torch_engine import TorchEngine
from simulation.worker import build
from tests.edge_runtime.conftest import relative
from tests.simulation.test_simulate import fleet_of

MIXED = {
    "num_rounds": 5,
    "participate": {"fraction_train": 0.6, "balance": False},
    "simulate": {"tiers": {"strong": 6, "moderate": 4, "weak": 10}},
}


def job(refresh_every, **local):
    return {**MIXED, "local": {"refresh_every": refresh_every, "rate": "0.2", **local}}


def run(bundle, folder, refresh_every, engine="torch", workers=1, **local):
    simulation = Simulation(fleet_of(bundle, job(refresh_every, **local)), folder, Options(engine, workers, InlinePool))
    found = simulation.run()
    return np.concatenate([found.weights[name].ravel() for name in sorted(found.weights)]), found.rounds


class KeepingTrainers:
    """Devices that are there from round to round, each with the trainer of a real one."""

    def __init__(self, tmp_path):
        self.folder = tmp_path
        self.trainers: dict[str, Trainer] = {}
        self.sources: dict[int, TrainedSource] = {}

    def one(self, portable, device, task, received, seen, age):
        fleet = portable._worker
        if task.round not in self.sources:
            folder = self.folder / str(task.round)
            folder.mkdir()
            weights = np.array(fleet.vectors[MODEL])
            self.sources[task.round] = TrainedSource(fleet.bundle, fleet.manifest, 0, weights, folder)
            self.sources[task.round].version = str(task.round)
        source = self.sources[task.round]
        if device not in self.trainers:
            self.trainers[device] = Trainer(fleet.bundle, source, fleet.samples(device), measures_memory=False)
        self.trainers[device].source = source
        return self.trainers[device].run(task, received)


def test_devices_train_on_what_they_stored_rounds_ago(bundle_of, tmp_path, monkeypatch):
    bundle = bundle_of("digits")
    found, _ = run(bundle, tmp_path / "found", 3, "portable")
    fresh, _ = run(bundle, tmp_path / "fresh", 1, "portable")
    real = KeepingTrainers(tmp_path)
    monkeypatch.setattr(worker._Portable, "_one", lambda self, *given: real.one(self, *given))
    expected, _ = run(bundle, tmp_path / "expected", 3, "portable")
    assert relative(found, expected) < 1e-5 < 1e-3 < relative(found, fresh)


def test_the_change_of_frozen_layers_bounds_how_long_activations_are_used(bundle_of, tmp_path, monkeypatch):
    bundle = bundle_of("digits")
    fresh, _ = run(bundle, tmp_path / "fresh", 1, "portable")
    kept, _ = run(bundle, tmp_path / "kept", 4, "portable")
    never, never_rounds = run(bundle, tmp_path / "never", 4, "portable", refresh_change=1e-9)
    always, always_rounds = run(bundle, tmp_path / "always", 4, "portable", refresh_change=1e5)
    assert np.array_equal(never, fresh) and np.array_equal(always, kept)
    assert sum(line["reused"] for line in never_rounds) == 0 < sum(line["reused"] for line in always_rounds)
    changes = [line["changes"]["conv1"] for line in always_rounds]
    assert all(0 < change < 10 for change in changes)
    bound = 1.01 * max(changes)  # each round's change is within it, those of two rounds are not always
    found, rounds = run(bundle, tmp_path / "found", 4, "portable", refresh_change=bound)
    assert 0 < sum(line["reused"] for line in rounds) < sum(line["reused"] for line in always_rounds)
    real = KeepingTrainers(tmp_path)
    monkeypatch.setattr(worker._Portable, "_one", lambda self, *given: real.one(self, *given))
    expected, _ = run(bundle, tmp_path / "expected", 4, "portable", refresh_change=bound)
    assert relative(found, expected) < 1e-5 < 1e-4 < min(relative(found, fresh), relative(found, kept))


def test_both_engines_agree_and_processes_change_no_bit(bundle_of, tmp_path):
    bundle = bundle_of("digits")
    portable, _ = run(bundle, tmp_path / "portable", 2, "portable")
    found = {n: run(bundle, tmp_path / str(n), 2, workers=n) for n in (1, 2, 5)}
    for weights, rounds in found.values():
        assert np.array_equal(weights, found[1][0])
        assert [line["loss"] for line in rounds] == [line["loss"] for line in found[1][1]]
    assert relative(found[1][0], portable) < 1e-3


@pytest.fixture
def passes(monkeypatch):
    """How many samples went through the frozen layers, each time that a device alone ran them."""
    monkeypatch.setattr("simulation.assignment.MOST_MACS", 0)  # no stacks
    found, store = [], TorchEngine.store

    def counted(self, boundary, inputs, count, *rest):
        found.append(count)
        return store(self, boundary, inputs, count, *rest)

    monkeypatch.setattr(TorchEngine, "store", counted)
    return found


def test_frozen_layers_run_only_for_new_activations_wherever_those_are_kept(bundle_of, tmp_path, monkeypatch, passes):
    bundle = bundle_of("digits")
    run(bundle, tmp_path / "fresh", 1)
    behind_frozen = len(passes)
    passes.clear()
    kept, rounds = run(bundle, tmp_path / "kept", 3)
    assert 0 < sum(line["reused"] for line in rounds) == behind_frozen - len(passes)
    monkeypatch.setattr("simulation.kept_trainers.MOST_BYTES", 0)
    passes.clear()
    without, _ = run(bundle, tmp_path / "without", 3)
    assert len(passes) == behind_frozen and np.array_equal(without, kept)


ALIKE = {"num_rounds": 6, "simulate": {"tiers": {"weak": 20}, "partitioner": "iid", "partition": {}}}


@pytest.mark.parametrize(("steps", "whole"), [(4, True), (1, False)])
def test_all_samples_pass_frozen_layers_where_two_rounds_would_see_them(steps, whole, bundle_of, tmp_path, passes):
    fleet = fleet_of(bundle_of("digits"), {**ALIKE, "local": {"refresh_every": 2, "steps": steps, "batch": 8}})
    shares = sorted(len(device.trained) for device in fleet.devices)
    assert shares[0] > 2 * 8 and shares[-1] <= 2 * 4 * 8
    Simulation(fleet, tmp_path, Options("torch", 1, InlinePool)).run()
    # No device trains these layers, so a device whose activations are kept never runs them again.
    assert sorted(passes) == (shares if whole else [8] * 6 * len(shares))


class TurnsPool(InlinePool):
    """Two processes' workers in this one, which take turns: a device's next round may be with the other."""

    def __init__(self, spec, count):
        super().__init__(spec, count)
        one, other = self._work, build(spec.settings, self._shared)
        self._turns = cycle((one, other, other))
        self._work = lambda job, slot: next(self._turns)(job, slot)


@pytest.mark.parametrize("pool", [InlinePool, TurnsPool])
def test_whether_activations_are_there_changes_no_bit(pool, bundle_of, tmp_path, monkeypatch, passes):
    """Epochs: where frozen layers stood still for a round, devices store all samples; else those that they take."""
    job = {
        "bundle": "none",
        "num_rounds": 12,
        "participate": {"fraction_train": 0.5, "balance": False},
        "local": {"epochs": 1, "batch": 32, "rate": "0.05"},
        "simulate": {"devices": 4, "dataset": "random", "partitioner": "iid", "tiers": {"strong": 1, "weak": 3}},
    }
    rng = np.random.default_rng(0)
    x, y = rng.random((4 * 258, 1, 28, 28), np.float32), rng.integers(0, 10, 4 * 258)
    fleet = open_fleet(plan_from(job), bundle_of("mnist_2nn").directory, Dataset("random", x, y, x[:9], y[:9], 10))

    def weights_of(name, pool):
        found = Simulation(fleet, tmp_path / name, Options("torch", 1, pool)).run()
        return np.concatenate([found.weights[name].ravel() for name in sorted(found.weights)])

    found = weights_of("found", pool)
    kept = len(passes)
    monkeypatch.setattr("simulation.kept_trainers.MOST_BYTES", 0)
    assert np.array_equal(weights_of("without", InlinePool), found)
    assert 0 < kept < len(passes) - kept


def test_what_is_kept_is_not_fetched_again(bundle_of, tmp_path):
    bundle = bundle_of("digits")
    often, seldom = (run(bundle, tmp_path / str(every), every)[1] for every in (1, 5))
    assert seldom[0]["bytes_down"] == often[0]["bytes_down"]
    assert sum(line["bytes_down"] for line in seldom) < sum(line["bytes_down"] for line in often)
    assert [line["bytes_up"] for line in seldom] == [line["bytes_up"] for line in often]


def test_a_run_that_goes_on_knows_what_devices_stored(bundle_of, tmp_path, monkeypatch):
    bundle = bundle_of("digits")
    whole, _ = run(bundle, tmp_path / "whole", 3)
    monkeypatch.setattr("simulation.simulate.CHECKPOINT_SECONDS", 0.0)
    halves = Simulation(fleet_of(bundle, job(3)), tmp_path / "halves", Options("torch", 1, InlinePool))

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        halves.run(on_round=stop)
    again, rounds = run(bundle, tmp_path / "halves", 3)
    assert np.array_equal(again, whole) and len(rounds) == 5


def test_augmented_activations_are_not_kept(bundle_of, tmp_path):
    fleet = fleet_of(bundle_of("digits"), job(2, crop=1))
    with pytest.raises(InputError, match=r"local.refresh_every: .* expected 1 with crop or flip"):
        Simulation(fleet, tmp_path, Options("torch", 1, InlinePool))
