"""Models that return more than one tensor."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import onnx
import pytest
import torch
from torch import Tensor, nn

from edge_runtime.bundle_files import read_manifest
from embrace.bundles import export
from federation.errors import InputError
from model_export.verify import TOLERANCE

Named = namedtuple("Named", ["scores", "hidden"])


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor
    hidden: Tensor


FORMS = {
    "dictionary": (None, lambda scores, hidden: {"hidden": hidden, "logits": scores}),
    "dataclass": (None, lambda scores, hidden: Output(None, scores, hidden)),
    "single": (None, lambda scores, hidden: [scores]),
    "named": ("scores", lambda scores, hidden: Named(scores, hidden)),
    "position": ("1", lambda scores, hidden: (hidden, scores)),
}


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.form = form

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.form(self.second(hidden), hidden)


@pytest.mark.parametrize("name", FORMS)
def test_one_tensor_is_trained(name, tmp_path):
    output, form = FORMS[name]
    bundle = export(Model(form), tmp_path / "bundle", input_shape=(3,), output=output)
    assert read_manifest(tmp_path / "bundle").source.output == output
    assert max(result.largest() for result in bundle.verify()) < TOLERANCE
    assert bundle.manifest.output.shape == (2,) and len(bundle.manifest.boundaries) == 2


def test_what_the_model_has_is_said_where_it_is_not_clear():
    model = Model(lambda scores, hidden: (hidden, scores))
    with pytest.raises(InputError, match=r"tuple with: 0 \(2, 4\), 1 \(2, 2\); say which one with --output NAME"):
        export(model, input_shape=(3,))
    with pytest.raises(InputError, match=r"it has no output 'logit'"):
        export(model, input_shape=(3,), output="logit")


def test_the_outputs_of_an_onnx_file(tmp_path):
    path = tmp_path / "two.onnx"
    model = Model(lambda scores, hidden: (hidden, scores))
    names = {"input_names": ["x"], "output_names": ["hidden", "scores"], "dynamic_axes": {"x": {0: "N"}}}
    torch.onnx.export(model, (torch.randn(2, 3),), path, dynamo=False, **names)
    assert [value.name for value in onnx.load(path).graph.output] == ["hidden", "scores"]
    with pytest.raises(InputError, match="has the outputs hidden, scores; say which one with --output NAME"):
        export(path)
    assert export(path, output="scores").manifest.output.shape == (2,)
    assert export(path, output="hidden").manifest.output.shape == (4,)
