"""Branches and loops that shapes decide, written out.

`If`, `Loop` and `Scan` whose condition or number of turns follows from shapes and constants alone: the branch that
is taken replaces the node, the body of a loop is repeated. What the data decides stays, and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from model_export.errors import ExportError
from model_export.graph import attribute, inputs_with_subgraphs, module_of, needed_nodes
from model_export.shapes import BATCHES, run_values

MOST_TURNS = 1024
MOST_PASSES = 32  # branches within branches
Sample = Callable[[int], np.ndarray]


def write_out(model: onnx.ModelProto, sample: Sample) -> None:
    """Replace every branch and loop that the data does not decide."""
    for _ in range(MOST_PASSES):
        found = [node for node in model.graph.node if node.op_type in ("If", "Loop", "Scan")]
        values = _static_values(model, found, sample) if found else {}
        nodes: list[NodeProto] = []
        for node in model.graph.node:
            replaced = _replaced(node, values) if node in found else None
            nodes += [node] if replaced is None else replaced
        if len(nodes) == len(model.graph.node):
            return
        del model.graph.node[:]
        model.graph.node.extend(needed_nodes(nodes, [value.name for value in model.graph.output]))


def _replaced(node: NodeProto, values: dict[str, np.ndarray]) -> list[NodeProto] | None:
    if node.op_type == "If":
        return _branch(node, bool(values[node.input[0]])) if node.input[0] in values else None
    if node.op_type == "Scan":
        return _scan(node, values)
    return _loop(node, values)


def _static_values(model: onnx.ModelProto, nodes: Sequence[NodeProto], sample: Sample) -> dict[str, np.ndarray]:
    """Conditions, numbers of turns and lengths that are the same whatever the data and the batch size."""
    held = {item.name for item in model.graph.initializer}
    data = {value.name for value in model.graph.input if value.name not in held}
    for node in model.graph.node:
        if node.op_type not in ("Shape", "Size") and any(name in data for name in inputs_with_subgraphs(node)):
            data.update(node.output)
    wanted = {name for node in nodes if node.op_type != "Scan" for name in node.input[:2] if name and name not in data}
    lengths = {name for node in nodes if node.op_type == "Scan" for name in _scanned(node)}
    given = next(value.name for value in model.graph.input if value.name not in held)
    first, second = (run_values(model, {given: sample(batch)}, wanted | lengths) for batch in BATCHES)
    values = {name: first[name] for name in wanted if np.array_equal(first[name], second[name])}
    return values | {f"{name}.shape": np.array(first[name].shape) for name in lengths}


def _scanned(node: NodeProto) -> list[str]:
    return list(node.input[len(node.input) - int(attribute(node, "num_scan_inputs")) :])


def _inlined(node: NodeProto, body: onnx.GraphProto, names: dict[str, str], prefix: str) -> list[NodeProto]:
    """The nodes of a body under names of their own; `names` says what its inputs are, and learns the rest."""
    nodes = [helper.make_node("Constant", [], [item.name], value=item) for item in body.initializer]
    copies = []
    for child in [*nodes, *body.node]:
        twin = NodeProto()
        twin.CopyFrom(child)
        names.update({name: f"{prefix}{name}" for name in child.output if name})
        _rename(twin, names)
        own = str(names[next(filter(None, child.output))]).replace("/", ".")  # one name for each, in its own module
        twin.name = f"{child.name or f'{node.name}/{child.op_type}'}.{own}"
        copies.append(twin)
    return copies


def _rename(node: NodeProto, names: dict[str, str]) -> None:
    for field in (node.input, node.output):
        for index, name in enumerate(field):
            field[index] = names.get(name, name)
    for item in node.attribute:
        if item.type == onnx.AttributeProto.GRAPH:
            own = {v.name for v in item.g.input} | {t.name for t in item.g.initializer}
            own |= {name for child in item.g.node for name in child.output}
            outer = {key: value for key, value in names.items() if key not in own}
            for child in item.g.node:
                _rename(child, outer)
            for value in item.g.output:
                value.name = outer.get(value.name, value.name)


def _same(source: str, name: str) -> NodeProto:
    return helper.make_node("Identity", [source], [name], f"{name}.same")


def _branch(node: NodeProto, taken: bool) -> list[NodeProto]:
    body: onnx.GraphProto = attribute(node, "then_branch" if taken else "else_branch")
    names: dict[str, str] = {}
    nodes = _inlined(node, body, names, f"{node.output[0]}/")
    results = [names.get(value.name, value.name) for value in body.output]
    return nodes + [_same(result, name) for result, name in zip(results, node.output, strict=True)]


def _constant(name: str, value: np.ndarray) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))


def _loop(node: NodeProto, values: dict[str, np.ndarray]) -> list[NodeProto] | None:
    """A fixed number of turns; a condition that the body computes ends no loop here."""
    body: onnx.GraphProto = attribute(node, "body")
    turns, condition = values.get(node.input[0]), values.get(node.input[1])
    goes_on = body.output[0].name
    if turns is None or (node.input[1] and (condition is None or not bool(condition))):
        return None
    if not _is_true(body, goes_on):
        return None
    count = _checked(node, int(turns))
    true = f"{node.output[0]}/goes_on"
    nodes = [_constant(true, np.array(True))]
    states = list(node.input[2:])
    collected: list[list[str]] = [[] for _ in body.output[1 + len(states) :]]
    for turn in range(count):
        prefix = f"{node.output[0]}/{turn}/"
        nodes.append(_constant(f"{prefix}turn", np.array(turn, np.int64)))
        names = dict(zip((v.name for v in body.input), (f"{prefix}turn", true, *states), strict=True))
        nodes += _inlined(node, body, names, prefix)
        results = [names.get(value.name, value.name) for value in body.output[1:]]
        states = results[: len(states)]
        for place, name in zip(collected, results[len(states) :], strict=True):
            place.append(name)
    return nodes + _results(node, states, collected, [0] * len(collected))


def _is_true(body: onnx.GraphProto, name: str) -> bool:
    """Whether the condition for another turn is the one that came in, or a constant."""
    makers = {output: child for child in body.node for output in child.output}
    while name in makers and makers[name].op_type in ("Identity", "Cast"):
        name = makers[name].input[0]
    if name in makers and makers[name].op_type == "Constant":
        return bool(numpy_helper.to_array(makers[name].attribute[0].t))
    return bool(name == body.input[1].name)


def _scan(node: NodeProto, values: dict[str, np.ndarray]) -> list[NodeProto] | None:
    body: onnx.GraphProto = attribute(node, "body")
    scanned = _scanned(node)
    if any(f"{name}.shape" not in values for name in scanned):
        return None
    given, made = len(scanned), len(node.output) - (len(node.input) - len(scanned))
    axes = list(attribute(node, "scan_input_axes", [0] * given))
    backwards = list(attribute(node, "scan_input_directions", [0] * given))
    states = list(node.input[: len(node.input) - given])
    count = _checked(node, int(values[f"{scanned[0]}.shape"][axes[0]]))
    nodes: list[NodeProto] = []
    collected: list[list[str]] = [[] for _ in range(made)]
    for turn in range(count):
        prefix = f"{node.output[0]}/{turn}/"
        pieces = []
        for number, name in enumerate(scanned):
            place, piece = f"{prefix}place{number}", f"{prefix}piece{number}"
            step = count - 1 - turn if backwards[number] else turn
            nodes.append(_constant(place, np.array(step, np.int64)))
            nodes.append(helper.make_node("Gather", [name, place], [piece], f"{node.name}/{piece}", axis=axes[number]))
            pieces.append(piece)
        names = dict(zip((v.name for v in body.input), (*states, *pieces), strict=True))
        nodes += _inlined(node, body, names, prefix)
        results = [names.get(value.name, value.name) for value in body.output]
        states = results[: len(states)]
        for kept, name in zip(collected, results[len(states) :], strict=True):
            kept.append(name)
    turned = list(attribute(node, "scan_output_directions", [0] * made))
    collected = [kept[::-1] if back else kept for kept, back in zip(collected, turned, strict=True)]
    return nodes + _results(node, states, collected, list(attribute(node, "scan_output_axes", [0] * made)))


def _checked(node: NodeProto, count: int) -> int:
    if not 0 < count <= MOST_TURNS:
        raise ExportError(
            f"node {node.name!r} (module {module_of(node)!r}): {node.op_type} of {count} turns; between 1 and "
            f"{MOST_TURNS} can be written out"
        )
    return count


def _results(
    node: NodeProto, states: Sequence[str], collected: Sequence[Sequence[str]], axes: Sequence[int]
) -> list[NodeProto]:
    """The outputs of a loop: its last states, and what each turn gave, one behind the other."""
    outputs = list(node.output)
    nodes = [_same(state, name) for state, name in zip(states, outputs, strict=False) if name]
    for name, parts, axis in zip(outputs[len(states) :], collected, axes, strict=True):
        if not name:
            continue
        nodes.append(_constant(f"{name}/axis", np.array([axis], np.int64)))
        wide = [f"{part}/wide{number}" for number, part in enumerate(parts)]
        nodes += [
            helper.make_node("Unsqueeze", [part, f"{name}/axis"], [each], f"{node.name}/{each}")
            for part, each in zip(parts, wide, strict=True)
        ]
        nodes.append(helper.make_node("Concat", wide, [name], f"{node.name}/{name}", axis=axis))
    return nodes
