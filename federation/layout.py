"""What a body consists of, and where each part of it is: a region for every track, tensors in some order.

The usual order is that of the ParameterSpace, track after track; the safetensors library sorts by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from federation import weights
from federation.errors import InputError
from federation.region import Region, Span, of_layers
from federation.space import Parameter, ParameterSpace

Place = tuple[int, Span]  # of one piece: offset in the file in bytes, elements of the model's flat vector
MODEL = "model"  # the track of the weights themselves


@dataclass(frozen=True)
class Order:
    """The tensors of a body in the order of its data."""

    start: int  # of the data, in bytes
    offsets: Mapping[str, int]  # of every tensor, in bytes from the start of the data
    places: Mapping[str, tuple[Place, ...]]  # by track


@dataclass(frozen=True)
class Layout:
    """What a body consists of: a region for every track."""

    tracks: Mapping[str, Region]

    @cached_property
    def space(self) -> ParameterSpace:
        """The tensors: track after track, each with its own names."""
        layers = []
        for track, region in self.tracks.items():
            layers += [[_named(track, parameter) for parameter in layer] for layer in region.space.layers]
        return ParameterSpace(layers)

    @cached_property
    def header(self) -> bytes:
        return weights.header(self.space)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each tensor begins in the data that is written here."""
        return {parameter.name: 4 * self.space.slice_of(parameter.name).start for parameter in self.space}

    @cached_property
    def tensors(self) -> dict[str, tuple[str, Parameter]]:
        """The track and the parameter of every tensor."""
        return {_named(track, p).name: (track, p) for track, region in self.tracks.items() for p in region.space}

    @cached_property
    def usual(self) -> Order:
        """The order of the space, which all our own devices write."""
        return self.order(self.offsets, len(self.header))

    @cached_property
    def bare(self) -> Order:
        """The same for data without a header."""
        return self.order(self.offsets, 0)

    def order(self, offsets: Mapping[str, int], start: int) -> Order:
        """Find every piece in a body whose data begins at byte `start`, and each tensor at its offset in it."""
        places = {
            track: tuple(
                (start + offsets[_named(track, piece.parameter).name], piece.run)
                for layer in region.layers
                for piece in layer
            )
            for track, region in self.tracks.items()
        }
        return Order(start, offsets, places)


def layers_layout(space: ParameterSpace, first_layer: int, end: int | None = None) -> Layout:
    """Describe a body with the model's layers [first_layer, end) alone."""
    count = len(space.layers)
    if not 0 <= first_layer < (count if end is None else end) <= count:
        raise InputError(f"there are no layers [{first_layer}, {end}); the model has {count}")
    return Layout({MODEL: of_layers(space, range(first_layer, count if end is None else end))})


def _named(track: str, parameter: Parameter) -> Parameter:
    return parameter if track == MODEL else replace(parameter, name=f"{track}/{parameter.name}")
