"""Control variates: g ← g + (c − c_i), the local step of SCAFFOLD and of VRL-SGD.

    exchanged   Karimireddy et al., SCAFFOLD, ICML 2020, option II: c_i ← c_i − c + (x − x_i)/(Kη), and the server keeps
                c ← c + Σ Δc_i / N, with the published divisor, the number of all devices
    own         Liang et al., Variance Reduced Local SGD with Lower Communication Complexity, 2019 (VRL-SGD): a device
                makes the difference itself, from its own last model and the mean that came of it

A device keeps c_i (`control`; of VRL-SGD the difference itself), c_i as the server has summed it (`reported`), and for
VRL-SGD the local model that went into the mean (`last`). Without a difference (the first round) this is plain SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from federation.accumulate import Doubles
from federation.axes.local.rule import LocalRule, Plain, Running, Start, Track, TrackBlock
from federation.device_task import DeviceTask, Handover, LocalModel, LocalResult
from federation.errors import FieldError
from federation.space import Vector

CONTROL, REPORTED, LAST = "control", "reported", "last"
Origin = Literal["exchanged", "own"]


@dataclass(frozen=True)
class ControlVariate(LocalRule):
    """Correct every gradient by how the device's data differ from the fleet's."""

    origin: Origin = "exchanged"  # 'own': VRL-SGD

    def __post_init__(self) -> None:
        if self.origin not in get_args(Origin):
            raise FieldError("origin", f"expected exchanged or own, got {self.origin!r}")

    @property
    def tracks(self) -> tuple[Track, ...]:
        # c is the sum of all c_i, so a change of c_i counts once, however often its device was drawn.
        return (Track(CONTROL, counts_once=True),) if self.origin == "exchanged" else ()

    @property
    def keeps(self) -> bool:
        return True

    @property
    def measures_steps(self) -> bool:
        return True

    def begin(self, start: Start) -> Running:
        control = start.brought.get(CONTROL)
        return Plain() if control is None else _Running(control)

    def begin_task(self, task: DeviceTask, model: LocalModel) -> Mapping[str, Vector]:
        """c − c_i."""
        if self.origin == "own":
            return _grown(task, model)
        common = task.server.state(CONTROL, task.everything)
        return {CONTROL: common - task.own.vectors[CONTROL] if task.own else np.array(common)}

    def finish_task(self, task: DeviceTask, result: LocalResult) -> Handover:
        if self.origin == "own":
            correction = result.brought.get(CONTROL)
            kept = np.zeros_like(result.x) if correction is None else correction
            return Handover(kept={CONTROL: kept, LAST: result.x})
        return _option_two(task, result)

    def move_track(self, name: str, old: Vector, sent: TrackBlock) -> Doubles:
        return sent.sum / sent.devices + old


def _option_two(task: DeviceTask, result: LocalResult) -> Handover:
    """c_i on the weights that are trained, and its change since the server has summed it."""
    moved = result.moved
    new = np.array(task.own.vectors[CONTROL]) if task.own else np.zeros_like(moved)
    reported = np.array(task.own.vectors[REPORTED]) if task.own else np.zeros_like(moved)
    weights = task.trained.only("weight").inside(task.graph)
    fresh = -result.brought[CONTROL] - moved / np.float32(result.rates)
    weights.scatter(weights.gather(fresh), new)
    change = new - reported
    result.sent.scatter(result.sent.gather(new), reported)
    return Handover({CONTROL: change}, {CONTROL: new, REPORTED: reported})


def _grown(task: DeviceTask, model: LocalModel) -> Mapping[str, Vector]:
    """VRL-SGD: the correction grows by how far the device's last model was from the mean that came of it."""
    if task.own is None:
        return {}
    grown: Vector = np.array(task.own.vectors[CONTROL])
    if task.was_there:
        last = task.own.vectors[LAST]
        for unit, version, walked in zip(task.units, task.exchange.changed, task.own.walked, strict=True):
            if version == task.round and walked:
                weights = (unit & task.trained).only("weight").inside(task.graph)
                distance = (weights.gather(last) - weights.gather(model.parameters)) / np.float32(walked)
                weights.scatter(weights.gather(grown) + distance, grown)
    return {CONTROL: grown}


class _Running(Plain):
    def __init__(self, control: Vector) -> None:
        self.control = control

    def direct(self, at: slice, g: Vector, x: Vector, scratch: Vector) -> None:
        np.add(g, self.control[at], out=g)
