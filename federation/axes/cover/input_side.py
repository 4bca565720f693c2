"""What a device trains: the first layers, as many as it can.

The order of layers of InclusiveFL (Liu et al., No One Left Behind: Inclusive Federated Learning over Heterogeneous
Devices, KDD 2022), which EmbracingFL compares itself with: memory is counted by the same formula, from the other end.
The gradient of the first layers comes through all others, so that the graph of the whole model is run, and a device
saves less than the formula says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from federation.axes.cover.rule import DeviceProfile, TieredCover
from federation.capacity import memory_for, predicted_memory
from federation.coverage import BEFORE
from federation.errors import InputError, OutOfMemory
from federation.manifest import Boundary, Manifest


@dataclass(frozen=True)
class InputSide(TieredCover):
    """The largest number of layers from the input on that fits. With devices that can train everything: FedAvg.

    A tier, or a boundary that the device measured, stands for the memory that training from there takes.
    """

    def choose(
        self, manifest: Manifest, profile: DeviceProfile, batch: int | None = None, buffers: int = 1
    ) -> Boundary:
        whole = manifest.whole
        if not profile.can_run(whole):
            raise InputError(f"boundary {whole.name!r} has no graph for the engines {profile.engines}")
        return whole

    def cover(self, manifest: Manifest, profile: DeviceProfile, batch: int | None = None, buffers: int = 1) -> str:
        whole, room = self.choose(manifest, profile), self._room(manifest, profile, batch, buffers)
        profile.check_measured(manifest, whole, batch)  # its graph runs whatever is trained
        if room is None:
            return whole.name
        needs = list(self._needs(manifest, batch or manifest.batch, buffers))
        end = sum(need <= room for need in needs)  # they grow
        if not any(layer.parameters for layer in manifest.layers[:end]):
            raise OutOfMemory(f"the first layer of {manifest.name!r} does not fit {room} bytes; it takes {needs[0]}")
        return whole.name if end == len(needs) else f"{BEFORE}{manifest.layers[end].name}"

    def _room(self, manifest: Manifest, profile: DeviceProfile, batch: int | None, buffers: int) -> int | None:
        told = profile.boundary or profile.tier
        return predicted_memory(manifest, manifest.boundary(told), batch, buffers).total if told else profile.memory

    def _needs(self, manifest: Manifest, batch: int, buffers: int) -> Iterator[int]:
        """Bytes of training the first layer, the first two, and so on."""
        weights = statistics = activations = 0
        for layer in manifest.layers:
            weights += sum(p.size for p in layer.parameters if p.kind == "weight")
            statistics += sum(p.size for p in layer.parameters if p.kind == "statistic")
            activations += layer.activations * batch
            yield memory_for(weights, statistics, activations, buffers).total
