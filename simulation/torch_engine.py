"""Compute steps of a simulation with PyTorch: the device's loop, PyTorch's own kernels and autograd.

A module's parameters and their gradients are views into the same two flat vectors that every engine has, and batch norm
writes its new statistics straight into the vector of gradients, so nothing is copied from one step to the next.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_runtime.activations import ActivationStore
from edge_runtime.data import TrainingSamples
from edge_runtime.engine.choose import open_step
from edge_runtime.engine.engine import GradientStep
from edge_runtime.engine.session import RuntimeSettings, is_out_of_memory
from edge_runtime.forward import ForwardPlan, Inputs
from edge_runtime.forward import Report as Progress
from edge_runtime.frozen_statistics import FrozenStatistics
from edge_runtime.timing import FORWARD, Stopwatch
from federation.axes.local import runs
from federation.errors import EmbraceError, OutOfMemory
from federation.manifest import BatchNorm, Boundary, Layer, Manifest
from federation.metrics import Score, score
from federation.space import ParameterSpace, Vector
from model_export.oracle import seeded_dropout, torch_loss
from model_export.plain_operators import plain_operators
from model_export.short_memory import HeadLayout, HeadModule, short_memory
from model_export.tail import tail_graph
from simulation.frozen_graph import FrozenGraph, suits_graph
from simulation.graph_tail import GraphTail
from simulation.pool import ALIGNMENT
from simulation.step_choice import find_tail, suits_portable
from simulation.torch_model import back_module, build_module, fold_norms, front_module, tensors_of, work_in_place

EVALUATION_BATCH = 256
MOST_ELEMENTS = 1 << 22  # that a frozen layer gives at once
LEAST_FORWARD, MOST_FORWARD = 16, 256  # samples


class TorchStep:
    """A training step like engine/step.BoundStep's: flat vectors over the trained suffix, filled in place."""

    engine = "torch"

    def __init__(
        self, module: nn.Module, manifest: Manifest, boundary: Boundary, tail: GraphTail | None = None
    ) -> None:
        """`module` takes what enters the boundary's layer, and gives what enters the `tail` if there is one."""
        space = boundary.space(manifest)
        self.suffix = space.suffix(boundary.layer)
        self.parameters: Vector = aligned_zeros(self.suffix.stop - self.suffix.start)
        self.gradients: Vector = aligned_zeros(self.parameters.size)
        self.values = space.views(self.parameters, start=self.suffix.start)
        self.results = space.views(self.gradients, start=self.suffix.start)
        self.kinds = {p.name: p.kind for layer in space.layers[boundary.layer :] for p in layer}
        _, self._statistics = runs(space, boundary.layer)
        self._module = add_in_place(module.train())
        self._tail = tail
        self._loss: Callable[[Tensor, Tensor], Tensor] = tail or partial(torch_loss, manifest.loss)
        self._flat = torch.from_numpy(self.gradients)
        self._channels_last = prefers_channels_last(module)
        self._forward = Forward(manifest, boundary)
        self._connect()

    def _connect(self) -> None:
        if self._tail is not None:
            self._tail.connect(self.values, self.results)
        for parameter in self._module.parameters():
            parameter.requires_grad_(False)  # what is not in the bundle is not trained
        known = tensors_of(self._module)
        for name, kind in self.kinds.items():
            if self._tail is not None and name in self._tail.kinds:
                continue
            if name not in known:
                raise EmbraceError(f"the source model has no parameter {name!r}: it changed since the export")
            if kind == "statistic":
                known[name].data = torch.from_numpy(self.results[name])
                continue
            known[name].data = torch.from_numpy(self.values[name])
            known[name].requires_grad_(True).grad = torch.from_numpy(self.results[name])

    def run(self, batch: NDArray[Any], labels: NDArray[Any], seed: int = 0) -> float:
        """Run one forward and backward pass; return the loss, leave the gradients in `gradients`."""
        x = channels_last(aligned(batch)) if self._channels_last else aligned(batch)
        self._flat.zero_()
        for run in self._statistics:
            self.gradients[run] = self.parameters[run]
        try:
            loss = self._loss(self._forward(self._module, x, seed), torch.from_numpy(labels))
            loss.backward()
        except RuntimeError as error:
            raise readable(error, len(batch)) from None
        return loss.item()


