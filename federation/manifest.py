"""The bundle manifest: what an exported model consists of, as versioned JSON.

A bundle is a directory with `manifest.json`, `weights.safetensors` and ONNX graphs. The manifest is the contract
between the exporter, the coordinator and the devices; docs/reference/bundle.md explains every field. Version 1.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

from federation.decode import ABSENT, decode
from federation.errors import BundleError, FieldError, InputError
from federation.inputs import NamedInput, check_inputs, row_dtype, row_size
from federation.narrow import Shapes, narrow_space
from federation.preprocessing import Preprocessing
from federation.space import Kind, Parameter, ParameterSpace

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "weights.safetensors"
FROZEN_NAME = "frozen.safetensors"
TOKENIZER_NAME = "tokenizer.json"
ROWS = ".rows"  # ending of a statistic's output in a graph that measures: a row for each that enters its batch norm
MOST_BATCHES = 64  # at which the memory of a boundary is predicted
MAX_MANIFEST_BYTES = 16 << 20  # a network of a thousand layers needs about one megabyte
MAX_TOKENIZER_BYTES = 32 << 20  # a vocabulary of 250,000 pieces needs about 17
LONGEST_CLASS = 200  # characters of a class's name

# A file of a bundle lies in its directory or at most two folders below; no part starts with a dot, so no way out.
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,119}"
_FILE_NAME = re.compile(rf"(?:{_PART}/){{0,2}}{_PART}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Storage = Literal["float32", "float16", "int8", "int4"]  # of frozen weights
MOST_RANK = 4096
# Of training graphs: how much time they give for memory. `half`: as balanced, and values are kept as float16.
MemoryPlan = Literal["fast", "balanced", "small", "half"]
# Of `heads` each output has a loss of these, `own` is a function that was traced into graphs.
LossName = Literal["cross_entropy", "bce_with_logits", "mse", "huber", "focal", "cosine", "heads", "own"]
PLAIN_LOSSES: tuple[LossName, ...] = get_args(LossName)[:-2]
TRACED_LOSSES = ("ctc", "cosine_embedding", "contrastive")  # functions that come with the exporter
CLASSIFYING = ("cross_entropy", "focal")  # labels are class numbers
MOST_HEADS = 64
# What a traced loss of a batch is of its samples: their mean, their sum, a mean over what they count, or neither: then
# samples are compared with each other, and a batch cannot go through in parts.
Reduction = Literal["mean", "sum", "counted", "batch"]


@dataclass(frozen=True)
class FileRef:
    """A file of the bundle, by name and content."""

    name: str
    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        if not _FILE_NAME.fullmatch(self.name):
            raise BundleError(
                f"file name {self.name!r} is not allowed: letters, digits and _ . @ - only, at most two folders deep"
            )
        if not _SHA256.fullmatch(self.sha256):
            raise BundleError(f"file {self.name!r}: sha256 must be 64 hexadecimal digits, got {self.sha256!r}")


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor for ONE sample: the batch dimension in front is left out."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Head:
    """One of several outputs: how much its loss counts, its shape for one sample, and the loss as in `Loss`."""

    name: str
    weight: float
    shape: tuple[int, ...]
    loss: LossName
    label_smoothing: float = 0.0
    ignore_index: int | None = None
    classes_last: bool | None = field(default=None, metadata=ABSENT)
    next_token: bool | None = field(default=None, metadata=ABSENT)
    delta: float | None = field(default=None, metadata=ABSENT)
    gamma: float | None = field(default=None, metadata=ABSENT)

    def __post_init__(self) -> None:
        if self.loss not in PLAIN_LOSSES or not 0 < self.weight < math.inf:
            raise BundleError(f"head {self.name!r}: expected {', '.join(PLAIN_LOSSES)} and a weight above 0")

    @cached_property
    def criterion(self) -> Loss:
        settings = (self.label_smoothing, self.ignore_index, self.classes_last, self.next_token, self.delta, self.gamma)
        return Loss(self.loss, *settings)

    @property
    def output(self) -> NamedInput:
        return NamedInput(self.name, "float32", self.shape)

    @property
    def labels(self) -> NamedInput:
        """Describe the labels, which have the name of the output."""
        if self.loss not in CLASSIFYING:
            return self.output
        rest, classes = (self.shape[:-1], self.shape[-1:]) if self.classes_last else (self.shape[1:], self.shape[:1])
        known = self.ignore_index is None and classes
        return NamedInput(self.name, "int64", rest, classes[0] if known else None)


@dataclass(frozen=True)
class OwnLoss:
    """A function of outputs and labels that was traced: training graphs contain it, and a graph alone scores by it."""

    function: str  # FILE.py:function, the name of one of the exporter's, or memory:NAME
    reduction: Reduction
    labels: tuple[NamedInput, ...]  # one: the function takes a tensor; several: a row, which it takes by name
    outputs: tuple[NamedInput, ...]  # likewise
    graph: FileRef

    @property
    def classes(self) -> int | None:
        """How many classes there are if a sample's label is the number of one of its outputs; None: it is not."""
        count = self.labels[0].vocabulary
        is_number = len(self.labels) == len(self.outputs) == 1 and self.labels[0].shape == ()
        return count if is_number and count is not None and self.outputs[0].shape == (count,) else None


