"""LSTM, GRU and RNN through Scan.

The forward Scan stores the gates of every step; a reverse Scan turns gradients of the outputs into gradients of the
gates; the weight gradients are then single large products over all steps at once. One product with the input weights
is taken out of the loop in front. Backpropagation can be limited to the last steps of each direction's recursion: the
steps before run as the plain operator and keep nothing, or they were run beforehand (`write_head`) and their states
are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper

from model_export.autodiff.engine import FLOAT, Context, Head
from model_export.autodiff.registry import Gradients, lowering, rule
from model_export.autodiff.rules.elementwise import Upstream
from model_export.errors import ExportError
from model_export.graph import Emitter, attribute, module_of, optional_input

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
# The activation functions of one direction that have a gradient here; the first ones are ONNX's defaults.
ACTIVATIONS = {"LSTM": [["Sigmoid", "Tanh", "Tanh"]], "GRU": [["Sigmoid", "Tanh"]], "RNN": [["Tanh"], ["Relu"]]}


@dataclass
class Direction:
    """One direction of one recurrent node, and the values its forward Scan keeps."""

    index: int  # 0, or 1 for the second direction of a bidirectional node
    reverse: bool
    weight: str = ""  # [gates * hidden, input]
    recurrent: str = ""  # [gates * hidden, hidden]
    recurrent_bias: str = ""  # [gates * hidden]
    x: str = ""  # [steps, N, input], the steps that are trained
    hidden_states: str = ""  # [steps, N, hidden]
    cells: str = ""  # LSTM: [steps, N, hidden]
    gates: str = ""  # activated gates, [steps, N, gates * hidden]
    candidate: str = ""  # GRU: the recurrent part of the candidate before the reset gate
    first_hidden: str = ""  # [N, hidden]
    first_cell: str = ""
    steps: int = 0
    skipped: int = 0  # steps at the start of the recursion that are not trained


def _check(context: Context, node: NodeProto) -> tuple[int, int, int]:
    """(hidden size, directions, steps), or an error for what the rule does not know."""
    place = f"node {node.name!r} (module {module_of(node)!r})"
    count = 2 if attribute(node, "direction") == "bidirectional" else 1
    is_known = any(_activations(node) == one * count for one in ACTIVATIONS[node.op_type])
    if not is_known or attribute(node, "clip") or attribute(node, "input_forget", 0):
        raise ExportError(f"{place}: {node.op_type} with custom activations, clip or input_forget has no gradient here")
    if optional_input(node, 4) or optional_input(node, 7) or attribute(node, "layout", 0):
        raise ExportError(
            f"{place}: {node.op_type} with sequence lengths, peepholes or batch layout has no gradient here"
        )
    steps = context.shape(node.input[0])[0]
    if steps is None:
        raise ExportError(f"{place}: the number of steps is known only at run time")
    return int(attribute(node, "hidden_size")), count, steps


def _activations(node: NodeProto) -> list[str]:
    count = 2 if attribute(node, "direction") == "bidirectional" else 1
    given = [name.decode() for name in attribute(node, "activations", [])]
    return given or ACTIVATIONS[node.op_type][0] * count


def _pick(context: Context, value: str, index: int, count: int) -> str:
    """Entry `index` of the leading direction axis."""
    if count == 1:
        return context.op("Squeeze", value, [0])
    return context.op("Gather", value, context.constant(np.array(index, np.int64)), axis=0)


@lowering("LSTM", "GRU", "RNN")
def forward(context: Context, node: NodeProto) -> None:
    hidden, count, steps = _check(context, node)
    directions = _directions(context, node, count, steps)
    sequences, last_hidden, last_cell = [], [], []
    for direction in directions:
        sequence, states = _run_direction(context, node, direction, hidden, count, steps)
        sequences.append(context.op("Unsqueeze", sequence, [1]))
        last_hidden.append(context.op("Unsqueeze", states[0], [0]))
        last_cell.append(context.op("Unsqueeze", states[-1], [0]))
    outputs = [*node.output, "", ""][:3]
    for name, parts, axis in zip(outputs, (sequences, last_hidden, last_cell), (1, 0, 0), strict=True):
        if name:
            context.ops("Concat", [name], *parts, axis=axis)
    context.saved[node_key(node)] = directions


def node_key(node: NodeProto) -> str:
    """Name a recurrent node, whichever of its outputs are there."""
    return f"{node.name}:{next(filter(None, node.output))}"


def _directions(context: Context, node: NodeProto, count: int, steps: int) -> list[Direction]:
    """Each direction with its weights and the steps that are trained."""
    reverse_only = attribute(node, "direction", "forward") == "reverse"
    trained = min(context.last_steps or steps, steps)
    return [
        Direction(
            i,
            reverse=bool(i) or reverse_only,
            weight=_pick(context, node.input[1], i, count),
            recurrent=_pick(context, node.input[2], i, count),
            steps=trained,
            skipped=steps - trained,
        )
        for i in range(count)
    ]


def write_head(context: Context, node: NodeProto) -> list[Head]:
    """Write the steps that are not trained, direction by direction; nothing if all are."""
    hidden, count, steps = _check(context, node)
    return [_skip(context, node, d, hidden, count) for d in _directions(context, node, count, steps) if d.skipped]


def _run_direction(
    context: Context, node: NodeProto, d: Direction, hidden: int, count: int, steps: int
) -> tuple[str, tuple[str, ...]]:
    """The whole sequence of hidden states and the final states of one direction."""
    gates = GATES[node.op_type] * hidden
    bias_name = optional_input(node, 3)
    zeros = context.constant(np.zeros(gates, np.float32))
    input_bias, d.recurrent_bias = zeros, zeros
    if bias_name:
        input_bias, d.recurrent_bias = context.ops(
            "Split", 2, _pick(context, bias_name, d.index, count), axis=0, num_outputs=2
        )
    x, head = node.input[0], ""
    if d.skipped:
        known = context.heads.get(node_key(node))
        head, first = known[d.index] if known else _skip(context, node, d, hidden, count)
        start = 0 if d.reverse else d.skipped
        x = context.op("Slice", x, [start], [start + d.steps], [0])
    else:
        first = _first(context, node, d, hidden, count)
    d.x, d.first_hidden, d.first_cell = x, first[0], first[-1]
    width = int(context.shape(node.input[0])[2] or 0)
    flat = context.op("Reshape", x, np.array([-1, width], np.int64))
    bias = input_bias if node.op_type == "GRU" else context.op("Add", input_bias, d.recurrent_bias)
    projected = context.op(
        "Reshape", context.op("Gemm", flat, d.weight, bias, transB=1), np.array([d.steps, -1, gates], np.int64)
    )
    if node.op_type == "LSTM":
        *last, d.hidden_states, d.cells, d.gates = scan(
            context, _lstm_body(context, d, hidden), first, [projected], reverse=d.reverse
        )
    elif node.op_type == "GRU":
        body = _gru_body(context, d, hidden, _linear(node))
        *last, d.hidden_states, d.gates, d.candidate = scan(context, body, first, [projected], reverse=d.reverse)
    else:
        body = _rnn_body(context, d, _activations(node)[0])
        *last, d.hidden_states = scan(context, body, first, [projected], reverse=d.reverse)
    sequence = d.hidden_states
    if head:
        sequence = context.op("Concat", *([sequence, head] if d.reverse else [head, sequence]), axis=0)
    return sequence, tuple(last)


def _states(node: NodeProto) -> int:
    return 2 if node.op_type == "LSTM" else 1


def _linear(node: NodeProto) -> bool:
    return bool(attribute(node, "linear_before_reset", 0))


def _first(context: Context, node: NodeProto, d: Direction, hidden: int, count: int) -> list[str]:
    """The states that a direction's recursion begins with."""
    return [_initial(context, node, index, d, count, hidden) for index in (5, 6)[: _states(node)]]