class Forward:
    """Calls the trained part of a model as the portable graphs compute it: same dropout masks, same short memory."""

    def __init__(self, manifest: Manifest, boundary: Boundary) -> None:
        self._seeded = manifest.uses_seed
        self._last_steps = boundary.last_steps
        self._dropouts = sum(layer.dropouts for layer in manifest.layers[: boundary.layer])
        self._boundary = boundary
        self._head: HeadLayout | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing has to be put in place of PyTorch's own functions."""
        return not self._seeded and self._last_steps is None

    def __call__(self, module: nn.Module, x: Tensor, seed: int) -> Tensor:
        if self.plain:
            return call(module, x)
        heads = None
        if self._boundary.head is not None:
            self._head = self._head or HeadLayout(module, self._boundary)
            x, heads = self._head.unpack(x)
        with contextlib.ExitStack() as stack:
            if self._seeded:
                stack.enter_context(seeded_dropout(seed, 0, self._dropouts))
            stack.enter_context(short_memory(self._last_steps, heads))
            stack.enter_context(plain_operators())
            return call(module, x)


def prefers_channels_last(module: nn.Module) -> bool:
    """Say whether a step is quicker with the channels of a pixel side by side: with batch norm and max pooling it is.

    Measured at batch 32: ResNet8 62 → 45 ms, ResNet20 162 → 118, MobileNetV2 283 → 185; group norm alike. Pooling the
    first layer of FEMNIST's network: 4.2 → 0.3 ms; its whole forward pass is a quarter quicker.
    """
    return any(isinstance(part, (nn.BatchNorm2d, nn.MaxPool2d)) for part in module.modules())


def channels_last(x: Tensor) -> Tensor:
    """Put the channels of a pixel side by side, if there are pixels."""
    if x.ndim != 4:
        return x
    if x.shape[1] == 1:  # lies in both orders: say which is meant
        return x.contiguous().as_strided(x.shape, (x.shape[2] * x.shape[3], 1, x.shape[3], 1))
    return x.contiguous(memory_format=torch.channels_last)


def add_in_place(module: nn.Module) -> nn.Module:
    """Let dense layers add the gradients of their weights to where gradients are summed, without one more copy."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = _Linear
    return module


class _Linear(nn.Linear):
    """A dense layer by `_Dense`."""

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.grad is None or input.ndim != 2:
            return F.linear(input, self.weight, self.bias)
        y: Tensor = _Dense.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y


class _Dense(torch.autograd.Function):
    """x·Wᵀ + b. With 3,136 × 2,048 weights and a batch of 32: 4.9 ms for their gradients instead of 8.5."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.biased = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (x,) = ctx.saved_tensors
        ctx.weight.grad.addmm_(gradient.T, x)
        return gradient @ ctx.weight if ctx.needs_input_grad[0] else None, None, gradient.sum(0) if ctx.biased else None


def call(module: nn.Module, x: Tensor) -> Tensor:
    """Run a module."""
    y: Tensor = module(x)
    return y


def aligned_zeros(size: int) -> Vector:
    """Return zeros in memory that begins where `aligned` tensors do."""
    zeros: Vector = torch.zeros(size).numpy()
    return zeros


