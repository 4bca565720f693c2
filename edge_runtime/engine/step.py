"""What every engine's training step has in common: two flat vectors that the session reads and writes in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_runtime.engine.session import is_out_of_memory
from federation.errors import EmbraceError, OutOfMemory
from federation.space import ParameterSpace, Vector


class Wire(NamedTuple):
    """A value of the graph and the memory it is bound to."""

    name: str
    memory: NDArray[Any]


class BoundStep:
    """Loss and gradients of everything from one layer to the output.

    `parameters` and `gradients` are flat vectors over that suffix of the space. After a run `gradients` holds the
    gradient of every weight and the NEW VALUE of every statistic; `parameters` is as it was. Nothing is copied, and
    nothing is allocated from one run to the next as long as batches come in the same memory.
    """

    engine: str

    def __init__(self, space: ParameterSpace, first_layer: int) -> None:
        self.suffix = space.suffix(first_layer)
        self.parameters: Vector = np.zeros(self.suffix.stop - self.suffix.start, np.float32)
        self.gradients: Vector = np.zeros_like(self.parameters)
        self.kinds = {p.name: p.kind for layer in space.layers[first_layer:] for p in layer}
        self.values = space.views(self.parameters, start=self.suffix.start)
        self.results = space.views(self.gradients, start=self.suffix.start)
        self._loss = np.zeros((), np.float32)
        self._seed = np.zeros((), np.int64)
        self._bound: dict[str, NDArray[Any]] = {}

    def connect(self, session: ort.InferenceSession, inputs: Iterable[Wire], outputs: Iterable[Wire]) -> None:
        """Bind everything that stays where it is; batches are bound when they come."""
        self.session = session
        self._wanted = {value.name for value in session.get_inputs()}
        self._binding = session.io_binding()
        for wire in inputs:
            self._bind_input(wire)
        for wire in (*outputs, Wire("loss", self._loss)):
            self._binding.bind_output(*pointer(wire))
        if "seed" in self._wanted:
            self._bind_input(Wire("seed", self._seed))

    @property
    def uses_seed(self) -> bool:
        return "seed" in self._wanted

    def run(self, batch: NDArray[Any], labels: NDArray[Any], seed: int = 0) -> float:
        """Run one forward and backward pass; return the loss, leave the gradients in `gradients`."""
        for name, value in (("input", batch), ("labels", labels)):
            known = self._bound.get(name)
            if known is None or _layout(known) != _layout(value):
                self._bind_input(Wire(name, np.ascontiguousarray(value)))
                self.rebind()
        self._seed[...] = seed
        self.prepare()
        try:
            self.session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises several unrelated types
            if is_out_of_memory(error):
                raise OutOfMemory(f"not enough memory for a training step of {len(batch)} samples") from None
            raise EmbraceError(f"{self.engine}: a training step failed: {str(error).splitlines()[0]}") from None
        return float(self._loss)

    def prepare(self) -> None:
        """Do what an engine has to do before each run."""

    def rebind(self) -> None:
        """Bind what an engine has to bind anew when batches come in other memory, which may be of another size."""

    def _bind_input(self, wire: Wire) -> None:
        if wire.name in self._wanted:  # a graph may not need a parameter's old value
            self._binding.bind_input(*pointer(wire))
        self._bound[wire.name] = wire.memory  # the session keeps an address: the memory must stay


def _layout(memory: NDArray[Any]) -> tuple[int, tuple[int, ...], tuple[int, ...], np.dtype[Any]]:
    """Describe where and how an array lies: its transpose begins at the same address and may have the same shape."""
    return memory.ctypes.data, memory.shape, memory.strides, memory.dtype


def pointer(wire: Wire) -> tuple[str, str, int, Any, tuple[int, ...], int]:
    memory = wire.memory
    return wire.name, "cpu", 0, memory.dtype.type, memory.shape, memory.ctypes.data
