"""Evaluation: where it cannot work it says so. What it computes is in tests/embrace/cli/test_train.py."""

from __future__ import annotations

import errno

import pytest

from edge_runtime import evaluate
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.evaluate import Evaluator
from edge_runtime.forward import ForwardPlan
from edge_runtime.layers import BundleSource
from federation.errors import DiskFull, InputError, OutOfMemory


def evaluator(bundle, samples, plan: ForwardPlan) -> Evaluator:
    source = BundleSource(bundle.directory, bundle.manifest)
    return Evaluator(bundle.directory, source, 3, samples, settings=RuntimeSettings(), plan=plan)


def test_a_folder_that_cannot_be_made(digits, samples, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot evaluate in .*folder: Not a directory"):
        evaluator(digits, samples, ForwardPlan(folder=tmp_path / "file" / "folder")).score(digits.suffix("weak"))


@pytest.mark.parametrize(
    ("error", "kind"), [(OSError(errno.ENOSPC, "full"), DiskFull), (MemoryError(), OutOfMemory)], ids=["disk", "memory"]
)
def test_no_room_is_a_report_and_leaves_nothing(digits, samples, tmp_path, monkeypatch, error, kind):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(evaluate, "TrainedSource", fails)
    with pytest.raises(kind, match="evaluate"):
        evaluator(digits, samples, ForwardPlan(folder=tmp_path)).score(digits.suffix("weak"))
    assert list(tmp_path.iterdir()) == []


def test_predictions_are_what_is_scored(digits, samples):
    judge = evaluator(digits, samples, ForwardPlan())
    outputs = judge.predict(digits.suffix("weak"))
    right = float((outputs.argmax(1) == samples.labels[:]).mean())
    assert outputs.shape == (len(samples), 10) and right == judge.score(digits.suffix("weak")).accuracy
