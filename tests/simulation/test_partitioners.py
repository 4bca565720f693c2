"""Partitioners: what must hold for any data, counts made by hand, and theory where chance decides."""

from __future__ import annotations

from collections import Counter
from dataclasses import is_dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.errors import DataError, InputError
from simulation.partitioners import (
    PARTITIONERS,
    DigitsPartitioner,
    DirichletPartitioner,
    IidPartitioner,
    NaturalIdPartitioner,
    ShardPartitioner,
    SimilarityPartitioner,
    constants_of,
    label_counts,
    make_partitioner,
)

MNIST = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
EVERY = [
    IidPartitioner(),
    DirichletPartitioner(0.1),
    DirichletPartitioner(100.0, min_partition_size=0),
    ShardPartitioner(2),
    DigitsPartitioner(2),
    SimilarityPartitioner(0.1),
    NaturalIdPartitioner(),
]


def drawn(seed: int, samples: int, classes: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, samples - classes)])
    of_groups = np.concatenate([np.arange(groups), rng.integers(0, groups, samples - groups)])
    return rng.permutation(labels), rng.permutation(of_groups)


@given(
    st.sampled_from(EVERY),
    st.integers(0, 2**32),
    st.integers(5, 12),
    st.integers(400, 900),
    st.integers(2, 10),
    st.integers(0, 2**63),
)
def test_every_sample_goes_to_exactly_one_device(partitioner, seed, devices, samples, classes, draw):
    labels, groups = drawn(seed, samples, classes, 20)
    parts = partitioner.partition(labels, devices, draw, groups)
    assert len(parts) == devices and all(part.dtype == np.int64 for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)  # sorted, nothing twice
    assert Counter(np.concatenate(parts).tolist()) == Counter(range(samples))
    again = partitioner.partition(labels, devices, draw, groups)
    assert all(np.array_equal(left, right) for left, right in zip(parts, again))


@pytest.mark.parametrize("partitioner", EVERY, ids=repr)
def test_another_seed_deals_differently(partitioner):
    labels, groups = drawn(3, 600, 10, 60)
    one, other = (partitioner.partition(labels, 6, seed, groups) for seed in (1, 2))
    assert any(not np.array_equal(left, right) for left, right in zip(one, other))


def test_iid_has_equal_sizes_and_every_label_in_its_share():
    parts = IidPartitioner().partition(MNIST, 7, 0)
    assert sorted(map(len, parts)) == [8571] * 4 + [8572] * 3
    shares = label_counts(parts, MNIST, 10) / np.bincount(MNIST)
    # Hypergeometric: the standard deviation of a share is below 0.005 here, five of them are 0.025.
    assert np.abs(shares - 1 / 7).max() < 0.025


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_their_mean_and_variance(alpha: float):
    """Each share is Beta(α, (m-1)α): mean 1/m, variance (m-1) / (m² (mα + 1))."""
    devices, draws = 20, 60
    partitioner = DirichletPartitioner(alpha, min_partition_size=0)
    counts = [label_counts(partitioner.partition(MNIST, devices, seed), MNIST, 10) for seed in range(draws)]
    shares = np.stack(counts) / np.bincount(MNIST)
    expected = (devices - 1) / (devices**2 * (devices * alpha + 1))
    # 60 draws of 10 labels: the means of single devices are within five standard errors.
    assert np.abs(shares.mean((0, 2)) - 1 / devices).max() < 5 * np.sqrt(expected / (draws * 10))
    assert shares.var() == pytest.approx(expected, rel=0.08)
    # The probability that a share is below a half of the mean, against numpy's own Beta.
    beta = np.random.default_rng(0).beta(alpha, (devices - 1) * alpha, 200_000)
    assert np.mean(shares < 0.5 / devices) == pytest.approx(np.mean(beta < 0.5 / devices), abs=0.02)


def test_dirichlet_with_few_samples_keeps_its_promise():
    labels = np.repeat([0, 1], 12_500)  # film reviews: most of 128 devices would get nothing
    bare = DirichletPartitioner(0.1, min_partition_size=0).partition(labels, 128, 0)
    filled = DirichletPartitioner(0.1, min_partition_size=32).partition(labels, 128, 0)
    assert min(map(len, bare)) == 0 and min(map(len, filled)) == 32
    for before, after in zip(bare, filled):
        if len(before) <= 32:
            assert len(after) == 32 and set(before) <= set(after)
        else:
            assert set(after) <= set(before)  # others only give away
    most = max(map(len, bare))
    untouched = [len(after) == len(before) for before, after in zip(bare, filled) if 32 < len(before) < most / 2]
    assert all(untouched)  # only those who have most give


