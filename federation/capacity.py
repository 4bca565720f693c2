"""What training from a boundary costs: computed from the manifest alone, or measured by a device.

Capacity is the papers' measure of a device: (2p + 2a) / (2p_full + 2a_full) with p trainable parameters and a output
activations of convolution, dense and recurrent layers from the boundary on, at a given batch.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from federation.errors import FieldError
from federation.manifest import Boundary, Manifest
from federation.space import Parameter

FLOAT_BYTES = 4
# Of a bundle without the lifetimes of its graphs: the runtime's own structures, about so many bytes for each byte of a
# graph, and what its arena cannot use.
GRAPH_BYTES, ARENA = 24, 1.15


@dataclass(frozen=True)
class PredictedMemory:
    """Predicted bytes of training from a boundary."""

    parameters: int  # weights and statistics
    gradients: int
    optimiser: int  # what the local rules hold: a momentum, or the two moments of Adam
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


def predicted_memory(
    manifest: Manifest, boundary: Boundary, batch: int | None = None, buffers: int = 1
) -> PredictedMemory:
    """Predict the bytes of each part; statistics count like weights, except that no moments are kept for them.

    `buffers`: vectors that the local rules hold (`working_vectors`).
    """
    weights, statistics = manifest.weights_of(boundary), manifest.statistics_of(boundary)
    return memory_for(weights, statistics, boundary.activations * (batch or manifest.batch), buffers)


def predicted_peak(manifest: Manifest, boundary: Boundary, batch: int | None = None, buffers: int = 1) -> int:
    """Predict the anonymous bytes of training from a boundary, beside the idle process.

    The values of the graph by their lifetimes, as the exporter found them, and what lies outside it: parameters,
    gradients, moments, the batch. An older bundle does not know lifetimes; the papers' formula stands in.
    """
    size, formula = batch or manifest.batch, predicted_memory(manifest, boundary, batch, buffers)
    if boundary.step_memory is None:
        graph = boundary.train.bytes if boundary.train else sum(f.bytes for f in boundary.ort_training[:1])
        return int(ARENA * (formula.total + GRAPH_BYTES * graph))
    entry = manifest.entry(boundary)
    item = 8 if entry.dtype.endswith("64") else FLOAT_BYTES
    vectors = formula.parameters + formula.gradients + formula.optimiser
    return vectors + size * item * math.prod(entry.shape) + _between(boundary.step_memory, size)


def _between(pairs: Sequence[tuple[int, ...]], batch: int) -> int:
    """Read a batch size off a table: on the line between its neighbours, or on the last line continued."""
    if len(pairs) == 1:
        return pairs[0][1] * batch // pairs[0][0]
    place = min(max(bisect.bisect_left(pairs, (batch,)), 1), len(pairs) - 1)
    (low, less), (high, more) = pairs[place - 1], pairs[place]
    return max(0, less + (more - less) * (batch - low) // (high - low))


def beside(manifest: Manifest, others: Sequence[Boundary]) -> int:
    """Predict the bytes of further graphs that are open beside the one that trains: their vectors and structures."""
    found = (memory_for(manifest.weights_of(b), manifest.statistics_of(b), 0) for b in others)
    vectors = sum(one.parameters + one.gradients for one in found)
    return vectors + GRAPH_BYTES * sum(b.train.bytes for b in others if b.train)


@dataclass(frozen=True)
class MeasuredNeed:
    """Bytes that a device measured for training with a graph, beside its idle process."""

    # The metadata describes and bounds each field in the coordinator's REST interface.
    graph: str = field(metadata={"description": "sha256 of the training graph.", "min_length": 64, "max_length": 64})
    batch: int = field(metadata={"description": "Samples of a step.", "ge": 1, "le": 65_536})
    bytes: int = field(metadata={"description": "Anonymous memory on top of the idle process.", "ge": 1, "le": 2**50})

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= 65_536:
            raise FieldError("batch", f"expected a number from 1 to 65536, got {self.batch}")
        if not 1 <= self.bytes <= 2**50:
            raise FieldError("bytes", f"expected a number from 1 to 2^50, got {self.bytes}")
        if len(self.graph) != 64:
            raise FieldError("graph", f"expected 64 hexadecimal digits, got {len(self.graph)} characters")


def megabytes(count: int) -> str:
    """Write a number of bytes for people.

    >>> megabytes(64_000_000), megabytes(2_700_000), megabytes(300)
    ('64 MB', '2.7 MB', '300 bytes')
    """
    if count < 10**5:
        return f"{count} bytes"
    return f"{count / 1e6:.0f} MB" if count >= 10**7 else f"{count / 1e6:.1f} MB"


def memory_for(weights: int, statistics: int, activations: int, buffers: int = 1) -> PredictedMemory:
    """Predict the bytes of training so many elements while so many activations are kept."""
    return PredictedMemory(
        parameters=FLOAT_BYTES * (weights + statistics),
        gradients=FLOAT_BYTES * (weights + statistics),
        optimiser=FLOAT_BYTES * buffers * weights,
        activations=2 * FLOAT_BYTES * activations,
    )


def forward_macs(manifest: Manifest, boundary: Boundary) -> int:
    """Count multiply-accumulates per sample of what is frozen: paid once, when the activations are stored."""
    return sum(layer.macs for layer in manifest.frozen(boundary))


def training_macs(manifest: Manifest, boundary: Boundary) -> int:
    """Count multiply-accumulates per sample of one training step: forward, weight gradients, input gradients.

    An estimate: each of the three costs about as much as the forward pass, and the first trained layer needs no
    input gradient (if it is a block, only its first operators are without). Steps of a head are not among them.
    A narrow layer multiplies as much less as it has fewer weights.
    """
    macs = [layer.macs for layer in manifest.layers]
    if boundary.narrow is not None:
        spaces = zip(manifest.space.layers, boundary.space(manifest).layers, strict=True)
        macs = [count * _factors(thin) // max(_factors(wide), 1) for count, (wide, thin) in zip(macs, spaces)]
    trained = macs[boundary.layer :]
    skipped = boundary.head.macs if boundary.head else 0
    return 3 * (sum(trained) - skipped) - max(trained[0] - skipped, 0)


def _factors(layer: Sequence[Parameter]) -> int:
    """Weights that a layer multiplies by: matrices and kernels."""
    return sum(p.size for p in layer if len(p.shape) > 1)
