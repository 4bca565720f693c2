"""Adapters and stored weights against PyTorch: the same LoRA written by hand, dequantised values, what is merged."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import embrace
from edge_runtime.engine.portable import LayerForward, TrainingStep
from edge_runtime.graph_check import check_forward_graph, check_training_graph
from embrace.errors import InputError
from federation.errors import EmbraceError
from model_export.frozen import pack, read_frozen, unpack
from tests.edge_runtime.conftest import relative

WORDS, WIDTH, LENGTH, CLASSES, RANK, ALPHA = 90, 64, 6, 3, 4, 8.0
STORAGES = ("float32", "float16", "int8", "int4")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        shares = torch.softmax(self.q(h) @ self.k(h).transpose(1, 2) * WIDTH**-0.5, -1)
        x = x + shares @ self.v(h)
        return x + self.down(torch.relu(self.up(x)))


class Words(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x)).mean(1))


def words(seed: int = 0) -> Words:
    torch.manual_seed(seed)
    return Words()


def data(count: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, WORDS, (count, LENGTH)), rng.integers(0, CLASSES, count)


def export(model: nn.Module | None = None, **options) -> embrace.Bundle:
    return embrace.export(model or words(), sample=data()[0], vocabulary=WORDS, **options)


ADAPTED = {"lora": RANK, "lora_alpha": ALPHA, "lora_layers": "blocks.1.q,blocks.1.v,embed", "lora_full": "head"}


def by_hand(model: Words, values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """LoRA as its paper has it, with the adapters of a bundle; nothing of the exporter is used."""

    def low(path: str, x: torch.Tensor) -> torch.Tensor:
        a, b = values.get(f"{path}.lora_A"), values.get(f"{path}.lora_B")
        return 0.0 if a is None or b is None else ALPHA / RANK * (x @ a.T) @ b.T

    h = model.embed(x) + ALPHA / RANK * values["embed.lora_A"][x] @ values["embed.lora_B"].T
    for number, block in enumerate(model.blocks):
        n = block.norm(h)
        q, k, v = (getattr(block, name)(n) + low(f"blocks.{number}.{name}", n) for name in "qkv")
        h = h + torch.softmax(q @ k.transpose(1, 2) * WIDTH**-0.5, -1) @ v
        h = h + block.down(torch.relu(block.up(h)))
    return F.linear(h.mean(1), values["head.weight"], values["head.bias"])


@pytest.mark.parametrize("storage", STORAGES)
def test_a_step_is_that_of_lora_by_hand_with_the_stored_weights(storage: str) -> None:
    model = words()
    bundle = export(model, **ADAPTED, frozen=storage, split=["head"])
    manifest, (x, labels) = bundle.manifest, data()
    frozen = read_frozen(bundle.path, manifest)
    assert {"blocks.0.q.weight", "embed.weight"} <= frozen.keys()
    for name, value in frozen.items():
        model.state_dict()[name].copy_(torch.from_numpy(value.copy()))
    rng = np.random.default_rng(1)  # B at zero would hide what reaches A
    vector = rng.standard_normal(manifest.space.size).astype(np.float32) * 0.1
    values = {name: torch.from_numpy(v.copy()).requires_grad_() for name, v in manifest.space.views(vector).items()}
    loss = F.cross_entropy(by_hand(model, values, torch.from_numpy(x)), torch.from_numpy(labels))
    loss.backward()
    whole = manifest.whole
    step = TrainingStep(bundle.path / whole.train.name, manifest.space, 0)
    step.parameters[:] = vector
    assert step.run(x, labels) == pytest.approx(loss.item(), rel=1e-5)
    trained = ("embed", "blocks.1.q", "blocks.1.v")
    assert set(step.results) == {f"{path}.lora_{m}" for path in trained for m in "AB"} | {"head.weight", "head.bias"}
    for name, gradient in step.results.items():
        assert relative(gradient, values[name].grad.numpy()) < 1e-4, name


@pytest.mark.parametrize("storage", [None, "int4"])
def test_every_boundary_verifies_and_frozen_blocks_are_pieces(storage: str | None) -> None:
    bundle = export(lora=RANK, lora_layers="blocks.1.*", frozen=storage)
    bundle.verify()
    manifest = bundle.manifest
    assert [layer.name for layer in manifest.layers][:3] == ["embed", "blocks.0.q", "blocks.0.up"]
    assert all(not layer.parameters for layer in manifest.layers[:3])
    behind = [manifest.layers[b.layer] for b in manifest.boundaries[1:]]  # in front of the adapters nothing is trained
    assert behind[0].name == "blocks.1.q" and all(layer.parameters for layer in behind)


def test_files_shrink_and_are_there_once() -> None:
    sizes = {storage: export(lora=RANK, frozen=storage, split=["head"]).manifest.stored.bytes for storage in STORAGES}
    large = sum(p.numel() for p in words().parameters() if p.numel() >= 4096)
    assert 4 * large <= sizes["float32"] < 4 * large + 4000
    assert sizes["float16"] < 0.51 * sizes["float32"]
    assert sizes["int8"] < 0.28 * sizes["float32"]
    assert sizes["int4"] < 0.17 * sizes["float32"]  # five bits, and names


def test_merged_files_are_the_adapted_model(tmp_path: Path) -> None:
    x, labels = data(32)
    for storage in ("float32", "int4"):
        bundle = export(**ADAPTED, frozen=storage, split=["head"])
        trained = embrace.train(bundle, (x, labels), rounds=2, batch=8, holdout=0.0, rules=["adamw"], rate=0.01).bundle
        assert relative(trained.state_dict()["embed.lora_A"], bundle.state_dict()["embed.lora_A"]) > 0.1
        value = x
        for layer in trained.manifest.layers:
            value = LayerForward(trained.path / layer.forward.name)(value)
        file = trained.to_onnx(tmp_path / f"{storage}.onnx")
        assert not any("lora" in item.name for item in onnx.load(file).graph.initializer)
        np.testing.assert_allclose(ort.InferenceSession(file).run(None, {"input": x})[0], value, atol=1e-5)
        model = words(7)  # every weight comes from the file
        model.load_state_dict(torch.load(trained.to_torch(tmp_path / f"{storage}.pt")))
        with torch.no_grad():
            np.testing.assert_allclose(model(torch.from_numpy(x)).numpy(), value, atol=1e-5)


def test_a_layer_that_is_trained_in_full_has_no_adapter(tmp_path: Path) -> None:
    bundle = export(lora=RANK, lora_full="head")
    assert {"head.weight", "blocks.1.q.lora_A"} < set(bundle.state_dict())
    assert "head.lora_A" not in bundle.state_dict()
    bundle.to_onnx(tmp_path / "model.onnx")


def test_a_weight_that_two_layers_share_has_no_adapter() -> None:
    model = words()
    model.head = nn.Linear(WIDTH, WORDS, bias=False)
    model.head.weight = model.embed.weight
    adapted = {name.rpartition(".")[0] for name in export(model, lora=RANK).state_dict() if "lora" in name}
    assert adapted == {f"blocks.{block}.{name}" for block in (0, 1) for name in ("q", "k", "v", "up", "down")}


def test_a_model_that_freezes_its_own_layers() -> None:
    model = words()
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    bundle = export(model, frozen="int8")
    bundle.verify()
    assert {p.name.partition(".")[0] for p in bundle.manifest.space} == {"blocks", "head"}
    assert not any(p.name.startswith("blocks.0") for p in bundle.manifest.space)


def test_adapters_of_an_onnx_file(tmp_path: Path) -> None:
    file = tmp_path / "words.onnx"
    torch.onnx.export(
        words(),
        (torch.from_numpy(data()[0]),),
        str(file),
        dynamo=False,
        input_names=["x"],
        dynamic_axes={"x": {0: "n"}},
    )
    bundle = embrace.export(
        file, tmp_path / "bundle", vocabulary=WORDS, lora=RANK, lora_layers="head", frozen="float16"
    )
    bundle.verify()
    assert {p.name for p in bundle.manifest.space} == {"head.lora_A", "head.lora_B"}


@pytest.mark.parametrize("shape", [(3, 64), (5, 40), (4096,), (7, 3, 3, 3)])
@pytest.mark.parametrize("storage", STORAGES)
def test_stored_values_are_near(storage: str, shape: tuple[int, ...]) -> None:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = unpack(pack(weight, storage))
    assert found.shape == shape and found.dtype == np.float32
    span = 2 * np.abs(weight).max()
    steps = {"float32": math.inf, "float16": 2**11, "int8": 254, "int4": 15}[storage]
    assert np.abs(found - weight).max() <= span / steps * 0.51 + 1e-2 * span * (storage == "int4")
    for odd in (np.zeros(shape, np.float32), np.full(shape, -2.5, np.float32)):
        np.testing.assert_allclose(unpack(pack(odd, storage)), odd, rtol=1e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": 0}, "lora: expected a rank from 1 to 4096, got 0"),
        ({"lora": 4, "lora_alpha": -1.0}, "lora: expected an alpha above 0, got -1.0"),
        ({"lora_layers": "head"}, "lora: say the rank of the adapters, too"),
        (
            {"lora": 4, "lora_layers": "nothing"},
            "no linear or embedding layer is called nothing; the model has: embed, bl",
        ),
        ({"frozen": "int2"}, "frozen: expected float32, float16, int8, int4, got 'int2'"),
        ({"lora": 4, "widths": (0.5,)}, "narrow models have no adapters"),
    ],
)
def test_what_cannot_be(options: dict, message: str) -> None:
    with pytest.raises((InputError, EmbraceError), match=message):
        export(**options)


ELSEWHERE = (
    {"location": "weights.safetensors"},
    {"location": "../frozen.safetensors"},
    {"offset": "-64"},
    {"offset": "9" * 15},
    {"length": "1e3"},
    {"length": "9" * 40},
)


def test_a_device_reads_stored_weights_inside_their_file_only(tmp_path: Path) -> None:
    bundle = export(lora=RANK, lora_layers="head", frozen="int8", split=["head"])
    manifest, file = bundle.manifest, tmp_path / "changed.onnx"
    boundary, layer = manifest.boundary("embed"), manifest.layers[1]
    graphs = [(boundary.train, check_training_graph, boundary), (layer.forward, check_forward_graph, layer)]
    for ref, check, subject in graphs:
        check(bundle.path / ref.name, manifest, subject)
        for place in ELSEWHERE:
            model = onnx.load(bundle.path / ref.name, load_external_data=False)
            stored = next(item for item in model.graph.initializer if item.name.endswith("::i8"))
            for entry in stored.external_data:
                entry.value = place.get(entry.key, entry.value)
            file.write_bytes(model.SerializeToString())
            with pytest.raises(EmbraceError, match="takes its values from another"):
                check(file, manifest, subject)
