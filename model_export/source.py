"""What the user named: a zoo model, a factory in a Python file, or an ONNX file. All become a `ModelSource`."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

from edge_runtime.user_module import import_file, neighbours, one_line
from federation.errors import InputError
from federation.inputs import NamedInput, check_inputs, row_dtype, row_size
from federation.manifest import Loss, LossName, Source
from federation.preprocessing import Preprocessing
from model_export.capture import EXPORTERS, OUTPUT_NAME, Captured, Exporter, capture_torch
from model_export.constant_weights import lift_constant_weights
from model_export.control_flow import write_out
from model_export.errors import ExportError
from model_export.graph import Graph
from model_export.inputs import called_with_row, sample_row, take_row
from model_export.lora import Target, adapt_module, choose, graph_targets, module_targets
from model_export.modes import set_modes
from model_export.new_head import replace_head
from model_export.normalise import make_batch_dynamic, to_supported_opset
from model_export.outputs import USUAL, named_tensors, output_names, pick_output
from model_export.own_loss import IN_MEMORY, OwnFunction
from model_export.plain_operators import plain_operators
from model_export.shapes import run_values, sample_input
from model_export.zoo import ZOO, Tier, ZooModel, narrower, zoo_model

DEFAULT_BATCH = 32
Module = nn.Module
MOST_ELEMENTS, MOST_BATCH = 1 << 28, 1 << 20  # of one sample, of one batch


@dataclass(frozen=True)
class ModelSource:
    """A model before capture, and everything that is known about its use."""

    name: str
    origin: Source
    input_shape: tuple[int, ...]
    input_dtype: str
    vocabulary: int | None
    loss: Loss
    batch: int
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    build: Callable[[], nn.Module] | None = None  # PyTorch sources
    build_head: Callable[[int], nn.Module] | None = None  # those whose number of classes can be chosen
    build_narrow: Callable[[float], nn.Module] | None = None  # those that can keep a share of their channels
    classes: tuple[str, ...] | None = None  # names of the classes, in the order of their numbers
    preprocessing: Preprocessing | None = None  # how stored values become inputs
    inputs: tuple[NamedInput, ...] | None = None  # of a model that takes several; shape and type are then the row's
    tokenizer: Path | None = None  # tokenizer.json, which travels in the bundle
    own: OwnFunction | None = None  # a loss that is traced; `loss` then says nothing yet

    def sample(self, batch: int, seed: int = 0) -> np.ndarray[Any, Any]:
        """Random input of the right shape and type."""
        if self.inputs is not None:
            return sample_row(self.inputs, batch, seed)
        array: np.ndarray[Any, Any] = sample_input(self.input_shape, self.input_dtype, self.vocabulary, batch, seed)
        return array

    def module(self) -> nn.Module:
        """The PyTorch module, with the weights its seed gives, and adapters if there are to be any."""
        module = self.plain_module()
        return module if self.origin.lora is None else adapt_module(module, self.origin.lora)

    def plain_module(self) -> nn.Module:
        """The PyTorch module as its factory makes it."""
        if self.build is None:
            raise ExportError(f"{self.origin.reference} is an ONNX file, it has no PyTorch module")
        torch.manual_seed(self.origin.seed)
        classes = self.origin.new_head
        built = self.build() if classes is None or self.build_head is None else self.build_head(classes)
        module = pick_output(built, self.origin.output, self.inputs)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
            modes = {path: part.training for path, part in module.named_modules()}
            with torch.no_grad():  # lazy modules take their sizes from the first input
                module.eval()(torch.from_numpy(self.sample(2)))
            set_modes(module, modes)
        return module

    def capture(self, exporters: Sequence[Exporter] = EXPORTERS) -> Captured:
        """The forward graph, by the first of these exporters of PyTorch that can."""
        if self.build is None:
            return capture_onnx(self.origin, self.sample, self.inputs)
        module, sample = self.plain_module(), torch.from_numpy(self.sample(2))
        if self.origin.lora is None and self.origin.storage is None:
            return capture_torch(module, sample, exporters)
        # Everything is captured as a parameter, under its own name, and frozen afterwards.
        untrained = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        captured = capture_torch(module.requires_grad_(True), sample, exporters)
        return replace(captured, untrained=[name for name in untrained if name in set(captured.trainable)])

    def adapters(self, graph: Graph) -> dict[str, Target]:
        """The layers that get adapters."""
        assert self.origin.lora is not None
        targets = graph_targets(graph) if self.build is None else module_targets(self.plain_module())
        return choose(targets, self.origin.lora)


def with_shapes(source: ModelSource) -> ModelSource:
    """Tell the heads of a loss the shapes of their outputs."""
    if source.loss.heads is None:
        return source
    known = {item.name: item.shape for item in _output_shapes(source)}
    heads = tuple(replace(head, shape=known[head.name]) for head in source.loss.heads)
    return replace(source, loss=replace(source.loss, heads=heads))


def named_outputs(source: ModelSource, graph: Graph) -> tuple[NamedInput, ...]:
    """Describe what a loss takes: the output of the graph, or several by name."""
    if output_names(source.origin.output):
        return _output_shapes(source)
    return (NamedInput("output", "float32", tuple(int(dim or 0) for dim in graph.shapes[graph.output][1:])),)


def _output_shapes(source: ModelSource) -> tuple[NamedInput, ...]:
    """Run a model once to see the outputs that its row is made of."""
    names, sample = output_names(source.origin.output) or [str(source.origin.output)], source.sample(2)
    if source.build is None:
        model = _load_onnx(Path(source.origin.reference))
        if source.inputs is not None:
            take_row(model, source.inputs)
        _refuse_unknown_outputs(model, names)
        found = run_values(model, {model.graph.input[0].name: sample}, names)
        return tuple(NamedInput(name, "float32", found[name].shape[1:]) for name in names)
    torch.manual_seed(source.origin.seed)
    module = source.build()
    call = called_with_row(module, source.inputs) if source.inputs is not None else module
    with torch.no_grad(), plain_operators():
        tensors = named_tensors(call(torch.from_numpy(sample)), names)
    return tuple(NamedInput(name, "float32", tuple(value.shape[1:])) for name, value in tensors.items())


def load_source(
    reference: str,
    *,
    input_shape: tuple[int, ...] | None = None,
    input_dtype: str | None = None,
    vocabulary: int | None = None,
    loss: Loss | None = None,
    batch: int | None = None,
    seed: int = 0,
    inputs: tuple[NamedInput, ...] | None = None,
) -> ModelSource:
    """Understand a reference as `embrace export` takes it; `inputs` are those of a model that takes several."""
    if inputs is not None:
        input_shape, input_dtype = _row(inputs)
    _check_ranges(input_shape, vocabulary, batch, seed)
    if reference.endswith(".onnx"):
        return _onnx_source(reference, input_shape, input_dtype, vocabulary, loss, batch, inputs)
    if ".py:" in reference:
        found = _file_source(reference, input_shape, input_dtype, vocabulary, loss, batch, seed)
        return replace(found, inputs=inputs)
    if reference.partition("@")[0] not in ZOO and re.search("[A-Za-z]", Path(reference).suffix):
        raise InputError(
            f"cannot tell what {reference!r} is: expected a zoo name, path/to/file.py:factory or a file ending in .onnx"
        )
    entry = zoo_model(reference)
    if entry.inputs is not None:
        return _text_source(entry, input_shape, inputs, loss, batch, seed)
    given = {"--input": input_shape, "--dtype": input_dtype, "--vocabulary": vocabulary}
    for option, value in given.items():
        if value is not None:
            raise InputError(
                f"{option} is fixed for zoo models; {reference} takes {entry.input_shape} {entry.input_dtype}"
            )
    return ModelSource(
        name=entry.name,
        origin=Source("zoo", entry.name, seed),
        input_shape=entry.input_shape,
        input_dtype=entry.input_dtype,
        vocabulary=entry.vocabulary,
        loss=loss or _zoo_loss(entry),
        batch=batch or entry.batch,
        tiers=entry.tiers,
        build=entry.build,
        build_narrow=lambda width: zoo_model(narrower(reference, width)).build(),
        tokenizer=entry.tokenizer() if entry.tokenizer is not None else None,
    )


def _text_source(
    entry: ZooModel,
    shape: tuple[int, ...] | None,
    given: Sequence[NamedInput] | None,
    loss: Loss | None,
    batch: int | None,
    seed: int,
) -> ModelSource:
    """A classifier of texts; of its inputs only the length can be chosen."""
    assert entry.inputs is not None and entry.longest is not None
    shape = shape if given is None else given[0].shape
    if shape is not None and (len(shape) != 1 or not 2 <= shape[0] <= entry.longest):
        raise InputError(f"--input of {entry.name}: expected a number of tokens from 2 to {entry.longest}")
    inputs = tuple(replace(item, shape=shape or item.shape) for item in entry.inputs)
    if given is not None and tuple(given) != inputs:
        raise InputError(f"--input of {entry.name}: expected one number, its tokens, as in --input 64")
    row, dtype = _row(inputs)
    build = partial(entry.build, inputs[0].shape[0])
    return ModelSource(
        name=entry.name,
        origin=Source("zoo", entry.name, seed),
        input_shape=row,
        input_dtype=dtype,
        vocabulary=None,
        loss=loss or Loss(_loss_name(entry.loss)),
        batch=batch or entry.batch,
        tiers=entry.tiers,
        build=build,
        build_head=build,
        inputs=inputs,
        tokenizer=entry.tokenizer() if entry.tokenizer is not None else None,
    )


def _row(inputs: Sequence[NamedInput]) -> tuple[tuple[int, ...], str]:
    """Shape and type of what several inputs are packed into."""
    check_inputs(inputs)
    return (row_size(inputs),), row_dtype(inputs)


def module_source(
    module: nn.Module,
    *,
    input_shape: tuple[int, ...] | None,
    input_dtype: str | None = None,
    vocabulary: int | None = None,
    loss: Loss | None = None,
    batch: int | None = None,
    seed: int = 0,
    inputs: tuple[NamedInput, ...] | None = None,
) -> ModelSource:
    """Take a module as it is, with its weights. No other process can build it again."""
    if inputs is not None:
        input_shape, input_dtype = _row(inputs)
    _check_ranges(input_shape, vocabulary, batch, seed)
    if not isinstance(module, nn.Module):
        raise InputError(f"expected a torch.nn.Module, a zoo name, file.py:factory or model.onnx, got {type(module)}")
    if input_shape is None:
        raise InputError("say what the model takes: sample=ARRAY, or input_shape=(3, 32, 32) without the batch")
    name = type(module).__name__
    return ModelSource(
        name=name,
        origin=Source("torch", f"{IN_MEMORY}:{name}", seed),
        input_shape=input_shape,
        input_dtype=input_dtype or "float32",
        vocabulary=vocabulary,
        loss=loss or Loss("cross_entropy"),
        batch=batch or DEFAULT_BATCH,
        build=lambda: copy.deepcopy(module),
        inputs=inputs,
    )


def _check_ranges(shape: tuple[int, ...] | None, vocabulary: int | None, batch: int | None, seed: int) -> None:
    if shape is not None and (min(shape, default=1) < 1 or math.prod(shape) > MOST_ELEMENTS):
        raise InputError(f"input shape {shape}: expected positive sizes and at most {MOST_ELEMENTS:,} elements")
    if vocabulary is not None and not 1 <= vocabulary < 2**31:
        raise InputError(f"vocabulary {vocabulary}: expected the number of different tokens, between 1 and 2^31")
    if batch is not None and not 1 <= batch <= MOST_BATCH:
        raise InputError(f"batch {batch}: expected a number between 1 and {MOST_BATCH:,}")
    if not 0 <= seed < 2**63:
        raise InputError(f"seed {seed}: expected a number between 0 and 2^63")


def reload_source(origin: Source, **known: Any) -> ModelSource:
    """The source a bundle was made from."""
    if origin.kind == "zoo":
        known = {name: known[name] for name in ("loss", "batch", "inputs") if known.get(name) is not None}
    source = load_source(origin.reference, **known, seed=origin.seed)
    return replace(source, origin=origin)


def _zoo_loss(entry: ZooModel) -> Loss:
    if entry.next_token:
        return Loss(_loss_name(entry.loss), classes_last=True, next_token=True)
    return Loss(_loss_name(entry.loss))


def _loss_name(name: str) -> LossName:
    if name not in get_args(LossName):
        raise InputError(f"unknown loss {name!r}; expected {', '.join(get_args(LossName))}")
    return name  # type: ignore[return-value]


def _file_source(
    reference: str,
    input_shape: tuple[int, ...] | None,
    input_dtype: str | None,
    vocabulary: int | None,
    loss: Loss | None,
    batch: int | None,
    seed: int,
) -> ModelSource:
    path_text, _, factory = reference.rpartition(":")
    path = Path(path_text)
    if input_shape is None:
        raise InputError(
            f"{reference}: say what the model takes, without the batch: --input 3,32,32; several inputs by name: "
            "--input ids=16:int64:1000 --input mask=16:bool"
        )
    build, takes_width = _load_factory(path, factory)
    return ModelSource(
        name=f"{path.stem}.{factory}",
        origin=Source("torch", reference, seed),
        input_shape=input_shape,
        input_dtype=input_dtype or "float32",
        vocabulary=vocabulary,
        loss=loss or Loss("cross_entropy"),
        batch=batch or DEFAULT_BATCH,
        build=build,
        build_narrow=(lambda width: build(width=width)) if takes_width else None,
    )


def _load_factory(path: Path, name: str) -> tuple[Callable[..., nn.Module], bool]:
    """A user's function that builds a model, and whether it takes a width."""
    module = import_file(path)
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = sorted(k for k, v in vars(module).items() if callable(v) and not k.startswith("_"))
        raise InputError(f"{path} has no callable named {name!r}; it has: {', '.join(functions) or 'none'}")

    def build(**options: float) -> nn.Module:
        try:
            with neighbours(path):
                built = factory(**options)
        except (Exception, SystemExit) as error:  # whatever the user's factory raises
            raise InputError(f"the factory {name} in {path} failed: {one_line(error)}") from error
        if not isinstance(built, nn.Module):
            raise InputError(
                f"the factory {name} in {path} must return a torch.nn.Module, it returned {type(built).__name__}"
            )
        return built

    return build, _takes_width(factory)