def _initial(context: Context, node: NodeProto, index: int, d: Direction, count: int, hidden: int) -> str:
    given = optional_input(node, index)
    if given:
        return _pick(context, given, d.index, count)
    batch = context.op("Gather", context.op("Shape", node.input[0]), [1], axis=0)
    shape = context.op("Concat", batch, [hidden], axis=0)
    return context.op("ConstantOfShape", shape)


def _skip(context: Context, node: NodeProto, d: Direction, hidden: int, count: int) -> Head:
    """Run the untrained steps with the plain operator: their outputs, the states after them."""
    start = d.steps if d.reverse else 0
    untrained = context.op("Slice", node.input[0], [start], [start + d.skipped], [0])
    weights = [context.op("Unsqueeze", value, [0]) for value in (d.weight, d.recurrent)]
    bias_name = optional_input(node, 3)
    bias = context.op("Unsqueeze", _pick(context, bias_name, d.index, count), [0]) if bias_name else ""
    states = [context.op("Unsqueeze", value, [0]) for value in _first(context, node, d, hidden, count)]
    results = context.ops(
        node.op_type,
        _states(node) + 1,
        untrained,
        *weights,
        bias,
        "",
        *states,
        hidden_size=attribute(node, "hidden_size"),
        direction="reverse" if d.reverse else "forward",
        linear_before_reset=attribute(node, "linear_before_reset"),
        activations=_activations(node)[: len(ACTIVATIONS[node.op_type][0])],
    )
    sequence = context.op("Squeeze", results[0], [1])
    return sequence, [context.op("Squeeze", value, [0]) for value in results[1:]]


