"""Gradients of exported graphs, run by onnxruntime, against those of PyTorch's autograd.

`check_operator` looks at one operator: the loss is sum(y * r) for a fixed random r, float inputs are trained. Shapes
are measured at two batch sizes, as the exporter does, and gradients compared at a third, so that a batch size baked
into a graph shows. Whole modules: module_harness.py.

Errors are measured as the largest difference, relative to the largest magnitude of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from onnx import NodeProto, helper, numpy_helper
from torch import Tensor

from edge_runtime.engine.session import RuntimeSettings, training_session
from model_export.autodiff import engine
from model_export.autodiff.engine import Context, active_values, write_backward, write_forward
from model_export.autodiff.registry import Rule, find_rule
from model_export.graph import Emitter, Shape, make_model, serialise, tensor_info
from model_export.shapes import BATCHES, run_everything, symbolic_shape

Arrays = dict[str, np.ndarray]
# Random data of a given shape, of the kind an operator can take.
Fill = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

OPSET = 18
RUN_BATCH = 5  # none of shapes.BATCHES
TOLERANCE = 1e-4
# A gradient that is zero in theory is noise in practice: errors are measured against at least this share of
# the largest of all gradients.
FLOOR = 2e-2

# Operators whose rule was called since the current test began; conftest.py holds the test's `operator` marks
# against it.
differentiated: set[str] = set()
# Says which operators a test differentiates.
operator = pytest.mark.operator


@contextmanager
def journal() -> Iterator[None]:
    """Note whose rules are called."""

    def find_and_note(op_type: str) -> Rule | None:
        differentiated.add(op_type)
        return find_rule(op_type)

    with mock.patch.object(engine, "find_rule", find_and_note):
        yield


def of(op_type: str, *values: Any) -> Any:
    """A case of a parametrised test, marked with its operator."""
    return pytest.param(op_type, *values, marks=operator(op_type), id=op_type)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Fixed:
    """An input that is given at run time and is not trained: an index, a condition."""

    shape: Shape
    fill: Fill = normal


# A trained input by its shape (None follows the batch), an untrained one, a constant, or an absent one.
Input = Shape | Fixed | np.ndarray | None


def relative_error(found: np.ndarray, expected: np.ndarray, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest magnitude; infinite for a wrong shape or a NaN."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    if not found.size:
        return 0.0
    scale = max(float(np.abs(expected).max()), floor, 1e-12)
    return float(np.abs(found.astype(np.float64) - expected).max()) / scale


def largest(values: Mapping[str, np.ndarray]) -> float:
    return max((float(np.abs(value).max()) for value in values.values() if value.size), default=0.0)


def assert_close(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], what: str, scale: float = 0.0
) -> None:
    """Every expected tensor was found and agrees; `scale` is the size of others of its kind."""
    assert set(expected) <= set(found), f"{what}: no {sorted(set(expected) - set(found))} among {sorted(found)}"
    floor = FLOOR * max(largest(expected), scale)
    errors = {name: relative_error(found[name], value, floor) for name, value in expected.items()}
    wrong = {
        name: f"{error:.1e}, shape {found[name].shape} for {expected[name].shape}"
        for name, error in errors.items()
        if error > TOLERANCE
    }
    assert not wrong, f"{what} differ from PyTorch: {wrong}"


def run(model: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> Arrays:
    """All outputs of a model, with onnxruntime as a device starts it; the model must be standard ONNX."""
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} <= {""}
    session = training_session(serialise(model), RuntimeSettings())
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))


def operator_gradients(
    nodes: Sequence[NodeProto],
    feed: Callable[[int], Arrays],
    trained: Sequence[str],
    seeds: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = OPSET,
    last_steps: int | None = None,
) -> Arrays:
    """The last node's outputs under their names, gradients as `name.grad`.

    `feed(batch)` makes what the graph reads at run time, `seeds` are the gradients of some of the outputs.
    """
    constants = dict(constants or {})
    measured = _measure(nodes, feed, constants, opset)
    results = [name for name in nodes[-1].output if name]
    emitter = Emitter()
    context = Context(emitter, measured.shapes, constants, active_values(nodes, trained), last_steps)
    write_forward(context, nodes)
    with journal():
        gradients = write_backward(context, nodes, {name: f"{name}.seed" for name in seeds}, trained)
    for name, value in gradients.items():
        emitter.ops("Identity", [f"{name}.grad"], value)
    inputs = [measured.info(name) for name in feed(1)]
    inputs += [tensor_info(f"{name}.seed", seed.dtype, measured.shapes[name]) for name, seed in seeds.items()]
    outputs = [measured.info(name) for name in results]
    outputs += [tensor_info(f"{name}.grad", np.float32, measured.shapes[name]) for name in trained]
    model = make_model("test", emitter.nodes, inputs, outputs, {**constants, **emitter.constants}, opset)
    return run(model, feed(RUN_BATCH) | {f"{name}.seed": seed for name, seed in seeds.items()})


@dataclass(frozen=True)
class _Measured:
    shapes: dict[str, Shape]
    dtypes: dict[str, np.dtype[Any]]

    def info(self, name: str) -> onnx.ValueInfoProto:
        return tensor_info(name, self.dtypes[name], self.shapes[name])


def _measure(nodes: Sequence[NodeProto], feed: Callable[[int], Arrays], constants: Arrays, opset: int) -> _Measured:
    """Shape and type of every value, measured at the exporter's two batch sizes."""
    small, large = feed(BATCHES[0]), feed(BATCHES[1])
    inputs = [tensor_info(name, value.dtype, (None,) * value.ndim) for name, value in small.items()]
    for index, value in enumerate(inputs):  # dimensions are free: each gets a name of its own
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"d{index}_{axis}"
    held = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "forward", inputs, [], initializer=held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    first, second = (given | constants | run_everything(model, given) for given in (small, large))
    return _Measured(
        {name: symbolic_shape(first[name].shape, second[name].shape, name) for name in first},
        {name: value.dtype for name, value in first.items()},
    )


