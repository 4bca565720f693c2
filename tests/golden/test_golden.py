"""The golden vectors are what the Python computes now; browser/tests holds the TypeScript to the same files."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.bundle_files import read_manifest
from edge_runtime.graph_check import check_training_graph
from federation.errors import UnsafeGraph
from tests.golden import pure, rounds
from tests.golden.values import floats

AGAIN = "the vectors are old: python -m tests.golden.write, then make test-browser"
PURE = json.loads((rounds.FOLDER / "pure.json").read_text())
TOLERANCE = 1e-5  # a round's, between any two runtimes


@pytest.mark.parametrize("section", [name for name in PURE if name != "graphs"])
def test_every_bit_is_the_same(section: str) -> None:
    found, known = pure.everything()[section], PURE[section]
    for one, other in zip(found.get("scores", []), known.get("scores", [])):  # but for logarithms
        assert one["score"].pop("loss") == pytest.approx(other["score"].pop("loss"), rel=1e-12)
    assert found == known, AGAIN


def test_the_python_refuses_the_hostile_graphs_too(tmp_path: Path) -> None:
    """Compared by what becomes of them: other versions of onnx may write other bytes."""
    assert pure.graphs().keys() == PURE["graphs"].keys(), AGAIN
    manifest, file = read_manifest(rounds.DIGITS), tmp_path / "graph.onnx"
    for graph in PURE["graphs"].values():
        file.write_bytes(base64.b64decode(graph))
        with pytest.raises(UnsafeGraph):
            check_training_graph(file, manifest, manifest.boundary("dense"))


def test_no_vector_is_missing() -> None:
    assert pure.everything().keys() == PURE.keys(), AGAIN
    assert list(rounds.kept()) == list(rounds.CASES), AGAIN


@pytest.mark.parametrize("name", rounds.CASES)
def test_a_round_is_the_same_within_the_tolerance(name: str, tmp_path: Path) -> None:
    found, known = rounds.run(name, tmp_path), rounds.kept()[name]
    update, expected = floats(found.pop("update")), floats(known.pop("update"))
    for loss in ("loss", "last_loss"):
        assert found.pop(loss) == pytest.approx(known.pop(loss), abs=TOLERANCE)
    assert found["score"].pop("loss") == pytest.approx(known["score"].pop("loss"), abs=100 * TOLERANCE)  # a sum
    assert found == known, AGAIN
    np.testing.assert_allclose(update, expected, rtol=0, atol=TOLERANCE, err_msg=AGAIN)
    assert np.abs(expected).max() > 100 * TOLERANCE  # the round went somewhere


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in rounds.FOLDER.rglob("*") if path.is_file()) < 1_000_000