@dataclass(frozen=True)
class Loss:
    """What the training graph minimises: the mean over the batch (over labels that are not ignored)."""

    name: LossName
    label_smoothing: float = 0.0
    ignore_index: int | None = None  # labels of this value do not count
    # Class numbers: the classes stand along the last axis of an output, not along its first.
    classes_last: bool | None = field(default=None, metadata=ABSENT)
    # The output of a position is compared with the label of the next one: labels may be the tokens themselves.
    next_token: bool | None = field(default=None, metadata=ABSENT)
    delta: float | None = field(default=None, metadata=ABSENT)  # huber: errors beyond it count linearly; None: 1
    gamma: float | None = field(default=None, metadata=ABSENT)  # focal: how much less sure labels count; None: 2
    heads: tuple[Head, ...] | None = field(default=None, metadata=ABSENT)  # of the loss `heads`
    own: OwnLoss | None = field(default=None, metadata=ABSENT)  # of the loss `own`

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise BundleError(f"label_smoothing must lie in [0, 1), got {self.label_smoothing}")
        if self.classes_last and self.name not in CLASSIFYING:
            raise BundleError(f"classes_last is for {' and '.join(CLASSIFYING)}, the loss is {self.name}")
        if self.label_smoothing and self.name not in ("cross_entropy", "bce_with_logits"):
            raise BundleError(f"label_smoothing is for cross_entropy and bce_with_logits, the loss is {self.name}")
        if self.ignore_index is not None and self.name == "cosine":
            raise BundleError("ignore_index: the loss cosine compares whole vectors, of which all count")
        self._check_parts()
        for name, value, owner, least in (("delta", self.delta, "huber", 0.0), ("gamma", self.gamma, "focal", 1.0)):
            if value is not None and self.name != owner:
                raise BundleError(f"{name} is for the loss {owner}, the loss is {self.name}")
            if value is not None and not (least <= value < math.inf and value > 0):
                raise BundleError(f"{name} is a positive number of the loss {owner}, at least {least:g}; got {value}")

    def _check_parts(self) -> None:
        if (self.heads is None) == (self.name == "heads") or (self.own is None) == (self.name == "own"):
            raise BundleError(f"the loss {self.name}: expected heads for the loss 'heads', own for the loss 'own'")
        if self.name in ("heads", "own") and (self.ignore_index is not None or self.next_token):
            raise BundleError(f"ignore_index and next_token: the loss {self.name} has none; give them to a head")
        if self.own is not None:
            check_inputs(self.own.labels)
            check_inputs(self.own.outputs)
        if self.heads is None:
            return
        names = [head.name for head in self.heads]
        if not 1 <= len(names) <= MOST_HEADS or len(set(names)) < len(names):
            raise BundleError(f"heads: expected 1 to {MOST_HEADS} different names, got {', '.join(names)[:200]}")

    @property
    def outputs(self) -> tuple[NamedInput, ...] | None:
        """What a row of outputs consists of; None: the output is one tensor."""
        if self.heads is not None:
            return tuple(head.output for head in self.heads)
        return self.own.outputs if self.own is not None and len(self.own.outputs) > 1 else None

    @property
    def labels(self) -> tuple[NamedInput, ...] | None:
        """What a row of labels consists of; None: labels are one tensor."""
        if self.heads is not None:
            return tuple(head.labels for head in self.heads)
        return self.own.labels if self.own is not None and len(self.own.labels) > 1 else None

    @property
    def couples(self) -> str | None:
        """Say why a batch cannot go through the graph in parts; None: it can."""
        if self.own is not None and self.own.reduction == "batch":
            return f"the loss {self.own.function} is no mean over the samples of a batch"
        ignoring = [head.name for head in self.heads or () if head.ignore_index is not None]
        return f"the head {ignoring[0]} ignores labels, and the others do not follow it" if ignoring else None

    @property
    def class_axis(self) -> int:
        """Where in a batch of outputs the classes are, as an axis."""
        return -1 if self.classes_last else 1


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters that are trained in the place of the weights: W + (alpha / rank)·B·A."""

    rank: int
    alpha: float
    layers: str | None = None  # patterns of the layers that have them; None: all linear ones
    full: str | None = None  # patterns of layers that are trained themselves, such as a new head

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK:
            raise BundleError(f"lora: expected a rank from 1 to {MOST_RANK}, got {self.rank}")
        if not 0 < self.alpha < 1e6:
            raise BundleError(f"lora: expected an alpha above 0, got {self.alpha}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class Source:
    """Where the model came from, so that `embrace verify` can build it again."""

    kind: Literal["zoo", "torch", "onnx"]
    reference: str
    seed: int = 0
    output: str | None = field(default=None, metadata=ABSENT)  # which of several outputs is trained
    new_head: int | None = field(default=None, metadata=ABSENT)  # classes of a last layer that replaces the file's
    lora: Lora | None = field(default=None, metadata=ABSENT)  # adapters that the exporter put in
    storage: Storage | None = field(default=None, metadata=ABSENT)  # of the large frozen weights; None: in the graphs


@dataclass(frozen=True)
class BatchNorm:
    """A batch norm, by the names of its running statistics."""

    mean: str
    variance: str
    momentum: float  # the share of the old value that a training step replaces
    positions: int  # values of a channel that one row of what enters has

    def __post_init__(self) -> None:
        if not 0 < self.momentum <= 1 or not 1 <= self.positions < 2**48:
            raise BundleError(f"batch norm {self.mean!r}: expected a momentum above 0 to 1, and positions")


@dataclass(frozen=True)
class Measuring:
    """A second graph of a layer: the same output, and beside it mean and variance of what enters its batch norms."""

    graph: FileRef
    norms: tuple[BatchNorm, ...]


@dataclass(frozen=True)
class Layer:
    """The smallest piece that travels alone: exactly one tensor enters and one leaves, if need be a row of several."""

    name: str
    input: TensorSpec
    output: TensorSpec
    parameters: tuple[Parameter, ...]
    activations: int  # outputs of convolution, dense and recurrent operators, per sample
    macs: int  # multiply-accumulates of one forward pass, per sample
    dropouts: int  # how many dropout operators it has; they are numbered through the whole model
    forward: FileRef
    # Weights that it uses and a later layer has: training from that layer on changes them, this one then stands still.
    borrowed: tuple[str, ...] | None = field(default=None, metadata=ABSENT)
    # The tensors that its output is a row of, where several cross: type and shape for one sample, batch first.
    packed: tuple[TensorSpec, ...] | None = field(default=None, metadata=ABSENT)
    # Elements of stored weights that its graph reads, which no device trains.
    stored: int | None = field(default=None, metadata=ABSENT)
    # For devices that do not train it and report statistics; None: it has no batch norm.
    measuring: Measuring | None = field(default=None, metadata=ABSENT)

    def __post_init__(self) -> None:
        shapes = {p.name: p.shape for p in self.parameters if p.kind == "statistic" and len(p.shape) == 1}
        norms = self.measuring.norms if self.measuring else ()
        if len(set(self.measured)) != 2 * len(norms) or not set(self.measured) <= set(shapes):
            raise BundleError(f"layer {self.name!r}: measuring: expected statistics of the layer, each once")
        if any(shapes[norm.mean] != shapes[norm.variance] for norm in norms):
            raise BundleError(f"layer {self.name!r}: measuring: expected means and variances of the same size")

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the statistics that a device measures which does not train the layer."""
        return tuple(
            name for norm in (self.measuring.norms if self.measuring else ()) for name in (norm.mean, norm.variance)
        )

    def graph(self, measuring: bool = False) -> FileRef:
        """The graph that runs it, or the one that also measures, if there is one."""
        return self.measuring.graph if measuring and self.measuring else self.forward


