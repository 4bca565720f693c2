"""The layers that the papers count: a convolution, dense, recurrent or embedding layer with all that belongs to it.

A piece of a bundle may have several of them: a residual block has two convolutions, and a third on its shortcut. Names
and shapes say which parameters belong together. Those of one module stand together (`conv1.weight`, `conv1.bias`); a
module without a weight of two dimensions or more (batch norm, its statistics too) belongs to the layer before it, or
to the first one of its piece. A piece without such a weight is one layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from federation.space import Parameter, ParameterSpace


@dataclass(frozen=True)
class ParameterLayer:
    """Parameters of one piece that are measured and synchronised together."""

    piece: int  # the layer of the space that they are part of
    module: str
    parameters: tuple[Parameter, ...]  # in the order of the space


def parameter_layers(space: ParameterSpace) -> tuple[ParameterLayer, ...]:
    """Divide a space: every parameter belongs to one layer, input side first; a piece without parameters has none.

    >>> names = ("conv1.weight", (8, 3, 3, 3)), ("bn1.weight", (8,)), ("conv2.weight", (8, 8, 3, 3)), ("bn2.bias", (8,))
    >>> block = [Parameter(name, "weight", shape) for name, shape in names]
    >>> [[p.name for p in layer.parameters] for layer in parameter_layers(ParameterSpace([block]))]
    [['conv1.weight', 'bn1.weight'], ['conv2.weight', 'bn2.bias']]
    """
    return tuple(layer for piece, own in enumerate(space.layers) for layer in _divided(piece, own))


def layer_labels(layers: Sequence[ParameterLayer], pieces: Sequence[str]) -> list[str]:
    """Name layers for people: as their piece where they are all of it, else as their module; no name is there twice."""
    alone = Counter(layer.piece for layer in layers)
    names = [pieces[layer.piece] if alone[layer.piece] == 1 else layer.module for layer in layers]
    times = Counter(names)
    return [
        name if times[name] == 1 else f"{pieces[layer.piece]}: {layer.parameters[0].name}"
        for name, layer in zip(names, layers)
    ]


def _divided(piece: int, parameters: Sequence[Parameter]) -> list[ParameterLayer]:
    modules = [_module(parameter.name) for parameter in parameters]
    leading = {module for module, p in zip(modules, parameters) if p.kind == "weight" and len(p.shape) > 1}
    leader = next((module for module in modules if module in leading), modules[0] if modules else "")
    leader_of: dict[str, str] = {}
    for module in modules:
        leader = module if module in leading else leader
        leader_of.setdefault(module, leader)
    return [
        ParameterLayer(piece, name, tuple(p for m, p in zip(modules, parameters) if leader_of[m] == name))
        for name in dict.fromkeys(leader_of.values())
    ]


def _module(name: str) -> str:
    """The name without its last part; a name of one part is a module of its own."""
    end = max(name.rfind("."), name.rfind("/"))
    return name[:end] if end > 0 else name
