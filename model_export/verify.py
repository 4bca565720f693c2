"""Does a bundle compute what its source computes? Every layer, every boundary, every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from edge_runtime.bundle_files import check_bundle, map_weights, read_manifest
from edge_runtime.engine.choose import EngineName, open_step
from edge_runtime.engine.portable import LayerForward
from federation.errors import BundleError, InputError
from federation.manifest import Boundary, Layer, Manifest
from federation.narrow import take_corners
from model_export.crossing import split_row
from model_export.frozen import read_frozen
from model_export.inputs import sample_of
from model_export.narrow import narrow_manifest, narrow_source
from model_export.onnx_oracle import OnnxOracle
from model_export.oracle import Oracle, StepResult, TorchOracle, differences, largest, random_labels
from model_export.source import ModelSource, reload_source

TOLERANCE = 1e-4
BATCH = 4
MOST_SAMPLES = 4096
# Gradients that are zero in theory (a bias in front of batch norm) are noise in practice. A tensor whose gradient is
# below NOISE times the largest of all must only be small: its differences are measured against FLOOR times the largest.
NOISE, FLOOR = 1e-4, 0.1
STATISTIC_FLOOR = 1e-3  # running means of centred values are zero in theory, too
# A ReLU whose input lies within rounding of zero may switch between two correct programs, and a single switch changes
# gradients by per cent. That is a matter of one input; a wrong rule is wrong for every input. So each tensor counts
# with its smallest error over a few inputs, tried only as long as something is above tolerance, the last ones with
# normalisation layers shifted so that activations stay away from their kinks.
NATURAL_INPUTS, CALM_INPUTS = 4, 3
# Deep networks with batch norm over a few samples lose more than the tolerance in any float32 program. Then the same
# step in float64 judges: a tensor may be ROUNDING times as far from it as PyTorch's float32 is. An input with which
# that would be more than MOST_ROUNDING judges nothing: a ReLU switched in PyTorch, and a wrong rule could hide there.
ROUNDING, MOST_ROUNDING = 5.0, 3e-3


@dataclass
class Comparison:
    """The largest relative difference of one boundary (or of the frozen layers), by kind of result.

    Where PyTorch itself is further from float64 than the tolerance, an error counts in proportion to that.
    """

    boundary: str
    engine: str
    tensors: dict[tuple[str, str], float] = field(default_factory=dict)  # (kind, tensor) -> error
    inputs: int = 0  # how many inputs were tried
    skipped: str = ""  # why something was not compared
    rounding: float = 0.0  # how far PyTorch's own float32 is from float64, where that was asked

    def add(self, errors: Mapping[tuple[str, str], float]) -> None:
        """Take in the errors of one more input."""
        self.inputs += 1
        for key, error in errors.items():
            known = error if np.isfinite(error) else float("inf")  # a NaN would compare as small
            self.tensors[key] = min(known, self.tensors.get(key, float("inf")))

    def largest(self, kind: str | None = None) -> float:
        return max((e for (k, _), e in self.tensors.items() if kind in (None, k)), default=0.0)

    @property
    def worst(self) -> str:
        """The tensor with the largest difference."""
        return max(self.tensors, key=lambda key: self.tensors[key])[1] if self.tensors else ""


def verify_bundle(
    directory: Path,
    *,
    source_reference: str | None = None,
    source: ModelSource | None = None,
    batch: int = BATCH,
    tolerance: float = TOLERANCE,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Comparison]:
    """Compare a bundle with its source: the layers first, then each boundary with each engine."""
    if not 2 <= batch <= MOST_SAMPLES:
        raise InputError(f"a batch of {batch} is out of range: between 2 and {MOST_SAMPLES} samples are compared")
    manifest = read_manifest(directory)
    check_bundle(directory, manifest)
    vector = np.array(map_weights(directory / manifest.weights.name, manifest.space))
    bundle = _Bundle(directory, manifest, vector)
    frozen = read_frozen(directory, manifest)
    oracle = _oracle(manifest, vector, frozen, source_reference, source)
    samples = _Samples(bundle, batch)
    total = len(manifest.boundaries) + 1
    progress("layers", 0, total)
    results = [_compare_layers(manifest, oracle, samples)]
    for number, boundary in enumerate(manifest.boundaries):
        progress(boundary.name, number + 1, total)
        vector, own = bundle.vector, oracle
        if boundary.width is not None:
            vector = take_corners(manifest.space, vector, boundary.space(manifest))
            own = _oracle(narrow_manifest(manifest, boundary), vector, {}, source_reference, source, boundary.width)
        for engine, run in _engines(bundle, boundary):
            results.append(_compare_boundary(boundary, engine, run, own, vector, samples, tolerance))
    progress("done", total, total)
    return results


@dataclass(frozen=True)
class _Bundle:
    directory: Path
    manifest: Manifest
    vector: np.ndarray


@dataclass(frozen=True)
class _Sample:
    """One random batch with everything the frozen layers make of it."""

    seed: int
    x: np.ndarray
    labels: np.ndarray
    outputs: list[np.ndarray]

    def entering(self, layer: int) -> np.ndarray:
        return self.outputs[layer - 1] if layer else self.x


class _Samples:
    """Random batches, each run through the layers once, as a device does it."""

    def __init__(self, bundle: _Bundle, batch: int) -> None:
        self.bundle = bundle
        self._batch = batch
        self._made: list[_Sample] = []

    def __getitem__(self, number: int) -> _Sample:
        while len(self._made) <= number:
            self._made.append(self._make(len(self._made) + 1))
        return self._made[number]

    def _make(self, seed: int) -> _Sample:
        manifest = self.bundle.manifest
        x = sample_of(manifest, self._batch, seed)
        outputs, value = [], x
        for layer in manifest.layers:
            value = LayerForward(self.bundle.directory / layer.forward.name)(value)
            outputs.append(value)
        return _Sample(seed, x, random_labels(manifest, self._batch, seed), outputs)


def _oracle(
    manifest: Manifest,
    vector: np.ndarray,
    frozen: Mapping[str, np.ndarray],
    reference: str | None,
    source: ModelSource | None,
    width: float | None = None,
) -> Oracle:
    source = source or rebuild_source(manifest, reference)
    if width is not None:
        source = narrow_source(source, width)
    if source.build is None:
        return OnnxOracle(source, manifest, frozen)
    return TorchOracle(source, manifest, vector, frozen)


def rebuild_source(manifest: Manifest, reference: str | None = None) -> ModelSource:
    """Build the source of a bundle again, from where it is now."""
    origin = manifest.source
    if reference:
        origin = replace(origin, reference=reference)
    known = {
        "input_shape": manifest.input.shape,
        "input_dtype": manifest.input.dtype,
        "vocabulary": manifest.vocabulary,
        "loss": manifest.loss,
        "batch": manifest.batch,
        "inputs": manifest.inputs,
    }
    path = Path(origin.reference.rpartition(":")[0] if origin.kind == "torch" else origin.reference)
    if origin.kind != "zoo" and not path.is_file():
        raise BundleError(f"the source {path} is not here; say where it is now with --source")
    return reload_source(origin, **known)


def _compare_layers(manifest: Manifest, oracle: Oracle, samples: _Samples) -> Comparison:
    result = Comparison("(forward)", "portable")
    expected = oracle.layer_outputs(samples[0].x, samples[0].outputs)
    errors = {}
    for layer, value, wanted in zip(manifest.layers, samples[0].outputs, expected, strict=True):
        if wanted is not None:
            pairs = zip(_parts(layer, value), _parts(layer, wanted), strict=True)
            errors["layers", layer.name] = max(relative_error(*pair) for pair in pairs)
        elif not result.skipped:
            result.skipped = f"the source has no tensor to compare layer {layer.name} with"
    result.add(errors)
    return result


def _parts(layer: Layer, row: np.ndarray) -> list[np.ndarray]:
    """The tensors that a layer's output has, each to be compared by its own size."""
    return [row] if layer.packed is None else split_row(row, [(part.dtype, part.shape) for part in layer.packed])


