"""The first steps of recurrent layers as a frozen layer: against cells of PyTorch that are called step by step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from edge_runtime.bundle_files import map_weights
from edge_runtime.engine.choose import open_step
from edge_runtime.engine.portable import LayerForward
from federation.manifest import Boundary, Loss, Manifest
from model_export import bundle as bundle_module
from model_export.autodiff.rules.dropout import reference_mask
from model_export.bundle import Choices, export_bundle
from model_export.source import load_source
from model_export.verify import verify_bundle

BATCH, SEED = 3, 5
WORDS, KEPT = 9, 4  # of a review: read, and trained at the end of each direction's recursion
TIMES, LATE = 7, 3  # of a measurement


class Reviews(nn.Module):
    """The shape of the papers' network: both directions, dropout on both sides, the last states of both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.before = nn.Dropout(0.3)
        self.lstm = nn.LSTM(6, 5, batch_first=True, bidirectional=True)
        self.after = nn.Dropout(0.3)
        self.classifier = nn.Linear(10, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (last, _) = self.lstm(self.before(self.embedding(tokens)))
        return self.classifier(self.after(last.transpose(0, 1).flatten(1)))


class Sensor(nn.Module):
    """A recurrent layer that comes first, and whose outputs are all read."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)
        self.classifier = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.gru(x)[0].mean(1))


class Stacked(nn.Module):
    """A recurrent layer that reads another's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.LSTM(3, 4, num_layers=2, batch_first=True)
        self.high = nn.RNN(4, 5, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.high(self.low(x)[0])[0][:, -1])


def export(folder: Path, module: type[nn.Module], split: str) -> tuple[Manifest, Boundary]:
    words = module is Reviews
    source = load_source(
        f"{__file__}:{module.__name__}",
        input_shape=(WORDS,) if words else (TIMES, 3),
        input_dtype="int64" if words else None,
        vocabulary=20 if words else None,
        loss=Loss("bce_with_logits" if words else "cross_entropy"),
    )
    manifest = export_bundle(source, folder, Choices([split]))
    return manifest, manifest.boundary(split)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory) -> tuple[Path, Manifest, Boundary]:
    folder = tmp_path_factory.mktemp("bundles") / "reviews"
    return folder, *export(folder, Reviews, f"lstm@{KEPT}")


def weights_of(folder: Path, manifest: Manifest) -> np.ndarray:
    return np.array(map_weights(folder / manifest.weights.name, manifest.space))


def tensors(manifest: Manifest, vector: np.ndarray) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value.copy()) for name, value in manifest.space.views(vector).items()}


def cell(kind: type[nn.Module], sizes: tuple[int, int], weights: Mapping[str, Tensor], place: str, end: str):
    """One step of a direction's recursion with some weights."""
    own = {name: weights[f"{place}.{name}_l0{end}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    return lambda x, state: functional_call(kind(*sizes), own, (x, state))


def check(folder: Path, manifest: Manifest, boundary: Boundary, x: np.ndarray, labels: np.ndarray, expect) -> None:
    """A step with other weights than the first steps ran with, against what `expect` computes from both."""
    before = weights_of(folder, manifest)
    after = before + np.random.default_rng(1).normal(0, 0.2, before.size).astype(np.float32)
    old, new = tensors(manifest, before), tensors(manifest, after)
    trained = [p.name for layer in manifest.layers[boundary.layer :] for p in layer.parameters]
    for name in trained:
        new[name].requires_grad_(True)
    loss = expect(old, new)
    loss.backward()
    value = x
    for layer in manifest.frozen(boundary):
        value = LayerForward(folder / layer.forward.name)(value)
    assert value.shape[1:] == manifest.entry(boundary).shape
    step = open_step(folder, manifest, boundary, "portable")
    step.parameters[:] = after[step.suffix]
    assert step.run(value, labels, SEED) == pytest.approx(loss.item(), rel=1e-5)
    for name in trained:
        np.testing.assert_allclose(step.results[name], new[name].grad.numpy(), rtol=1e-3, atol=1e-6, err_msg=name)


def test_both_directions_are_trained_from_the_states_that_the_weights_of_the_round_give(reviews):
    folder, manifest, boundary = reviews
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, 20, (BATCH, WORDS)), rng.integers(0, 2, (BATCH, 1)).astype(np.float32)

    def expect(old: dict[str, Tensor], new: dict[str, Tensor]) -> Tensor:
        words = old["embedding.weight"][torch.from_numpy(tokens)]
        dropped = words * torch.from_numpy(reference_mask(SEED, 0, tuple(words.shape), float(np.float32(0.3))))
        ends = []
        for end, order in (("", range(WORDS)), ("_reverse", range(WORDS)[::-1])):
            first, last = (cell(nn.LSTMCell, (6, 5), w, "lstm", end) for w in (old, new))
            state = (torch.zeros(BATCH, 5), torch.zeros(BATCH, 5))
            for at in order[: WORDS - KEPT]:
                state = first(words[:, at], state)  # nothing is dropped where nothing is trained
            for at in order[WORDS - KEPT :]:
                state = last(dropped[:, at], state)
            ends.append(state[0])
        both = torch.cat(ends, 1)
        both = both * torch.from_numpy(reference_mask(SEED, 1, tuple(both.shape), float(np.float32(0.3))))
        logits = F.linear(both, new["classifier.weight"], new["classifier.bias"])
        return F.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels))

    check(folder, manifest, boundary, tokens, labels, expect)


