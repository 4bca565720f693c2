"""What onnxruntime-training cannot train is refused before it is tried; no need to have it installed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from federation.manifest import Loss
from model_export.ort_preflight import unsupported

MSE = Loss("mse")
ROW = np.ones((1, 4), np.float32)
FILTER = np.ones((2, 2, 3, 3), np.float32)


def vectors(body: str, output: str = "float[N,4] y", **constants: np.ndarray) -> onnx.ModelProto:
    """z = x * w with a trained w, then the given nodes from z to y."""
    return network(body, "float[N,4] x", output, w=np.arange(1.0, 5.0, dtype=np.float32), **constants)


def images(body: str, size: int, **constants: np.ndarray) -> onnx.ModelProto:
    return network(body, "float[N,2,8,8] x", f"float[N,2,{size},{size}] y", w=np.float32([[[2.0]]]), **constants)


def sequences(body: str, **constants: np.ndarray) -> onnx.ModelProto:
    return network(body, "float[5,N,4] x", "float[1,N,3] y", w=np.ones(4, np.float32), **constants)


def network(body: str, source: str, output: str, **constants: np.ndarray) -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    net ({source}) => ({output})
    {{ z = Mul (x, w)
       {body} }}"""
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items())
    model.graph.node[-1].name = "culprit"
    return model


GATES = {"W": np.ones((1, 9, 4), np.float32), "R": np.ones((1, 9, 3), np.float32)}
REFUSED = {
    "Einsum has no usable gradient": vectors('y = Einsum <equation = "ij,ij->ij"> (z, z)'),
    "Atan has no usable gradient": vectors("y = Atan (z)"),
    "ConvTranspose has no usable gradient": images("y = ConvTranspose <strides = [1, 1]> (z, v)", 10, v=FILTER),
    "Resize has no usable gradient": images("y = Resize (z, , s)", 16, s=np.float32([1, 1, 2, 2])),
    "AveragePool has no usable gradient": images("y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (z)", 8),
    "Conv has a wrong gradient with auto_pad": images(
        'y = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (z, v)', 4, v=FILTER
    ),
    "GRU has no gradient with linear_before_reset=0": sequences("_, y = GRU <hidden_size = 3> (z, W, R)", **GATES),
    "GRU has no gradient with sequence lengths": sequences(
        "_, y = GRU <hidden_size = 3, linear_before_reset = 1> (z, W, R, , lengths)",
        lengths=np.int32([5, 4]),
        **GATES,
    ),
    "Pow has no gradient for its input v": vectors("y = Pow (z, v)", v=ROW),
    "Pow has no gradient with an integer exponent": vectors("y = Pow (z, two)", two=np.int64(2)),
    "Clip has no gradient for its input low": vectors("low = ReduceSum <keepdims = 0> (w) y = Clip (z, low)"),
    "Where has a wrong gradient for its broadcast input v": vectors(
        "c = Greater (z, zero) y = Where (c, z, v)", zero=np.float32(0), v=np.ones(4, np.float32)
    ),
    "Split has a wrong gradient with an unused output": vectors(
        "y, rest = Split <axis = 1, num_outputs = 2> (z)", "float[N,2] y"
    ),
    "Slice has no gradient with negative steps": vectors(
        "y = Slice (z, start, end, axis, step)",
        start=np.int64([-1]),
        end=np.int64([-99]),
        axis=np.int64([1]),
        step=np.int64([-1]),
    ),
    "Pad has no gradient with mode=reflect": vectors(
        'y = Pad <mode = "reflect"> (z, pads)', "float[N,6] y", pads=np.int64([0, 1, 0, 1])
    ),
    "Pad has no gradient with axes": vectors(
        "y = Pad (z, pads, , axes)", "float[N,6] y", pads=np.int64([1, 1]), axes=np.int64([1])
    ),
    "ScatterND has a wrong gradient with reduction=add": vectors(
        'y = ScatterND <reduction = "add"> (z, i, v)', i=np.zeros((1, 1), np.int64), v=ROW
    ),
    "Transpose has no gradient without perm": vectors("y = Transpose (z)", "float[4,N] y"),
    "MatMul has no gradient for a vector": vectors("y = MatMul (z, w)", "float[N] y"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_has_no_gradient_is_named(reason: str) -> None:
    lines = unsupported(REFUSED[reason], MSE)
    assert len(lines) == 1
    assert lines[0].startswith(f"culprit: operator {reason}")


ACCEPTED = {
    "ties_to_a_constant": vectors("c = Greater (z, zero) y = Where (c, z, zero)", zero=np.float32(0)),
    "constant_exponent": vectors("y = Pow (z, two)", two=np.float32(2)),
    "whole_split": vectors("a, b = Split <axis = 1, num_outputs = 2> (z) y = Add (a, b)", "float[N,2] y"),
    "average_pool": images("y = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (z)", 4),
    "same_padding": images('y = Conv <auto_pad = "SAME_UPPER"> (z, v)', 8, v=FILTER),
    "gru": sequences("_, y = GRU <hidden_size = 3, linear_before_reset = 1> (z, W, R)", **GATES),
    "integers": vectors("i = ArgMax (z) f = Cast <to = 1> (i) y = Mul (z, f)"),
}


@pytest.mark.parametrize("model", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_can_be_trained_passes(model: onnx.ModelProto) -> None:
    before = model.SerializeToString(deterministic=True)
    assert unsupported(model, MSE) == []
    assert model.SerializeToString(deterministic=True) == before


def test_only_the_gradients_path_matters() -> None:
    """In front of the first trained parameter anything goes."""
    model = vectors("bent = Atan (x) y = Mul (z, bent)")
    assert unsupported(model, MSE) == []
    bent = REFUSED["Atan has no usable gradient"]
    assert unsupported(bent, MSE, trainable=["w"]) != []
    assert unsupported(bent, MSE, trainable=[]) == []


def test_cross_entropy_needs_classes() -> None:
    model = vectors("y = ReduceSum <keepdims = 0> (z, axis)", "float[N] y", axis=np.int64([1]))
    assert unsupported(model, MSE) == []
    assert "class dimension" in unsupported(model, Loss("cross_entropy"))[0]


def test_other_opsets_are_refused() -> None:
    model = vectors("y = Abs (z)")
    model.opset_import[0].version = 17
    assert "opset 17" in unsupported(model, MSE)[0]
