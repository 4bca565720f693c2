"""Values made again in the backward pass: the same bits in less memory, whatever the network has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from edge_runtime.engine.session import RuntimeSettings, training_session
from model_export.bundle import Choices, export_bundle, load_graph
from model_export.graph import serialise
from model_export.lifetimes import sizes_of, touched
from model_export.recompute import FAR, SLOWER, Remade, choose_remade, remake
from model_export.source import ModelSource, load_source, module_source
from model_export.training import training_graph
from model_export.verify import TOLERANCE, verify_bundle
from model_export.zoo import ZOO

BATCH = 4
QUICK = ("residual", "separable", "attentive")


class Residual(nn.Module):
    """Tiles, a residual sum, batch norm in the pixel-major layout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.one = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16))
        self.out = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        for _ in range(2):  # the same layers twice
            x = torch.relu(x + self.two(self.one(x)))
        return self.out(x.mean((2, 3)))


def separable() -> nn.Module:
    """Depthwise convolutions and onnxruntime's own batch norm, which writes over its inputs."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        *(nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6()),
        *(nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()),
        *(nn.Conv2d(32, 32, 3, 2, 1, groups=32, bias=False), nn.BatchNorm2d(32), nn.Hardswish()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


class Attentive(nn.Module):
    """Softmax, layer norm, dropout and an LSTM, whose Scan reads values by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.drop = nn.Dropout(0.2)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.out = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(torch.softmax(q @ k.transpose(1, 2) / 6.0, -1) @ v)
        return self.out(self.lstm(torch.tanh(x))[0].mean(1))


MODELS = {
    "residual": (Residual, (3, 16, 16)),
    "separable": (separable, (3, 32, 32)),
    "attentive": (Attentive, (64, 32)),
}


def own_source(module: nn.Module, shape: tuple[int, ...]) -> ModelSource:
    return module_source(module, input_shape=shape, batch=32)


def plain_graph(name: str) -> onnx.ModelProto:
    """The training graph of the whole model, with everything kept."""
    if name in MODELS:
        make, shape = MODELS[name]
        torch.manual_seed(0)
        source = own_source(make(), shape)
    else:
        source = load_source(name)
    graph, layers = load_graph(source)
    return training_graph(graph, layers, source.loss)


def run(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    session = training_session(serialise(model), RuntimeSettings())
    rng, feed = np.random.default_rng(0), {}
    for value in session.get_inputs():
        shape = [dim if isinstance(dim, int) else BATCH for dim in value.shape]
        whole = value.type == "tensor(int64)"
        feed[value.name] = rng.integers(0, 2, shape) if whole else rng.standard_normal(shape).astype(np.float32) * 0.3
        if value.name.endswith("running_var"):
            feed[value.name] = np.abs(feed[value.name]) + 0.5
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def check(name: str, slower: float, batch: int) -> None:
    plain = plain_graph(name)
    chosen = choose_remade(plain, sizes_of(plain), batch, slower)
    remade = remake(plain, chosen)
    onnx.checker.check_model(remade)
    before, after = run(plain), run(remade)
    for output, value in before.items():
        np.testing.assert_array_equal(after[output], value, err_msg=output)
    less, more = (touched(model, sizes_of(model), batch) for model in (remade, plain))
    assert less < more if chosen else less == more


@pytest.mark.parametrize("name", QUICK)
def test_gradients_keep_their_bits_and_take_less_memory(name: str) -> None:
    check(name, SLOWER["small"], 32)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["balanced", "small"])
@pytest.mark.parametrize("name", ZOO)
def test_every_model_keeps_its_bits(name: str, plan: str) -> None:
    check(name, SLOWER[plan], 32)


def test_more_time_buys_memory_and_none_changes_nothing() -> None:
    plain = plain_graph("separable")
    sizes = sizes_of(plain)
    assert choose_remade(plain, sizes, 32, SLOWER["fast"]) == []
    remade = [remake(plain, choose_remade(plain, sizes, 32, slower)) for slower in SLOWER.values()]
    needs = [touched(model, sizes_of(model), 32) for model in remade]
    assert needs[0] >= needs[1] > needs[2]


def test_what_is_made_again_comes_in_front_of_its_first_reader_together_with_what_it_is_made_from() -> None:
    make = onnx.helper.make_node
    nodes = [
        make("MatMul", ["x", "w"], ["product"], "forward/a"),
        make("Relu", ["product"], ["active"], "forward/b"),
        make("Neg", ["active"], ["turned"], "forward/c"),
        make("ReduceSum", ["turned"], ["loss"], "forward/d", keepdims=0),
        make("Exp", ["w"], ["other"], "backward/e"),
        make("Mul", ["turned", "other"], ["first"], "backward/f"),
        make("Mul", ["active", "first"], ["gradient"], "backward/g"),
    ]
    info = onnx.helper.make_tensor_value_info
    ends = [[info(name, onnx.TensorProto.FLOAT, [8, 8]) for name in names] for names in ("xw", ["loss", "gradient"])]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "train", *ends))
    found = remake(model, [Remade(("turned",), ("turned",), True), Remade(("active",), ("active",), True)]).graph.node
    assert [node.output[0] for node in found[4:]] == ["other", "active.again1", "turned.again0", "first", "gradient"]
    assert [list(node.input) for node in found[5:]] == [
        ["product"],
        ["active.again1"],
        ["turned.again0", "other"],
        ["active.again1", "first"],
    ]
    assert all(node.name.startswith("backward") for node in found[4:]), "profiles tell the two passes by it"


@pytest.mark.parametrize(("once", "copies"), [(True, 1), (False, 2)])
def test_readers_far_apart_get_copies_of_their_own_unless_a_value_is_dear(once: bool, copies: int) -> None:
    make = onnx.helper.make_node
    nodes = [
        make("Relu", ["x"], ["active"], "forward/a"),
        make("ReduceSum", ["active"], ["loss"], "forward/b", keepdims=0),
    ]
    nodes += [make("Mul", ["active", "x"], ["v0"], "backward/c")]
    nodes += [make("Neg", [f"v{i}"], [f"v{i + 1}"], f"backward/d{i}") for i in range(FAR + 1)]
    nodes += [make("Mul", ["active", f"v{FAR + 1}"], ["gradient"], "backward/e")]
    info = onnx.helper.make_tensor_value_info
    ends = [[info(name, onnx.TensorProto.FLOAT, [8, 8]) for name in names] for names in ("x", ["gradient"])]
    graph = onnx.helper.make_graph(nodes, "train", *ends)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    found = remake(model, [Remade(("active",), ("active",), once)])
    onnx.checker.check_model(found)
    made = [node for node in found.graph.node if node.op_type == "Relu" and node.name.startswith("backward")]
    assert len(made) == copies
    np.testing.assert_array_equal(run(found)["gradient"], run(model)["gradient"])


def test_a_bundle_says_its_plan_and_verifies_and_promises_less(tmp_path: Path) -> None:
    source = own_source(separable(), (3, 32, 32))
    fast = export_bundle(source, tmp_path / "fast", Choices(tiers={}, memory_plan="fast"))
    small = export_bundle(source, tmp_path / "small", Choices(tiers={}, memory_plan="small"))
    assert (fast.memory_plan, small.memory_plan) == ("fast", "small")
    needs = [dict(manifest.boundaries[0].step_memory or ())[256] for manifest in (fast, small)]
    assert needs[1] < needs[0]
    assert max(one.largest() for one in verify_bundle(tmp_path / "small", source=source)) < TOLERANCE
