"""Take one training step of several devices at once: stacked parameters, batched products.

The vectors of D devices lie parameter by parameter: D times the first, D times the second. So each stack is one
contiguous tensor, and weights and statistics are runs like those of one device, D times as long, which is all that a
local rule needs to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from federation.axes.local import shortening
from federation.manifest import Boundary, Loss, Manifest
from federation.space import Vector
from model_export.oracle import torch_loss
from simulation.torch_engine import aligned, aligned_zeros, readable


class StackedStep:
    """Takes a device's step for `count` devices at once; a row is a device."""

    def __init__(self, module: nn.Module, manifest: Manifest, boundary: Boundary, count: int) -> None:
        """`module` takes what enters the boundary's layer and was prepared by `prepare_stack`."""
        space = boundary.space(manifest)
        self.count = count
        start, size = space.suffix(boundary.layer).start, space.size - space.suffix(boundary.layer).start
        self.parameters: Vector = aligned_zeros(count * size)
        self.gradients: Vector = aligned_zeros(count * size)
        self._places = [
            slice(space.slice_of(p.name).start - start, space.slice_of(p.name).stop - start)
            for layer in space.layers[boundary.layer :]
            for p in layer
        ]
        self._size = size
        self._module = module
        self._loss = manifest.loss
        self._weights: dict[str, Tensor] = {}
        self._statistics: dict[str, Tensor] = {}
        known = [p for layer in space.layers[boundary.layer :] for p in layer]
        for parameter, place in zip(known, self._places, strict=True):
            own, result = (
                torch.from_numpy(flat[count * place.start : count * place.stop].reshape(count, *parameter.shape))
                for flat in (self.parameters, self.gradients)
            )
            if parameter.kind == "statistic":
                self._statistics[parameter.name] = result  # batch norm writes new values where they are expected
            else:
                self._weights[parameter.name] = own.requires_grad_(True)
                own.grad = result
        self._old_statistics = [
            slice(count * place.start, count * place.stop)
            for parameter, place in zip(known, self._places, strict=True)
            if parameter.kind == "statistic"
        ]

    def stretched(self, runs: Sequence[slice]) -> list[slice]:
        """Turn runs of one device's vector into runs of the stack."""
        return [slice(self.count * run.start, self.count * run.stop) for run in runs]

    def stack(self, vectors: Sequence[Vector]) -> Vector:
        """Put the vectors of all devices into the order of the stack."""
        flat = np.empty_like(self.parameters)
        for row, vector in enumerate(vectors):
            for place in self._places:
                length = place.stop - place.start
                start = self.count * place.start + row * length
                flat[start : start + length] = vector[place]
        return flat

    def row(self, flat: Vector, row: int) -> Vector:
        """Copy one device's vector out of a stack."""
        vector = np.empty(self._size, np.float32)
        for place in self._places:
            length = place.stop - place.start
            start = self.count * place.start + row * length
            vector[place] = flat[start : start + length]
        return vector

    def clip(self, most: float) -> None:
        """Shorten the gradient of every device's weights to the length `most`."""
        gradients = [weight.grad for weight in self._weights.values() if weight.grad is not None]
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        factors = torch.tensor([shortening(norm, most) for norm in norms.tolist()])
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *(1 for _ in gradient.shape[1:])))

    def run(self, batches: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.float32]:
        """Return the loss of every device; leave gradients and new statistics in `gradients`."""
        self.gradients.fill(0.0)
        for run in self._old_statistics:
            self.gradients[run] = self.parameters[run]
        try:
            predictions = vmap(self._predict)(self._weights, self._statistics, aligned(batches))
            losses = stacked_losses(self._loss, predictions, torch.from_numpy(labels))
            losses.sum().backward()
        except RuntimeError as error:
            raise readable(error, batches.shape[0] * batches.shape[1]) from None
        found: NDArray[np.float32] = losses.detach().numpy()
        return found

    def _predict(self, weights: dict[str, Tensor], statistics: dict[str, Tensor], x: Tensor) -> Tensor:
        predictions: Tensor = functional_call(self._module, (weights, statistics), (x,))
        return predictions


def stacked_losses(loss: Loss, predictions: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of every device's batch."""
    if loss == Loss("cross_entropy", loss.label_smoothing):
        each = F.cross_entropy(
            predictions.flatten(0, 1), labels.flatten(0, 1), reduction="none", label_smoothing=loss.label_smoothing
        )
        return each.reshape(len(labels), -1).mean(1)
    return vmap(lambda predicted, wanted: torch_loss(loss, predicted, wanted))(predictions, labels)


def prepare_stack(module: nn.Module) -> nn.Module:
    """Let dense layers form their products in the order in which a stack of them is quick."""
    for part in module.requires_grad_(False).train().modules():
        if type(part) is nn.Linear:
            part.__class__ = _Linear
    return module


class _Linear(nn.Linear):
    """A dense layer as (W·xᵀ)ᵀ + b, whose gradient of W is a product of few rows and many columns.

    For a stack of x·Wᵀ it would be that of Wᵀ, many rows of few columns: four times slower for logistic regression.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 2:
            return F.linear(input, self.weight, self.bias)
        product = (self.weight @ input.T).T
        return product if self.bias is None else product + self.bias