def _takes_width(factory: Callable[..., Any]) -> bool:
    try:
        return "width" in inspect.signature(factory).parameters
    except ValueError:  # not written in Python
        return False


def _onnx_source(
    reference: str,
    input_shape: tuple[int, ...] | None,
    input_dtype: str | None,
    vocabulary: int | None,
    loss: Loss | None,
    batch: int | None,
    given: Sequence[NamedInput] | None,
) -> ModelSource:
    path = Path(reference)
    model = _load_onnx(path)
    held = {item.name for item in model.graph.initializer}
    found = [value for value in model.graph.input if value.name not in held]
    inputs = None
    if given is not None or len(found) > 1:
        if given is None and input_shape is not None:
            names = ", ".join(value.name for value in found)
            raise InputError(f"{path} has the inputs {names}; say the shape of each by its name: --input NAME=3,32,32")
        inputs = _onnx_inputs(path, found, given or ())
        input_shape, input_dtype = _row(inputs)
    if not found:
        raise ExportError(f"{path} has no input")
    tensor = found[0].type.tensor_type
    dims = [dim.dim_value for dim in tensor.shape.dim][1:]
    if input_shape is None and (not dims or any(size <= 0 for size in dims)):
        raise InputError(f"{path} leaves its input size open; say it without the batch: --input 3,32,32")
    return ModelSource(
        name=path.stem,
        origin=Source("onnx", reference),
        input_shape=input_shape or tuple(dims),
        input_dtype=input_dtype or str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)),
        vocabulary=vocabulary,
        loss=loss or Loss("cross_entropy"),
        batch=batch or DEFAULT_BATCH,
        inputs=inputs,
    )


