"""Every rule has a test.

Tests say which operators they differentiate with the mark `operator`; that they really do is checked after
each of them (conftest.py). Here the marks are read from the test files, so that it does not matter which of
them are run, or by how many processes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_export.autodiff.registry import known_operators


def marks_of(test: object) -> Iterator[pytest.Mark]:
    """The marks of a test function, those of its parametrised cases included."""
    for mark in getattr(test, "pytestmark", []):
        yield mark
        if mark.name == "parametrize":
            for case in mark.args[1]:
                yield from getattr(case, "marks", ())


def marked_operators() -> set[str]:
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    modules = [
        importlib.import_module(f"tests.model_export.autodiff.{file.stem}") for file in files if file != Path(__file__)
    ]
    tests = [test for module in modules for name, test in vars(module).items() if name.startswith("test_")]
    marks = [getattr(mark, "mark", mark) for test in tests for mark in marks_of(test)]
    return {name for mark in marks if mark.name == "operator" for name in mark.args}


def test_every_rule_is_exercised_by_a_test() -> None:
    assert sorted(set(known_operators()) - marked_operators()) == []


def test_every_mark_names_an_operator_that_has_a_rule() -> None:
    assert sorted(marked_operators() - set(known_operators())) == []


# What was asked for; operators with a function body instead of a rule are in test_engine_sources.py.
REQUIRED = """
    Conv ConvTranspose Gemm MatMul Add Sub Mul Div Neg Pow Sqrt Exp Log Abs Erf Relu LeakyRelu PRelu
    Sigmoid Tanh Softplus Clip HardSigmoid Softmax LogSoftmax BatchNormalization LayerNormalization
    InstanceNormalization MaxPool AveragePool GlobalAveragePool ReduceMean ReduceSum ReduceMax Reshape
    Flatten Squeeze Unsqueeze Transpose Concat Split Slice Pad Expand Gather Where Cast Identity Dropout
    Resize LSTM GRU
"""


def test_the_required_operators_have_rules() -> None:
    assert sorted(set(REQUIRED.split()) - set(known_operators())) == []
