"""Narrow versions of a PyTorch model: the same layers with the first channels of each.

The function that builds the model decides which channels a width keeps; here the narrow module gets the wide one's
values, and is refused if it is anything but the corner of the wide one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from federation.errors import InputError
from federation.manifest import Boundary, Manifest
from federation.narrow import fits
from federation.space import ParameterSpace
from model_export.errors import ExportError
from model_export.layers import LayerGraph
from model_export.source import ModelSource

TOLERANCE = 1e-3  # relative, in float32; a model that is no corner is off by tens of per cent


def narrow_source(source: ModelSource, width: float) -> ModelSource:
    """The source of the narrow model, whose tensors have the values of the wide one's corners."""
    if source.build_narrow is None:
        raise InputError(
            f"{source.name} has one width only: expected a zoo model that narrows, or a function that takes width="
        )
    build = source.build_narrow
    fresh = replace(source, build=lambda: build(width))

    def narrow() -> nn.Module:
        module = fresh.module()
        _fill(module, source.module(), f"{source.name} at width {width:g}")
        return module

    return replace(source, build=narrow)


def _fill(narrow: nn.Module, wide: nn.Module, what: str) -> None:
    """Corners of the wide tensors into the narrow ones; those that are not trained, too."""
    known = wide.state_dict()
    for name, value in narrow.state_dict().items():
        if name not in known:
            raise ExportError(f"{what} has a tensor {name!r} that the wide model does not have")
        if not fits(value.shape, known[name].shape):
            raise ExportError(
                f"{what}: {name} has the shape {tuple(value.shape)}, "
                f"which is no corner of the wide {tuple(known[name].shape)}"
            )
        value.copy_(_corner(known[name], value.shape))


def _corner(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The part of a wide tensor that a narrow one is; a view, as `federation.narrow.corner` of an array."""
    return tensor[tuple(slice(size) for size in shape)]


def check_narrow(source: ModelSource, width: float, wide: Sequence[LayerGraph], thin: Sequence[LayerGraph]) -> None:
    """Refuse a narrow model with other layers, or one that does not compute what the first channels compute."""
    what = f"{source.name} at width {width:g}"
    names, own = [layer.name for layer in wide], [layer.name for layer in thin]
    if names != own:
        raise ExportError(
            f"{what} has the layers {', '.join(own)}; expected those of the wide model: {', '.join(names)}"
        )
    for one, other in zip(wide, thin, strict=True):
        if [(p.name, p.kind) for p in one.parameters] != [(p.name, p.kind) for p in other.parameters]:
            raise ExportError(f"{what}: the parameters of layer {one.name} are not those of the wide model")
    if any(node.op_type in ("LSTM", "GRU", "RNN") for layer in wide for node in layer.nodes):
        raise ExportError(
            f"{what}: the gates of a recurrent layer lie behind one another, so its first units are no corner of it"
        )
    if not _is_corner(source, width, ParameterSpace([layer.parameters for layer in thin])):
        raise ExportError(f"{what} does not compute what the first channels of the wide model compute")


def _is_corner(source: ModelSource, width: float, space: ParameterSpace) -> bool:
    """With nothing but its corner left, the wide model must give what the narrow one gives.

    Normalisation over channels is another function where there are fewer, so it is taken as its weight and bias alone.
    """
    thin, wide = narrow_source(source, width).module().eval(), source.module().eval()
    state = wide.state_dict()
    for parameter in space:
        kept = _corner(state[parameter.name], parameter.shape).clone()
        state[parameter.name].zero_()
        _corner(state[parameter.name], parameter.shape).copy_(kept)
    x = torch.from_numpy(source.sample(2))
    with torch.no_grad(), _without_normalisation():
        found, expected = wide(x), thin(x)
    if found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1e-6))


@contextmanager
def _without_normalisation() -> Iterator[None]:
    def groups(
        x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        shape = (-1, *[1] * (x.dim() - 2))  # one for each channel
        return _affine(x, *(None if value is None else value.reshape(shape) for value in (weight, bias)))

    def last(
        x: Tensor, shape: object, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        return _affine(x, weight, bias)

    with mock.patch.object(F, "group_norm", groups), mock.patch.object(F, "layer_norm", last):
        yield


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def narrow_shapes(layers: Sequence[LayerGraph]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """As a manifest has them."""
    return tuple(tuple(tuple(p.shape) for p in layer.parameters) for layer in layers)


def narrow_manifest(manifest: Manifest, boundary: Boundary) -> Manifest:
    """What the manifest says about parameters and loss, for the narrow model of a boundary."""
    spaces = boundary.space(manifest).layers
    layers = [replace(layer, parameters=tuple(own)) for layer, own in zip(manifest.layers, spaces, strict=True)]
    return replace(manifest, layers=tuple(layers), boundaries=(), tiers={})
