"""Loss functions of a user's own, several heads, CTC and pairs: from the export to a trained, scored bundle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import embrace
from edge_runtime import bundle_loss
from edge_runtime.bundle_files import map_weights, read_manifest
from edge_runtime.bundle_loss import BundleLoss
from edge_runtime.data import load_samples
from edge_runtime.layers import BundleSource
from edge_runtime.trainer import Received, Trainer, batches
from federation.errors import BundleError, FieldError, InputError
from federation.messages import Task
from model_export.ready_losses import ctc, ctc_of_torch

COUNT = 40
RNG = np.random.default_rng(0)
X = RNG.standard_normal((COUNT, 6)).astype(np.float32)
CLASSES = RNG.integers(0, 4, COUNT)
NUMBERS = RNG.standard_normal((COUNT, 4)).astype(np.float32)
MASK = RNG.random((COUNT, 4)) < 0.6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))


class Heads(nn.Module):
    """Returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.digit = nn.Linear(4, 5)
        self.angle = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"digit": self.digit(h), "angle": self.angle(h)}


class Pair(nn.Module):
    """Two views through one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(a), self.body(b)


def each_sample(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none") + 0.1 * outputs.square().sum(1)


def summed(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).abs().sum()


def masked(outputs: Tensor, labels: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    counts = labels["mask"].to(outputs.dtype)
    return ((outputs - labels["wanted"]).square() * counts).sum(), counts.sum()


def smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=1)(outputs, labels)
    return loss


def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    """Has a tensor of its own, and divides by the weights of the labels that a batch has."""
    return F.cross_entropy(outputs, labels, weight=torch.tensor([1.0, 2.0, 0.5, 4.0]))


def ranked(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compares every sample with every other."""
    apart, wanted = (column[:, None] - column[None, :] for column in (outputs[:, 0], labels[:, 0]))
    return torch.relu(1 - apart * torch.sign(wanted)).mean()


CASES: dict[str, tuple[Callable[[Any, Any], Any], Any, str]] = {
    "a number for each sample": (each_sample, CLASSES, "mean"),
    "a sum": (summed, NUMBERS, "sum"),
    "what counts": (masked, {"wanted": NUMBERS, "mask": MASK}, "counted"),
    "samples compared": (ranked, NUMBERS, "batch"),
    "label smoothing": (smoothed, CLASSES, "batch"),
    "weights of classes": (weighted, CLASSES, "batch"),
}


def of_batch(function: Callable[[Any, Any], Any], outputs: Tensor, labels: Any, indices: Any) -> Tensor:
    """The loss of some samples by PyTorch."""
    own = {k: torch.from_numpy(v[indices]) for k, v in labels.items()} if isinstance(labels, dict) else None
    result = function(outputs, torch.from_numpy(labels[indices]) if own is None else own)
    return result[0] / result[1] if isinstance(result, tuple) else result.mean() if result.ndim else result


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    function, labels, reduction = CASES[request.param]
    out = tmp_path_factory.mktemp("own") / "bundle"
    bundle = embrace.export(network(), out, sample=X, loss=function, labels=labels, batch=8)
    return bundle, function, labels, reduction


def test_a_function_becomes_graph_and_is_pytorchs(case: Any) -> None:
    bundle, _, _, reduction = case
    assert max(result.largest() for result in bundle.verify()) < 1e-5
    assert bundle.manifest.loss.own.reduction == reduction


