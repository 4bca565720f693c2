"""Writing a bundle: capture, cut, differentiate, and put everything into one directory at once."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from edge_runtime.bundle_files import file_ref, write_weights
from edge_runtime.data.token_file import write_ids
from edge_runtime.engine.session import RuntimeSettings, inference_session, training_session
from federation.capacity import capacity
from federation.errors import EmbraceError, InputError
from federation.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    Boundary,
    FileRef,
    Layer,
    Manifest,
    Measuring,
    MemoryPlan,
    TensorSpec,
    dumps,
    narrow_name,
)
from federation.space import ParameterSpace
from federation.weights import places
from model_export.autodiff.chunked_loss import find_output_product
from model_export.autodiff.engine import has_every_rule
from model_export.autodiff.losses import labels_spec
from model_export.autodiff.registry import has_rule
from model_export.autodiff.rules.dropout import SEEDED
from model_export.capacity import RECURRENT_VALUES, layer_activations, layer_macs
from model_export.capture import EXPORTERS, REMEDY, Captured, Exporter, cause
from model_export.crossing import sample_shape
from model_export.errors import ExportError
from model_export.frozen import freeze, stored_elements, write_frozen
from model_export.graph import Graph, serialise
from model_export.head import HeadCut
from model_export.layers import LayerGraph, find_layer, split_layers
from model_export.lifetimes import step_memory
from model_export.lora import adapt_graph
from model_export.memory_plan import plan_memory
from model_export.narrow import check_narrow, narrow_shapes, narrow_source
from model_export.normalise import normalise
from model_export.ort_artifacts import unsupported, write_artifacts
from model_export.own_loss import TracedLoss, trace_loss
from model_export.recompute import SLOWER
from model_export.source import ModelSource, named_outputs, with_shapes
from model_export.training import (
    head_graph,
    inference_graph,
    measuring_graph,
    ort_forward_graph,
    tensor_spec,
    training_graph,
    uses_seed,
)
from model_export.zoo import Tier

ENGINES = ("portable", "ort-training")
TRIED_LENGTH = 8  # tokens of the text that a tokenizer is tried with
ONE_LAYER = (
    "the model is one layer: nothing that a device could store separates two groups of weights, so every device trains "
    "all of it"
)
# Called with what happens now, and how many of how many steps are done.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Choices:
    """Which boundaries get a training graph, and for which engines."""

    splits: Sequence[str] = ()  # boundary names; empty: all, or the tiers'
    tiers: Mapping[str, float] | None = None  # tier -> capacity
    engines: Sequence[str] = ("portable",)
    widths: Sequence[float] = ()  # shares of the channels that narrow boundaries keep
    memory_plan: MemoryPlan = "balanced"

    def __post_init__(self) -> None:
        unknown = sorted(set(self.engines) - set(ENGINES))
        if unknown or not self.engines:
            raise InputError(f"unknown engine {', '.join(unknown)!r}; expected {' or '.join(ENGINES)}")
        if self.memory_plan not in SLOWER:
            raise InputError(f"memory plan {self.memory_plan!r}: expected {', '.join(SLOWER)}")
        if self.tiers is not None and not isinstance(self.tiers, Mapping):
            raise InputError(f"tiers: expected a capacity for each tier, as in {{'weak': 0.3}}, got {self.tiers!r}")
        for tier, share in (self.tiers or {}).items():
            if not tier or tier == "strong":
                raise InputError(f"tier {tier!r}: a tier needs a name, and 'strong' is the one that trains everything")
            if not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
                raise InputError(f"tier {tier!r}: a capacity lies between 0 and 1, got {share}")
        if not all(0.0 < width < 1.0 for width in self.widths) or len(set(self.widths)) < len(self.widths):
            raise InputError(
                f"widths {', '.join(f'{width:g}' for width in self.widths)}: expected different numbers between 0 and 1"
            )


@dataclass(frozen=True)
class Cut:
    """A boundary to be exported: a layer, possibly with shortened backpropagation through time."""

    layer: int
    last_steps: int | None = None


def usable_graph(capture: Callable[[Sequence[Exporter]], Captured], sample: Callable[[int], np.ndarray]) -> Graph:
    """The working form of a captured model; a graph that is of no use is made again by PyTorch's other exporter.

    An operator without a rule is no mistake yet: the layer that has it may be frozen at every boundary.
    """
    captured = capture(EXPORTERS)
    try:
        found = _normalised(captured, sample)
        if has_every_rule(found) or not captured.others:
            return found
    except Exception as error:  # whatever onnx and onnxruntime raise about a foreign graph
        if captured.others:
            with contextlib.suppress(Exception):
                return _normalised(capture(captured.others), sample)
        if isinstance(error, EmbraceError):
            raise
        raise ExportError(f"the forward graph cannot be used: {cause(error)}; {REMEDY}") from error
    with contextlib.suppress(Exception):
        other = _normalised(capture(captured.others), sample)
        if has_every_rule(other):
            return other
    return found


def _normalised(captured: Captured, sample: Callable[[int], np.ndarray]) -> Graph:
    """With what the module does besides the graph."""
    vectors = [name for item in captured.power_iterations for name in (item.u, item.v)]
    graph = normalise(captured.model, captured.trainable, sample, has_rule, vectors, captured.from_torch)
    graph.fixed_rows = captured.fixed_rows
    graph.power_iterations = captured.power_iterations
    graph.untrained = captured.untrained
    return graph


def load_graph(source: ModelSource) -> tuple[Graph, list[LayerGraph]]:
    """Capture a model and cut it into layers."""
    graph = usable_graph(source.capture, source.sample)
    lora, storage, frozen = source.origin.lora, source.origin.storage, graph.untrained
    if lora is not None:
        frozen = adapt_graph(graph, source.adapters(graph), lora, source.origin.seed)
    if storage is not None and lora is None and not frozen:
        raise InputError(
            f"frozen {storage}: every weight of {source.name} is trained, so there is none to store; freeze some with "
            "requires_grad_(False), or train adapters with --lora"
        )
    freeze(graph, frozen, storage)
    return graph, split_layers(graph)


def export_bundle(
    source: ModelSource,
    out: Path,
    choices: Choices | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Manifest:
    """Write the bundle of a model to a directory that must be absent or empty."""
    choices = choices or Choices()
    if choices.widths and (source.origin.lora or source.origin.storage):
        raise InputError("narrow models have no adapters and no stored weights; give --widths, or --lora and --frozen")
    if source.tokenizer is not None:
        write_ids(source.tokenizer, [("a", True)], np.uint32, TRIED_LENGTH)  # refuses what no device could use
    out = out.resolve()
    _check_target(out)
    progress("capturing the model", 0, 1)
    source = with_shapes(source)
    graph, layers = load_graph(source)
    traced = trace_loss(source.own, named_outputs(source, graph)) if source.own is not None else None
    with _workshop(out.parent) as workshop:
        manifest = _write(source, graph, layers, traced, choices, workshop, progress)
        _check_loads(manifest, workshop)
        _move(workshop, out)
    return manifest


@contextlib.contextmanager
def _workshop(parent: Path) -> Iterator[Path]:
    """A directory beside the target to write in, gone afterwards whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix=".embrace-export-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(workshop: Path, out: Path) -> None:
    """Into place at once; into a directory that exists (and is empty) file by file, the manifest last."""
    if not out.exists():
        workshop.chmod(0o755)
        workshop.rename(out)
        return
    for path in sorted(workshop.iterdir(), key=lambda path: path.name == MANIFEST_NAME):
        path.rename(out / path.name)


