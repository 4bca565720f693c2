"""SVCCA against canonical correlations computed another way, and what must not change it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.errors import InputError
from simulation.svcca import (
    as_matrix,
    canonical_correlations,
    main_directions,
    most_similar,
    pairwise,
    svcca,
    svcca_of_batches,
)


def by_covariances(first: np.ndarray, second: np.ndarray, count: int) -> float:
    """Hotelling's formulation: project on the top directions, then the eigenvalues of Σxx⁻¹ Σxy Σyy⁻¹ Σyx are ρ²."""

    def project(matrix: np.ndarray) -> np.ndarray:
        centred = matrix - matrix.mean(0)
        _, vectors = np.linalg.eigh(centred.T @ centred)  # principal components, ascending
        return centred @ vectors[:, ::-1][:, :count]

    x, y = project(first), project(second)
    xx, yy, xy = x.T @ x, y.T @ y, x.T @ y
    squares = np.linalg.eigvals(np.linalg.solve(xx, xy) @ np.linalg.solve(yy, xy.T)).real
    return float(np.sqrt(np.clip(squares, 0, 1)).mean())


def related(seed: int, samples: int = 200, first: int = 12, second: int = 9, noise: float = 0.5) -> list[np.ndarray]:
    """Two layers that see the same five factors, each in its own way."""
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(samples, 5))
    return [
        factors @ rng.normal(size=(5, width)) + noise * rng.normal(size=(samples, width)) + rng.normal(size=width)
        for width in (first, second)
    ]


@given(st.integers(0, 2**32), st.integers(1, 6), st.floats(0.05, 3))
def test_the_same_as_by_covariances(seed: int, count: int, noise: float):
    first, second = related(seed, noise=noise)
    assert svcca(first, second, count) == pytest.approx(by_covariances(first, second, count), abs=1e-7)


def test_single_correlations_by_hand():
    """Two neurons each; one is shared, the others are orthogonal: correlations 1 and 0."""
    x = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]], float)
    y = np.stack([x[:, 0], x[:, 0] * x[:, 1]], 1)
    found = canonical_correlations(main_directions(x), main_directions(y))
    assert found == pytest.approx([1, 0], abs=1e-12) and svcca(x, y) == pytest.approx(0.5)


def test_one_neuron_each_is_the_absolute_correlation():
    first, second = related(1, first=1, second=1)
    expected = abs(np.corrcoef(first[:, 0], second[:, 0])[0, 1])
    assert svcca(first, second) == pytest.approx(expected)


@given(st.integers(0, 2**32))
def test_rotation_scale_shift_and_order_do_not_matter(seed: int):
    first, second = related(seed)
    before = svcca(first, second)
    rng = np.random.default_rng(seed)
    rotation, _ = np.linalg.qr(rng.normal(size=(12, 12)))
    order = rng.permutation(len(first))
    assert svcca(first @ rotation * 7.5 + rng.normal(size=12), second) == pytest.approx(before, abs=1e-7)
    assert svcca(first[order], second[order]) == pytest.approx(before, abs=1e-7)
    assert svcca(second, first) == pytest.approx(before, abs=1e-9)
    assert svcca(first, first @ rotation) == pytest.approx(1)
    assert 0 <= before <= 1


def test_more_noise_is_less_similar_and_nothing_shared_is_near_chance():
    similar = [np.mean([svcca(*related(seed, noise=noise), 5) for seed in range(8)]) for noise in (0.01, 1, 3)]
    assert similar[0] > 0.95 and similar[0] > similar[1] > similar[2]
    rng = np.random.default_rng(0)
    chance = svcca(rng.normal(size=(4000, 30)), rng.normal(size=(4000, 30)))
    assert chance < 4 * np.sqrt(4 / 4000)


def test_only_the_largest_directions_count():
    """Two strong shared directions and weak ones that are not: with 2 it is 1, with 4 it is about a half."""
    rng = np.random.default_rng(0)
    shared = 100 * rng.normal(size=(5000, 2))
    first, second = (np.hstack([shared, rng.normal(size=(5000, 2))]) for _ in range(2))
    assert svcca(first, second, 2) == pytest.approx(1, abs=1e-3)
    assert svcca(first, second, 4) == pytest.approx(0.5, abs=0.05)


def test_images_and_texts_become_samples_of_neurons():
    images = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    matrix = as_matrix(images)
    assert matrix.shape == (40, 3) and matrix[1 * 20 + 2 * 5 + 3].tolist() == images[1, :, 2, 3].tolist()
    texts = np.arange(24.0).reshape(2, 3, 4)
    assert as_matrix(texts)[1 * 3 + 2].tolist() == texts[1, 2].tolist()
    assert as_matrix(images.reshape(2, -1)).dtype == np.float64


def test_layers_of_low_rank():
    rng = np.random.default_rng(0)
    column = rng.normal(size=(50, 1))
    assert main_directions(column @ rng.normal(size=(1, 8))).shape == (50, 1)
    dead = np.full((50, 8), 0.1)  # after a ReLU that nothing passes
    assert main_directions(dead).shape == (50, 0)
    assert svcca(dead, dead + 1) == 1 and svcca(dead, column) == 0


def test_pairs_of_devices():
    layers = [related(0)[0], related(0)[1], related(5)[0]]
    directions = [main_directions(layer) for layer in layers]
    found = pairwise(directions)
    for row in range(3):
        for column in range(3):
            assert found[row, column] == pytest.approx(svcca(layers[row], layers[column]))
    assert most_similar(directions) == found[0, 1] > found[0, 2]


def test_batches_are_averaged():
    first, second = related(3)
    parts = [slice(0, 100), slice(100, 200)]
    expected = np.mean([by_covariances(first[part], second[part], 4) for part in parts])
    assert svcca_of_batches([first[p] for p in parts], [second[p] for p in parts]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: svcca(np.ones((3, 2)), np.ones((4, 2))), "the same samples, got 3 and 4"),
        (lambda: svcca(np.ones((1, 2)), np.ones((1, 2))), "at least 2 samples, got 4 of 1"),
        (lambda: svcca(np.ones((3, 2)), np.ones((3, 2)), 0), "at least 1 direction"),
        (lambda: svcca(np.ones(3), np.ones(3)), "with 2, 3 or 4 axes"),
        (lambda: svcca(np.array([[1.0], [np.nan]]), np.ones((2, 1))), "expected finite activations"),
        (lambda: svcca_of_batches([np.ones((3, 2))], []), "equally many batches of both, got 1 and 0"),
        (lambda: most_similar([np.ones((3, 1))]), "at least two devices, got 1"),
    ],
)
def test_what_cannot_be_compared(call, message: str):
    with pytest.raises(InputError, match=message):
        call()
