"""onnxruntime-training against PyTorch autograd: loss, every gradient, every new statistic."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from torch import Tensor, nn
from torch.nn import functional as F

from federation.errors import MissingPackage
from federation.manifest import Loss
from model_export.ort_artifacts import ArtifactStep, unsupported, write_artifacts
from model_export.ort_runner import training_module

try:
    API = training_module("api")
except MissingPackage as missing:
    pytest.skip(str(missing), allow_module_level=True)

TOLERANCE = 1e-4
FLOOR = 1e-2  # gradients that are zero in theory (a bias before normalisation) are compared with the largest of all
CROSS_ENTROPY, MSE = Loss("cross_entropy"), Loss("mse")
FILES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")


@dataclass
class Case:
    """A model in evaluation form beside the PyTorch module it came from."""

    module: nn.Module
    forward: onnx.ModelProto
    trainable: list[str]
    statistics: list[str]

    def values(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: self.module.state_dict()[name].numpy().copy() for name in names}

    def write(self, directory: Path, loss: Loss = CROSS_ENTROPY) -> list[Path]:
        return write_artifacts(self.forward, self.trainable, self.statistics, loss, directory)


def case(module: nn.Module, sample: Tensor) -> Case:
    """Export as the exporter does; parameters differ from each other, else equal ones would share one initialiser."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.add_(0.3 * torch.rand_like(buffer))
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            (sample,),
            file,
            dynamo=False,
            opset_version=18,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.EVAL,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
        )
    forward = onnx.load_from_string(file.getvalue())
    held = {item.name for item in forward.graph.initializer}
    trainable = [name for name, _ in module.named_parameters() if name in held]
    return Case(module, forward, trainable, [name for name, _ in module.named_buffers() if name in held])


def torch_step(
    module: nn.Module, x: Tensor, labels: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The same step by autograd."""
    module.train()
    module.zero_grad()
    value = loss(module(x), labels)
    value.backward()
    gradients = {name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None}
    return value.item(), gradients, {name: b.numpy().copy() for name, b in module.named_buffers()}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], names: Sequence[str]) -> None:
    assert list(found) == list(names)
    largest = max((float(np.abs(expected[name]).max()) for name in names), default=0.0)
    for name in names:
        scale = max(float(np.abs(expected[name]).max()), FLOOR * largest)
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=TOLERANCE * scale, err_msg=name)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=0.3)
        self.dense = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(x + self.norm2(self.conv2(x)))
        return self.dense(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU], last: bool, **settings: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 5)
        self.recurrence = kind(5, 6, batch_first=True, **settings)
        self.dense = nn.Linear(12 if settings.get("bidirectional") else 6, 4)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        every, state = self.recurrence(self.embedding(x))
        state = state[0] if isinstance(state, tuple) else state
        return self.dense(state.transpose(0, 1).flatten(1) if self.last else every.mean(1))


class LearnedState(nn.Module):
    """A bidirectional GRU that starts from a trained state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.dense = nn.GRU(5, 6, batch_first=True, bidirectional=True), nn.Linear(12, 4)
        self.start = nn.Parameter(torch.randn(2, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        every, _ = self.gru(x, self.start.expand(2, x.shape[0], 6).contiguous())
        return self.dense(every[:, 3])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8, bias=False)
        self.inward, self.outward = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU("tanh"))
        self.dense = nn.Linear(8, 4)
        self.register_buffer("mask", torch.ones(6, 6).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(self.norm1(x)).reshape(-1, 6, 2, 12).transpose(1, 2).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(~self.mask, float("-inf"))
        x = x + self.outward((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 6, 8))
        return self.dense((x + self.mlp(self.norm2(x))).mean(1))


def image_net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.LazyLinear(4))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (Residual, (3, 8, 8)),
    "max_pool": (lambda: image_net(nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1)), (3, 8, 8)),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)), (6,)),
    "batch_norm_of_few_values": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, eps=1e-3), nn.ReLU(), nn.Linear(8, 4)),
        (6,),
    ),
    "depthwise_relu6": (lambda: image_net(nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU6()), (3, 8, 8)),
    "grouped_same_padding": (lambda: image_net(nn.Conv2d(8, 6, 4, groups=2, padding="same"), nn.SiLU()), (3, 8, 8)),
    "group_norm": (lambda: image_net(nn.GroupNorm(2, 8), nn.ReLU()), (3, 8, 8)),
    "average_pool": (lambda: image_net(nn.Hardswish(), nn.AvgPool2d(2), nn.AvgPool2d(3, 1, 1)), (3, 8, 8)),
    "activations": (lambda: image_net(nn.ELU(), nn.Mish(), nn.PReLU(8), nn.Hardsigmoid(), nn.SELU()), (3, 4, 4)),
    "lstm": (lambda: Recurrent(nn.LSTM, False), (7,)),
    "bidirectional_lstm_last": (lambda: Recurrent(nn.LSTM, True, bidirectional=True), (7,)),
    "bidirectional_lstm_every": (lambda: Recurrent(nn.LSTM, False, bidirectional=True, bias=False), (7,)),
    "bidirectional_gru": (lambda: Recurrent(nn.GRU, False, bidirectional=True), (7,)),
    "learned_state": (LearnedState, (7, 5)),
    "attention": (Attention, (6, 8)),
}