class Body:
    """The graph inside a Scan; it may read values of the graph around it."""

    def __init__(self, context: Context, name: str, states: Sequence[str], inputs: Sequence[str]) -> None:
        self.emitter = Emitter(prefix=f"{name}.b")
        self.op = self.emitter.op
        self.ops = self.emitter.ops
        self.name = name
        self.states = list(states)
        self.inputs = list(inputs)

    def finish(self, next_states: Sequence[str], outputs: Sequence[str]) -> onnx.GraphProto:
        values = [helper.make_tensor_value_info(n, FLOAT, None) for n in [*self.states, *self.inputs]]
        results = []
        for i, value in enumerate([*next_states, *outputs]):  # each result needs a name of its own
            self.ops("Identity", [f"{self.name}.r{i}"], value)
            results.append(helper.make_tensor_value_info(f"{self.name}.r{i}", FLOAT, None))
        held = [onnx.numpy_helper.from_array(array, name) for name, array in self.emitter.constants.items()]
        return helper.make_graph(self.emitter.nodes, self.name, values, results, initializer=held)


def scan(
    context: Context,
    body: tuple[Body, Sequence[str], Sequence[str]],
    states: Sequence[str],
    inputs: Sequence[str],
    *,
    reverse: bool,
) -> tuple[str, ...]:
    """Final states, then stacked outputs; everything stays in the order of time also when run in reverse."""
    frame, next_states, outputs = body
    flags = {
        "scan_input_directions": [int(reverse)] * len(inputs),
        "scan_output_directions": [int(reverse)] * len(outputs),
    }
    return context.ops(
        "Scan",
        len(states) + len(outputs),
        *states,
        *inputs,
        body=frame.finish(next_states, outputs),
        num_scan_inputs=len(inputs),
        **flags,
    )


def _frame(context: Context, d: Direction, kind: str, states: Sequence[str], inputs: Sequence[str]) -> Body:
    name = f"{kind}{len(context.emitter.nodes)}"
    return Body(context, name, [f"{name}.{s}" for s in states], [f"{name}.{i}" for i in inputs])


