"""Mistakes that were once taken without a word: each is mended, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import embrace
from edge_runtime.data import load_samples
from federation.errors import DataError, FieldError, InputError
from federation.job import Plan
from federation.messages import Task
from simulation.fleet import open_fleet
from simulation.simulate import choose_engine

X = np.random.default_rng(0).standard_normal((12, 6)).astype(np.float32)


class Two(nn.Module):
    """Takes ids and numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 4)
        self.numbers = nn.Linear(6, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        told: Tensor = self.out(torch.tanh(self.words(ids).mean(1) + self.numbers(numbers)))
        return told


IDS = np.random.default_rng(1).integers(0, 9, (12, 5))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> embrace.Bundle:
    sample = {"ids": IDS, "numbers": X}
    return embrace.export(Two(), tmp_path_factory.mktemp("two") / "bundle", sample=sample, vocabulary=9)


def test_the_onnx_file_of_several_inputs_has_them_by_name(two: embrace.Bundle, tmp_path: Path) -> None:
    session = ort.InferenceSession(two.to_onnx(tmp_path / "model.onnx"))
    inputs = [(value.name, value.type, value.shape[1:]) for value in session.get_inputs()]
    assert inputs == [("ids", "tensor(int64)", [5]), ("numbers", "tensor(float)", [6])]
    with torch.no_grad():
        expected = Two()(torch.from_numpy(IDS), torch.from_numpy(X)).numpy()
    found = session.run(["output"], {"ids": IDS, "numbers": X})[0]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_an_array_that_lacks_an_input_names_it(two: embrace.Bundle, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", ids=IDS, y=np.zeros(12, np.int64))
    message = "has no numbers: expected arrays named ids, numbers, y, found ids, y"
    with pytest.raises(DataError, match=message):
        load_samples(tmp_path / "data.npz", two.manifest)


def test_an_input_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match="the model has no input 'idz': its forward takes ids, numbers"):
        embrace.export(Two(), sample={"idz": IDS, "numbers": X}, vocabulary=9)


class Packed(nn.Module):
    """Takes the lengths of sequences beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reader = nn.GRU(3, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        told: Tensor = self.out(self.reader(packed)[1][-1])
        return told


def test_lengths_may_be_an_input() -> None:
    x = np.random.default_rng(2).standard_normal((6, 5, 3)).astype(np.float32)
    lengths = np.array([5, 2, 4, 1, 3, 5])
    bundle = embrace.export(Packed(), sample={"x": x, "lengths": lengths}, vocabulary=6)
    assert max(result.largest() for result in bundle.verify()) < 1e-5
    with torch.no_grad():
        expected = Packed()(torch.from_numpy(x), torch.from_numpy(lengths)).numpy()
    path = bundle.path / "model.onnx"
    found = ort.InferenceSession(bundle.to_onnx(path)).run(None, {"x": x, "lengths": lengths})[0]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_nothing_to_freeze_is_refused() -> None:
    with pytest.raises(InputError, match="frozen int4: every weight of Linear is trained"):
        embrace.export(nn.Linear(6, 3), sample=X, frozen="int4")


def test_a_simulation_of_fewer_bits_takes_the_portable_engine(two: embrace.Bundle) -> None:
    frozen = nn.Sequential(nn.Linear(6, 1024), nn.ReLU(), nn.Linear(1024, 3))
    frozen[0].requires_grad_(False)
    bundle = embrace.export(frozen, sample=X, frozen="int8")
    assert choose_engine(bundle.manifest) == "portable"


def test_the_pace_of_a_tier_that_is_not_there_is_refused(two: embrace.Bundle) -> None:
    plan = Plan("bundle", simulate={"devices": 2, "pace": {"tiers": {"stronk": 2.0}}})
    with pytest.raises(FieldError, match=r"simulate\.pace\.tiers\.stronk: no such tier; .* have strong"):
        open_fleet(plan, two.path, ({"ids": IDS, "numbers": X}, np.arange(12) % 3))


def test_parts_of_one_sample_are_refused_with_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    bundle = embrace.export(model, sample=X)
    for size in (1, 3):
        with pytest.raises(
            FieldError, match=f"micro_batch: {size} of 4 leaves parts of one sample, over which batch norm"
        ):
            Task("strong", 1, 4, 0.1, micro_batch=size).check_parts(bundle.manifest)
        with pytest.raises(FieldError, match="micro_batch"):
            embrace.train(bundle, (X, np.arange(12) % 3), rounds=1, batch=4, micro_batch=size, boundary="strong")
    Task("strong", 1, 4, 0.1, micro_batch=2).check_parts(bundle.manifest)
    whole = Task("strong", 1, 4, 0.1)
    assert whole.in_parts(2, bundle.manifest).at_once == 2 and whole.in_parts(8, bundle.manifest) is whole
    assert whole.in_parts(1, bundle.manifest).at_once == 2  # no part of one sample, nor at the end of a batch
    odd = Task("strong", 1, 33, 0.1)
    assert [odd.in_parts(size, bundle.manifest).at_once for size in (1, 8, 16)] == [3, 7, 15]
    assert whole.in_parts(2, bundle.manifest, samples=3).at_once == 3
