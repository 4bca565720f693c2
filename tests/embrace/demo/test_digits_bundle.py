"""What ships with the demo is what the exporter writes and what scikit-learn has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_runtime.bundle_files import check_bundle, read_manifest
from embrace.demo.digits_demo import FLEET, SHIPPED, load_digits
from simulation.datasets.digits import DIGITS

MODEL = SHIPPED / "model"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_it_is_whole_and_small() -> None:
    manifest = read_manifest(MODEL)
    check_bundle(MODEL, manifest)
    assert contents(MODEL).keys() == {"manifest.json", *(file.name for file in manifest.files())}
    assert all(boundary.train and not boundary.ort_training for boundary in manifest.boundaries)
    assert {member.tier for member in FLEET} == manifest.tiers.keys()
    assert sum(map(len, contents(SHIPPED).values())) < 300_000


def test_exporting_again_gives_the_same_bytes(tmp_path: Path) -> None:
    """Every file, and with the manifest every sha256. If it fails after a change of the exporter: export it again."""
    pytest.importorskip("torch")
    from model_export.bundle import export_bundle
    from model_export.source import load_source

    export_bundle(load_source("digits"), tmp_path / "model")
    made, shipped = contents(tmp_path / "model"), contents(MODEL)
    assert made.keys() == shipped.keys()
    assert [name for name in made if made[name] != shipped[name]] == []


def test_the_digits_are_those_of_scikit_learn() -> None:
    theirs = pytest.importorskip("sklearn.datasets").load_digits()
    with np.load(DIGITS) as ours:
        assert np.array_equal(ours["x"], theirs.images) and np.array_equal(ours["y"], theirs.target)


def test_every_image_is_somewhere_once_and_labels_are_skewed() -> None:
    devices, (held_x, held_y) = load_digits()
    assert [len(y) for _, y in devices] == [477, 324, 207, 434]  # the same on every machine
    assert len(held_y) + sum(len(y) for _, y in devices) == 1797
    assert held_x.dtype == np.float32 and (held_x.min(), held_x.max()) == (0, 1)
    assert np.bincount(held_y).min() >= 34
    for _, labels in devices:
        counts = np.bincount(labels, minlength=10)
        assert counts.max() > 5 * np.sort(counts)[2]  # at least three digits are rare