def _check_loads(manifest: Manifest, directory: Path) -> None:
    """Nothing leaves the exporter that a runtime does not load: the largest training graphs, and every layer."""
    for boundary in manifest.boundaries:
        if boundary.train and boundary.layer == 0:
            training_session(directory / boundary.train.name, RuntimeSettings())
    heads = [boundary.head for boundary in manifest.boundaries if boundary.head]
    for layer in (*manifest.layers, *heads):
        for measuring in {False, layer.measuring is not None}:
            inference_session(directory / layer.graph(measuring).name, RuntimeSettings())


def _check_target(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out} exists and is not empty; choose another --out or remove it")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; --out takes a directory")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _workshop(out.parent):
            pass
    except OSError as error:
        raise InputError(f"cannot write to {out.parent}: {error.strerror}; choose another --out") from None


def _write(
    source: ModelSource,
    graph: Graph,
    layers: list[LayerGraph],
    traced: TracedLoss | None,
    choices: Choices,
    directory: Path,
    progress: Progress,
) -> Manifest:
    output = tensor_spec(graph, graph.output)
    if traced is not None:
        source = replace(source, loss=traced.write(directory))
    labels = labels_spec(source.loss, output) if traced is None else traced.label_spec
    space = ParameterSpace([layer.parameters for layer in layers])
    write_weights(directory / WEIGHTS_NAME, space, space.flatten(graph.parameters()))
    frozen, where = write_frozen(directory, graph), places(space)
    product = find_output_product(graph, source.loss)
    described = []
    for index, layer in enumerate(layers):
        name = f"forward.{_file_stem(index, layer.name)}.onnx"
        (directory / name).write_bytes(serialise(inference_graph(graph, layer, where)))
        measuring = _write_measuring(graph, layer, where, directory, f"measure.{_file_stem(index, layer.name)}.onnx")
        described.append(replace(_describe(graph, layer, file_ref(directory, name)), measuring=measuring))
    plain = Manifest(
        version=FORMAT_VERSION,
        name=source.name,
        source=source.origin,
        opset=graph.opset,
        loss=source.loss,
        input=tensor_spec(graph, graph.input),
        labels=labels,
        output=output,
        vocabulary=source.vocabulary,
        batch=source.batch,
        uses_seed=uses_seed(graph),
        layers=tuple(described),
        boundaries=(),
        tiers={},
        weights=file_ref(directory, WEIGHTS_NAME),
        classes=source.classes,
        preprocessing=source.preprocessing,
        inputs=source.inputs,
        stored=frozen,
        tokenizer=_copy_tokenizer(source, directory),
        loss_chunk=product.chunk if product else None,
        memory_plan=choices.memory_plan,
    )
    cuts, tiers = choose_cuts(plain, graph, layers, choices, source.tiers)
    boundaries: list[Boundary] = []
    notes = [ONE_LAYER] if len(layers) == 1 else []
    total = len(cuts) + len(choices.widths)
    for number, (own, suffix, plain_boundary) in enumerate(_to_write(source, graph, layers, cuts, choices)):
        progress(f"differentiating from {plain_boundary.name}", number, total)
        boundary, remarks = _write_boundary(own, suffix, plain_boundary, source, traced, choices, directory, where)
        boundaries.append(boundary)
        notes += [remark for remark in remarks if remark not in notes]
    progress("done", total, total)
    named = {tier: boundary_name(layers, cut) for tier, cut in tiers.items()}
    manifest = replace(plain, boundaries=tuple(boundaries), tiers=named, notes=tuple(notes))
    (directory / MANIFEST_NAME).write_bytes(dumps(manifest).encode())  # as text Windows would end lines otherwise
    return manifest