def _lstm_body(context: Context, d: Direction, hidden: int) -> tuple[Body, list[str], list[str]]:
    """ONNX gate order: input, output, forget, cell."""
    recurrent = context.op("Transpose", d.recurrent, perm=[1, 0])
    f = _frame(context, d, "lstm", ["h", "c"], ["z"])
    h, c = f.states
    z = f.op("Add", f.inputs[0], f.op("MatMul", h, recurrent))
    three, cell = f.ops("Split", 2, z, [3 * hidden, hidden], axis=-1)
    three, cell = f.op("Sigmoid", three), f.op("Tanh", cell)
    gate_in, gate_out, forget = f.ops("Split", 3, three, axis=-1, num_outputs=3)
    new_c = f.op("Add", f.op("Mul", forget, c), f.op("Mul", gate_in, cell))
    new_h = f.op("Mul", gate_out, f.op("Tanh", new_c))
    return f, [new_h, new_c], [new_h, new_c, f.op("Concat", three, cell, axis=-1)]


def _gru_body(context: Context, d: Direction, hidden: int, linear: bool) -> tuple[Body, list[str], list[str]]:
    """ONNX gate order: update, reset, hidden. `linear`: the reset gate acts after the recurrent product."""
    recurrent = context.op("Transpose", d.recurrent, perm=[1, 0])
    bias = d.recurrent_bias
    f = _frame(context, d, "gru", ["h"], ["z"])
    h = f.states[0]
    two_x, new_x = f.ops("Split", 2, f.inputs[0], [2 * hidden, hidden], axis=-1)
    if linear:
        two_h, new_h = f.ops("Split", 2, f.op("Add", f.op("MatMul", h, recurrent), bias), [2 * hidden, hidden], axis=-1)
        two = f.op("Sigmoid", f.op("Add", two_x, two_h))
        update, reset = f.ops("Split", 2, two, axis=-1, num_outputs=2)
        candidate = new_h
        new = f.op("Tanh", f.op("Add", new_x, f.op("Mul", reset, new_h)))
    else:
        r_two, r_new = context.ops("Split", 2, recurrent, [2 * hidden, hidden], axis=1)
        b_two, b_new = context.ops("Split", 2, bias, [2 * hidden, hidden], axis=0)
        two = f.op("Sigmoid", f.op("Add", two_x, f.op("Add", f.op("MatMul", h, r_two), b_two)))
        update, reset = f.ops("Split", 2, two, axis=-1, num_outputs=2)
        candidate = f.op("Mul", reset, h)
        new = f.op("Tanh", f.op("Add", new_x, f.op("Add", f.op("MatMul", candidate, r_new), b_new)))
    mixed = f.op("Add", f.op("Mul", f.op("Sub", 1.0, update), new), f.op("Mul", update, h))
    return f, [mixed], [mixed, f.op("Concat", two, new, axis=-1), candidate]


def _rnn_body(context: Context, d: Direction, activation: str) -> tuple[Body, list[str], list[str]]:
    recurrent = context.op("Transpose", d.recurrent, perm=[1, 0])
    f = _frame(context, d, "rnn", ["h"], ["z"])
    h = f.op(activation, f.op("Add", f.inputs[0], f.op("MatMul", f.states[0], recurrent)))
    return f, [h], [h]


@rule("LSTM", "GRU", "RNN")
def backward(context: Context, node: NodeProto, upstream: Upstream) -> Gradients:
    hidden, count, _ = _check(context, node)
    upstream = [*upstream, None, None][:3]
    directions = context.saved[node_key(node)]
    per_direction = [_through_direction(context, node, d, upstream, hidden, count) for d in directions]
    gradients: list[str | None] = []
    for name in ("x", "weight", "recurrent", "bias"):
        parts = [part[name] for part in per_direction]
        if name == "x":
            gradients.append(parts[0] if count == 1 else context.op("Add", *parts) if context.wants(node, 0) else None)
        else:
            gradients.append(context.op("Concat", *(context.op("Unsqueeze", p, [0]) for p in parts), axis=0))
    skipped = any(d.skipped for d in directions)  # then nothing flows back to the initial states
    states = [
        context.op("Concat", *(context.op("Unsqueeze", part["states"][i], [0]) for part in per_direction), axis=0)
        if context.wants(node, 5 + i) and not skipped
        else None
        for i in range(_states(node))
    ]
    return [*gradients, None, *states]