@dataclass(frozen=True)
class Boundary:
    """A place from which a device can train: layer `layer` and everything after it.

    A narrow one trains all layers, and of each the first channels only; its graphs take parameters of these shapes.
    """

    name: str
    layer: int
    last_steps: int | None  # recurrent layers backpropagate through the last so many steps; None: all
    activations: int  # what training from here keeps, per sample
    train: FileRef | None  # graph of the portable engine
    ort_training: tuple[FileRef, ...]  # artifacts of onnxruntime-training, empty if not exported
    width: float | None = field(default=None, metadata=ABSENT)  # share of the channels; None: all
    # Shapes of all parameters of all layers, in their order, if it is narrow.
    narrow: tuple[tuple[tuple[int, ...], ...], ...] | None = field(default=None, metadata=ABSENT)
    # Pairs of a batch size and the bytes that the portable graph takes at it, predicted from its values' lifetimes.
    step_memory: tuple[tuple[int, ...], ...] | None = field(default=None, metadata=ABSENT)
    # With last_steps: the steps before them as a frozen layer, whose output is what enters the training graph.
    head: Layer | None = field(default=None, metadata=ABSENT)

    def __post_init__(self) -> None:
        pairs = self.step_memory
        if pairs is None:
            return
        if not 1 <= len(pairs) <= MOST_BATCHES or any(len(pair) != 2 or pair[0] < 1 or pair[1] < 0 for pair in pairs):
            raise BundleError(f"boundary {self.name!r}: step_memory: expected pairs of a batch size and bytes")
        if any(one[0] >= other[0] for one, other in pairwise(pairs)):
            raise BundleError(f"boundary {self.name!r}: step_memory: expected growing batch sizes")

    @property
    def whole(self) -> bool:
        """Whether training from here changes every element of the model, and does so exactly."""
        return self.layer == 0 and self.last_steps is None and self.narrow is None

    def space(self, manifest: Manifest) -> ParameterSpace:
        """Return the parameters its graphs work on: all layers of the model, with the narrow shapes if it is narrow."""
        if self.narrow is None:
            return manifest.space
        return narrow_space([layer.parameters for layer in manifest.layers], self.narrow)