def test_outputs_of_the_first_steps_stay_as_the_round_began(tmp_path):
    manifest, boundary = export(tmp_path / "b", Sensor, f"gru@{LATE}")
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(BATCH, TIMES, 3)).astype(np.float32), rng.integers(0, 2, BATCH)

    def expect(old: dict[str, Tensor], new: dict[str, Tensor]) -> Tensor:
        first, last = (cell(nn.GRUCell, (3, 4), w, "gru", "") for w in (old, new))
        values, state, outputs = torch.from_numpy(x), torch.zeros(BATCH, 4), []
        for at in range(TIMES):
            state = (first if at < TIMES - LATE else last)(values[:, at], state)
            outputs.append(state)
        logits = F.linear(torch.stack(outputs).mean(0), new["classifier.weight"], new["classifier.bias"])
        return F.cross_entropy(logits, torch.from_numpy(labels))

    assert boundary.layer == 0 and not boundary.whole
    check(tmp_path / "b", manifest, boundary, x, labels, expect)


def test_a_training_graph_behind_a_head_has_none_of_the_first_steps(reviews):
    folder, manifest, boundary = reviews
    graph = onnx.load(folder / boundary.train.name).graph
    assert {node.op_type for node in graph.node}.isdisjoint({"LSTM", "GRU", "RNN"})
    states = 2 * 2 * 5  # h and c of both directions
    assert boundary.head.output.shape == (WORDS * 6 + states,), "outputs that nothing reads are not stored"
    whole = manifest.layers[1]
    assert boundary.head.macs == whole.macs * (WORDS - KEPT) // WORDS
    assert boundary.head.activations == whole.activations - boundary.activations


def test_verify_knows_heads(reviews, tmp_path):
    export(tmp_path / "b", Stacked, "low@2")
    for folder in (reviews[0], tmp_path / "b"):
        assert all(found.largest() < 1e-5 for found in verify_bundle(folder))


def test_verify_knows_heads_of_onnx_files(tmp_path):
    """With dropout in the file: the trained steps have masks, the first ones have none."""
    torch.onnx.export(
        Reviews().train(),
        (torch.zeros(2, WORDS, dtype=torch.int64),),
        tmp_path / "reviews.onnx",
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        input_names=["tokens"],
        output_names=["logits"],
        dynamic_axes={"tokens": {0: "N"}, "logits": {0: "N"}},
    )
    known = {"vocabulary": 20, "loss": Loss("bce_with_logits")}
    source = load_source(str(tmp_path / "reviews.onnx"), **known)
    manifest = export_bundle(source, tmp_path / "b", Choices([f"lstm@{KEPT}"]))
    assert manifest.boundary(f"lstm@{KEPT}").head is not None and manifest.uses_seed
    compared = {found.boundary: found for found in verify_bundle(tmp_path / "b")}  # the file itself drops out, always
    assert compared[f"lstm@{KEPT}"].largest() < 1e-5 and compared["embedding"].largest() < 1e-5


def test_a_bundle_from_before_heads_runs_the_first_steps_in_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle_module, "head_cut", lambda *_: None)
    _, boundary = export(tmp_path / "b", Reviews, f"lstm@{KEPT}")
    assert boundary.head is None
    assert all(found.largest() < 1e-5 for found in verify_bundle(tmp_path / "b"))


def test_numbers_of_words_are_not_stored_so_the_embedding_has_no_head(tmp_path):
    _, boundary = export(tmp_path / "b", Reviews, f"embedding@{KEPT}")
    assert boundary.head is None and boundary.last_steps == KEPT
    assert all(found.largest() < 1e-5 for found in verify_bundle(tmp_path / "b"))