def _through_direction(
    context: Context, node: NodeProto, d: Direction, upstream: Sequence[str | None], hidden: int, count: int
) -> dict[str, Any]:
    dy, dh, dc = upstream
    zeros = context.op("Mul", d.first_hidden, 0.0)
    starts = [_pick(context, value, d.index, count) if value else zeros for value in (dh, dc)[: _states(node)]]
    if dy:
        taken = _pick_axis(context, dy, d.index, count)
        if d.skipped:
            cut = [d.steps, d.skipped] if d.reverse else [d.skipped, d.steps]
            taken = context.ops("Split", 2, taken, cut, axis=0)[0 if d.reverse else 1]
    else:
        taken = context.op("Mul", d.hidden_states, 0.0)
    before_h = _previous(context, d.hidden_states, d.first_hidden, d)
    if node.op_type == "LSTM":
        body = _lstm_back(context, d, hidden)
        before_c = _previous(context, d.cells, d.first_cell, d)
        *states, dz = scan(context, body, starts, [taken, d.gates, d.cells, before_c], reverse=not d.reverse)
        dz_h = dz
    elif node.op_type == "RNN":
        body = _rnn_back(context, d, _activations(node)[0])
        *states, dz = scan(context, body, starts, [taken, d.hidden_states], reverse=not d.reverse)
        dz_h = dz
    else:
        body = _gru_back(context, d, hidden, _linear(node))
        *states, dz, dz_h = scan(context, body, starts, [taken, d.gates, d.candidate, before_h], reverse=not d.reverse)
    return _weight_gradients(context, node, d, dz, dz_h, before_h, hidden) | {"states": states}


def _weight_gradients(
    context: Context, node: NodeProto, d: Direction, dz: str, dz_h: str, before_h: str, hidden: int
) -> dict[str, Any]:
    """All steps at once: three products of large matrices."""
    gates, width = GATES[node.op_type] * hidden, int(context.shape(node.input[0])[2] or 0)

    def flat(value: str, columns: int) -> str:
        return context.op("Reshape", value, np.array([-1, columns], np.int64))

    rows, rows_h, previous = flat(dz, gates), flat(dz_h, gates), flat(before_h, hidden)
    if node.op_type == "GRU" and not _linear(node):
        # The candidate's recurrent weights met reset * h, the other gates' met h.
        two, new = context.ops("Split", 2, rows_h, [2 * hidden, hidden], axis=1)
        products = [(two, previous), (new, flat(d.candidate, hidden))]
        recurrent = context.op("Concat", *(context.op("Gemm", a, b, transA=1) for a, b in products), axis=0)
    else:
        recurrent = context.op("Gemm", rows_h, previous, transA=1)
    sums = [context.op("ReduceSum", value, [0], keepdims=0) for value in (rows, rows_h)]
    dx = None
    if context.wants(node, 0):
        product = context.op("Gemm", rows, d.weight)
        dx = context.op("Reshape", product, np.array([d.steps, -1, width], np.int64))
        if d.skipped:
            pads = [0, 0, 0, d.skipped, 0, 0] if d.reverse else [d.skipped, 0, 0, 0, 0, 0]
            dx = context.op("Pad", dx, np.array(pads, np.int64))
    return {
        "x": dx,
        "weight": context.op("Gemm", rows, flat(d.x, width), transA=1),
        "recurrent": recurrent,
        "bias": context.op("Concat", *sums, axis=0),
    }


def _pick_axis(context: Context, dy: str, index: int, count: int) -> str:
    """[steps, directions, N, hidden] -> [steps, N, hidden]."""
    if count == 1:
        return context.op("Squeeze", dy, [1])
    return context.op("Gather", dy, context.constant(np.array(index, np.int64)), axis=1)