def narrow_name(first_layer: str, width: float) -> str:
    """Name a narrow boundary."""
    return f"{first_layer}@{width:g}"


@dataclass(frozen=True)
class Manifest:
    """Everything about a bundle but the bytes of its files."""

    version: int
    name: str
    source: Source
    opset: int
    loss: Loss
    input: TensorSpec
    labels: TensorSpec
    output: TensorSpec
    vocabulary: int | None  # token inputs: ids are below this number
    batch: int  # the batch size at which capacity is quoted
    uses_seed: bool  # training graphs take a `seed` (dropout)
    layers: tuple[Layer, ...]
    boundaries: tuple[Boundary, ...]
    tiers: dict[str, str]  # tier name -> boundary name
    weights: FileRef
    notes: tuple[str, ...] = ()  # what the exporter could not do, e.g. an engine that cannot serve the model
    # Names of the classes in the order of their numbers; None: each device sorts those that it finds.
    classes: tuple[str, ...] | None = field(default=None, metadata=ABSENT)
    preprocessing: Preprocessing | None = field(default=None, metadata=ABSENT)
    # What a model of several inputs takes; `input` is then the row of all of them.
    inputs: tuple[NamedInput, ...] | None = field(default=None, metadata=ABSENT)
    stored: FileRef | None = field(default=None, metadata=ABSENT)  # weights that no device trains, for all graphs
    tokenizer: FileRef | None = field(default=None, metadata=ABSENT)  # makes token ids of texts
    # Of a large vocabulary: words of the output that a training graph computes at a time. It then gives no predictions.
    loss_chunk: int | None = field(default=None, metadata=ABSENT)
    # How much time the training graphs give for memory: what the backward pass makes again instead of keeping it.
    memory_plan: MemoryPlan | None = field(default=None, metadata=ABSENT)

    def __post_init__(self) -> None:
        if not self.layers:
            raise BundleError("a bundle needs at least one layer")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise BundleError(f"loss_chunk: expected a positive number of words, got {self.loss_chunk}")
        if self.batch < 1 or min(layer.activations for layer in self.layers) < 0:
            raise BundleError("batch must be at least 1, and numbers of activations cannot be negative")
        self._check_borrowed()
        for boundary in self.boundaries:
            if not 0 <= boundary.layer < len(self.layers):
                raise BundleError(f"boundary {boundary.name!r} starts at layer {boundary.layer}, which does not exist")
            if boundary.width is not None or boundary.narrow is not None:
                self._check_narrow(boundary)
            if boundary.head is not None:
                self._check_head(boundary, boundary.head)
        names = [b.name for b in self.boundaries]
        if len(set(names)) != len(names):
            raise BundleError("two boundaries have the same name")
        for tier, name in self.tiers.items():
            if name not in names:
                raise BundleError(f"tier {tier!r} names boundary {name!r}, which does not exist")
        if self.classes is not None:
            self._check_classes(self.classes)
        if self.inputs is not None:
            self._check_inputs(self.inputs)
        if self.tokenizer is not None and self.tokenizer.bytes > MAX_TOKENIZER_BYTES:
            raise BundleError(f"tokenizer: expected at most {MAX_TOKENIZER_BYTES >> 20} MiB")
        if self.preprocessing is not None:
            try:
                self.preprocessing.check(self.input.shape, self.input.dtype)
            except FieldError as error:
                raise BundleError(str(error.below("preprocessing"))) from None

    def _check_borrowed(self) -> None:
        later: set[str] = set()
        for layer in reversed(self.layers):
            strange = sorted(set(layer.borrowed or ()) - later)
            if strange:
                raise BundleError(f"layer {layer.name!r} borrows {strange[0]!r}, which no later layer has")
            later |= {parameter.name for parameter in layer.parameters}

    def _check_inputs(self, inputs: tuple[NamedInput, ...]) -> None:
        check_inputs(inputs)
        row = TensorSpec(row_dtype(inputs), (row_size(inputs),))
        if self.input != row or self.vocabulary is not None or self.preprocessing is not None:
            raise BundleError(f"inputs: expected an input of {row}, no vocabulary of all and no preprocessing")

    def _check_classes(self, names: tuple[str, ...]) -> None:
        if len(names) != self.class_count:
            has = "labels that are no classes" if self.class_count is None else f"{self.class_count} classes"
            raise BundleError(f"classes: {len(names)} names, the model {self.name!r} has {has}")
        bad = [name for name in names if not name.strip() or not name.isprintable() or len(name) > LONGEST_CLASS]
        if bad or len(set(names)) != len(names):
            what = f"got {bad[0][:LONGEST_CLASS]!r}" if bad else "one is there twice"
            raise BundleError(f"classes: expected different names of at most {LONGEST_CLASS} characters, {what}")

    def _check_narrow(self, boundary: Boundary) -> None:
        if boundary.width is None or boundary.narrow is None or not 0 < boundary.width < 1:
            raise BundleError(f"boundary {boundary.name!r}: expected narrow shapes and a width between 0 and 1")
        if boundary.name != narrow_name(self.layers[0].name, boundary.width):
            raise BundleError(
                f"boundary {boundary.name!r}: expected the name {narrow_name(self.layers[0].name, boundary.width)!r}"
            )
        if boundary.layer != 0 or boundary.last_steps is not None:
            raise BundleError(f"boundary {boundary.name!r}: a narrow one starts at layer 0 and has no last_steps")
        try:
            boundary.space(self)
        except InputError as error:
            raise BundleError(f"boundary {boundary.name!r}: {error}") from None

    def _check_head(self, boundary: Boundary, head: Layer) -> None:
        if boundary.last_steps is None:
            raise BundleError(f"boundary {boundary.name!r}: a head has the steps in front of last_steps, which is null")
        if head.input != self.layers[boundary.layer].input or head.output.dtype != "float32":
            raise BundleError(f"boundary {boundary.name!r}: its head must take what enters its layer, and give float32")
        own = {p for layer in self.layers[boundary.layer :] for p in layer.parameters}
        if not own.issuperset(head.parameters):
            raise BundleError(f"boundary {boundary.name!r}: its head has parameters that the boundary does not train")

    @cached_property
    def space(self) -> ParameterSpace:
        return ParameterSpace([layer.parameters for layer in self.layers])

    def parameters_of(self, layer: Layer) -> list[Parameter]:
        """List all parameters that a layer uses, its own and those it borrows."""
        borrowed = set(layer.borrowed or ())
        return [*layer.parameters, *(p for p in self.space if p.name in borrowed)] if borrowed else [*layer.parameters]

    @property
    def class_count(self) -> int | None:
        """How many classes a sample can belong to; None if its label is something else."""
        if math.prod(self.labels.shape) != 1:
            return None
        if self.loss.name in CLASSIFYING or self.loss.own is not None:
            return self.label_count
        return 2 if self.loss.name == "bce_with_logits" else None

    @property
    def label_count(self) -> int | None:
        """How many class numbers there are, for a sample or for each of its positions; None without classes."""
        if self.loss.own is not None:
            return self.loss.own.classes
        if self.loss.name not in CLASSIFYING or not self.output.shape:
            return None
        return self.output.shape[-1 if self.loss.classes_last else 0]

    @property
    def whole(self) -> Boundary:
        """The boundary that trains everything."""
        for boundary in self.boundaries:
            if boundary.whole:
                return boundary
        raise BundleError(f"{self.name!r} has no boundary that trains the whole model; export it again")

    def boundary(self, name: str) -> Boundary:
        """Find a boundary by its own name or by a tier's name."""
        wanted = self.tiers.get(name, name)
        for boundary in self.boundaries:
            if boundary.name == wanted:
                return boundary
        known = ", ".join([*self.tiers, *(b.name for b in self.boundaries)])
        raise BundleError(f"no boundary or tier named {name!r}; this bundle has: {known}")

    def frozen(self, boundary: Boundary) -> tuple[Layer, ...]:
        """List what runs once per round, so that training from a boundary can begin: the layers in front, the head."""
        return (*self.layers[: boundary.layer], *((boundary.head,) if boundary.head else ()))

    def entry(self, boundary: Boundary) -> TensorSpec:
        """Describe the tensor that enters the training graphs of a boundary."""
        return boundary.head.output if boundary.head else self.layers[boundary.layer].input

    def weights_from(self, layer: int) -> int:
        """Count the trainable elements from a layer to the output (p in the papers)."""
        return self._count(layer, "weight")

    def statistics_from(self, layer: int) -> int:
        return self._count(layer, "statistic")

    def weights_of(self, boundary: Boundary) -> int:
        """Count the elements that training from a boundary changes by their gradients."""
        return self._count(boundary.layer, "weight", boundary.narrow)

    def statistics_of(self, boundary: Boundary) -> int:
        return self._count(boundary.layer, "statistic", boundary.narrow)

    def _count(self, first_layer: int, kind: Kind, narrow: Shapes | None = None) -> int:
        """Count elements of one kind without making a space: asked for every device of a large fleet."""
        if narrow is None:
            return sum(p.size for layer in self.layers[first_layer:] for p in layer.parameters if p.kind == kind)
        pairs = zip((p for layer in self.layers for p in layer.parameters), (s for own in narrow for s in own))
        return sum(math.prod(shape) for parameter, shape in pairs if parameter.kind == kind)

    def elements_of(self, layer: Layer) -> int:
        """Count the weights and statistics that running a layer takes, those of the file of frozen weights included."""
        return sum(p.size for p in self.parameters_of(layer)) + (layer.stored or 0)

    def files(self) -> list[FileRef]:
        """List every file of the bundle but the manifest itself."""
        found = [self.weights, *(layer.forward for layer in self.layers)]
        found += [layer.measuring.graph for layer in self.layers if layer.measuring]
        found += [self.stored] if self.stored else []
        found += [self.tokenizer] if self.tokenizer else []
        found += [self.loss.own.graph] if self.loss.own else []
        for boundary in self.boundaries:
            found += [boundary.train] if boundary.train else []
            found += boundary.ort_training
            found += [boundary.head.forward] if boundary.head else []
        return found


def dumps(manifest: Manifest) -> str:
    """Write JSON, the same bytes for the same manifest; what was added to version 1 later is there if it is used."""
    return json.dumps(asdict(manifest, dict_factory=_used), indent=1) + "\n"


_ADDED = {f.name for kind in (Source, Loss, Layer, Boundary, Manifest) for f in fields(kind) if f.metadata == ABSENT}


def _used(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if value is not None or name not in _ADDED}


def loads(text: str) -> Manifest:
    """Parse and check a manifest; a BundleError names the field that is wrong."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"the manifest is not JSON: {error}") from None
    version = data.get("version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(f"manifest version {version!r} is not supported; this program reads version {FORMAT_VERSION}")
    try:
        return decode(Manifest, data, "manifest")
    except FieldError as error:
        raise BundleError(str(error)) from None
