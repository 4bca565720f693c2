"""Branches and loops that shapes decide."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from model_export.bundle import export_bundle, load_graph
from model_export.errors import ExportError
from model_export.source import load_source
from model_export.verify import TOLERANCE, verify_bundle

HEAD = '<ir_version: 8, opset_import: ["" : 18]>'
WEIGHTS = {name: np.random.default_rng(n).standard_normal((4, 4)).astype(np.float32) for n, name in enumerate("ab")}


def write(path: Path, text: str) -> str:
    model = parser.parse_model(f"{HEAD} {text}")
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in WEIGHTS.items())
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return str(path)


def checked(path: str, folder: Path) -> list[str]:
    """The operators of a file's graph, after its bundle was compared with autograd."""
    source = load_source(path)
    graph, _ = load_graph(source)
    export_bundle(source, folder)
    assert max(result.largest() for result in verify_bundle(folder)) < TOLERANCE
    return [node.op_type for node in graph.nodes]


LOOP = """g (float[N, 4] x) => (float[N, 4] y)
<int64 turns = {3}, bool always = {1}> {
    y, each = Loop (turns, always, x) <body = inner (int64 i, bool go, float[N, 4] state)
        => (bool go_on, float[N, 4] next, float[N, 4] out) {
        go_on = Identity (go)
        product = MatMul (state, a)
        out = MatMul (product, b)
        next = Tanh (out)
    }>
}"""


def test_a_loop_of_a_fixed_number_of_turns_is_written_out(tmp_path: Path) -> None:
    kinds = checked(write(tmp_path / "m.onnx", LOOP), tmp_path / "bundle")
    assert "Loop" not in kinds and kinds.count("Tanh") == 3


def test_what_each_turn_gives_comes_one_behind_the_other(tmp_path: Path) -> None:
    text = LOOP.replace("=> (float[N, 4] y)", "=> (float[N, 4] z)").replace(
        "}>\n}", "}>\n    last = ReduceMean <keepdims=0> (each, axis) z = Add (last, y)\n}"
    )
    text = text.replace("bool always = {1}", "bool always = {1}, int64[1] axis = {0}")
    kinds = checked(write(tmp_path / "m.onnx", text), tmp_path / "bundle")
    assert kinds.count("Concat") == 1


def test_the_branch_that_shapes_choose_is_taken(tmp_path: Path) -> None:
    text = """g (float[N, 4] x) => (float[N, 4] y) <int64 four = {4}, int64 one = {1}> {
        shape = Shape (x)
        width = Gather (shape, one)
        same = Equal (width, four)
        y = If (same) <then_branch = yes () => (float[N, 4] t) { m = MatMul (x, a) t = MatMul (m, b) },
                       else_branch = no () => (float[N, 4] e) { e = MatMul (x, a) }>
    }"""
    kinds = checked(write(tmp_path / "m.onnx", text), tmp_path / "bundle")
    assert kinds.count("MatMul") == 2 and "If" not in kinds


def test_a_scan_is_written_out(tmp_path: Path) -> None:
    text = """g (float[N, 3, 4] x) => (float[N, 4] y) <float[1] zero = {0}> {
        turned = Transpose <perm=[1, 0, 2]> (x)
        first = ReduceSum <keepdims=0> (x, axis)
        start = Mul (first, zero)
        last, all = Scan <num_scan_inputs=1, scan_input_directions=[1], body = inner (float[N, 4] h, float[N, 4] piece)
            => (float[N, 4] next, float[N, 4] out) {
            old = MatMul (h, a)
            new = MatMul (piece, b)
            sum = Add (old, new)
            next = Tanh (sum)
            out = Identity (next)
        }> (start, turned)
        total = ReduceSum <keepdims=0> (all, steps)
        y = Add (last, total)
    }"""
    text = text.replace("<float[1] zero = {0}>", "<float[1] zero = {0}, int64[1] axis = {1}, int64[1] steps = {0}>")
    kinds = checked(write(tmp_path / "m.onnx", text), tmp_path / "bundle")
    assert kinds.count("Tanh") == 3 and "Scan" not in kinds


def test_a_loop_that_would_never_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", LOOP.replace("{3}", "{1000000}"))
    with pytest.raises(ExportError, match="Loop of 1000000 turns; between 1 and 1024"):
        load_graph(load_source(path))
