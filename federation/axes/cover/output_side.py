"""What a device trains: everything, or as much of the output side as it can.

Lee et al., Embracing Federated Learning: Enabling Weak Client Participation via Partial Model Training, 2024: a weak
device trains the last layers, so a layer near the input is trained by strong devices only. If the draw of a round
happens to have none of them, that layer stands still; balance.py puts one in.
"""

from __future__ import annotations

from dataclasses import dataclass

from federation.axes.cover.rule import DeviceProfile, TieredCover
from federation.capacity import megabytes
from federation.coverage import STATISTICS
from federation.errors import FieldError, InputError, OutOfMemory
from federation.manifest import Boundary, Manifest


@dataclass(frozen=True)
class OutputSide(TieredCover):
    """EmbracingFL: from the boundary nearest to the input that the device can train, to the output.

    With devices that can train everything this is FedAvg.

    A weak device runs its data through the layers in front of its boundary. With `frozen_statistics` it also reports
    the statistics of what enters each batch norm there, which otherwise come from strong devices alone.
    """

    frozen_statistics: bool = False

    def check(self, manifest: Manifest) -> None:
        front = manifest.layers[: max((b.layer for b in manifest.boundaries if b.narrow is None), default=0)]
        if not self.frozen_statistics or any(layer.measured for layer in front):
            return
        has_some = any(parameter.kind == "statistic" for layer in front for parameter in layer.parameters)
        why = "no graphs that measure batch norm; export it again" if has_some else "no batch norm that is ever frozen"
        raise FieldError(("cover", "frozen_statistics"), f"{manifest.name!r} has {why}, or expected false")

    def cover(self, manifest: Manifest, profile: DeviceProfile, batch: int | None = None, buffers: int = 1) -> str:
        boundary = self.choose(manifest, profile, batch, buffers)
        measures = self.frozen_statistics and profile.measures
        measured = measures and any(layer.measured for layer in manifest.layers[: boundary.layer])
        return boundary.name + STATISTICS if measured else boundary.name

    def choose(
        self, manifest: Manifest, profile: DeviceProfile, batch: int | None = None, buffers: int = 1
    ) -> Boundary:
        told = profile.boundary or profile.tier
        if told:
            boundary = manifest.boundary(told)
            if not profile.can_run(boundary):
                raise InputError(f"boundary {boundary.name!r} has no graph for the engines {profile.engines}")
            profile.check_measured(manifest, boundary, batch)
            return boundary
        ordinary = (b for b in manifest.boundaries if b.narrow is None and profile.can_run(b))
        usable = sorted(ordinary, key=_nearest_to_the_input)
        if not usable:
            raise InputError(f"{manifest.name!r} has no training graph for the engines {profile.engines}")
        for boundary in usable:
            if profile.fits(manifest, boundary, batch, buffers):
                return boundary
        needs = {boundary.name: profile.need(manifest, boundary, batch, buffers) for boundary in usable}
        least = min(needs, key=needs.__getitem__)
        raise OutOfMemory(
            f"no boundary of {manifest.name!r} fits: the smallest, {least!r}, needs about {megabytes(needs[least])} at "
            f"batch {batch or manifest.batch}, and {megabytes(profile.memory or 0)} are left beside the idle process; "
            "give it more memory or use a smaller batch"
        )


@dataclass(frozen=True)
class Everything(TieredCover):
    """Every device trains the whole model; one that cannot does not take part."""

    def cover(self, manifest: Manifest, profile: DeviceProfile, batch: int | None = None, buffers: int = 1) -> str:
        return self.choose(manifest, profile, batch, buffers).name

    def choose(
        self, manifest: Manifest, profile: DeviceProfile, batch: int | None = None, buffers: int = 1
    ) -> Boundary:
        most = OutputSide().choose(manifest, profile, batch, buffers)
        if not most.whole:
            raise OutOfMemory(f"everything is to be trained, and the device can train from {most.name!r} on")
        return most


def _nearest_to_the_input(boundary: Boundary) -> tuple[int, int]:
    """Of boundaries at the same layer the one that keeps more: it backpropagates through more steps."""
    return boundary.layer, -boundary.activations