def data(name: str, batch: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    if "lstm" in name or "gru" in name:
        return torch.randint(0, 20, (batch, *shape), generator=generator)
    return torch.randn(batch, *shape, generator=generator)


def drop_initial_states(forward: onnx.ModelProto) -> None:
    """As the normalised graph has it: zero is the default."""
    for node in forward.graph.node:
        if node.op_type in ("LSTM", "GRU"):
            del node.input[4:]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_step_equals_pytorch(name: str, tmp_path: Path) -> None:
    build, shape = MODELS[name]
    module = build()
    module(data(name, 4, shape))  # gives lazy layers their size
    model = case(module, data(name, 4, shape))
    if isinstance(module, Recurrent):
        drop_initial_states(model.forward)
    assert unsupported(model.forward, CROSS_ENTROPY) == []
    model.write(tmp_path)
    step = ArtifactStep(tmp_path)
    for batch in (3, 5):  # neither is the batch size of the export
        x, labels = data(name, batch, shape), torch.arange(batch) % 4
        parameters, statistics = model.values(model.trainable), model.values(model.statistics)
        loss, gradients, new = step.loss_and_gradients(parameters, statistics, x.numpy(), labels.numpy())
        value, expected, buffers = torch_step(model.module, x, labels, F.cross_entropy)
        assert loss == pytest.approx(value, rel=TOLERANCE)
        assert_close(gradients, expected, model.trainable)
        assert_close(new, buffers, model.statistics)


def test_one_value_per_channel_leaves_statistics_finite(tmp_path: Path) -> None:
    """PyTorch refuses such a batch; a device meets it when its data ends."""
    model = case(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), torch.randn(2, 6))
    model.write(tmp_path)
    parameters, statistics = model.values(model.trainable), model.values(model.statistics)
    x, labels = np.ones((1, 6), np.float32), np.zeros(1, np.int64)
    _, _, new = ArtifactStep(tmp_path).loss_and_gradients(parameters, statistics, x, labels)
    assert all(np.isfinite(value).all() for value in new.values())


def smoothed_bce(predictions: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(predictions, 0.8 * target + 0.1)


CLASSES = torch.tensor([2, 0, -1, 1, -1])
TARGETS = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.4], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
LOSSES = {
    "ignored_labels": (
        Loss("cross_entropy", ignore_index=-1),
        CLASSES,
        lambda y, t: F.cross_entropy(y, t, ignore_index=-1),
    ),
    "label_smoothing": (
        Loss("cross_entropy", 0.1, -1),
        CLASSES,
        lambda y, t: F.cross_entropy(y, t, ignore_index=-1, label_smoothing=0.1),
    ),
    "bce_with_logits": (Loss("bce_with_logits"), TARGETS, F.binary_cross_entropy_with_logits),
    "bce_smoothed": (Loss("bce_with_logits", 0.2), TARGETS, smoothed_bce),
    "mse": (MSE, TARGETS, F.mse_loss),
}


