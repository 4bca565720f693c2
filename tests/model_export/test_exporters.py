"""What PyTorch's two exporters write about the same model differs; both become graphs that train alike."""

from __future__ import annotations

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from model_export import capture
from model_export.errors import ExportError
from model_export.normalise import _without_sequences
from model_export.shapes import run_everything
from tests.model_export.autodiff.module_harness import check_module


class Model(nn.Module):
    """Two dense layers around something; the second may be the first one again, under another name."""

    def __init__(self, between, shared: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.between = between
        if shared:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.between(self.first(x))))


def pieces(x: Tensor) -> Tensor:
    a, b, c = x.split(2, dim=1)
    d, e = torch.cat([c, a, b], 1).split([4, 2], dim=-1)
    return torch.cat([e, d], 1)


def positions(x: Tensor) -> Tensor:
    return x + (x > -9.0).cumsum(-1) / 6.0


@pytest.mark.parametrize("exporter", ["_export_script", "_export_dynamo"])
@pytest.mark.parametrize(("between", "shared"), [(nn.Identity(), True), (pieces, False), (positions, False)])
def test_either_exporter_s_graph_agrees_with_autograd(exporter, between, shared, monkeypatch) -> None:
    def cannot(*given) -> None:
        raise RuntimeError("not this one")

    for name in {"_export_script", "_export_dynamo"} - {exporter}:
        monkeypatch.setattr(capture, name, cannot)
    torch.manual_seed(0)
    exported = check_module(Model(between, shared), torch.randn(2, 6))
    assert ("last.weight" in exported.graph.weights) is not shared


def sequence_model(sizes, index: int) -> onnx.ModelProto:
    given = {"at": index} | ({} if sizes is None else {"sizes": sizes})
    held = [numpy_helper.from_array(torch.tensor(value).numpy(), name) for name, value in given.items()]
    nodes = [
        helper.make_node(
            "SplitToSequence", ["x", *(["sizes"] if sizes is not None else [])], ["all"], axis=1, keepdims=0
        ),
        helper.make_node("SequenceAt", ["all", "at"], ["y"]),
    ]
    kinds = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", kinds[:1], kinds[1:], initializer=held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize(("sizes", "index"), [([1, 2, 3], 1), ([1, 2, 3], -1), (2, 2), (4, 1), (None, 3)])
def test_a_piece_of_a_list_is_a_slice(sizes, index: int) -> None:
    x = torch.randn(2, 6)
    model = sequence_model(sizes, index)
    _without_sequences(model)
    assert not any("Sequence" in node.op_type for node in model.graph.node)
    expected = x[:, index] if sizes is None else x.split(sizes, 1)[index]
    assert torch.equal(torch.from_numpy(run_everything(model, {"x": x.numpy()})["y"]), expected)


def test_a_list_of_unknown_pieces_is_refused_by_name() -> None:
    model = sequence_model(2, 1)
    del model.graph.initializer[:]
    with pytest.raises(ExportError, match="SplitToSequence makes a list whose pieces are known only at run time"):
        _without_sequences(model)
