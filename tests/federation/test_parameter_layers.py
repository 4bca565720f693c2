"""Which parameters are a layer of the papers: blocks written out by hand, and every parameter once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from federation.axes.sync import FedLama
from federation.exchange import units_region
from federation.parameter_layers import layer_labels, parameter_layers
from federation.space import Kind, Parameter, ParameterSpace
from tests.federation.regions import spaces


def piece(*names: str) -> list[Parameter]:
    """Parameters by name: weights of two dimensions, but for norms and biases; running means are statistics."""
    found = []
    for name in names:
        kind: Kind = "statistic" if "running" in name else "weight"
        flat = kind == "statistic" or "bn" in name or "norm" in name or "bias" in name
        found.append(Parameter(name, kind, (4,) if flat else (4, 3)))
    return found


def divided(*pieces: list[Parameter]) -> list[list[str]]:
    return [[p.name for p in layer.parameters] for layer in parameter_layers(ParameterSpace(pieces))]


BLOCK = piece(
    *(f"b.{name}" for name in ("conv1.weight", "bn1.weight", "bn1.bias", "conv2.weight", "bn2.weight", "bn2.bias")),
    *(f"b.{name}" for name in ("shortcut.weight", "shortcut_bn.weight")),
    *(f"b.{name}.running_mean" for name in ("bn1", "bn2", "shortcut_bn")),
)


def test_batch_norm_and_its_statistics_belong_to_the_convolution_before_them() -> None:
    assert divided(BLOCK) == [
        ["b.conv1.weight", "b.bn1.weight", "b.bn1.bias", "b.bn1.running_mean"],
        ["b.conv2.weight", "b.bn2.weight", "b.bn2.bias", "b.bn2.running_mean"],
        ["b.shortcut.weight", "b.shortcut_bn.weight", "b.shortcut_bn.running_mean"],
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["norm.weight", "dense.weight", "dense.bias"], [["norm.weight", "dense.weight", "dense.bias"]]),
        (["lstm.w_ih", "lstm.w_hh", "lstm.bias_ih"], [["lstm.w_ih", "lstm.w_hh", "lstm.bias_ih"]]),
        (["a/kernel", "a/bias", "b/kernel"], [["a/kernel", "a/bias"], ["b/kernel"]]),
        (["Plus12", "bias3", "MatMul7"], [["Plus12", "bias3"], ["MatMul7"]]),
        (["norm.weight", "norm.bias", "bn.weight"], [["norm.weight", "norm.bias", "bn.weight"]]),
        ([], []),
    ],
    ids=["norm first", "recurrent", "slashes", "no modules", "no matrix", "nothing"],
)
def test_other_pieces(names: list[str], expected: list[list[str]]) -> None:
    assert divided(piece(*names)) == expected


def test_labels_are_pieces_where_they_can_and_are_there_once() -> None:
    space = ParameterSpace(
        [piece("stem.weight"), [], BLOCK, piece("x.weight", "y.weight"), piece("x.other", "z.weight")]
    )
    names = layer_labels(parameter_layers(space), ["in", "pool", "block", "two", "more"])
    assert names == ["in", "b.conv1", "b.conv2", "b.shortcut", "two: x.weight", "y", "more: x.other", "z"]


@given(space=spaces())
@settings(max_examples=50, deadline=None)
def test_every_parameter_is_in_one_layer(space: ParameterSpace) -> None:
    assert sorted(name for layer in divided(*map(list, space.layers)) for name in layer) == sorted(
        p.name for p in space
    )


def test_layers_of_one_piece_are_sent_together_in_the_order_of_the_space() -> None:
    space = ParameterSpace([piece("stem.weight"), BLOCK])
    region = units_region(FedLama(), space, (3, 1))
    assert [piece.parameter.name for piece in region.layers[1]] == [
        *("b.conv1.weight", "b.bn1.weight", "b.bn1.bias", "b.shortcut.weight", "b.shortcut_bn.weight"),
        *("b.bn1.running_mean", "b.shortcut_bn.running_mean"),
    ]
    assert region.layers[0] == ()
