"""A device's side of a task: what it kept, what the server has, and what of that is newer.

The model (edge_runtime/participant.py) and the local rules begin and finish a task with what is here. Every vector
covers what the training graph works on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from federation.coverage import Coverage, coverage
from federation.errors import InputError
from federation.exchange import Exchange, graph_region, measured_region, trained_region
from federation.manifest import Manifest
from federation.region import Region, of_layers
from federation.space import Vector

OWN_MODEL, REFERENCE = "model", "reference"  # what a device keeps of the model itself


@dataclass(frozen=True)
class Part:
    """What a device asks the server for: everything that a boundary's graph works on, or one unit."""

    region: Region
    boundary: str
    unit: int | None = None


class ServerValues(Protocol):
    """The server's vectors, as a device asks for them; what comes may be mapped files and is not changed."""

    def model(self, part: Part) -> Vector:
        """Fetch the version of the task."""

    def before(self, part: Part) -> Vector:
        """Fetch the version before."""

    def state(self, name: str, part: Part) -> Vector:
        """Fetch a vector of the server's state."""

    def inherited(self) -> tuple[Region, Vector]:
        """Fetch what the device that had this place before the window sent of the model."""


@dataclass(frozen=True)
class Kept:
    """What a device keeps of a task."""

    task: str
    boundary: str
    vectors: Mapping[str, Vector]
    walked: tuple[float, ...] = ()  # of every unit: the sum of the rates of its steps since it was synchronised
    steps: int = 0  # that the device has taken with what it keeps


@dataclass(frozen=True)
class DeviceTask:
    """A task as the device meets it. `own` is what it kept of its last task, if it still has that."""

    round: int
    boundary: str
    exchange: Exchange
    manifest: Manifest
    server: ServerValues
    own: Kept | None = None

    @cached_property
    def covered(self) -> Coverage:
        return coverage(self.manifest, self.boundary)

    @cached_property
    def graph(self) -> Region:
        """What the training graph works on."""
        return graph_region(self.manifest, self.covered)

    @cached_property
    def trained(self) -> Region:
        """What the device changes."""
        return trained_region(self.manifest, self.covered)

    @cached_property
    def measured(self) -> Region:
        """What the device does not train and reports statistics of."""
        return measured_region(self.manifest, self.covered)

    @cached_property
    def units(self) -> tuple[Region, ...]:
        """The parts of the model that are synchronised together."""
        found, told = self.exchange.sync.units(self.manifest.space), len(self.exchange.changed)
        if len(found) != told:
            raise InputError(f"the task divides the model into {told} parts, this agent into {len(found)}; update it")
        return found

    @property
    def lost(self) -> bool:
        """Whether the device kept something once, and it is gone."""
        return self.exchange.last_task is not None and self.own is None

    @property
    def was_there(self) -> bool:
        """Whether the device took part in the round before."""
        return self.exchange.last_round == self.round - 1

    @property
    def everything(self) -> Part:
        return Part(self.graph, self.boundary)

    @cached_property
    def fresh(self) -> tuple[Part, ...]:
        """What the server has newer, and what the device does not train."""
        if not self.exchange.keeps_model or not self._stays:
            return (self.everything,)
        space = self.manifest.space
        untrained = set(range(len(self.manifest.layers))) - set(self.covered.layers)
        parts = [Part(of_layers(space, untrained) & self.graph, self.boundary)]
        parts += [Part(self.units[unit] & self.trained, self.boundary, unit) for unit in self.exchange.replaced]
        return tuple(part for part in parts if part.region.size)

    @property
    def _stays(self) -> bool:
        """Whether the device has something of its own from this window."""
        last = self.exchange.last_round
        return self.own is not None and last is not None and last >= self.exchange.window_from

    def goes_on(self, name: str) -> bool:
        """Whether the device goes on with its own vector of a name, but for what is fresh."""
        return self.exchange.keeps_model and self._stays and self.own is not None and name in self.own.vectors

    def renewed(self, name: str, values: Sequence[Vector]) -> Vector:
        """Copy a vector that was kept, with the values of what is fresh, part by part."""
        assert self.own is not None
        found: Vector = np.array(self.own.vectors[name])
        for part, newer in zip(self.fresh, values, strict=True):
            part.region.inside(self.graph).scatter(newer, found)
        return found


@dataclass(frozen=True, eq=False)
class LocalModel:
    """Where a device starts, and the server's value that its update is the difference from."""

    parameters: Vector
    reference: Vector


@dataclass(frozen=True, eq=False)
class LocalResult:
    """A task after its last step."""

    model: LocalModel
    brought: Mapping[str, Vector]  # what the rules began with, by name
    x: Vector  # where the device is now
    update: Vector  # what it reports: how far that is from the reference
    rates: float  # sum over the steps
    state: Mapping[str, Vector]  # buffers of the rules at work, by name
    sent: Region  # what is sent, as a part of the graph's vector

    @property
    def moved(self) -> Vector:
        """How far the device's own steps have taken it."""
        return self.update - (self.model.parameters - self.model.reference)


@dataclass(frozen=True, eq=False)
class Handover:
    """What a rule hands over at the end of a task: tracks to the server, vectors to the device's next task."""

    tracks: Mapping[str, Vector] = field(default_factory=dict)  # as long as the graph's; only what is due is sent
    kept: Mapping[str, Vector] = field(default_factory=dict)