@pytest.mark.parametrize("scale", [0.0, 1.0, 1000.0], ids=["zero", "ordinary", "huge"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_equals_pytorch(name: str, scale: float, tmp_path: Path) -> None:
    """Zero logits are those of a fresh classifier, huge ones overflow a naive formula."""
    loss, labels, reference = LOSSES[name]
    model = case(nn.Linear(4, 3), torch.randn(2, 4))
    model.write(tmp_path, loss)
    x = scale * data("", 5, (4,))
    with torch.no_grad():
        model.module.bias.mul_(scale)
    value, gradients, _ = ArtifactStep(tmp_path).loss_and_gradients(
        model.values(model.trainable), {}, x.numpy(), labels.numpy()
    )
    expected, reference_gradients, _ = torch_step(model.module, x, labels, reference)
    assert value == pytest.approx(expected, rel=TOLERANCE)
    assert_close(gradients, reference_gradients, model.trainable)


def test_a_batch_without_labels_gives_zero(tmp_path: Path) -> None:
    model = case(nn.Linear(4, 3), torch.randn(2, 4))
    model.write(tmp_path, Loss("cross_entropy", 0.1, -1))
    x, labels = np.ones((2, 4), np.float32), np.full(2, -1)
    loss, gradients, _ = ArtifactStep(tmp_path).loss_and_gradients(model.values(model.trainable), {}, x, labels)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("layer", [nn.Softplus(), nn.ELU(), nn.SELU(), nn.Mish()], ids=lambda m: type(m).__name__)
def test_large_activations_do_not_overflow(layer: nn.Module, tmp_path: Path) -> None:
    model = case(nn.Sequential(nn.Linear(4, 4), layer), torch.randn(2, 4))
    model.write(tmp_path, MSE)
    x, target = torch.full((2, 4), 1000.0), torch.zeros(2, 4)
    found = ArtifactStep(tmp_path).loss_and_gradients(model.values(model.trainable), {}, x.numpy(), target.numpy())
    expected = torch_step(model.module, x, target, F.mse_loss)
    assert_close(found[1], expected[1], model.trainable)


def test_operators_of_newer_opsets(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 20]>
    net (float[N,4] x) => (float[N,4] y)
    { z = Mul (x, w)
      a = Gelu <approximate = "tanh"> (z)
      b = HardSigmoid (z)
      y = Sum (a, b, z) }"""
    forward = parser.parse_model(text)
    w = torch.linspace(-1, 1, 4, requires_grad=True)
    forward.graph.initializer.append(numpy_helper.from_array(w.detach().numpy(), "w"))
    write_artifacts(forward, ["w"], [], MSE, tmp_path)
    x, target = data("", 3, (4,)), torch.zeros(3, 4)
    _, found, _ = ArtifactStep(tmp_path).loss_and_gradients({"w": w.detach().numpy()}, {}, x.numpy(), target.numpy())
    z = x * w
    F.mse_loss(F.gelu(z, approximate="tanh") + torch.clamp(0.2 * z + 0.5, 0, 1) + z, target).backward()
    assert_close(found, {"w": w.grad.numpy()}, ["w"])


def test_dropout_nodes_drop_in_training_only(tmp_path: Path) -> None:
    """The masks are the package's own, so what is checked is that loss and gradient belong to one mask."""
    text = """<ir_version: 8, opset_import: ["" : 18]>
    net (float[N,200] x) => (float[N,200] y) <float ratio = {0.25}, bool train = {1}>
    { z = Mul (x, w)
      y = Dropout (z, ratio, train) }"""
    forward = parser.parse_model(text)
    forward.graph.initializer.append(numpy_helper.from_array(np.full((1, 200), 2.0, np.float32), "w"))
    write_artifacts(forward, ["w"], [], MSE, tmp_path)
    x, target = np.ones((1, 200), np.float32), np.zeros((1, 200), np.float32)
    loss, gradients, _ = ArtifactStep(tmp_path).loss_and_gradients(
        {"w": np.full((1, 200), 2.0, np.float32)}, {}, x, target
    )
    kept = gradients["w"] != 0
    assert 0.5 < kept.mean() < 0.95
    np.testing.assert_allclose(gradients["w"][kept], 2 * 2 / 0.75**2 / 200, rtol=TOLERANCE)
    assert loss == pytest.approx(kept.mean() * (2 / 0.75) ** 2, rel=TOLERANCE)
    state = API.CheckpointState.load_checkpoint(str(tmp_path / "checkpoint"))
    module = API.Module(str(tmp_path / FILES[0]), state, str(tmp_path / FILES[1])).eval()
    assert float(module(x, target)) == pytest.approx(4.0)


def test_the_packages_own_loop_trains(tmp_path: Path) -> None:
    model = case(Residual(), torch.randn(2, 3, 8, 8))
    assert model.write(tmp_path) == [tmp_path / name for name in FILES]
    state = API.CheckpointState.load_checkpoint(str(tmp_path / "checkpoint"))
    module = API.Module(str(tmp_path / FILES[0]), state, str(tmp_path / FILES[1]))
    optimizer = API.Optimizer(str(tmp_path / FILES[2]), module)
    optimizer.set_learning_rate(0.1)
    x, labels = data("", 5, (3, 8, 8)), torch.arange(5) % 4
    reference = torch.optim.SGD(model.module.parameters(), lr=0.1)
    for _ in range(3):
        module(x.numpy(), labels.numpy())
        optimizer.step()
        module.lazy_reset_grad()
        torch_step(model.module, x, labels, F.cross_entropy)
        reference.step()
    found = {name: state.parameters[name].data for name in [*model.trainable, *model.statistics]}
    assert_close(found, model.values(list(found)), list(found))
    expected = F.cross_entropy(model.module.eval()(x), labels).item()
    assert float(module.eval()(x.numpy(), labels.numpy())) == pytest.approx(expected, rel=TOLERANCE)
