"""A device's part in a round, around the training: what it starts from, what it sends, what it keeps.

The same code whether the server is far away (agent.py) or in the same process (a simulation): it talks to a `Server`,
and keeps things in a `Memory`. All vectors that are kept cover what the training graph works on.

    kept               by which algorithms

    model, reference   what is not synchronised in every round: the device's own weights, and the server's value that
                       their difference is taken from (less what was the server's own movement)
    momentum           local momentum that is kept, or averaged at other times than every round
    control            c_i of SCAFFOLD; of VRL-SGD the correction itself
    reported           c_i as the server has summed it
    last               VRL-SGD: the local model that went into the mean
    received           DOMO: the server's values as they came; the next round is compared with them, and fetches nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edge_runtime.trainer import Outcome, Received
from federation.axes.local import ControlVariate, Momentum, fuses
from federation.coverage import Coverage, coverage
from federation.exchange import graph_region, trained_region, units_region
from federation.layout import MODEL
from federation.manifest import Manifest
from federation.messages import Task
from federation.region import Region, of_layers
from federation.server_step import CONTROL, MOMENTUM
from federation.space import Vector

OWN_MODEL, REFERENCE, REPORTED, LAST, RECEIVED = "model", "reference", "reported", "last", "received"
Vectors = dict[str, Vector]


@dataclass(frozen=True)
class Part:
    """What is asked for: of the graph of a boundary everything, or one unit."""

    region: Region
    boundary: str
    unit: int | None = None


class Server(Protocol):
    """What a device asks the server for during a task; what comes may be mapped files and is not changed."""

    def model(self, part: Part) -> Vector:
        """The version of the task."""

    def before(self, part: Part) -> Vector:
        """The version before."""

    def state(self, name: str, part: Part) -> Vector:
        """A vector of the server's state."""

    def inherited(self) -> tuple[Region, Vector]:
        """What the one who had this place before the window sent of the model."""


@dataclass(frozen=True)
class Kept:
    """What a device keeps of a task."""

    task: str
    boundary: str
    vectors: Mapping[str, Vector]
    walked: tuple[float, ...] = ()  # of every unit: the sum of the rates of its steps since it was synchronised


class Memory(Protocol):
    """Where a device keeps things between tasks."""

    def load(self, task: str) -> Kept | None:
        """What was kept of a task, if it is still there."""


@dataclass(frozen=True)
class Begun:
    """A task that is ready to be trained."""

    task: Task
    graph: Region
    trained: Region
    received: Received
    own: Kept | None
    lost: bool  # something was kept once, and is gone
    walked: tuple[float, ...] = ()  # of every unit, until now
    values: Vector | None = None  # DOMO: the server's, as far as the device has them


@dataclass(frozen=True)
class Contribution:
    """What a device sends: for every track a region and its values; and what it keeps."""

    tracks: dict[str, tuple[Region, Vector]]
    kept: Vectors
    walked: tuple[float, ...]

    @property
    def bytes(self) -> int:
        return sum(4 * vector.size for _, vector in self.tracks.values())


def begin(task: Task, manifest: Manifest, server: Server, memory: Memory) -> Begun:
    """Everything that training starts from."""
    exchange, covered = task.exchange, coverage(manifest, task.boundary)
    graph, trained = graph_region(manifest, covered), trained_region(manifest, covered)
    own = memory.load(exchange.last_task) if exchange.last_task else None
    own = own if own and own.boundary == task.boundary else None
    start = _Start(task, manifest, covered, graph, trained, server, own)
    parameters, reference = start.model()
    received = Received(
        parameters, start.momentum(), start.control(parameters), start.server_momentum(reference), reference
    )
    lost = exchange.last_task is not None and own is None
    return Begun(task, graph, trained, received, own, lost, start.walked, start.server_values(reference))


