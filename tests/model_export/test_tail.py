"""The last layers as a training graph that also gives the gradient of what enters: against plain autograd."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

import onnxruntime as ort  # noqa: E402

from edge_runtime.bundle_files import read_manifest  # noqa: E402
from model_export.bundle import Choices, export_bundle  # noqa: E402
from model_export.errors import ExportError  # noqa: E402
from model_export.source import load_source  # noqa: E402
from model_export.tail import tail_graph  # noqa: E402
from tests.edge_runtime.conftest import relative  # noqa: E402

NETWORK = """
from torch import nn

def network():
    front = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1)]
    return nn.Sequential(*front, nn.BatchNorm2d(6, momentum=0.3), nn.ReLU(), nn.Flatten(), nn.Linear(384, 5))
"""

DROPOUT = """
from torch import nn

def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 5))
"""


def exported(folder, text):
    (folder / "model.py").write_text(text)
    source = load_source(f"{folder / 'model.py'}:network", input_shape=(1, 8, 8))
    export_bundle(source, folder / "bundle", Choices(engines=("portable",)))
    return source, folder / "bundle", read_manifest(folder / "bundle")


def without_momentum(file):
    """Write a forward graph as older versions did."""
    model = onnx.load(file, load_external_data=False)
    for node in model.graph.node:
        kept = [item for item in node.attribute if item.name != "momentum"]
        del node.attribute[:]
        node.attribute.extend(kept)
    onnx.save(model, file)


@pytest.mark.parametrize("older", [False, True], ids=["bundle", "older bundle"])
def test_gradients_and_statistics_are_those_of_autograd(tmp_path, older):
    source, directory, manifest = exported(tmp_path, NETWORK)
    for layer in manifest.layers if older else ():
        without_momentum(directory / layer.forward.name)
    first = next(number for number, layer in enumerate(manifest.layers) if layer.measuring)
    assert first > 0
    session = ort.InferenceSession(tail_graph(directory, manifest, first), providers=["CPUExecutionProvider"])
    module = source.module().train()
    known = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    rng = np.random.default_rng(1)
    x, labels = rng.random((7, *manifest.layers[first].input.shape), np.float32), rng.integers(0, 5, 7)
    given = {"input": x, "labels": labels} | {name: value.detach().numpy().copy() for name, value in known.items()}
    inputs = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(names, {k: v for k, v in given.items() if k in inputs}), strict=True))

    entering = torch.from_numpy(x).requires_grad_(True)
    loss = torch.nn.functional.cross_entropy(module[2:](entering), torch.from_numpy(labels))
    loss.backward()
    assert float(found["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    assert relative(found["input.grad"], entering.grad.numpy()) < 1e-4
    parameters = [p for layer in manifest.layers[first:] for p in layer.parameters]
    largest = max(float(known[p.name].grad.abs().max()) for p in parameters if p.kind == "weight")
    for parameter in parameters:
        mine = found[parameter.name + (".grad" if parameter.kind == "weight" else ".new")]
        wanted = known[parameter.name].grad if parameter.kind == "weight" else known[parameter.name]
        scale = max(float(wanted.abs().max()), largest / 10)  # the bias in front of a batch norm has none but rounding
        assert float(np.abs(mine - wanted.detach().numpy()).max()) < 1e-4 * scale, parameter.name


def test_layers_that_draw_are_refused(tmp_path):
    _, directory, manifest = exported(tmp_path, DROPOUT)
    with pytest.raises(ExportError, match="more than their forward graphs"):
        tail_graph(directory, manifest, 0)
