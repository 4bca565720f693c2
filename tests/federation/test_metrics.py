"""Scores against PyTorch's losses, and that parts add up to the whole."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.manifest import Loss
from federation.metrics import Score, score


def made(shape: tuple[int, ...], classes: int | None, seed: int, ignore: int | None = None):
    """Outputs, and labels some of which are to be ignored."""
    rng = np.random.default_rng(seed)
    outputs = (rng.standard_normal(shape) * 4).astype(np.float32)
    if classes is None:
        return outputs, rng.integers(0, 2, shape).astype(np.float32)
    labels = rng.integers(0, classes, (shape[0], *shape[2:]))
    if ignore is not None:
        labels[rng.random(labels.shape) < 0.4] = ignore
    return outputs, labels


@pytest.mark.parametrize("shape", [(64, 10), (8, 5, 7), (4, 3, 6, 5)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore", [None, -100, 2])
def test_cross_entropy_is_pytorchs(shape, smoothing, ignore):
    torch = pytest.importorskip("torch")
    outputs, labels = made(shape, shape[1], 0, ignore)
    found = score(Loss("cross_entropy", smoothing, ignore), outputs, labels)
    expected = torch.nn.functional.cross_entropy(
        torch.from_numpy(outputs).double(),
        torch.from_numpy(labels),
        label_smoothing=smoothing,
        ignore_index=-100 if ignore is None else ignore,
    )
    assert found.mean_loss == pytest.approx(expected.item(), rel=1e-12)
    counted = labels != ignore if ignore is not None else np.ones_like(labels, bool)
    assert found.counted == counted.sum()
    assert found.accuracy == (torch.from_numpy(outputs).argmax(1).numpy() == labels)[counted].mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_binary_cross_entropy_is_pytorchs(smoothing):
    """With smoothing as the training graphs have it: every label moves towards one half."""
    torch = pytest.importorskip("torch")
    outputs, labels = made((32, 3), None, 0)
    outputs[0, 0], outputs[1, 1] = 500, -500  # must not overflow
    found = score(Loss("bce_with_logits", smoothing), outputs, labels)
    soft = torch.from_numpy(labels).double() * (1 - smoothing) + smoothing / 2
    expected = torch.nn.functional.binary_cross_entropy_with_logits(torch.from_numpy(outputs).double(), soft)
    assert found.mean_loss == pytest.approx(expected.item(), rel=1e-12)
    right = (torch.sigmoid(torch.from_numpy(outputs)) > 0.5).numpy() == (labels == 1)
    assert found.accuracy == right.mean()


def test_squared_error_is_pytorchs_and_classifies_nothing():
    torch = pytest.importorskip("torch")
    outputs, labels = made((16, 4), None, 0)
    found = score(Loss("mse"), outputs, labels)
    expected = torch.nn.functional.mse_loss(torch.from_numpy(outputs).double(), torch.from_numpy(labels).double())
    assert found.mean_loss == pytest.approx(expected.item(), rel=1e-12)
    assert found.accuracy is None


REAL = [Loss("huber"), Loss("huber", delta=0.4, ignore_index=1), Loss("mse", ignore_index=0), Loss("cosine")]
POSITIONS = [
    Loss(name, ignore_index=ignore, classes_last=last, next_token=shifted)
    for name in ("cross_entropy", "focal")
    for ignore in (None, 2)
    for last in (None, True)
    for shifted in (None, True)
]


@pytest.mark.parametrize("which", [*REAL, *POSITIONS], ids=str)
def test_other_losses_are_pytorchs(which):
    """Against the reference of the exporter, which calls PyTorch's functions."""
    torch = pytest.importorskip("torch")
    oracle = pytest.importorskip("model_export.oracle")
    outputs, labels = made((6, 5, 9), 5 if which in POSITIONS else None, 0, which.ignore_index)
    if which.classes_last:
        outputs = np.ascontiguousarray(outputs.transpose(0, 2, 1))
    found = score(which, outputs, labels)
    wanted = torch.from_numpy(labels)
    wanted = wanted.double() if wanted.is_floating_point() else wanted
    expected = oracle.torch_loss(which, torch.from_numpy(outputs).double(), wanted)
    assert found.mean_loss == pytest.approx(expected.item(), rel=1e-9)
    assert (found.accuracy is not None) == (which in POSITIONS)


LOSSES = [Loss("cross_entropy", 0.1), Loss("cross_entropy", 0.0, 1), Loss("bce_with_logits"), Loss("mse"), *REAL]


@given(cuts=st.lists(st.integers(0, 20), max_size=4), which=st.sampled_from(LOSSES), seed=st.integers(0, 100))
def test_scores_of_parts_add_up_to_the_whole(cuts, which, seed):
    outputs, labels = made((20, 6), 6 if which.name == "cross_entropy" else None, seed, which.ignore_index)
    whole = score(which, outputs, labels)
    edges = [0, *sorted(cuts), 20]
    parts = sum((score(which, outputs[a:b], labels[a:b]) for a, b in itertools.pairwise(edges) if a < b), Score())
    assert (parts.correct, parts.counted, parts.classifies) == (whole.correct, whole.counted, whole.classifies)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)


def test_nothing_counted_is_no_number():
    found = score(Loss("cross_entropy", 0.0, 2), np.zeros((3, 4), np.float32), np.full(3, 2))
    assert (found.loss, found.counted, found.accuracy) == (0, 0, None)
    assert math.isnan(found.mean_loss) and math.isnan(Score().mean_loss)