@dataclass(frozen=True)
class _Start:
    task: Task
    manifest: Manifest
    covered: Coverage
    graph: Region
    trained: Region
    server: Server
    own: Kept | None

    def model(self) -> tuple[Vector, Vector]:
        """(where the device starts, the server's value that its difference will be taken from)."""
        exchange = self.task.exchange
        if self._goes_on(OWN_MODEL):
            assert self.own is not None
            parameters, reference = (np.array(self.own.vectors[name]) for name in (OWN_MODEL, REFERENCE))
            for part in self._fresh:
                values, inside = self.server.model(part), part.region.inside(self.graph)
                inside.scatter(values, parameters)
                inside.scatter(values, reference)
            return parameters, reference
        received = self.server.model(self._everything)
        return (self._taken_over(received) if exchange.inherit else received), received

    def _taken_over(self, received: Vector) -> Vector:
        """Take over another device's model, as far as both train it and it was not averaged when the window ended."""
        theirs, moved = self.server.inherited()
        parameters: Vector = np.array(received)
        units = self.task.exchange.sync.units(self.manifest.space)
        for unit, version in zip(units, self.task.exchange.changed, strict=True):
            common = unit & self.trained & theirs
            if version < self.task.round and common.size:
                inside = common.inside(self.graph)
                difference = common.inside(theirs).gather(moved)
                inside.scatter(inside.gather(parameters) + difference, parameters)
        return parameters

    def momentum(self) -> Vector | None:
        rule = next((rule for rule in self.task.rules if isinstance(rule, Momentum)), None)
        if rule is None or rule.between == "reset":
            return None
        if rule.between == "keep":
            return self.own.vectors.get(MOMENTUM) if self.own else None
        if not self._goes_on(MOMENTUM):
            return self.server.state(MOMENTUM, self._everything)
        assert self.own is not None
        found = np.array(self.own.vectors[MOMENTUM])
        for part in self._fresh:
            part.region.inside(self.graph).scatter(self.server.state(MOMENTUM, part), found)
        return found

    def control(self, parameters: Vector) -> Vector | None:
        """c − c_i."""
        rule = next((rule for rule in self.task.rules if isinstance(rule, ControlVariate)), None)
        if rule is None:
            return None
        if rule.origin == "own":
            return self._own_control(parameters)
        common = self.server.state(CONTROL, self._everything)
        difference: Vector = common - self.own.vectors[CONTROL] if self.own else np.array(common)
        return difference

    def _own_control(self, parameters: Vector) -> Vector | None:
        """VRL-SGD: the correction grows by how far the device's last model was from the mean that came of it."""
        if self.own is None:
            return None
        grown: Vector = np.array(self.own.vectors[CONTROL])
        exchange, last = self.task.exchange, self.own.vectors[LAST]
        if exchange.last_round == self.task.round - 1:
            units = exchange.sync.units(self.manifest.space)
            for unit, version, walked in zip(units, exchange.changed, self.own.walked, strict=True):
                if version == self.task.round and walked:
                    weights = (unit & self.trained).only("weight").inside(self.graph)
                    distance = (weights.gather(last) - weights.gather(parameters)) / np.float32(walked)
                    weights.scatter(weights.gather(grown) + distance, grown)
        return grown

    @property
    def walked(self) -> tuple[float, ...]:
        """How far the device has gone with what it has of each unit."""
        exchange = self.task.exchange
        known = self.own.walked if self.own and self._goes_on(OWN_MODEL) else (0.0,) * len(exchange.changed)
        return tuple(0.0 if unit in exchange.replaced else walked for unit, walked in enumerate(known))

    def server_momentum(self, reference: Vector) -> Vector | None:
        """DOMO: what the server's last step says about its momentum, where it has just moved."""
        exchange, fuse = self.task.exchange, self.task.exchange.fuse
        if fuse is None:
            return None
        momentum: Vector = np.zeros_like(reference)
        known = self.own.vectors.get(RECEIVED) if self.own and exchange.last_round == self.task.round - 1 else None
        for part in self._fresh:
            inside = part.region.inside(self.graph)
            before = self.server.before(part) if known is None else inside.gather(known)
            inside.scatter((before - inside.gather(reference)) * np.float32(fuse), momentum)
        return momentum

    def server_values(self, reference: Vector) -> Vector | None:
        """DOMO: the server's values of this version, whatever the device itself goes on with."""
        if not fuses(self.task.rules):
            return None
        if not self._goes_on(OWN_MODEL):
            return reference
        if not self._goes_on(RECEIVED):
            return None
        assert self.own is not None
        found: Vector = np.array(self.own.vectors[RECEIVED])
        for part in self._fresh:
            inside = part.region.inside(self.graph)
            inside.scatter(inside.gather(reference), found)
        return found

    @property
    def _everything(self) -> Part:
        return Part(self.graph, self.task.boundary)

    @property
    def _fresh(self) -> list[Part]:
        """What the server has newer, and what the device does not train."""
        exchange, space = self.task.exchange, self.manifest.space
        if not exchange.keeps_model or not self._stays:
            return [self._everything]
        units = exchange.sync.units(space)
        untrained = set(range(len(self.manifest.layers))) - set(self.covered.layers)
        parts = [Part(of_layers(space, untrained) & self.graph, self.task.boundary)]
        parts += [Part(units[unit] & self.trained, self.task.boundary, unit) for unit in exchange.replaced]
        return [part for part in parts if part.region.size]

    @property
    def _stays(self) -> bool:
        """Whether the device has something of its own from this window."""
        exchange = self.task.exchange
        return self.own is not None and exchange.last_round is not None and exchange.last_round >= exchange.window_from

    def _goes_on(self, name: str) -> bool:
        return self.task.exchange.keeps_model and self._stays and self.own is not None and name in self.own.vectors


