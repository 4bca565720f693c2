"""Fleets: the same devices for the same job and data, whether they come from a table or from arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embrace
from federation.errors import DataError, InputError
from federation.job import plan_from
from simulation.fleet import SimulatedFleet, fleet_table, open_fleet, read_job


def arrays(count: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Samples that all differ, of three classes."""
    return np.arange(4.0 * count, dtype=np.float32).reshape(count, 4), np.arange(count) % 3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """A model of three classes that takes four numbers; what is trained does not matter here."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("bundles") / "dense"
    return embrace.export(torch.nn.Sequential(torch.nn.Linear(4, 3)), folder, input_shape=(4,)).path


@pytest.fixture(scope="module")
def regression(tmp_path_factory) -> Path:
    """A model of one number."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("bundles") / "regression"
    return embrace.export(torch.nn.Sequential(torch.nn.Linear(4, 1)), folder, input_shape=(4,), loss="mse").path


def fleet(bundle: Path, data: Any, seed: int = 0, **table: Any) -> SimulatedFleet:
    plan = plan_from({"bundle": "none", "seed": seed, "simulate": {"devices": 5, **table}})
    return open_fleet(plan, bundle, data)


def rows(samples: Any, numbers: np.ndarray | None = None) -> list[tuple[float, ...]]:
    return [tuple(row) for row in samples.batch(np.arange(len(samples)) if numbers is None else numbers)[0].tolist()]


def test_a_share_is_held_out_the_same_for_every_seed(bundle):
    x, y = arrays(60)
    first, again = fleet(bundle, (x, y), test_share=0.25), fleet(bundle, (x, y), seed=1, test_share=0.25)
    assert (len(first.train), len(first.test)) == (45, 15)
    assert np.bincount(first.test.labels).tolist() == [5, 5, 5], "the same share of each class"
    assert rows(first.test) == rows(again.test) and first.table == again.table
    assert sorted(rows(first.train) + rows(first.test)) == sorted(map(tuple, x.tolist()))
    assert fleet(bundle, (x + 1, y)).table.dataset != first.table.dataset, "other samples are another data set"


@pytest.mark.parametrize(
    ("partitioner", "constants"),
    [
        ("iid", {}),
        ("dirichlet", {"alpha": 0.5, "min_partition_size": 2}),
        ("shard", {}),
        ("digits", {"labels_per_partition": 1}),
        ("similarity", {"similarity": 0.5}),
        ("natural", {}),
    ],
)
def test_every_partitioner_deals_own_data_once(bundle, tmp_path, partitioner, constants):
    x, y = arrays(60)
    np.savez(tmp_path / "own.npz", x=x, y=y, groups=np.arange(60) // 5)
    made = fleet(bundle, str(tmp_path / "own.npz"), partitioner=partitioner, partition=constants)
    dealt = [row for device in made.devices for row in rows(made.train, device.numbers)]
    assert len(made.devices) == 5 and sorted(dealt) == sorted(rows(made.train))
    if partitioner == "natural":  # the group follows from the sample's first number, which is 4 times its place
        owners: dict[int, set[str]] = {}
        for device in made.devices:
            for row in rows(made.train, device.numbers):
                owners.setdefault(int(row[0]) // 20, set()).add(device.id)
        assert len(owners) == 12 and all(len(own) == 1 for own in owners.values())


def test_every_sample_has_a_group(bundle, tmp_path):
    x, y = arrays(60)
    np.savez(tmp_path / "own.npz", x=x, y=y, groups=np.arange(59))
    with pytest.raises(DataError, match="60 samples but 59 groups"):
        fleet(bundle, tmp_path / "own.npz")


def test_labels_that_are_no_classes_are_dealt_without_them(regression):
    x, y = arrays(60)
    made = fleet(regression, (x, y / 7))
    assert made.labels is None and sum(len(device.numbers) for device in made.devices) == 48
    with pytest.raises(InputError, match="deals by classes"):
        _ = fleet(regression, (x, y / 7), partitioner="shard").devices


def test_test_samples_may_be_given(bundle):
    made = open_fleet(plan_from({"bundle": "none"}), bundle, arrays(), test_data=arrays(5))
    assert (len(made.train), len(made.test)) == (50, 5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros(3), "data: expected a pair of arrays"),
        ((np.zeros((3, 4)), np.zeros(4, int)), "3 inputs but 4 labels"),
        ((np.zeros((1, 4)), np.zeros(1, int)), "1 samples are too few"),
        ((np.zeros((3, 4)), np.full(3, 0.5)), "label 0.5"),
        ((np.zeros((3, 4)), np.array([0, 1, -1])), "label -1"),
        ("mnits", "no data set named 'mnits'"),
        ("none.npz", "no such file"),
    ],
)
def test_what_are_no_samples(bundle, data, message):
    with pytest.raises((InputError, DataError), match=message):
        fleet(bundle, data)


def test_what_is_given_counts_more_than_the_table():
    plan = plan_from({"bundle": "none", "simulate": {"devices": 8, "tiers": {"strong": 2, "weak": 6}}})
    assert fleet_table(plan, {"devices": None}).devices == 8
    assert fleet_table(plan, {"devices": 12}).tiers == {"strong": 3, "weak": 9}
    assert fleet_table(plan, {"devices": 3, "tiers": {"weak": 3}}).tiers == {"weak": 3}
    with pytest.raises(InputError, match="add up to 4 devices, got 3"):
        fleet_table(plan, {"devices": 4, "tiers": {"weak": 3}})


def test_a_job_file_names_a_bundle_beside_it(tmp_path: Path):
    file = tmp_path / "job.toml"
    file.write_text('bundle = "digits"\nseed = 4\n')
    plan, bundle = read_job(file, num_rounds=3)
    assert (plan.num_rounds, plan.seed, bundle) == (3, 4, tmp_path / "digits")
    assert read_job(file, seed=0)[0].seed == 0
    with pytest.raises(InputError, match="cannot read"):
        read_job(tmp_path / "none.toml")
    file.write_bytes(b"\xff")
    with pytest.raises(InputError, match="UTF-8"):
        read_job(file)
