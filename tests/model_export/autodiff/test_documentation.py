"""What docs/reference/operators.md shows to somebody who adds a rule works as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.nn.functional as F
from hypothesis import given
from onnx import NodeProto

from model_export.autodiff import registry
from model_export.autodiff.engine import Context
from model_export.graph import Shape
from tests.model_export.autodiff.drawing import examples, shapes
from tests.model_export.autodiff.harness import check_operator, operator

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "operators.md"


def snippet(beginning: str) -> str:
    """The Python block of the page that begins so."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return next(block for block in blocks if block.startswith(beginning))


def test_the_lowering_shown_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """log(exp(x) + 1) is softplus, so it is tried as the lowering of that."""
    monkeypatch.setattr(registry, "_lowerings", dict(registry._lowerings))
    names = {"lowering": registry.lowering, "Context": Context, "NodeProto": NodeProto}
    exec(snippet("@lowering").replace("MyOperator", "Softplus"), names)
    assert registry.find_lowering("Softplus") is names["my_forward"]
    check_operator("Softplus", F.softplus, [(None, 3)])


def test_the_test_shown_passes() -> None:
    names = {"given": given, "shapes": shapes, "examples": examples, "Shape": Shape, "F": F}
    names |= {"operator": operator, "check_operator": check_operator}
    exec(snippet("@operator"), names)
    names["test_softplus"]()
