"""What training from a boundary costs, computed from the manifest alone.

Capacity is the papers' measure of a device: (2p + 2a) / (2p_full + 2a_full) with p trainable parameters and a output
activations of convolution, dense and recurrent layers from the boundary on, at a given batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from federation.manifest import Boundary, Manifest
from federation.space import Parameter

FLOAT_BYTES = 4


@dataclass(frozen=True)
class PredictedMemory:
    """Predicted bytes of training from a boundary."""

    parameters: int  # weights and statistics
    gradients: int
    optimiser: int  # one momentum buffer
    activations: int  # kept outputs and their gradients

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimiser + self.activations


def capacity(manifest: Manifest, boundary: Boundary, batch: int | None = None) -> float:
    """Compute the papers' capacity of a boundary, relative to training everything."""
    size = batch or manifest.batch
    everything = sum(layer.activations for layer in manifest.layers)
    full = manifest.weights_from(0) + everything * size
    return (manifest.weights_of(boundary) + boundary.activations * size) / full


def predicted_memory(manifest: Manifest, boundary: Boundary, batch: int | None = None) -> PredictedMemory:
    """Predict the bytes of each part; statistics count like weights, except that no momentum is kept for them."""
    weights, statistics = manifest.weights_of(boundary), manifest.statistics_of(boundary)
    return memory_for(weights, statistics, boundary.activations * (batch or manifest.batch))


def memory_for(weights: int, statistics: int, activations: int) -> PredictedMemory:
    """Predict the bytes of training so many elements while so many activations are kept."""
    return PredictedMemory(
        parameters=FLOAT_BYTES * (weights + statistics),
        gradients=FLOAT_BYTES * (weights + statistics),
        optimiser=FLOAT_BYTES * weights,
        activations=2 * FLOAT_BYTES * activations,
    )


def forward_macs(manifest: Manifest, boundary: Boundary) -> int:
    """Count multiply-accumulates per sample of the frozen layers: paid once, when the activations are stored."""
    return sum(layer.macs for layer in manifest.layers[: boundary.layer])


def training_macs(manifest: Manifest, boundary: Boundary) -> int:
    """Count multiply-accumulates per sample of one training step: forward, weight gradients, input gradients.

    An estimate: each of the three costs about as much as the forward pass, and the first trained layer needs no
    input gradient (if it is a block, only its first operators are without). `last_steps` is not taken into account.
    A narrow layer multiplies as much less as it has fewer weights.
    """
    macs = [layer.macs for layer in manifest.layers]
    if boundary.narrow is not None:
        spaces = zip(manifest.space.layers, boundary.space(manifest).layers, strict=True)
        macs = [count * _factors(thin) // max(_factors(wide), 1) for count, (wide, thin) in zip(macs, spaces)]
    trained = macs[boundary.layer :]
    return 3 * sum(trained) - trained[0]


def _factors(layer: Sequence[Parameter]) -> int:
    """Weights that a layer multiplies by: matrices and kernels."""
    return sum(p.size for p in layer if len(p.shape) > 1)