def test_parts_of_a_batch_are_exact_or_refused(case: Any) -> None:
    bundle, function, labels, reduction = case
    manifest = read_manifest(bundle.path)
    samples = load_samples((X, labels), manifest)
    trainer = Trainer(bundle.path, BundleSource(bundle.path, manifest), samples)
    task = Task(manifest.boundaries[0].name, 3, 10, 0.05, seed=3, micro_batch=4)
    received = Received(np.array(map_weights(bundle.path / manifest.weights.name, manifest.space)))
    if reduction == "batch":
        message = f"micro_batch: the loss memory:{function.__name__} is no mean over the samples"
        with pytest.raises(FieldError, match=message):
            trainer.run(task, received)
        task = replace(task, micro_batch=None)
    outcome = trainer.run(task, received)
    module, losses = network(), []
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05)
    for _, indices in batches(COUNT, task.batch, task):
        optimiser.zero_grad()
        loss = of_batch(function, module(torch.from_numpy(X[indices])), labels, indices)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert outcome.report.loss == pytest.approx(np.mean(losses), rel=1e-5)
    views = manifest.space.views(outcome.parameters)
    for name, value in module.state_dict().items():
        np.testing.assert_allclose(views[name], value.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_score_is_the_functions_own(case: Any) -> None:
    bundle, function, labels, reduction = case
    done = embrace.train(
        bundle, (X, labels), test=(X, labels), boundary="strong", rounds=1, steps=2, batch=8, rate=0.01
    )
    with torch.no_grad():
        outputs = network()(torch.from_numpy(X))
    everything = slice(None)
    if reduction == "batch":  # in batches as the bundle has them
        rows = [slice(start, start + 8) for start in range(0, COUNT, 8)]
        expected = float(np.mean([of_batch(function, outputs[row], labels, row) for row in rows]))
    else:
        expected = float(of_batch(function, outputs, labels, everything)) / (COUNT if reduction == "sum" else 1)
    assert done.before is not None
    assert done.before.mean_loss == pytest.approx(expected, rel=1e-5)
    assert done.before.accuracy is None  # the labels were not said to be classes


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> embrace.Bundle:
    torch.manual_seed(1)
    chosen = {"digit": "cross_entropy:1.5:label_smoothing=0.1", "angle": "huber:0.5"}
    return embrace.export(Heads(), tmp_path_factory.mktemp("heads") / "bundle", sample=X, loss=chosen)


def test_heads_with_weights_train_and_are_scored_one_by_one(heads: embrace.Bundle, tmp_path: Path) -> None:
    assert max(result.largest() for result in heads.verify()) < 1e-5
    digit, angle = CLASSES, NUMBERS[:, :2]
    np.savez(tmp_path / "data.npz", x=X, digit=digit.astype(np.uint8), angle=angle)
    data = str(tmp_path / "data.npz")
    done = embrace.train(heads, data, test=data, boundary="strong", rounds=1, steps=2, batch=8, rate=0.01)
    assert done.before is not None
    torch.manual_seed(1)
    with torch.no_grad():
        told = Heads()(torch.from_numpy(X))
    first = F.cross_entropy(told["digit"], torch.from_numpy(digit), label_smoothing=0.1)
    second = F.huber_loss(told["angle"], torch.from_numpy(angle))
    assert done.before.mean_loss == pytest.approx(float(1.5 * first + 0.5 * second), rel=1e-5)
    parts = done.before.parts
    assert parts["digit"].mean_loss == pytest.approx(float(first), rel=1e-5)
    assert parts["angle"].mean_loss == pytest.approx(float(second), rel=1e-5)
    assert parts["digit"].accuracy == pytest.approx(float((told["digit"].argmax(1).numpy() == digit).mean()))
    assert parts["angle"].accuracy is None and done.before.accuracy is None


def test_heads_in_a_simulation(heads: embrace.Bundle) -> None:
    labels = {"digit": CLASSES, "angle": NUMBERS[:, :2]}
    job = embrace.Job(heads, num_rounds=1)
    run = embrace.simulate(job, data=(X, labels), devices=2, partition="iid", workers=1)
    assert set(run.rounds[-1]["by_head"]) == {"digit", "angle"}


def test_a_label_that_a_head_does_not_have_is_refused(heads: embrace.Bundle) -> None:
    wrong = {"digit": CLASSES + 5, "angle": NUMBERS[:, :2]}
    with pytest.raises(InputError, match=r"digit: sample \d has label \d, the model takes 0 to 4"):
        embrace.train(heads, (X, wrong), rounds=1)
    with pytest.raises(InputError, match="has no angle; the model 'Heads' takes the labels digit, angle"):
        embrace.train(heads, (X, {"digit": CLASSES}), rounds=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ctc_is_pytorchs(dtype: torch.dtype) -> None:
    """Random lengths of targets (none at all, too), of inputs, repeated labels, alignments that do not exist."""
    generator, limit = torch.Generator().manual_seed(0), 1e-12 if dtype == torch.float64 else 5e-6
    for trial in range(30):
        outputs = (3 * torch.randn(4, 7, 5, dtype=dtype, generator=generator)).requires_grad_()
        targets = torch.randint(1, 4, (4, 3), generator=generator)
        targets[torch.arange(3)[None] >= torch.randint(0, 4, (4, 1), generator=generator)] = 0
        lengths = torch.randint(1, 8, (4,), generator=generator)
        labels = {"targets": targets, "input_lengths": lengths} if trial % 2 else targets
        found, expected = ctc(outputs, labels).mean(), ctc_of_torch(outputs, labels)
        gradients = [torch.autograd.grad(value, outputs)[0] for value in (found, expected)]
        assert abs(found.item() - expected.item()) <= limit * max(1.0, abs(expected.item()))
        assert (gradients[0] - gradients[1]).abs().max().item() <= limit


class Reader(nn.Module):
    """Classes for each of seven positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reader = nn.GRU(3, 6, batch_first=True)
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        told: Tensor = self.out(self.reader(x)[0])
        return told


@pytest.mark.parametrize("lengths", [False, True])
def test_ctc_in_a_bundle(lengths: bool) -> None:
    x = RNG.standard_normal((8, 7, 3)).astype(np.float32)
    targets = RNG.integers(1, 5, (8, 3))
    labels: Any = {"targets": targets, "input_lengths": np.full(8, 6)} if lengths else targets
    bundle = embrace.export(Reader(), sample=x, loss="ctc", labels=labels)
    assert max(result.largest() for result in bundle.verify()) < 2e-5
    done = embrace.train(bundle, (x, labels), test=(x, labels), boundary="strong", rounds=1, steps=2, batch=4, rate=0.1)
    assert done.before is not None
    wanted = {k: torch.from_numpy(v) for k, v in labels.items()} if lengths else torch.from_numpy(targets)
    with torch.no_grad():
        expected = ctc_of_torch(Reader()(torch.from_numpy(x)), wanted)
    assert done.before.mean_loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("loss", ["contrastive", "cosine_embedding"])
def test_pairs(loss: str) -> None:
    torch.manual_seed(0)
    bundle = embrace.export(Pair(), sample={"a": X, "b": X}, loss=loss, output="0,1")
    assert max(result.largest() for result in bundle.verify()) < 2e-5
    own = bundle.manifest.loss.own
    assert own is not None and own.reduction == ("batch" if loss == "contrastive" else "mean")


def unlabelled(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.square().mean()


def by_length(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().sum() / len(outputs)


def a_matrix(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square()


def a_count_of_outputs(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return (outputs - labels).square().sum(), (outputs > 0).sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (unlabelled, "it does not depend on the labels"),
        (by_length, r"its trace gives .* x\.shape\[0\] where it has len\(x\)"),
        (a_matrix, "expected a number, a number for each sample, or the pair"),
        (a_count_of_outputs, "must be a whole number that follows from the labels alone"),
    ],
)
def test_what_cannot_be_a_loss_says_so(function: Callable[[Any, Any], Any], message: str) -> None:
    with pytest.raises(InputError, match=f"the loss memory:{function.__name__}.*{message}") as caught:
        embrace.export(network(), sample=X, loss=function, labels=NUMBERS)
    assert "\n" not in str(caught.value)


def test_labels_that_cannot_be_told_are_asked_for() -> None:
    with pytest.raises(InputError, match=r"takes labels of float32 \(4,\), int64 \(\); say which: --labels"):
        embrace.export(network(), sample=X, loss=lambda outputs, labels: F.cross_entropy(outputs, labels))
    with pytest.raises(InputError, match=r"none of the usual kinds \(expected a number, .*got \(4, 4\)\); say which"):
        embrace.export(network(), sample=X, loss=lambda outputs, labels: outputs)


def test_a_graph_that_counts_nothing_sensible_is_refused(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, *_ = case
    answers = Mock(run=Mock(return_value=[np.float32(1), np.float32(np.nan)]))
    monkeypatch.setattr(bundle_loss, "inference_session", lambda *_: answers)
    with pytest.raises(BundleError, match="the bundle's loss counts nan of 2 samples"):
        BundleLoss(bundle.path, bundle.manifest).score(NUMBERS[:2], CLASSES[:2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mse", "label_smoothing": 0.1}, "label_smoothing is for cross_entropy and bce_with_logits"),
        ({"loss": {"a": "mse", "b": "nothing"}}, "loss b=nothing: expected OUTPUT=LOSS:WEIGHT"),
        ({"loss": {"a": "mse", "b": "mse:2:many"}}, "then options among label_smoothing"),
        ({"loss": {"a": "mse"}}, "say --output a and --loss mse"),
        ({"loss": "ctc"}, "ctc: say how many labels a sample has at most"),
        ({"loss": "nothing"}, "expected cross_entropy, .*FILE.py:function"),
        ({"loss": "absent.py:mine"}, "there is no file absent.py"),
        ({"loss": "mse", "labels": NUMBERS}, "labels: only a loss function of your own and ctc"),
        ({"loss": summed, "ignore_index": 3}, "ignore_index is not for this loss"),
    ],
)
def test_wrong_losses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        embrace.export(network(), sample=X, **options)


def test_the_onnx_file_of_several_heads_has_them_by_name(heads: embrace.Bundle, tmp_path: Path) -> None:
    session = ort.InferenceSession(heads.to_onnx(tmp_path / "model.onnx"))
    assert [value.name for value in session.get_outputs()] == ["digit", "angle"]
    torch.manual_seed(1)
    with torch.no_grad():
        told = Heads()(torch.from_numpy(X))
    for name, found in zip(("digit", "angle"), session.run(None, {"input": X}), strict=True):
        np.testing.assert_allclose(found, told[name].numpy(), atol=1e-6)