def aligned(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor that begins at a multiple of 64 bytes, copied if it has to be.

    Matrix products may sum in another order elsewhere, and NumPy's memory begins where the process's history says.
    """
    tensor = torch.from_numpy(array)
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def readable(error: RuntimeError, count: int) -> EmbraceError:
    """Say in one line what PyTorch says."""
    if is_out_of_memory(error) or "can't allocate memory" in str(error):
        return OutOfMemory(f"not enough memory for a training step of {count} samples")
    return EmbraceError(f"torch: a training step failed: {str(error).splitlines()[0]}")


class TorchEngine:
    """Steps and frozen layers of one model in one process. `weights` are the global ones, read where they lie."""

    name = "torch"

    def __init__(self, directory: Path, manifest: Manifest, weights: Vector) -> None:
        """`directory` is the bundle's; when `weights` change the trainer's source needs another version."""
        self.directory = directory
        self.manifest = manifest
        self.weights = weights
        self._steps: dict[str, GradientStep] = {}
        self._fronts: dict[tuple[Layer, ...], nn.Module] = {}
        self._measuring: dict[str, MeasuringModule] = {}
        self._graphs: dict[tuple[Layer, ...], FrozenGraph | None] = {}
        self._whole: nn.Module | None = None

    def open_step(self, boundary: Boundary) -> GradientStep:
        """Return the step of a boundary: devices that take turns share it, because a task fills all of it."""
        if boundary.name not in self._steps:
            portable = suits_portable(self.directory, self.manifest, boundary)
            self._steps[boundary.name] = self._portable_step(boundary) if portable else self._own_step(boundary)
        return self._steps[boundary.name]

    def _own_step(self, boundary: Boundary) -> TorchStep:
        """Make a step by PyTorch, and the last layers by a graph where that is quicker and the model can be cut."""
        first = find_tail(self.directory, self.manifest, boundary)
        if first is not None:
            with contextlib.suppress(EmbraceError):
                return self.joined_step(boundary, first)
        return self.torch_step(boundary)

    def joined_step(self, boundary: Boundary, first: int) -> TorchStep:
        """Make a step of the whole model: PyTorch in front of a layer, a graph from there on."""
        tail = GraphTail(tail_graph(self.directory, self.manifest, first), self.manifest.space, first)
        front = work_in_place(front_module(self.directory, self.manifest, first, training=True))
        return TorchStep(front, self.manifest, boundary, tail)

    def torch_step(self, boundary: Boundary) -> TorchStep:
        """Make a step by PyTorch."""
        return TorchStep(self.trained_part(boundary), self.manifest, boundary)

    def _portable_step(self, boundary: Boundary) -> GradientStep:
        return open_step(self.directory, self.manifest, boundary, "portable", RuntimeSettings(threads=1))

    def trained_part(self, boundary: Boundary) -> nn.Module:
        """Make a new module that takes what enters the boundary's layer."""
        if boundary.layer == 0:
            return build_module(self.manifest, boundary.width).train()
        return back_module(self.directory, self.manifest, boundary.layer)

    def entering(self, boundary: Boundary, batch: NDArray[Any]) -> NDArray[Any]:
        """Run what is frozen at a boundary, with the global weights as they are now."""
        graph = None if boundary.head else self._graph(self.manifest.frozen(boundary))
        return graph(batch) if graph else infer(self.frozen_part(boundary), batch)

    def _graph(self, layers: tuple[Layer, ...]) -> FrozenGraph | None:
        if layers not in self._graphs:
            suits = suits_graph(self.directory, layers)
            made = FrozenGraph(self.directory, self.manifest.space, layers, self.weights) if suits else None
            self._graphs[layers] = made
        return self._graphs[layers]

    def frozen_part(self, boundary: Boundary) -> nn.Module:
        """Return a module of everything that is frozen at a boundary, with the global weights as they are now."""
        frozen = self.manifest.frozen(boundary)
        if frozen not in self._fronts:
            self._fronts[frozen] = self._with_head(
                boundary, fold_norms(self._front(boundary)) if boundary.layer else None
            )
        return self._fronts[frozen]

    def measuring_part(self, boundary: Boundary, statistics: FrozenStatistics) -> nn.Module:
        """Return the same module for one device, whose statistics get what enters the batch norms."""
        if boundary.name not in self._measuring:
            self._measuring[boundary.name] = MeasuringModule(self._front(boundary), statistics)
        self._measuring[boundary.name].begin(statistics, self.weights)
        return self._with_head(boundary, self._measuring[boundary.name])

    def _front(self, boundary: Boundary) -> nn.Module:
        return self._frozen(front_module(self.directory, self.manifest, boundary.layer))

    def _with_head(self, boundary: Boundary, front: nn.Module | None) -> nn.Module:
        """Return what is frozen: the layers in front, and the boundary's head behind them if it has one."""
        head = HeadModule(self._frozen(self.trained_part(boundary)), boundary) if boundary.head else None
        parts = [part for part in (front, head) if part is not None]
        return parts[0] if len(parts) == 1 else nn.Sequential(*parts)

    def _frozen(self, module: nn.Module) -> nn.Module:
        return connect_frozen(module, self.manifest.space, self.weights)

    def forward_batch(self, boundary: Boundary) -> int:
        """Say how many samples go through frozen layers at once: as many as keep what these give small.

        ResNet20 at 256 samples instead of 64 is 7 % quicker, a dense layer of 3,136 × 2,048 a tenth.
        """
        largest = max((math.prod(piece.output.shape) for piece in self.manifest.frozen(boundary)), default=1)
        return min(max(MOST_ELEMENTS // largest, LEAST_FORWARD), MOST_FORWARD)

    def store(
        self,
        boundary: Boundary,
        inputs: Inputs,
        count: int,
        plan: ForwardPlan,
        watch: Stopwatch,
        progress: Progress,
        statistics: FrozenStatistics | None = None,
    ) -> ActivationStore:
        measuring = self.measuring_part(boundary, statistics) if statistics else None
        frozen = self.manifest.frozen(boundary)
        last = frozen[-1]
        rows = ActivationStore(count, last.output, stored_as=plan.stored_as, folder=plan.folder, limit=plan.store_limit)
        for start in range(0, count, plan.batch):
            stop = min(start + plan.batch, count)
            progress(last.name, len(frozen) * stop, len(frozen) * count)
            with watch.part("activation_io"):
                x = inputs(start, stop)
            with watch.part(FORWARD + last.name):
                value = infer(measuring, x) if measuring else self.entering(boundary, x)
            with watch.part("activation_io"):
                rows.write(start, value)
        return rows

    def score(self, samples: TrainingSamples, batch: int = EVALUATION_BATCH) -> Score:
        """Score the global weights."""
        total = Score()
        for start in range(0, len(samples), batch):
            x, labels = samples.batch(np.arange(start, min(start + batch, len(samples))))
            total += score(self.manifest.loss, self._predicted(x), labels)
        return total

    def _predicted(self, batch: NDArray[Any]) -> NDArray[Any]:
        if graph := self._graph(self.manifest.layers):
            return graph(batch)
        if self._whole is None:
            whole = connect_frozen(build_module(self.manifest), self.manifest.space, self.weights)
            self._whole = fold_norms(whole)
        return infer(self._whole, batch)


class MeasuringModule(nn.Module):
    """The frozen layers of a boundary; statistics get what enters their batch norms."""

    def __init__(self, front: nn.Module, statistics: FrozenStatistics) -> None:
        super().__init__()
        self.front = front
        self._statistics = statistics
        for norm in (norm for own in statistics.norms.values() for norm in own):
            part = front.get_submodule(norm.mean.rpartition(".")[0])
            part.register_forward_pre_hook(partial(self._enter, norm))

    def begin(self, statistics: FrozenStatistics, weights: Vector) -> None:
        """Measure for another device."""
        self._statistics = statistics
        for layer in statistics.norms:
            statistics.begin(layer, weights.__getitem__)

    def _enter(self, norm: BatchNorm, part: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0] if given[0].ndim > 2 else given[0].unsqueeze(-1)
        variances, means = torch.var_mean(x, dim=tuple(range(2, x.ndim)), correction=0)
        self._statistics.add(norm, means.numpy(), variances.numpy())

    def forward(self, x: Tensor) -> Tensor:
        return call(self.front, x)


def connect_frozen(module: nn.Module, space: ParameterSpace, weights: Vector) -> nn.Module:
    """Let a module read its weights in a vector, without a copy where the vector may be written to."""
    known = tensors_of(module.requires_grad_(False).eval())
    for name, value in space.views(weights if weights.flags.writeable else weights.copy()).items():
        if name in known:
            known[name].data = torch.from_numpy(value)
    return module


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use a single thread, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def infer(module: nn.Module, batch: NDArray[Any]) -> NDArray[Any]:
    """Return what a module in evaluation mode gives."""
    x = aligned(np.ascontiguousarray(batch))
    if prefers_channels_last(module):
        x = channels_last(x)
    with torch.inference_mode():
        outputs: NDArray[Any] = call(module, x).contiguous().numpy()
    return outputs