def _copy_tokenizer(source: ModelSource, directory: Path) -> FileRef | None:
    if source.tokenizer is None:
        return None
    shutil.copyfile(source.tokenizer, directory / TOKENIZER_NAME)
    return file_ref(directory, TOKENIZER_NAME)


def _to_write(
    source: ModelSource, graph: Graph, layers: list[LayerGraph], cuts: Sequence[Cut], choices: Choices
) -> Iterator[tuple[Graph, list[LayerGraph], Boundary]]:
    """Every boundary without its files, with the graph it is cut from and its layers; narrow ones are the last."""
    # Before anything is differentiated: that takes long, and not every model has every width.
    narrow = [_narrow(source, layers, width) for width in sorted(choices.widths, reverse=True)]
    for cut in cuts:
        yield graph, layers[cut.layer :], _plain_boundary(graph, layers, cut)
    yield from narrow


def _narrow(source: ModelSource, wide: list[LayerGraph], width: float) -> tuple[Graph, list[LayerGraph], Boundary]:
    graph, layers = load_graph(narrow_source(source, width))
    check_narrow(source, width, wide, layers)
    plain = _plain_boundary(graph, layers, Cut(0))
    name = narrow_name(layers[0].name, width)
    return graph, layers, replace(plain, name=name, width=width, narrow=narrow_shapes(layers))


