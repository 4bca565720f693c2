"""Losses: value and slope together, over any batch, with ignored labels and smoothed ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federation.manifest import Loss, TensorSpec
from model_export.autodiff.engine import Context
from model_export.autodiff.losses import LABELS_INPUT, labels_spec, write_loss
from model_export.errors import ExportError
from model_export.graph import Emitter, Shape, make_model, tensor_info
from model_export.oracle import torch_loss
from tests.model_export.autodiff.drawing import examples
from tests.model_export.autodiff.harness import OPSET, Arrays, assert_close, normal, run
from tests.model_export.autodiff.module_harness import random_labels

images = st.lists(st.integers(1, 3), max_size=2)
smoothings = st.sampled_from([0.0, 0.1, 0.5])


def loss_and_slope(loss: Loss, predictions: np.ndarray, labels: np.ndarray) -> Arrays:
    """The loss and the gradient of the predictions, as a training graph computes them."""
    shape: Shape = (None, *predictions.shape[1:])
    emitter = Emitter()
    value, slope = write_loss(Context(emitter, {"predictions": shape}, {}, set()), loss, "predictions")
    emitter.ops("Identity", ["loss"], value)
    emitter.ops("Identity", ["slope"], slope)
    spec = labels_spec(loss, TensorSpec("float32", tuple(predictions.shape[1:])))
    inputs = [tensor_info("predictions", np.float32, shape)]
    inputs.append(tensor_info(LABELS_INPUT, spec.dtype, (None, *spec.shape)))
    outputs = [tensor_info("loss", np.float32, ()), tensor_info("slope", np.float32, shape)]
    model = make_model("loss", emitter.nodes, inputs, outputs, emitter.constants, OPSET)
    return run(model, {"predictions": predictions, LABELS_INPUT: labels})


def check_loss(loss: Loss, predictions: np.ndarray, labels: np.ndarray) -> None:
    tensor = torch.from_numpy(predictions).double().requires_grad_()
    target = torch.from_numpy(labels)
    value = torch_loss(loss, tensor, target.double() if target.is_floating_point() else target)
    value.backward()
    found = loss_and_slope(loss, predictions, labels)
    assert_close(found, {"loss": value.detach().numpy()}, "loss")
    assert_close(found, {"slope": tensor.grad.numpy()}, "slope")


@given(batch=st.integers(1, 6), classes=st.integers(2, 5), image=images, smoothing=smoothings)
@examples(30)
def test_cross_entropy_with_label_smoothing(batch: int, classes: int, image: list[int], smoothing: float) -> None:
    loss = Loss("cross_entropy", label_smoothing=smoothing)
    predictions = normal(np.random.default_rng(0), (batch, classes, *image)) * np.float32(3.0)
    check_loss(loss, predictions, random_labels(loss, predictions.shape))


@given(
    batch=st.integers(1, 6),
    classes=st.integers(2, 5),
    image=images,
    smoothing=smoothings,
    ignore=st.sampled_from([-100, -1, 0, 1, 255]),
)
@examples(40)
def test_ignored_labels_count_neither_above_nor_below_the_fraction_line(
    batch: int, classes: int, image: list[int], smoothing: float, ignore: int
) -> None:
    loss = Loss("cross_entropy", label_smoothing=smoothing, ignore_index=ignore)
    predictions = normal(np.random.default_rng(0), (batch, classes, *image))
    labels = random_labels(loss, predictions.shape)
    labels.reshape(-1)[1::2] = ignore
    labels.reshape(-1)[0] = 1 if ignore == 0 else 0
    check_loss(loss, predictions, labels)


def test_a_batch_of_ignored_labels_only_has_no_loss_and_no_slope() -> None:
    """PyTorch says NaN, which would spoil a device's parameters for good."""
    found = loss_and_slope(
        Loss("cross_entropy", ignore_index=-100), np.ones((3, 4), np.float32), np.full(3, -100, np.int64)
    )
    assert found["loss"] == 0.0
    assert not found["slope"].any()


@given(batch=st.integers(1, 6), shape=st.lists(st.integers(1, 4), max_size=3), smoothing=smoothings)
@examples(30)
def test_binary_cross_entropy_with_logits(batch: int, shape: list[int], smoothing: float) -> None:
    loss = Loss("bce_with_logits", label_smoothing=smoothing)
    predictions = normal(np.random.default_rng(0), (batch, *shape)) * np.float32(3.0)
    check_loss(loss, predictions, random_labels(loss, predictions.shape))


@given(batch=st.integers(1, 6), shape=st.lists(st.integers(1, 4), max_size=3))
@examples(30)
def test_mean_squared_error(batch: int, shape: list[int]) -> None:
    predictions = normal(np.random.default_rng(0), (batch, *shape))
    check_loss(Loss("mse"), predictions, random_labels(Loss("mse"), predictions.shape))


