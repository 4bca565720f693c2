"""The first steps of recurrent layers, as a frozen layer of their own.

A device that trains from `layer@steps` on runs everything in front of the last steps once per round: each direction of
each recurrent node reads the steps that its recursion begins with, and gives the states after them. States and the
layer's input lie side by side in the one tensor that is stored, and the training graph begins there. Outputs of the
first steps are among them only if a later node reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from onnx import NodeProto

from model_export.autodiff.engine import Context, Head
from model_export.autodiff.rules.recurrent import GATES, node_key, write_head
from model_export.graph import Graph, Shape, attribute, inputs_with_subgraphs
from model_export.layers import LayerGraph
from model_export.packing import packed_size, unpack

TIME_FIRST = [1, 0, 2]  # and back


@dataclass
class HeadCut:
    """What crosses in front of the last steps of some layers: the layers' input, states, and outputs where needed."""

    graph: Graph
    layers: Sequence[LayerGraph]
    last_steps: int
    values: dict[str, Shape] = field(default_factory=dict)  # in the order in which they are packed
    heads: dict[str, list[Head]] = field(default_factory=dict)  # by recurrent node: the same, as the node takes it

    def __post_init__(self) -> None:
        source = self.layers[0].input
        self.values[source] = self.graph.shapes[source]
        read = {self.graph.output, *(name for node in self.nodes for name in inputs_with_subgraphs(node))}
        short = list(self._shortened())
        needs_outputs = any(node.output[0] in read for node, _ in short)
        outputs: dict[str, Shape] = {}
        for node, skipped in short:
            hidden, key = int(attribute(node, "hidden_size")), node_key(node)
            self.heads[key] = []
            for direction in range(2 if attribute(node, "direction") == "bidirectional" else 1):
                states = [f"{key}.{direction}.{state}" for state in ("h", "c")[: 2 if node.op_type == "LSTM" else 1]]
                self.values |= dict.fromkeys(states, (None, hidden))
                output = f"{key}.{direction}.y" if needs_outputs else ""
                outputs |= {output: (None, skipped, hidden)} if output else {}
                self.heads[key].append((output and f"{output}.steps", states))
        self.values |= outputs

    @property
    def nodes(self) -> list[NodeProto]:
        return [node for layer in self.layers for node in layer.nodes]

    def _shortened(self) -> Iterator[tuple[NodeProto, int]]:
        """Recurrent nodes with the number of steps that are not trained."""
        for node in self.nodes:
            if node.op_type in GATES:
                skipped = (self.graph.shapes[node.input[0]][0] or 0) - self.last_steps
                if skipped > 0:
                    yield node, skipped

    @property
    def size(self) -> int:
        """How many numbers of a sample cross."""
        return packed_size(self.values)

    def read(self, context: Context, packed: str) -> None:
        """Write the beginning of a training graph: every value by its name."""
        unpack(context.emitter, packed, self.values)
        for output, _ in (head for heads in self.heads.values() for head in heads):
            if output:
                context.ops("Transpose", [output], output.removesuffix(".steps"), perm=TIME_FIRST)

    def write(self, context: Context, node: NodeProto) -> None:
        """Write what a recurrent node gives to the crossing."""
        for (outputs, states), (output, names) in zip(write_head(context, node), self.heads.get(node_key(node), ())):
            for name, state in zip(names, states, strict=True):
                context.ops("Identity", [name], state)
            if output:
                context.ops("Transpose", [output.removesuffix(".steps")], outputs, perm=TIME_FIRST)