def _write_measuring(
    graph: Graph, layer: LayerGraph, where: Mapping[str, tuple[int, int]], directory: Path, name: str
) -> Measuring | None:
    made = measuring_graph(graph, layer, where)
    if made is None:
        return None
    (directory / name).write_bytes(serialise(made[0]))
    return Measuring(file_ref(directory, name), made[1])


def _describe(graph: Graph, layer: LayerGraph, forward: FileRef) -> Layer:
    return Layer(
        name=layer.name,
        input=tensor_spec(graph, layer.input),
        output=tensor_spec(graph, layer.output),
        parameters=tuple(layer.parameters),
        activations=layer_activations(graph, layer),
        macs=layer_macs(graph, layer),
        dropouts=sum(node.op_type in SEEDED for node in layer.nodes),
        forward=forward,
        borrowed=tuple(p.name for p in layer.borrowed) or None,
        packed=None if layer.output in layer.leaving else tuple(_part_spec(graph, name) for name in layer.leaving),
        stored=stored_elements(graph, layer) if graph.stored else None,
    )


def _part_spec(graph: Graph, name: str) -> TensorSpec:
    return TensorSpec(str(graph.dtypes[name]), sample_shape(graph, name))


def boundary_name(layers: Sequence[LayerGraph], cut: Cut) -> str:
    """The layer's name, with @steps where backpropagation through time is shortened."""
    name = layers[cut.layer].name
    return f"{name}@{cut.last_steps}" if cut.last_steps else name


def choose_cuts(
    manifest: Manifest,
    graph: Graph,
    layers: list[LayerGraph],
    choices: Choices,
    known: Mapping[str, Tier],
) -> tuple[list[Cut], dict[str, Cut]]:
    """Boundaries to export, input side first, and which of them each tier uses. `strong` trains everything."""
    tiers = {"strong": Cut(0)}
    if choices.tiers is not None:
        for tier, share in choices.tiers.items():
            tiers[tier] = _largest_within(manifest, graph, layers, tier, share)
    elif not choices.splits:
        for tier, place in known.items():
            tiers[tier] = Cut(find_layer(layers, place.boundary), place.last_steps)
    cuts = set(tiers.values())
    if choices.splits:
        cuts |= {_parse_split(layers, text) for text in choices.splits}
    elif choices.tiers is None:
        cuts |= {Cut(index) for index, layer in enumerate(layers) if layer.parameters or layer.borrowed or not index}
    return sorted(cuts, key=lambda cut: (cut.layer, -(cut.last_steps or 1 << 30))), tiers


def _parse_split(layers: Sequence[LayerGraph], text: str) -> Cut:
    name, _, steps = text.partition("@")
    if steps and not (steps.isdigit() and int(steps) > 0):
        raise InputError(f"split {text!r}: expected a boundary name, or name@steps with a positive number of steps")
    cut = Cut(find_layer(layers, name), int(steps) if steps else None)
    kinds = {node.op_type for layer in layers[cut.layer :] for node in layer.nodes}
    if cut.last_steps and not kinds & set(RECURRENT_VALUES):
        raise InputError(f"split {text!r}: there is no recurrent layer from {name!r} on, so @steps means nothing")
    return cut


def _largest_within(manifest: Manifest, graph: Graph, layers: list[LayerGraph], tier: str, share: float) -> Cut:
    """The boundary nearest to the input whose capacity does not exceed the given one."""
    for index in range(len(layers)):
        boundary = _plain_boundary(graph, layers, Cut(index))
        if capacity(manifest, boundary) <= share:
            return Cut(index)
    smallest = capacity(manifest, _plain_boundary(graph, layers, Cut(len(layers) - 1)))
    raise ExportError(f"tier {tier}={share}: no boundary is that small; the last layer alone needs {smallest:.3f}")


def _plain_boundary(graph: Graph, layers: Sequence[LayerGraph], cut: Cut) -> Boundary:
    activations = sum(layer_activations(graph, layer, cut.last_steps) for layer in layers[cut.layer :])
    return Boundary(boundary_name(layers, cut), cut.layer, cut.last_steps, activations, None, ())