def check_operator(
    op_type: str,
    reference: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Input],
    *,
    fill: Fill | Sequence[Fill] = normal,
    outputs: Sequence[str] = ("y",),
    unused: Sequence[str] = (),
    opset: int = OPSET,
    last_steps: int | None = None,
    **attrs: Any,
) -> None:
    """One node against PyTorch: outputs, and gradients with all inputs trained and with each one alone.

    `reference` takes the inputs that are not constants and gives one tensor for each output; an absent output
    has the name "". Outputs in `unused` get no gradient from above. An array in `inputs` is a constant.
    """
    names = ["" if item is None else f"in{index}" for index, item in enumerate(inputs)]
    node = helper.make_node(op_type, names, outputs, name=f"/{op_type}", **attrs)
    named = dict(zip(names, inputs))
    check_nodes([node], reference, named, fill=fill, unused=unused, opset=opset, last_steps=last_steps)


def check_nodes(
    nodes: Sequence[NodeProto],
    reference: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Mapping[str, Input],
    *,
    fill: Fill | Sequence[Fill] = normal,
    unused: Sequence[str] = (),
    opset: int = OPSET,
    last_steps: int | None = None,
) -> None:
    """Like `check_operator` for several nodes; `reference` gives the outputs of the last of them."""
    inputs = {name: item for name, item in inputs.items() if item is not None}
    constants = {name: item for name, item in inputs.items() if isinstance(item, np.ndarray)}
    trained = [name for name, item in inputs.items() if isinstance(item, tuple)]
    fills = fill if isinstance(fill, Sequence) else [fill] * len(trained)
    makers = dict(zip(trained, fills, strict=True))

    def feed(batch: int) -> Arrays:
        rng = np.random.default_rng(batch)
        values = {}
        for name, item in inputs.items():
            if not isinstance(item, np.ndarray):
                shape, maker = (item.shape, item.fill) if isinstance(item, Fixed) else (item, makers[name])
                values[name] = np.asarray(maker(rng, tuple(batch if dim is None else dim for dim in shape)))
        return values

    data = feed(RUN_BATCH)
    tensors = {name: torch.from_numpy(value) for name, value in data.items()}
    tensors |= {name: tensors[name].double().requires_grad_() for name in trained}
    results = reference(*tensors.values())
    results = [results] if isinstance(results, Tensor) else list(results)
    expected = dict(zip(filter(None, nodes[-1].output), results, strict=True))
    rng = np.random.default_rng(0)
    seeds = {name: normal(rng, tuple(value.shape)) for name, value in expected.items() if name not in unused}
    total = torch.stack([(expected[name] * torch.from_numpy(seed)).sum() for name, seed in seeds.items()]).sum()
    slopes = torch.autograd.grad(total, [tensors[name] for name in trained], materialize_grads=True)
    gradients = {f"{name}.grad": slope.numpy() for name, slope in zip(trained, slopes, strict=True)}
    for chosen in [trained, *([name] for name in trained if len(trained) > 1)]:
        found = operator_gradients(nodes, feed, chosen, seeds, constants, opset=opset, last_steps=last_steps)
        title = f"{nodes[-1].op_type} with {', '.join(chosen)} trained"
        assert_close(found, {name: value.detach().numpy() for name, value in expected.items()}, f"outputs of {title}")
        wanted = {f"{name}.grad": gradients[f"{name}.grad"] for name in chosen}
        assert_close(found, wanted, f"gradients of {title}", largest(gradients))