def _onnx_inputs(
    path: Path, found: Sequence[onnx.ValueInfoProto], given: Sequence[NamedInput]
) -> tuple[NamedInput, ...]:
    """The inputs of a file in its order; what the user said of one goes before what the file says."""
    said = {item.name: item for item in given}
    inputs = []
    for value in found:
        tensor = value.type.tensor_type
        dims = tuple(dim.dim_value for dim in tensor.shape.dim)[1:]
        if value.name not in said and min(dims, default=1) <= 0:
            example = f"--input {value.name}=128:int64:1000"
            raise InputError(f"{path} leaves the size of {value.name!r} open; say it without the batch: {example}")
        kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)).kind
        dtype = {"f": "float32", "b": "bool"}.get(kind, "int64")
        inputs.append(said.pop(value.name) if value.name in said else NamedInput(value.name, dtype, dims))
    if said:
        known = ", ".join(value.name for value in found)
        raise InputError(f"{path} has no input {', '.join(said)}; its inputs are {known}")
    return tuple(inputs)


def _load_onnx(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise InputError(f"no such file: {path}")
    try:
        model = onnx.load(str(path))
        onnx.checker.check_model(model)
    except Exception as error:  # protobuf and the checker raise unrelated types
        raise InputError(f"{path} is not a readable ONNX model: {one_line(error)}") from None
    return model


def capture_onnx(
    origin: Source, sample: Callable[[int], np.ndarray], inputs: Sequence[NamedInput] | None = None
) -> Captured:
    """A forward graph from anywhere. Float initialisers with at least one dimension are taken as trainable."""
    model = _load_onnx(Path(origin.reference))
    if inputs is not None:
        take_row(model, inputs)
    _keep_one_output(model, origin.output)
    if any(item.type == onnx.AttributeProto.GRAPH for node in model.graph.node for item in node.attribute):
        model = to_supported_opset(model)
        make_batch_dynamic(model)
        write_out(model, sample)  # weights may lie in the branches
    lift_constant_weights(model)
    _separate_equal_vectors(model)
    if origin.new_head is not None:
        replace_head(model, origin.new_head, origin.seed)
    trainable = [
        item.name for item in model.graph.initializer if item.data_type == onnx.TensorProto.FLOAT and len(item.dims) > 0
    ]
    used_as_weight = _weight_inputs(model)
    return Captured(model, [name for name in trainable if name in used_as_weight])


def _keep_one_output(model: onnx.ModelProto, name: str | None) -> None:
    if names := output_names(name):
        _pack_outputs(model, names)
        return
    known = [value.name for value in model.graph.output]
    chosen = name or (USUAL if USUAL in known else known[0] if len(known) == 1 else None)
    if chosen not in known:
        asked = "say which one with --output NAME" if name is None else f"it has no output {name!r}"
        raise ExportError(f"the ONNX file has the outputs {', '.join(known)}; {asked}")
    kept = [value for value in model.graph.output if value.name == chosen]
    del model.graph.output[:]
    model.graph.output.extend(kept)


def _refuse_unknown_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    known = [value.name for value in model.graph.output]
    if unknown := [name for name in names if name not in known]:
        raise ExportError(f"the ONNX file has the outputs {', '.join(known)}, and no output {unknown[0]!r}")


def _pack_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Let a model give one row of several outputs."""
    _refuse_unknown_outputs(model, names)
    flat = [f"{OUTPUT_NAME}.{name}" for name in names]
    nodes = [
        onnx.helper.make_node("Flatten", [name], [row], row, axis=1) for name, row in zip(names, flat, strict=True)
    ]
    model.graph.node.extend([*nodes, onnx.helper.make_node("Concat", flat, [OUTPUT_NAME], OUTPUT_NAME, axis=1)])
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info(OUTPUT_NAME, onnx.TensorProto.FLOAT, ["N", None]))


# Inputs that are constants of the operator rather than something to learn.
_NOT_WEIGHTS = {"Resize", "Clip", "Pad", "Dropout", "Pow", "Range", "ConstantOfShape", "Where", "OneHot"}


def _weight_inputs(model: onnx.ModelProto) -> set[str]:
    return {name for node in model.graph.node if node.op_type not in _NOT_WEIGHTS for name in node.input}


def _separate_equal_vectors(model: onnx.ModelProto) -> None:
    """Exporters store equal values once and copy them by Identity: all-zero biases, say, or the ones of batch norm.

    Such vectors are parameters in their own right. A matrix that is copied is a tied weight and stays one.
    """
    held = {item.name: item for item in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        original = held.get(node.input[0]) if node.op_type == "Identity" else None
        if original is not None and len(original.dims) == 1:
            model.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(original), node.output[0]))
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