def test_filling_up_to_the_mean_makes_all_equal():
    labels = np.repeat([0, 1, 2], 40)
    parts = DirichletPartitioner(0.05, min_partition_size=12).partition(labels, 10, 4)
    assert [len(part) for part in parts] == [12] * 10
    with pytest.raises(DataError, match="120 samples are too few for 10 devices with at least 13 each"):
        DirichletPartitioner(0.05, min_partition_size=13).partition(labels, 10, 4)


def test_shards_are_equal_stretches_of_one_or_two_labels():
    parts = ShardPartitioner(2).partition(MNIST, 100, 0)
    assert [len(part) for part in parts] == [600] * 100
    kinds = (label_counts(parts, MNIST, 10) > 0).sum(1)
    assert kinds.min() >= 1 and kinds.max() <= 4 and np.mean(kinds) < 3
    one = label_counts(ShardPartitioner(1).partition(np.repeat(np.arange(4), 25), 4, 0), np.repeat(np.arange(4), 25), 4)
    assert sorted(map(tuple, one.tolist())) == [(0, 0, 0, 25), (0, 0, 25, 0), (0, 25, 0, 0), (25, 0, 0, 0)]


@pytest.mark.parametrize("digits", [1, 2, 5, 10])
def test_digits_per_worker_as_in_the_paper(digits: int):
    """100 workers: every digit goes to 10 p of them, who share it equally."""
    parts = DigitsPartitioner(digits).partition(MNIST, 100, 0)
    counts = label_counts(parts, MNIST, 10)
    assert ((counts > 0).sum(1) == digits).all()
    assert ((counts > 0).sum(0) == 10 * digits).all()
    for label, total in enumerate(np.bincount(MNIST)):
        own = counts[:, label][counts[:, label] > 0]
        assert own.max() - own.min() <= 1 and own.sum() == total


def test_pairs_of_digits_are_mixed():
    counts = label_counts(DigitsPartitioner(2).partition(MNIST, 100, 0), MNIST, 10)
    pairs = {tuple(np.flatnonzero(row)) for row in counts}
    assert len(pairs) > 25  # of 45; dealing them in a circle would give 5


@given(st.integers(1, 30), st.integers(2, 9), st.integers(1, 9), st.integers(0, 1000))
def test_digits_in_uneven_numbers(devices: int, classes: int, each: int, seed: int):
    labels = np.repeat(np.arange(classes), 40)
    if each > classes or each * devices < classes:
        with pytest.raises(InputError):
            DigitsPartitioner(each).partition(labels, devices, seed)
        return
    counts = label_counts(DigitsPartitioner(each).partition(labels, devices, seed), labels, classes)
    takers = (counts > 0).sum(0)
    assert ((counts > 0).sum(1) == each).all() and takers.max() - takers.min() <= 1


@pytest.mark.parametrize("similarity", [0.0, 0.05, 0.1, 0.2, 1.0])
def test_similarity_deals_a_fraction_evenly_and_the_rest_by_label(similarity: float):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 1600))
    parts = SimilarityPartitioner(similarity).partition(labels, 16, 0)
    assert [len(part) for part in parts] == [1000] * 16
    counts = label_counts(parts, labels, 10)
    # 1,600 of a label and stretches of 1,000 (1 - s): a label's sorted part touches at most three devices.
    stretch = 1000 * (1 - similarity)
    for device in range(16):
        largest = np.sort(counts[device])[::-1]
        assert largest[:2].sum() >= stretch
        others = largest[2:] if similarity < 1 else largest
        assert others.mean() == pytest.approx(100 * similarity, abs=5 * np.sqrt(100 * similarity) / np.sqrt(8) + 1e-9)


