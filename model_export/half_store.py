"""Keep values for the backward pass as float16: half of their memory, for gradients that are a little less exact.

What is alive where the backward pass begins is written as float16 after the forward pass has read it for the last
time, and made float32 again in front of its readers. Values beyond 65504 would become infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import NodeProto, TensorProto, helper

from model_export.graph import inputs_with_subgraphs
from model_export.lifetimes import Course, Size, not_in_arena, steps_of
from model_export.recompute import FAR, SMALL, turn_of, with_nodes

_FLOAT = 4


def store_halves(model: onnx.ModelProto, sizes: Mapping[str, Size], batch: int) -> onnx.ModelProto:
    """Write the graph so that large values wait for the backward pass as float16."""
    steps = steps_of(model)
    turn = turn_of(steps)
    fixed = {value.name for value in model.graph.output}
    for step in steps[turn:]:
        fixed |= set(step.captured) - set(step.inputs)
    kept = {
        owner: names
        for owner, names in Course(steps, not_in_arena(model), sizes, until=turn).alive().items()
        if sizes[owner].at(batch) > SMALL and all(sizes[n].item == _FLOAT and n not in fixed for n in names)
    }
    return with_nodes(model, _Writer(list(model.graph.node), turn, kept).write())


class _Writer:
    def __init__(self, nodes: Sequence[NodeProto], turn: int, kept: Mapping[str, Sequence[str]]) -> None:
        """`kept`: by the value whose memory it is, all that share it."""
        self._nodes = nodes
        self._turn = turn
        self._owner = {name: owner for owner, names in kept.items() for name in names}
        self._makers = {name: node for node in nodes[:turn] for name in node.output if name}
        self._copy: dict[str, int] = {}  # by owner: the number of its last copy
        self._read: dict[str, int] = {}  # by owner: where its last copy was read last
        self._views: dict[str, str] = {}  # the last copies of values that share memory
        self._written: list[NodeProto] = []

    def write(self) -> list[NodeProto]:
        after: dict[int, list[str]] = {}  # by node: what the forward pass does not read any more
        for owner, place in self._last_uses().items():
            after.setdefault(place, []).append(owner)
        for number, node in enumerate(self._nodes[: self._turn]):
            self._written.append(node)
            for owner in after.get(number, ()):
                self._cast(owner, _half(owner), TensorProto.FLOAT16, "forward")
        for number, node in enumerate(self._nodes[self._turn :]):
            twin = NodeProto()
            twin.CopyFrom(node)
            twin.input[:] = [self._whole(name, number) if name in self._owner else name for name in node.input]
            self._written.append(twin)
        return self._written

    def _last_uses(self) -> dict[str, int]:
        found: dict[str, int] = {}
        owners = {**self._owner, **{owner: owner for owner in self._owner.values()}}
        for number, node in enumerate(self._nodes[: self._turn]):
            found |= {owners[name]: number for name in (*inputs_with_subgraphs(node), *node.output) if name in owners}
        return found

    def _whole(self, name: str, place: int) -> str:
        """Make a value float32 again, unless that was done for a reader a moment ago; return its name."""
        owner = self._owner[name]
        if owner not in self._read or place - self._read[owner] > FAR:
            self._copy[owner] = self._copy.get(owner, -1) + 1
            self._views = {key: new for key, new in self._views.items() if self._owner.get(key, key) != owner}
            self._views[owner] = f"{owner}.whole{self._copy[owner]}"
            self._cast(_half(owner), self._views[owner], TensorProto.FLOAT, "backward")
        self._read[owner] = place
        return self._view(name, owner)

    def _view(self, name: str, owner: str) -> str:
        """Reshape what was made whole as the forward pass did."""
        if name not in self._views:
            maker = self._makers[name]
            twin = NodeProto()
            twin.CopyFrom(maker)
            twin.input[0] = self._view(maker.input[0], owner)
            twin.output[0] = self._views[name] = f"{name}.whole{self._copy[owner]}"
            twin.name = f"backward/{twin.output[0]}"
            self._written.append(twin)
        return self._views[name]

    def _cast(self, source: str, target: str, kind: int, scope: str) -> None:
        self._written.append(helper.make_node("Cast", [source], [target], name=f"{scope}/{target}", to=kind))


def _half(name: str) -> str:
    return f"{name}.half"
