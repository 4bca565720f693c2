"""Fleets: the same devices for the same job and data, whether they come from a table or from arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from federation.errors import DataError, InputError
from federation.job import plan_from
from simulation.fleet import dataset_of, fleet_table, read_job


def arrays(count: int = 50) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(3.0 * count).reshape(count, 3), np.arange(count) % 7


def test_a_share_of_arrays_is_held_out_the_same_each_time():
    x, y = arrays()
    first, again = dataset_of((x, y)), dataset_of((x, y))
    assert (len(first.y_train), len(first.y_test), first.num_classes) == (40, 10, 7)
    assert np.array_equal(first.x_test, again.x_test) and first.name == again.name
    together = np.concatenate([first.x_train, first.x_test])
    assert sorted(map(tuple, together)) == sorted(map(tuple, x))
    assert dataset_of((x + 1, y)).name != first.name, "other samples are another data set"


def test_test_samples_may_be_given():
    data = dataset_of(arrays(), arrays(5))
    assert (len(data.y_train), len(data.y_test)) == (50, 5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros(3), "data: expected a pair of arrays"),
        ((np.zeros((3, 2)), np.zeros(4, int)), "as many inputs as labels"),
        ((np.zeros((1, 2)), np.zeros(1, int)), "at least two"),
        ((np.zeros((3, 2)), np.zeros(3)), "data: labels: expected one integer per sample, got float64"),
        ((np.zeros((3, 2)), np.array([0, 1, -1])), "expected labels from 0"),
    ],
)
def test_what_are_no_samples(data, message):
    with pytest.raises((InputError, DataError), match=message):
        dataset_of(data)


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