def _write_boundary(
    graph: Graph,
    suffix: Sequence[LayerGraph],
    boundary: Boundary,
    source: ModelSource,
    traced: TracedLoss | None,
    choices: Choices,
    directory: Path,
    where: Mapping[str, tuple[int, int]],
) -> tuple[Boundary, list[str]]:
    """One boundary's graphs for each engine, and what could not be done."""
    stem = _file_stem(boundary.layer, boundary.name)
    notes: list[str] = []
    if "portable" in choices.engines:
        name = f"train.{stem}.onnx"
        cut = head_cut(graph, suffix, boundary)
        write = partial(training_graph, graph, suffix, source.loss, boundary.last_steps, cut, traced=traced)
        planned = plan_memory(lambda parts, alone: write(parts=parts, alone=alone), source.batch, choices.memory_plan)
        (directory / name).write_bytes(serialise(planned.model))
        head = _write_head(cut, boundary, where, directory, f"forward.{stem}.onnx") if cut else None
        memory = step_memory(planned.model, planned.sizes, graph.stored)
        boundary = replace(boundary, train=file_ref(directory, name), step_memory=memory, head=head)
    if "ort-training" in choices.engines:
        refs, notes = _write_ort(graph, suffix, boundary, source, directory, f"ort_training/{stem}")
        boundary = replace(boundary, ort_training=refs)
    return boundary, notes


def head_cut(graph: Graph, suffix: Sequence[LayerGraph], boundary: Boundary) -> HeadCut | None:
    """Where the first steps end that run once per round; None where all are trained, or numbers of words come in."""
    if boundary.last_steps is None or graph.dtypes[suffix[0].input] != np.float32:
        return None
    cut = HeadCut(graph, suffix, boundary.last_steps)
    return cut if cut.heads else None


def _write_head(
    cut: HeadCut, boundary: Boundary, where: Mapping[str, tuple[int, int]], directory: Path, name: str
) -> Layer:
    model, parameters = head_graph(cut, where)
    (directory / name).write_bytes(serialise(model))

    def skipped(count: Callable[[Graph, LayerGraph, int | None], int]) -> int:
        """What the trained steps do not have of a count."""
        return sum(count(cut.graph, layer, None) - count(cut.graph, layer, cut.last_steps) for layer in cut.layers)

    return Layer(
        name=boundary.name,
        input=tensor_spec(cut.graph, cut.layers[0].input),
        output=TensorSpec("float32", (cut.size,)),
        parameters=tuple(parameters),
        activations=skipped(layer_activations),
        macs=skipped(layer_macs),
        dropouts=0,
        forward=file_ref(directory, name),
    )


def _write_ort(
    graph: Graph, suffix: Sequence[LayerGraph], boundary: Boundary, source: ModelSource, directory: Path, folder: str
) -> tuple[tuple[FileRef, ...], list[str]]:
    if boundary.last_steps:
        return (), ["ort-training: shortened backpropagation through time is for the portable engine only"]
    if any(p.name in graph.fixed_rows for layer in suffix for p in layer.parameters):
        return (), ["ort-training: it would train the padding row of an embedding"]
    if any(p.name == item.u for item in graph.power_iterations for layer in suffix for p in layer.parameters):
        return (), ["ort-training: it would not move the vectors of spectral norm"]
    if graph.stored:
        return (), ["ort-training: it would hold the frozen weights of the file in memory"]
    forward = ort_forward_graph(graph, suffix)
    reasons = unsupported(forward, source.loss)
    if reasons:
        return (), [f"ort-training: {reason}" for reason in reasons]
    target = directory / folder
    target.mkdir(parents=True)
    parameters = [p for layer in suffix for p in layer.parameters]
    paths = write_artifacts(
        forward,
        [p.name for p in parameters if p.kind == "weight"],
        [p.name for p in parameters if p.kind == "statistic"],
        source.loss,
        target,
    )
    return tuple(file_ref(directory, f"{folder}/{path.name}") for path in sorted(paths)), []


def _file_stem(index: int, name: str) -> str:
    return f"{index:02d}-{re.sub(r'[^A-Za-z0-9_.@-]', '_', name)[:80]}"
