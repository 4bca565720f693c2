"""What a device trains: all layers, and of each as many channels as it can. The channels nest, the first are shared.

Diao, Ding and Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients,
ICLR 2021: a device always trains the same width. Horváth et al., FjORD, NeurIPS 2021: it trains another one in every
step, up to the same largest (edge_runtime/engine/ordered_dropout.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from federation.axes.cover.rule import DeviceProfile, TieredCover
from federation.capacity import beside, megabytes
from federation.coverage import OR, width_of
from federation.errors import FieldError, InputError, OutOfMemory
from federation.manifest import Boundary, Manifest


@dataclass(frozen=True)
class Width(TieredCover):
    """HeteroFL: the widest narrow boundary that the device can train, or the whole model.

    A tier has a width of its own here, whatever layers it trains in other jobs. A device that measured from which
    layer it can train is taken to have the memory for that. With devices that can train everything this is FedAvg.
    """

    def __post_init__(self) -> None:
        for tier, width in self.tiers.items():
            if not 0 < width <= 1:
                raise FieldError(("tiers", tier), f"expected a share of the channels, above 0 to 1, got {width}")

    @property
    def by_layer(self) -> bool:
        return False

    def choose(
        self, manifest: Manifest, profile: DeviceProfile, batch: int | None = None, buffers: int = 1
    ) -> Boundary:
        return self.allowed(manifest, profile, batch, buffers)[0]

    def cover(self, manifest: Manifest, profile: DeviceProfile, batch: int | None = None, buffers: int = 1) -> str:
        return self.choose(manifest, profile, batch, buffers).name

    def allowed(
        self, manifest: Manifest, profile: DeviceProfile, batch: int | None = None, buffers: int = 1
    ) -> list[Boundary]:
        """Everything from the widest that the device can train to the narrowest there is."""
        usable = sorted((b for b in _of_all_layers(manifest) if profile.can_run(b)), key=width_of, reverse=True)
        told, room = self._told(manifest, profile, batch, buffers)
        if told is not None:
            if told not in usable:
                raise InputError(f"boundary {told.name!r} has no graph for the engines {profile.engines}")
            profile.check_measured(manifest, told, batch)
            return usable[usable.index(told) :]
        if not usable:
            raise InputError(f"{manifest.name!r} has no graph of all layers for the engines {profile.engines}")
        needs = [self._need(manifest, profile, boundary, batch, buffers) for boundary in usable]
        fitting = [boundary for boundary, need in zip(usable, needs, strict=True) if room is None or need <= room]
        if not fitting:
            raise OutOfMemory(
                f"no width of {manifest.name!r} fits {megabytes(room or 0)}; {usable[-1].name!r} needs about "
                f"{megabytes(needs[-1])}"
            )
        return usable[usable.index(fitting[0]) :]

    def _need(
        self, manifest: Manifest, profile: DeviceProfile, boundary: Boundary, batch: int | None, buffers: int
    ) -> int:
        return profile.need(manifest, boundary, batch, buffers)

    def _told(
        self, manifest: Manifest, profile: DeviceProfile, batch: int | None, buffers: int
    ) -> tuple[Boundary | None, int | None]:
        """The boundary that is settled, or else the bytes that there are."""
        if profile.boundary:
            measured = manifest.boundary(profile.boundary)
            if measured in _of_all_layers(manifest):
                return measured, None
            return None, profile.need(manifest, measured, batch, buffers)
        if not profile.tier:
            return None, profile.memory
        if profile.tier in self.tiers:
            return _with_width(manifest, profile.tier, self.tiers[profile.tier]), None
        boundary = manifest.boundary(profile.tier)
        if boundary not in _of_all_layers(manifest):
            raise InputError(f"tier {profile.tier!r} has no width: expected one in cover.tiers, {sorted(self.tiers)}")
        return boundary, None


@dataclass(frozen=True)
class OrderedDropout(Width):
    """FjORD: in every step one of the widths up to the widest that the device can train."""

    def cover(self, manifest: Manifest, profile: DeviceProfile, batch: int | None = None, buffers: int = 1) -> str:
        return OR.join(boundary.name for boundary in self.allowed(manifest, profile, batch, buffers))

    def _need(
        self, manifest: Manifest, profile: DeviceProfile, boundary: Boundary, batch: int | None, buffers: int
    ) -> int:
        narrower = [other for other in _of_all_layers(manifest) if width_of(other) < width_of(boundary)]
        return profile.need(manifest, boundary, batch, buffers) + beside(manifest, narrower)


def _of_all_layers(manifest: Manifest) -> list[Boundary]:
    return [boundary for boundary in manifest.boundaries if boundary.whole or boundary.narrow is not None]


def _with_width(manifest: Manifest, tier: str, width: float) -> Boundary:
    for boundary in _of_all_layers(manifest):
        if width_of(boundary) == width:
            return boundary
    known = ", ".join(f"{width_of(boundary):g}" for boundary in _of_all_layers(manifest))
    raise InputError(
        f"tier {tier!r} trains the width {width:g}, and {manifest.name!r} has {known or 'none'}; "
        f"export it with --widths {width:g}"
    )
