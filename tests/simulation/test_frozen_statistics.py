"""Weak devices report statistics of the batch norms that they do not train: what that changes, and what it does not."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from federation.errors import FieldError
from federation.space import ParameterSpace
from simulation.pool import InlinePool
from simulation.simulate import Options, Simulation
from tests.edge_runtime.conftest import relative
from tests.edge_runtime.test_frozen_statistics import seen_by_torch
from tests.simulation.test_simulate import fleet_of

ON, OFF = ({"cover": {"rule": "output_side", "frozen_statistics": measures}} for measures in (True, False))
WEAK = {"simulate": {"devices": 6, "tiers": {"weak": 6}}, "num_rounds": 8}
MIXED = {"simulate": {"devices": 6, "tiers": {"strong": 1, "moderate": 2, "weak": 3}}, "num_rounds": 3}
STRONG = {"simulate": {"devices": 4}, "num_rounds": 2}


def run(bundle, folder, job, engine="portable", workers=1):
    return Simulation(fleet_of(bundle, job), folder, Options(engine, workers, InlinePool)).run()


def flat(space: ParameterSpace, found) -> np.ndarray:
    return space.flatten(found.weights)


@pytest.mark.parametrize("job", [MIXED, WEAK, STRONG], ids=["mixed", "weak", "strong"])
def test_off_is_the_default_to_the_last_bit(bundle_of, tmp_path, job):
    bundle = bundle_of("digits")
    plain, off = (run(bundle, tmp_path / name, {**job, **more}) for name, more in (("plain", {}), ("off", OFF)))
    assert (flat(bundle.manifest.space, plain) == flat(bundle.manifest.space, off)).all()


def test_without_weak_devices_it_changes_no_bit(bundle_of, tmp_path):
    bundle = bundle_of("digits")
    plain, on = (run(bundle, tmp_path / name, {**STRONG, **more}) for name, more in (("plain", {}), ("on", ON)))
    assert (flat(bundle.manifest.space, plain) == flat(bundle.manifest.space, on)).all()


@pytest.mark.parametrize("engine", ["portable", "torch"])
def test_weak_devices_alone_find_the_statistics_of_their_data_and_move_no_weight(bundle_of, tmp_path, engine):
    bundle = bundle_of("digits")
    frozen = bundle.manifest.boundary("weak").layer
    fleet, found = fleet_of(bundle, WEAK), run(bundle, tmp_path / "run", {**WEAK, **ON}, engine)
    before = bundle.manifest.space.views(np.array(bundle.weights))
    kinds = {p.name: p.kind for layer in bundle.manifest.layers[:frozen] for p in layer.parameters}
    assert sorted(kinds.values()).count("statistic") == 6
    for name, kind in kinds.items():
        moved = found.weights[name] != before[name]
        assert moved.all() if kind == "statistic" else not moved.any(), name
    # What enters the first batch norm never changes; those behind it follow. 8 rounds of 3 steps.
    each = [seen_by_torch(bundle, fleet.train.batch(device.trained)[0], 1) for device in fleet.devices]
    for name in each[0]:
        truth = np.mean([own[name] for own in each], axis=0)
        assert relative(found.weights[name], before[name] + (1 - 0.9**24) * (truth - before[name])) < 1e-5


def test_both_engines_agree_and_processes_change_no_bit(bundle_of, tmp_path):
    bundle, space = bundle_of("digits"), bundle_of("digits").manifest.space
    job = {**MIXED, **ON}
    portable, torch, three = (
        flat(space, run(bundle, tmp_path / name, job, engine, workers))
        for name, engine, workers in (("portable", "portable", 1), ("torch", "torch", 1), ("three", "torch", 3))
    )
    assert relative(torch, portable) < 1e-4 and (torch == three).all()
    assert relative(flat(space, run(bundle, tmp_path / "off", {**MIXED, **OFF})), portable) > 1e-3


def test_a_model_without_batch_norm_is_refused_in_one_line(bundle_of, tmp_path):
    with pytest.raises(FieldError, match="no batch norm that is ever frozen"):
        run(bundle_of("mnist_2nn"), tmp_path, {**WEAK, **ON})