@given(batch=st.integers(1, 6), shape=st.lists(st.integers(1, 4), max_size=3), delta=st.sampled_from([None, 0.3, 2.0]))
@examples(15)
def test_huber(batch: int, shape: list[int], delta: float | None) -> None:
    predictions = normal(np.random.default_rng(0), (batch, *shape)) * np.float32(2.0)
    check_loss(Loss("huber", delta=delta), predictions, random_labels(Loss("mse"), predictions.shape))


@given(
    batch=st.integers(1, 6),
    image=images,
    gamma=st.sampled_from([None, 1.0, 3.5]),
    ignore=st.sampled_from([None, -100, 1]),
)
@examples(25)
def test_focal(batch: int, image: list[int], gamma: float | None, ignore: int | None) -> None:
    predictions = normal(np.random.default_rng(0), (batch, 4, *image)) * np.float32(2.0)
    labels = random_labels(Loss("cross_entropy"), predictions.shape)
    if ignore is not None:
        labels.reshape(-1)[1::2] = ignore
        labels.reshape(-1)[0] = 0
    check_loss(Loss("focal", gamma=gamma, ignore_index=ignore), predictions, labels)


@given(batch=st.integers(1, 6), image=images)
@examples(10)
def test_cosine(batch: int, image: list[int]) -> None:
    predictions = normal(np.random.default_rng(0), (batch, 5, *image))
    check_loss(Loss("cosine"), predictions, random_labels(Loss("mse"), predictions.shape))


@pytest.mark.parametrize("name", ["mse", "huber", "bce_with_logits"])
def test_a_mask_in_the_labels_of_real_numbers(name: str) -> None:
    loss = Loss(name, ignore_index=-7)  # type: ignore[arg-type]
    predictions = normal(np.random.default_rng(0), (4, 3, 5))
    labels = random_labels(loss, predictions.shape)
    labels[np.random.default_rng(1).random(labels.shape) < 0.5] = -7
    check_loss(loss, predictions, labels)
    empty = loss_and_slope(loss, predictions, np.full_like(labels, -7))
    assert empty["loss"] == 0.0 and not empty["slope"].any()


@pytest.mark.parametrize("name", ["cross_entropy", "focal"])
@pytest.mark.parametrize("last", [None, True])
@pytest.mark.parametrize("shifted", [None, True])
@pytest.mark.parametrize("ignore", [None, 0])
def test_language_models_predict_the_next_token(
    name: str, last: bool | None, shifted: bool | None, ignore: int | None
) -> None:
    """Outputs [N, positions, classes] or [N, classes, positions], labels the tokens themselves, padding left out."""
    loss = Loss(name, classes_last=last, next_token=shifted, ignore_index=ignore)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    predictions = normal(rng, (3, 7, 5) if last else (3, 5, 7))
    check_loss(loss, predictions, rng.integers(0, 5, (3, 7)))


def test_real_numbers_of_the_next_position() -> None:
    predictions = normal(np.random.default_rng(0), (3, 6, 2))
    check_loss(Loss("mse", next_token=True), predictions, random_labels(Loss("mse"), predictions.shape))


def test_positions_are_needed_to_predict_the_next() -> None:
    with pytest.raises(ExportError, match="needs outputs for each position"):
        labels_spec(Loss("cross_entropy", next_token=True), TensorSpec("float32", (5,)))
    spec = labels_spec(Loss("cross_entropy", classes_last=True, next_token=True), TensorSpec("float32", (8, 5)))
    assert spec == TensorSpec("int64", (8,))


def test_cross_entropy_of_enormous_logits_stays_finite() -> None:
    predictions = np.array([[1000.0, -1000.0, 0.0], [-1000.0, 1000.0, 900.0]], np.float32)
    check_loss(Loss("cross_entropy"), predictions, np.array([1, 1]))


def test_binary_cross_entropy_of_enormous_logits_stays_finite() -> None:
    predictions = np.array([[1000.0, -1000.0], [-50.0, 50.0]], np.float32)
    check_loss(Loss("bce_with_logits"), predictions, np.array([[0.0, 1.0], [0.0, 1.0]], np.float32))


def test_labels_are_what_each_loss_reads() -> None:
    assert labels_spec(Loss("cross_entropy"), TensorSpec("float32", (5,))) == TensorSpec("int64", ())
    assert labels_spec(Loss("cross_entropy"), TensorSpec("float32", (5, 7))) == TensorSpec("int64", (7,))
    assert labels_spec(Loss("mse"), TensorSpec("float32", (5, 7))) == TensorSpec("float32", (5, 7))
    assert labels_spec(Loss("bce_with_logits"), TensorSpec("float32", (1,))) == TensorSpec("float32", (1,))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_cross_entropy_over_one_class_is_refused_with_the_loss_to_use(shape: tuple[int, ...]) -> None:
    with pytest.raises(ExportError, match="bce_with_logits"):
        labels_spec(Loss("cross_entropy"), TensorSpec("float32", shape))