def _engines(bundle: _Bundle, boundary: Boundary) -> Iterator[tuple[EngineName, EngineRun]]:
    """Each engine that has a graph for this boundary, as a function of a sample."""
    if boundary.train:
        yield "portable", EngineRun(bundle, boundary, "portable")
    if boundary.ort_training:
        yield "ort-training", EngineRun(bundle, boundary, "ort-training")


class EngineRun:
    """A training step of one engine, as a device runs it."""

    def __init__(self, bundle: _Bundle, boundary: Boundary, engine: EngineName) -> None:
        self.space = boundary.space(bundle.manifest)
        self.boundary = boundary
        self.head = LayerForward(bundle.directory / boundary.head.forward.name) if boundary.head else None
        self.step = open_step(bundle.directory, bundle.manifest, boundary, engine)

    def __call__(self, sample: _Sample, vector: np.ndarray) -> StepResult:
        self.step.parameters[:] = vector[self.step.suffix]
        x = sample.entering(self.boundary.layer)
        loss = self.step.run(self.head(x) if self.head else x, sample.labels, sample.seed)
        values = self.space.views(self.step.gradients.copy(), start=self.step.suffix.start)
        kinds = self.step.kinds
        gradients = {name: value for name, value in values.items() if kinds[name] == "weight"}
        return StepResult(loss, gradients, {name: v for name, v in values.items() if kinds[name] == "statistic"})


