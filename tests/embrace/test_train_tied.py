"""Fine-tuning a model whose frozen layers borrow what is trained: the score is that of the bundle that is written."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import embrace
from tests.model_export.crossing_models import TiedLanguageModel


def mean_loss(bundle: embrace.Bundle, x: np.ndarray, y: np.ndarray) -> float:
    """Score a bundle with PyTorch alone, from the state dict that it writes."""
    module = TiedLanguageModel()
    state = {name: torch.from_numpy(np.array(value)) for name, value in bundle.state_dict().items()}
    assert module.load_state_dict(state, strict=False).missing_keys == ["head.weight"]  # which is the embedding's
    with torch.no_grad():
        outputs = module.eval()(torch.from_numpy(x))
        return float(torch.nn.functional.cross_entropy(outputs, torch.from_numpy(y)))


def test_a_tied_model_is_scored_as_it_is_written(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(1, 11, (48, 5))
    y = np.roll(x, -1, axis=1)
    torch.manual_seed(0)
    bundle = embrace.export(TiedLanguageModel(), sample=x, vocabulary=11)
    weak = bundle.boundaries[-1]["name"]
    tuned = embrace.train(
        bundle, (x, y), test=(x, y), boundary=weak, rounds=3, epochs=2, batch=8, rate=0.5, out=tmp_path / "trained"
    )
    assert tuned.before.mean_loss == pytest.approx(mean_loss(bundle, x, y), rel=1e-4)
    assert tuned.after.mean_loss == pytest.approx(mean_loss(tuned.bundle, x, y), rel=1e-4)
    assert abs(tuned.after.mean_loss - tuned.before.mean_loss) > 0.05