def test_natural_groups_stay_together():
    _, groups = drawn(1, 3000, 10, 291)
    labels = np.zeros(3000, np.int64)
    parts = NaturalIdPartitioner(2).partition(labels, 128, 0, groups)
    writers = [set(groups[part].tolist()) for part in parts]
    assert all(len(own) == 2 for own in writers) and len(set.union(*writers)) == 256
    for part, own in zip(parts, writers):
        assert part.tolist() == np.flatnonzero(np.isin(groups, list(own))).tolist()
    sizes = [len(set(groups[part].tolist())) for part in NaturalIdPartitioner().partition(labels, 128, 0, groups)]
    assert sorted(sizes) == [2] * (128 - 35) + [3] * 35  # 291 = 2 · 128 + 35


def test_group_numbers_mean_nothing():
    _, groups = drawn(1, 500, 10, 30)
    labels = np.zeros(500, np.int64)
    one = NaturalIdPartitioner(3).partition(labels, 10, 0, groups)
    other = NaturalIdPartitioner(3).partition(labels, 10, 0, 1_000_003 * groups - 5)
    assert [part.tolist() for part in one] == [part.tolist() for part in other]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NaturalIdPartitioner().partition(MNIST, 2, 0), "no natural groups; expected femnist, imdb"),
        (lambda: NaturalIdPartitioner().partition(MNIST, 2, 0, np.zeros(3, np.int64)), "one group per sample, got 3"),
        (lambda: NaturalIdPartitioner(3).partition(MNIST, 4, 0, MNIST), "4 devices with 3 groups each need 12 groups"),
        (lambda: NaturalIdPartitioner().partition(MNIST, 11, 0, MNIST), "11 devices need 11 groups, .* has 10"),
        (lambda: NaturalIdPartitioner(0), "groups_per_partition: expected 1 or more"),
        (lambda: IidPartitioner().partition(MNIST, 0, 0), "expected at least one device, got 0"),
        (lambda: IidPartitioner().partition(MNIST, 2, -1), "seed: expected 0 or more, got -1"),
        (lambda: IidPartitioner().partition(MNIST[:3], 4, 0), "3 samples are too few for 4 devices"),
        (lambda: IidPartitioner().partition(MNIST * 0.5, 4, 0), "expected one integer label per sample, got float64"),
        (lambda: DirichletPartitioner(0), "alpha: expected a number above 0, got 0"),
        (lambda: DirichletPartitioner(float("nan")), "alpha: expected a number above 0, got nan"),
        (lambda: DirichletPartitioner(1, -1), "min_partition_size: expected 0 or more"),
        (lambda: ShardPartitioner(0), "shards_per_partition: expected 1 or more"),
        (lambda: DigitsPartitioner(0), "labels_per_partition: expected 1 or more"),
        (lambda: DigitsPartitioner(11).partition(MNIST, 20, 0), "expected at most 10, all labels, got 11"),
        (lambda: DigitsPartitioner(2).partition(MNIST, 4, 0), "expected at least 5 devices"),
        (lambda: DigitsPartitioner(1).partition(np.array([0, 1, 1, 1]), 4, 0), "label 0 has 1 samples for 2 devices"),
        (lambda: SimilarityPartitioner(1.1), "expected a fraction from 0 to 1, got 1.1"),
        (lambda: make_partitioner("dirichlet"), "partitioner 'dirichlet': alpha: required, and not given"),
        (lambda: make_partitioner("iid", {"alpha": 1}), "the partitioner 'iid' takes no constants, got alpha"),
        (lambda: make_partitioner("shard", {"shards_per_partition": 1.5}), "expected int, got '1.5'"),
        (lambda: make_partitioner("dirichlt"), "no partitioner named 'dirichlt', .* did you mean 'dirichlet'"),
    ],
)
def test_what_cannot_be_dealt(make, message: str):
    with pytest.raises(InputError, match=message):
        make()


def test_the_registry_names_every_partitioner():
    assert {type(partitioner) for partitioner in EVERY} == set(PARTITIONERS.values())
    assert all(is_dataclass(kind) and kind.__dataclass_params__.frozen for kind in PARTITIONERS.values())
    assert make_partitioner("similarity", {"similarity": 1}) == SimilarityPartitioner(1.0)
    assert make_partitioner("natural", {"groups_per_partition": 2}) == NaturalIdPartitioner(2)
    assert constants_of("dirichlet") == ["alpha", "min_partition_size"]