def finish(begun: Begun, outcome: Outcome, manifest: Manifest) -> Contribution:
    """What to send and what to keep; the vectors are good until the trainer's next task."""
    task, local, received = begun.task, outcome.local, begun.received
    update, reference = local.update(), received.origin
    sent = units_region(task.exchange.sync, manifest.space, task.exchange.sent) & begun.trained
    inside = sent.inside(begun.graph)
    tracks = {MODEL: (sent, inside.gather(update))}
    kept: Vectors = {}
    if task.exchange.keeps_model:
        kept = {OWN_MODEL: local.x, REFERENCE: reference if task.exchange.fuse is None else local.x - update}
    if begun.values is not None:
        kept[RECEIVED] = begun.values
    rule = next((rule for rule in task.rules if isinstance(rule, Momentum)), None)
    if rule is not None and rule.between != "reset":
        velocity = local.state()["momentum"]
        if rule.between == "average":
            tracks[MOMENTUM] = (sent, inside.gather(velocity))
        if rule.between == "keep" or task.exchange.keeps_model:
            kept[MOMENTUM] = velocity
    control = next((rule for rule in task.rules if isinstance(rule, ControlVariate)), None)
    if control is not None and control.origin == "own":
        correction = received.control if received.control is not None else np.zeros_like(local.x)
        kept |= {CONTROL: correction, LAST: local.x}
    elif control is not None:
        new, reported = _control(begun, outcome, update)
        tracks[CONTROL] = (sent, inside.gather(new - reported))
        inside.scatter(inside.gather(new), reported)
        kept |= {CONTROL: new, REPORTED: reported}
    return Contribution(tracks, kept, tuple(walked + local.rates for walked in begun.walked))


def _control(begun: Begun, outcome: Outcome, update: Vector) -> tuple[Vector, Vector]:
    """SCAFFOLD, option II: c_i ← c_i − c + (x − x_i) / (Kη), on the weights that are trained; and c_i as reported."""
    received, local = begun.received, outcome.local
    assert received.control is not None
    moved = update - (received.parameters - received.origin)
    old = begun.own.vectors[CONTROL] if begun.own else np.zeros_like(moved)
    reported = np.array(begun.own.vectors[REPORTED]) if begun.own else np.zeros_like(moved)
    new = np.array(old)
    weights = begun.trained.only("weight").inside(begun.graph)
    fresh = -received.control - moved / np.float32(local.rates)
    weights.scatter(weights.gather(fresh), new)
    return new, reported
