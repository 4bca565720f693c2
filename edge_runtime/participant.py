"""A device's part in a round, around the training: what it starts from, what it sends, what it keeps.

The same code whether the server is far away (agent.py) or in the same process (a simulation): it asks `ServerValues`,
and finds what it kept in a `DeviceState`. The model itself is handled here; everything else that an algorithm starts
from, sends and keeps is its local rules' own (federation/axes/local).

    model       the device's own weights, where not everything is synchronised in every round
    reference   the server's value that their difference is taken from
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edge_runtime.trainer import Outcome, Received
from federation.device_task import OWN_MODEL, REFERENCE, DeviceTask, Kept, LocalModel, LocalResult, ServerValues
from federation.exchange import units_region
from federation.layout import MODEL
from federation.manifest import Manifest
from federation.messages import Task
from federation.region import Region
from federation.space import Vector


class DeviceState(Protocol):
    """Where a device keeps things between tasks."""

    def load(self, task: str) -> Kept | None:
        """Read what was kept of a task, if it is still there."""


@dataclass(frozen=True)
class Begun:
    """A task that is ready to be trained."""

    task: Task
    device: DeviceTask
    received: Received


@dataclass(frozen=True)
class Contribution:
    """What a device sends: for every track a region and its values; and what it keeps."""

    tracks: dict[str, tuple[Region, Vector]]
    kept: dict[str, Vector]
    walked: tuple[float, ...]
    steps: int = 0  # that the device has taken with what it keeps

    @property
    def bytes(self) -> int:
        return sum(4 * vector.size for _, vector in self.tracks.values())


def begin(task: Task, manifest: Manifest, server: ServerValues, state: DeviceState) -> Begun:
    """Collect everything that training starts from."""
    last = task.exchange.last_task
    own = state.load(last) if last else None
    fits = own and own.boundary == task.boundary and len(own.walked) == len(task.exchange.changed)
    own = own if fits else None
    device = DeviceTask(task.round, task.boundary, task.exchange, manifest, server, own)
    model = _model(device)
    brought: dict[str, Vector] = {}
    for rule in task.rules:
        brought |= rule.begin_task(device, model)
    steps = device.own.steps if device.own else 0
    return Begun(task, device, Received(model.parameters, brought, model.reference, steps))


def finish(begun: Begun, outcome: Outcome, spare: Vector | None = None) -> Contribution:
    """Collect what to send and what to keep; the vectors are good until the trainer's next task.

    `spare` is memory for the update; None: new memory.
    """
    device, received, local, exchange = begun.device, begun.received, outcome.local, begun.task.exchange
    update, model = local.update(spare), LocalModel(received.parameters, received.origin)
    due = units_region(exchange.sync, device.manifest.space, exchange.sent)
    sent, measured = due & device.trained, due & device.measured
    inside = sent.inside(device.graph)
    result = LocalResult(model, received.brought, local.x, update, local.rates, local.state(), inside)
    tracks: dict[str, Vector] = {}
    kept = {OWN_MODEL: local.x, REFERENCE: model.reference} if exchange.keeps_model else {}
    for rule in begun.task.rules:
        handed = rule.finish_task(device, result)
        tracks |= handed.tracks
        kept |= handed.kept
    sending = {MODEL: update, **dict(sorted(tracks.items()))}
    sent_tracks = {name: (sent, inside.gather(vector)) for name, vector in sending.items()}
    if measured.size:  # it lies in front of what is trained
        front = measured.inside(device.measured).gather(outcome.measured)
        sent_tracks[MODEL] = measured | sent, np.concatenate([front, sent_tracks[MODEL][1]])
    return Contribution(
        sent_tracks,
        kept,
        tuple(walked + local.rates for walked in _walked(device)),
        received.steps_before + local.steps,
    )


def _model(device: DeviceTask) -> LocalModel:
    """Where the device starts: at its own model, at one that it takes over, or at the server's."""
    if device.goes_on(OWN_MODEL):
        values = [device.server.model(part) for part in device.fresh]
        return LocalModel(device.renewed(OWN_MODEL, values), device.renewed(REFERENCE, values))
    received = device.server.model(device.everything)
    return LocalModel(_taken_over(device, received) if device.exchange.inherit else received, received)


def _taken_over(device: DeviceTask, received: Vector) -> Vector:
    """Take over another device's model, as far as both train it and it was not averaged when the window ended."""
    theirs, moved = device.server.inherited()
    parameters: Vector = np.array(received)
    for unit, version in zip(device.units, device.exchange.changed, strict=True):
        common = unit & device.trained & theirs
        if version < device.round and common.size:
            inside = common.inside(device.graph)
            difference = common.inside(theirs).gather(moved)
            inside.scatter(inside.gather(parameters) + difference, parameters)
    return parameters


def _walked(device: DeviceTask) -> tuple[float, ...]:
    """How far the device has gone with what it has of each unit, until this task."""
    exchange = device.exchange
    known = device.own.walked if device.own and device.goes_on(OWN_MODEL) else (0.0,) * len(exchange.changed)
    return tuple(0.0 if unit in exchange.replaced else walked for unit, walked in enumerate(known))
