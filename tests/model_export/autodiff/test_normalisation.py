"""Normalisation: gradients through the statistics, and the running statistics that PyTorch would keep."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from federation.manifest import Loss
from tests.model_export.autodiff.drawing import examples, positive
from tests.model_export.autodiff.harness import Fixed, check_operator, normal, operator, run
from tests.model_export.autodiff.module_harness import check_module, export

sizes = st.integers(1, 4)
images = st.lists(st.integers(1, 4), max_size=3)
# Two or three numbers, normalised, are almost constants, and their gradient a small difference of large ones.
enough = st.lists(st.integers(1, 5), min_size=1, max_size=3).filter(lambda dims: math.prod(dims) >= 4)
epsilons = st.sampled_from([1e-5, 1e-3, 0.1])


@operator("BatchNormalization")
@given(channels=sizes, image=images, epsilon=epsilons)
@examples(25)
def test_batch_norm_differentiates_through_the_statistics_of_the_batch(
    channels: int, image: list[int], epsilon: float
) -> None:
    statistics = [Fixed((channels,)), Fixed((channels,), positive)]

    def reference(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, scale, bias, True, 0.1, epsilon)

    check_operator(
        "BatchNormalization",
        reference,
        [(None, channels, *image), (channels,), (channels,), *statistics],
        fill=[normal, positive, normal],
        epsilon=epsilon,
    )


class BatchNorm(nn.Module):
    """Batch norm between a convolution that feeds it and a dense layer that reads it."""

    def __init__(self, rank: int, channels: int, **options: float) -> None:
        super().__init__()
        kinds = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
        self.norm = kinds[rank](channels, **options)
        self.scale = nn.Parameter(torch.randn(channels, *[1] * rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * self.scale) * self.scale


@operator("BatchNormalization")
@given(
    rank=st.integers(0, 3),
    momentum=st.sampled_from([0.1, 0.3, 1.0, 0.0]),
    epsilon=epsilons,
    affine=st.booleans(),
)
@examples(10)
def test_new_running_statistics_are_those_of_pytorch(rank: int, momentum: float, epsilon: float, affine: bool) -> None:
    torch.manual_seed(0)
    module = BatchNorm(rank, 3, momentum=momentum, eps=epsilon, affine=affine)
    with torch.no_grad():
        module.norm.running_mean.normal_()
        module.norm.running_var.uniform_(0.5, 2.0)
    exported = check_module(module, torch.randn(4, 3, *[2, 3, 2][:rank]))
    outputs = {value.name for value in exported.train.graph.output}
    assert {"norm.running_mean.new", "norm.running_var.new"} <= outputs


@operator("BatchNormalization")
def test_batch_norm_of_a_frozen_layer_uses_and_keeps_the_running_statistics() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    with torch.no_grad():
        module[1].running_mean.normal_()
        module[1].running_var.uniform_(0.5, 2.0)
    exported = check_module(module, torch.randn(4, 3), boundary=1)
    names = {value.name for value in [*exported.train.graph.input, *exported.train.graph.output]}
    assert "3.running_mean.new" in names
    assert not any(name.startswith("1.") for name in names)


@operator("BatchNormalization")
def test_batch_norm_used_twice_moves_its_statistics_twice() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = nn.Linear(3, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.second(torch.tanh(self.norm(self.first(x)))))

    check_module(Model(), torch.randn(4, 3), batch=16)


def test_batch_norm_does_not_write_over_the_callers_statistics() -> None:
    """onnxruntime overwrites the inputs it is given for them; a device's parameters are bound by pointer."""
    torch.manual_seed(0)
    train = export(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.randn(4, 3), Loss("mse")).train
    feed = {value.name: normal(np.random.default_rng(1), dimensions(value)) for value in train.graph.input}
    kept = {name: value.copy() for name, value in feed.items()}
    run(train, feed)
    assert {name for name in feed if (feed[name] != kept[name]).any()} == set()


def dimensions(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(dim.dim_value or 5 for dim in value.type.tensor_type.shape.dim)


@operator("LayerNormalization")
@given(data=st.data())
@examples(40)
def test_layer_norm_over_the_last_axes(data: st.DataObject) -> None:
    inner = tuple(data.draw(enough))
    whole = [None, *data.draw(st.lists(sizes, max_size=1)), *inner]
    start = len(whole) - len(inner)
    epsilon, has_bias = data.draw(epsilons), data.draw(st.booleans())
    axis = start - len(whole) if data.draw(st.booleans()) else start

    def reference(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, inner, scale, bias, epsilon)

    inputs = [tuple(whole), inner, *([inner] if has_bias else [])]
    fills = [normal, positive, normal][: len(inputs)]
    check_operator("LayerNormalization", reference, inputs, fill=fills, axis=axis, epsilon=epsilon)


@operator("LayerNormalization")
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_as_pytorch_exports_it(affine: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6, elementwise_affine=affine), nn.Linear(6, 2))
    check_module(module, torch.randn(2, 3))


@operator("InstanceNormalization")
@given(channels=sizes, image=enough, epsilon=epsilons)
@examples(25)
def test_instance_norm_over_each_image(channels: int, image: list[int], epsilon: float) -> None:
    def reference(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return F.instance_norm(x, None, None, scale, bias, True, 0.1, epsilon)

    check_operator(
        "InstanceNormalization",
        reference,
        [(None, channels, *image), (channels,), (channels,)],
        fill=[normal, positive, normal],
        epsilon=epsilon,
    )


@operator("InstanceNormalization")
@given(groups=st.integers(1, 3), width=st.integers(1, 2), image=enough)
@examples(8)
def test_group_norm_as_pytorch_exports_it(groups: int, width: int, image: list[int]) -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(groups * width, *[1] * len(image)))
            self.norm = nn.GroupNorm(groups, groups * width)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x * self.scale)

    check_module(Model(), torch.randn(2, groups * width, *image))
