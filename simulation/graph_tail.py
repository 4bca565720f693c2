"""The last layers of a model whose first ones PyTorch trains, as one graph of onnxruntime.

PyTorch calls it like a loss: it takes what enters its first layer, and gives the loss; the backward pass gets the
gradient of what entered. Gradients and statistics of its own layers go where the step wants them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_runtime.engine.session import RuntimeSettings, training_session
from edge_runtime.engine.step import Wire, pointer
from federation.space import ParameterSpace
from model_export.autodiff.losses import LABELS_INPUT
from model_export.training import GRADIENT_SUFFIX, INPUT, INPUT_GRADIENT, LOSS, NEW_SUFFIX


class GraphTail:
    """Computes loss and gradients from a graph by `model_export.tail`."""

    def __init__(self, graph: bytes, space: ParameterSpace, first: int) -> None:
        """`first` is the number of its first layer."""
        self.kinds = {p.name: p.kind for layer in space.layers[first:] for p in layer}
        self._session = training_session(graph, RuntimeSettings(threads=1))
        self._binding = self._session.io_binding()
        self._loss = np.zeros((), np.float32)
        self._binding.bind_output(*pointer(Wire(LOSS, self._loss)))

    def connect(self, values: Mapping[str, NDArray[Any]], results: Mapping[str, NDArray[Any]]) -> None:
        """Read parameters in `values`, and write gradients and new statistics to `results`, from now on."""
        read = {value.name for value in self._session.get_inputs()}
        for name, kind in self.kinds.items():
            if name in read:  # old statistics may not be
                self._binding.bind_input(*pointer(Wire(name, values[name])))
            suffix = GRADIENT_SUFFIX if kind == "weight" else NEW_SUFFIX
            self._binding.bind_output(*pointer(Wire(name + suffix, results[name])))

    def __call__(self, entering: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch, as a tensor that leads back to what enters."""
        loss: Tensor = _Tail.apply(entering, labels, self)  # type: ignore[no-untyped-call]
        return loss

    def run(self, entering: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient of what enters, which lies in memory as that does."""
        plain = entering.detach().contiguous()
        gradient = torch.empty_like(plain)
        for name, tensor in ((INPUT, plain), (LABELS_INPUT, labels.contiguous())):
            self._binding.bind_input(*pointer(Wire(name, tensor.numpy())))
        self._binding.bind_output(*pointer(Wire(INPUT_GRADIENT, gradient.numpy())))
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises several unrelated types, PyTorch one
            raise RuntimeError(str(error)) from None
        return torch.tensor(float(self._loss)), torch.empty_like(entering).copy_(gradient)


class _Tail(torch.autograd.Function):
    """Both passes at once: the graph knows its loss is the last value."""

    @staticmethod
    def forward(ctx: Any, entering: Tensor, labels: Tensor, tail: GraphTail) -> Tensor:
        loss, gradient = tail.run(entering, labels)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None