def _previous(context: Context, values: str, first: str, d: Direction) -> str:
    """The value before each step: shifted by one in the direction of the recursion."""
    start = context.op("Unsqueeze", first, [0])
    if d.steps == 1:
        return start
    if d.reverse:
        return context.op("Concat", context.op("Slice", values, [1], [d.steps], [0]), start, axis=0)
    return context.op("Concat", start, context.op("Slice", values, [0], [d.steps - 1], [0]), axis=0)


def _slope(f: Body, gate: str) -> str:
    """Derivative of the sigmoid by its value."""
    return f.op("Mul", gate, f.op("Sub", 1.0, gate))


def _lstm_back(context: Context, d: Direction, hidden: int) -> tuple[Body, list[str], list[str]]:
    f = _frame(context, d, "lstmgrad", ["dh", "dc"], ["dy", "gates", "c", "before"])
    dh, dc = f.states
    dy, gates, c, before = f.inputs
    three, cell = f.ops("Split", 2, gates, [3 * hidden, hidden], axis=-1)
    gate_in, gate_out, forget = f.ops("Split", 3, three, axis=-1, num_outputs=3)
    dh = f.op("Add", dh, dy)
    bent = f.op("Tanh", c)
    dc = f.op("Add", dc, f.op("Mul", f.op("Mul", dh, gate_out), f.op("Sub", 1.0, f.op("Mul", bent, bent))))
    outer = f.op("Concat", f.op("Mul", dc, cell), f.op("Mul", dh, bent), f.op("Mul", dc, before), axis=-1)
    d_cell = f.op("Mul", f.op("Mul", dc, gate_in), f.op("Sub", 1.0, f.op("Mul", cell, cell)))
    dz = f.op("Concat", f.op("Mul", outer, _slope(f, three)), d_cell, axis=-1)
    return f, [f.op("MatMul", dz, d.recurrent), f.op("Mul", dc, forget)], [dz]


def _gru_back(context: Context, d: Direction, hidden: int, linear: bool) -> tuple[Body, list[str], list[str]]:
    f = _frame(context, d, "grugrad", ["dh"], ["dy", "gates", "candidate", "before"])
    dy, gates, candidate, before = f.inputs
    update, reset, new = f.ops("Split", 3, gates, axis=-1, num_outputs=3)
    dh = f.op("Add", f.states[0], dy)
    d_new = f.op("Mul", f.op("Mul", dh, f.op("Sub", 1.0, update)), f.op("Sub", 1.0, f.op("Mul", new, new)))
    d_update = f.op("Mul", f.op("Mul", dh, f.op("Sub", before, new)), _slope(f, update))
    kept = f.op("Mul", dh, update)
    if linear:
        d_reset = f.op("Mul", f.op("Mul", d_new, candidate), _slope(f, reset))
        dz_h = f.op("Concat", d_update, d_reset, f.op("Mul", d_new, reset), axis=-1)
        d_before = f.op("Add", kept, f.op("MatMul", dz_h, d.recurrent))
        dz = f.op("Concat", d_update, d_reset, d_new, axis=-1)
    else:
        r_two, r_new = context.ops("Split", 2, d.recurrent, [2 * hidden, hidden], axis=0)
        d_candidate = f.op("MatMul", d_new, r_new)
        d_reset = f.op("Mul", f.op("Mul", d_candidate, before), _slope(f, reset))
        through = f.op("MatMul", f.op("Concat", d_update, d_reset, axis=-1), r_two)
        d_before = f.op("Add", f.op("Add", kept, f.op("Mul", d_candidate, reset)), through)
        dz = dz_h = f.op("Concat", d_update, d_reset, d_new, axis=-1)
    return f, [d_before], [dz, dz_h]


def _rnn_back(context: Context, d: Direction, activation: str) -> tuple[Body, list[str], list[str]]:
    f = _frame(context, d, "rnngrad", ["dh"], ["dy", "h"])
    dy, h = f.inputs
    slope = f.op("Sub", 1.0, f.op("Mul", h, h)) if activation == "Tanh" else f.op("Sign", h)
    dz = f.op("Mul", f.op("Add", f.states[0], dy), slope)
    return f, [f.op("MatMul", dz, d.recurrent)], [dz]