def _compare_boundary(
    boundary: Boundary,
    engine: EngineName,
    run: EngineRun,
    oracle: Oracle,
    natural: np.ndarray,
    samples: _Samples,
    tolerance: float,
) -> Comparison:
    result = Comparison(boundary.name, engine)
    while result.inputs < NATURAL_INPUTS + CALM_INPUTS and (not result.inputs or result.largest() > tolerance):
        sample = samples[result.inputs]
        vector = natural if result.inputs < NATURAL_INPUTS else oracle.calm(boundary, natural)
        given = (boundary, sample.x, sample.labels, sample.seed, vector, sample.entering(boundary.layer))
        expected = oracle.step(*given)
        if expected is not None:
            found = run(sample, vector)
            errors = step_errors(found, expected)
            if max(errors.values()) > tolerance >= TOLERANCE:  # a smaller one is taken literally
                precise = oracle.precise_step(*given)
                if precise is not None:
                    own = step_errors(expected, precise)
                    errors = _beyond_rounding(step_errors(found, precise), own, tolerance)
                    result.rounding = max(result.rounding, *own.values())
            result.add(errors)
        elif engine == "portable":
            result.add(_errors_by_differences(run, sample, vector))
        else:
            result.skipped = "the source has no gradients to compare with; the portable engine is checked instead"
            break
    return result


def _beyond_rounding(
    errors: Mapping[tuple[str, str], float], own: Mapping[tuple[str, str], float], tolerance: float
) -> dict[tuple[str, str], float]:
    """Scale each error so that what rounding explains is within the tolerance; `own` are PyTorch's distances."""
    scaled = {}
    for key, error in errors.items():
        explained = ROUNDING * own[key]
        scaled[key] = error * tolerance / explained if tolerance < explained <= MOST_ROUNDING else error
    return scaled


def step_errors(found: StepResult, expected: StepResult) -> dict[tuple[str, str], float]:
    """Measure how far a step is from the expected one: (kind, tensor) -> relative error."""
    errors = {("loss", "loss"): abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-6)}
    sizes = {name: float(np.abs(g).max()) for name, g in expected.gradients.items() if g.size}
    largest = max(sizes.values(), default=1.0)
    for name, gradient in expected.gradients.items():
        floor = FLOOR * largest if sizes.get(name, 0.0) < NOISE * largest else 0.0
        errors["gradients", name] = relative_error(found.gradients[name], gradient, floor)
    for name, statistic in expected.statistics.items():
        errors["statistics", name] = relative_error(found.statistics[name], statistic, STATISTIC_FLOOR)
    return errors


def relative_error(found: np.ndarray, expected: np.ndarray, floor: float = 1e-6) -> float:
    """Largest difference, relative to the largest magnitude; a NaN or a wrong shape is an infinite error."""
    if found.shape != expected.shape:
        return float("inf")
    if not found.size:
        return 0.0
    error = float(differences(found, expected).max()) / largest(expected, max(floor, 1e-12))
    return error if np.isfinite(error) else float("inf")


def _errors_by_differences(run: EngineRun, sample: _Sample, vector: np.ndarray) -> dict[tuple[str, str], float]:
    """Without autograd: slopes of the loss along each gradient and in other directions, by central differences.

    In float32 that is good to a few per cent, so the error is divided by DIFFERENCE_SLACK before it is reported.
    """
    found = run(sample, vector)
    largest = max((float(np.linalg.norm(g)) for g in found.gradients.values()), default=0.0)
    errors = {}
    for name, gradient in found.gradients.items():
        length = float(np.linalg.norm(gradient))
        if length > SMALLEST_SLOPE * largest:
            error = max(_slope_error(run, sample, vector, name, gradient, v) for v in (gradient, *_random(gradient)))
            errors["gradients", name] = error / DIFFERENCE_SLACK
    return errors


SMALLEST_SLOPE = 1e-2  # of the largest; below it differences in float32 say nothing
DIFFERENCE_SLACK = 500.0  # 5 % by differences counts like 1e-4 against autograd


def _random(gradient: np.ndarray) -> list[np.ndarray]:
    """Directions in which an element of the gradient that is wrong shows: random signs, and all elements alike."""
    rng = np.random.default_rng(gradient.size)
    signs = np.where(rng.random(gradient.shape) < 0.5, -1.0, 1.0)
    return [signs * np.abs(gradient), signs]


def _slope_error(
    run: EngineRun, sample: _Sample, vector: np.ndarray, name: str, gradient: np.ndarray, toward: np.ndarray
) -> float:
    """How far the measured slope is from what the gradient says, relative to the gradient's length."""
    direction = (toward / np.linalg.norm(toward)).astype(np.float32)
    expected = float(np.vdot(gradient, direction))
    slopes = [_slope(run, sample, vector, name, direction, h) for h in (1e-2, 3e-3, 1e-3)]
    return min(abs(slope - expected) for slope in slopes) / float(np.linalg.norm(gradient))


def _slope(run: EngineRun, sample: _Sample, vector: np.ndarray, name: str, direction: np.ndarray, h: float) -> float:
    values = []
    for sign in (1.0, -1.0):
        moved = vector.copy()
        moved[run.space.slice_of(name)] += np.float32(sign * h) * direction.ravel()
        values.append(run(sample, moved).loss)
    return (values[0] - values[1]) / (2 * h)
