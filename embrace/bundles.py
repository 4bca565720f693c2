"""A model as a bundle: ONNX pieces, split at layer boundaries, that a device can train from any of them."""

from __future__ import annotations

import html
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edge_runtime.bundle_files import check_bundle, map_weights, read_manifest
from edge_runtime.signing import read_key, read_signer, sign_bundle
from embrace.errors import BundleError, InputError, VerificationError
from embrace.loss_choice import LossChoice, parse_loss
from federation.capacity import capacity, forward_macs, predicted_memory, predicted_peak, training_macs
from federation.inputs import NamedInput
from federation.manifest import Boundary, Layer, Lora, Manifest, MemoryPlan, Storage
from federation.preprocessing import PLAIN, Preprocessing
from federation.signature import SigningKey

if TYPE_CHECKING:
    from model_export.source import ModelSource, Module
    from model_export.verify import Comparison

TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2  # of relative errors; the latter where values are kept as float16
MOST_CLASSES = 1 << 20  # of a new head
Progress = Callable[[str, int, int], None]  # what happens now, and how many of how many steps are done


def quiet(what: str, done: int, total: int) -> None:
    """Show nothing."""


class Bundle:
    """A model that devices can train from every layer boundary.

    >>> bundle = embrace.export(model, sample=x)
    >>> bundle
    Bundle('Sequential', 2 layers, 2,410 weights)
    >>> [row["name"] for row in bundle.boundaries]
    ['1', '3']
    >>> sorted(bundle.state_dict())
    ['1.bias', '1.weight', '3.bias', '3.weight']
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest: Manifest = read_manifest(self.path)
        self._source: ModelSource | None = None  # of a model that lives in this process only

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def tiers(self) -> dict[str, str]:
        """The boundary that each tier trains from."""
        return dict(self.manifest.tiers)

    @property
    def boundaries(self) -> list[dict[str, Any]]:
        """A row for each place from which a device can train, input side first, with what that needs."""
        return [describe_boundary(self.manifest, boundary) for boundary in self.manifest.boundaries]

    def inspect(self, batch: int | None = None) -> dict[str, Any]:
        """Return all figures; MACs, shapes and layers' activations are per sample."""
        manifest = self.manifest
        return {
            "name": manifest.name,
            "source": asdict(manifest.source),
            "loss": asdict(manifest.loss),
            "input": asdict(manifest.input),
            "inputs": None if manifest.inputs is None else [asdict(item) for item in manifest.inputs],
            "output": asdict(manifest.output),
            "classes": None if manifest.classes is None else list(manifest.classes),
            "tokenizer": None if manifest.tokenizer is None else asdict(manifest.tokenizer),
            "preprocessing": None if manifest.preprocessing is None else asdict(manifest.preprocessing),
            "batch": batch or manifest.batch,
            "layers": [describe_layer(layer) for layer in manifest.layers],
            "boundaries": [describe_boundary(manifest, boundary, batch) for boundary in manifest.boundaries],
            "tiers": manifest.tiers,
            "notes": list(manifest.notes),
            "bytes": sum(ref.bytes for ref in manifest.files()),
            "signer": self.signer,
        }

    @property
    def signer(self) -> str | None:
        """The public key that signed this bundle, None if no key did; BundleError if the signature is wrong."""
        return read_signer(self.path)

    def sign(self, key: SigningKey | str | Path) -> None:
        """Sign the bundle with a private key (`embrace key new`), in place of a signature that it has."""
        sign_bundle(self.path, key if isinstance(key, SigningKey) else read_key(Path(key)))

    def verify(
        self,
        source: str | None = None,
        *,
        tolerance: float | None = None,
        batch: int = 4,
        progress: Progress = quiet,
    ) -> list[Comparison]:
        """Compare every layer, loss, gradient and statistic with the source; VerificationError if one differs.

        `source` says where the model is now, if it moved: `file.py:factory` or `model.onnx`. `tolerance`: the largest
        relative error; without, what fits the bundle's memory plan.
        """
        results = self.compare(source, tolerance=tolerance, batch=batch, progress=progress)
        refuse_differences(results, self.tolerance if tolerance is None else tolerance)
        return results

    @property
    def tolerance(self) -> float:
        """The largest relative error that `verify` allows unless it is told another."""
        return HALF_TOLERANCE if self.manifest.memory_plan == "half" else TOLERANCE

    def compare(
        self, source: str | None = None, *, tolerance: float | None = None, batch: int = 4, progress: Progress = quiet
    ) -> list[Comparison]:
        """Return the differences that `verify` judges."""
        from model_export.verify import verify_bundle

        tolerance = self.tolerance if tolerance is None else tolerance
        own = self._source if source is None else None
        return verify_bundle(
            self.path, source_reference=source, source=own, batch=batch, tolerance=tolerance, progress=progress
        )

    def check(self) -> None:
        """Compare every file with the digest that the manifest states; BundleError if one differs."""
        check_bundle(self.path, self.manifest)

    def state_dict(self) -> dict[str, NDArray[np.float32]]:
        """Return the weights and statistics by name, as copies."""
        vector = np.array(map_weights(self.path / self.manifest.weights.name, self.manifest.space))
        return dict(self.manifest.space.views(vector))

    def save(self, path: str | Path) -> Bundle:
        """Copy the bundle to a new directory."""
        target = Path(path)
        if target.exists():
            raise InputError(f"{target} exists; choose another path or remove it")
        shutil.copytree(self.path, target)
        return Bundle(target)

    def to_onnx(self, path: str | Path) -> Path:
        """Write the whole model as one forward graph with its weights inside."""
        from model_export.to_onnx import write_onnx

        write_onnx(self.path, Path(path))
        return Path(path)

    def to_torch(self, path: str | Path) -> Path:
        """Write a state dict: `module.load_state_dict(torch.load(path))`."""
        from model_export.to_onnx import write_state_dict

        write_state_dict(self.path, Path(path))
        return Path(path)

    def plot(self, path: str | Path, batch: int | None = None) -> Path:
        """Draw memory and arithmetic of every boundary to a .png, .svg or .pdf file."""
        from embrace.boundary_plot import plot_boundaries

        plot_boundaries(self.manifest, batch or self.manifest.batch, Path(path))
        return Path(path)

    def __repr__(self) -> str:
        manifest = self.manifest
        layers = "1 layer" if len(manifest.layers) == 1 else f"{len(manifest.layers)} layers"
        return f"Bundle({manifest.name!r}, {layers}, {manifest.weights_from(0):,} weights)"

    def _repr_html_(self) -> str:
        """Show the boundaries as a table in a notebook."""
        columns = ("boundary", "tiers", "weights", "capacity", "memory (MB)")
        rows = [
            (
                row["name"],
                ", ".join(row["tiers"]),
                f"{row['parameters']:,}",
                f"{row['capacity']:.3f}",
                f"{row['memory']['total'] / 1e6:.2f}",
            )
            for row in self.boundaries
        ]
        head = "".join(f"<th>{name}</th>" for name in columns)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        title = f"{html.escape(self.name)}: training from a boundary at batch {self.manifest.batch}"
        return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def refuse_differences(results: Sequence[Comparison], tolerance: float) -> None:
    """Raise VerificationError if the largest error is above the tolerance, or is no number."""
    worst = max(results, key=lambda result: result.largest())
    if not worst.largest() <= tolerance:
        raise VerificationError(
            f"boundary {worst.boundary}, engine {worst.engine}: {worst.worst} is off by {worst.largest():.2e}, "
            f"more than the tolerance {tolerance:g}"
        )


def load(path: str | Path) -> Bundle:
    """Open a bundle that `export` wrote, and check its files.

    >>> embrace.load(folder / "bundle").name
    'Sequential'
    """
    bundle = Bundle(path)
    bundle.check()
    return bundle


def export(
    model: Module | str | Path,
    out: str | Path | None = None,
    *,
    sample: ArrayLike | Mapping[str, ArrayLike] | None = None,
    input_shape: Sequence[int] | None = None,
    dtype: str | None = None,
    vocabulary: int | Mapping[str, int] | None = None,
    loss: LossChoice | None = None,
    labels: ArrayLike | Mapping[str, ArrayLike] | None = None,
    label_smoothing: float | None = None,
    ignore_index: int | None = None,
    classes_last: bool | None = None,
    next_token: bool | None = None,
    delta: float | None = None,
    gamma: float | None = None,
    split: Sequence[str] = (),
    tiers: Mapping[str, float] | None = None,
    widths: Sequence[float] = (),
    memory_plan: MemoryPlan = "balanced",
    engines: Sequence[str] = ("portable",),
    classes: Sequence[str] | str | Path | None = None,
    scale: float | None = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    output: str | None = None,
    new_head: int | None = None,
    lora: int | None = None,
    lora_layers: str | None = None,
    lora_alpha: float | None = None,
    lora_full: str | None = None,
    frozen: Storage | None = None,
    tokenizer: str | Path | None = None,
    batch: int | None = None,
    seed: int = 0,
    sign: str | Path | None = None,
    progress: Progress = quiet,
) -> Bundle:
    """Turn a model into a bundle.

    `model` is a module, with the weights it has now; or the name of a zoo model, `file.py:factory` or `model.onnx`.
    `sample` is an array with a batch of inputs, of which shape and type are taken; `input_shape` and `dtype` say the
    same in words. A model of several inputs has an array for each, by the names that its `forward` or its file has for
    them, and `vocabulary` a number for all inputs of token ids or for each by name. Without `out` the bundle is a
    temporary folder that is removed together with the object.

    `classes` are names in the order of their numbers, or data that has them: a folder with one sub-folder of images per
    class, FILE.csv or FILE.jsonl. Stored values become inputs by (value × scale − mean) / std on every device; without
    `scale`, bytes are divided by 255. Both stand in the metadata of the ONNX file that comes of it. `sign` is a private
    key.

    `loss` is a name; a function of (outputs, labels) that returns a number, one for each sample, or (total, count), or
    `file.py:function`; or of several outputs each one's, {"digit": "cross_entropy", "angle": "mse:0.5"} with weights.
    `labels` is an array with labels of a batch, or one for each name, where a function's labels cannot be told.

    `memory_plan` says how much time training may give for memory: "fast" nothing, "balanced" about 3 %, "small" up to a
    quarter; "half" is "balanced" with values kept as float16, for gradients that are less exact.

    `output` names the tensor that is trained, if the model returns several: a key, a field or a position. Without it
    `logits` is taken. `new_head` replaces the last dense layer of an ONNX file by one for that many classes.

    `lora` is the rank of adapters that are trained in the place of the weights: on the layers that `lora_layers` names
    ("*.q_proj,*.v_proj"; default: every linear one), scaled by `lora_alpha` / rank (default: the rank, so 1). Layers
    that `lora_full` names are trained themselves. `frozen` stores what is not trained as "float32", "float16", "int8"
    or "int4", in one file that all graphs read. `tokenizer` is a tokenizer.json that travels in the bundle, so that
    devices take texts.

    >>> bundle = embrace.export(model, folder / "bundle", sample=x, tiers={"weak": 0.5})
    >>> bundle.tiers
    {'strong': '1', 'weak': '3'}
    """
    key = None if sign is None else read_key(Path(sign))  # a wrong one is answered before the work
    from model_export.bundle import Choices, export_bundle

    source = open_source(
        model,
        sample=sample,
        input_shape=input_shape,
        dtype=dtype,
        vocabulary=vocabulary,
        loss=loss,
        labels=None if labels is None else named_labels(labels),
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        classes_last=classes_last,
        next_token=next_token,
        delta=delta,
        gamma=gamma,
        batch=batch,
        seed=seed,
        classes=classes,
        preprocessing=Preprocessing(scale, tuple(mean), tuple(std)),
        output=output,
        new_head=new_head,
        lora=parse_lora(lora, lora_layers, lora_alpha, lora_full),
        frozen=frozen,
        tokenizer=tokenizer,
    )
    choices = Choices(split, tiers, engines, widths, memory_plan)
    bundle = written_to(out, lambda target: export_bundle(source, target, choices, progress))
    bundle._source = None if isinstance(model, (str, Path)) else source
    if key is not None:
        bundle.sign(key)
    return bundle


def written_to(out: str | Path | None, write: Callable[[Path], object]) -> Bundle:
    """Let `write` fill a directory, and open it. Without `out` the directory is removed together with the bundle."""
    if out is not None:
        write(Path(out))
        return Bundle(out)
    folder = Path(tempfile.mkdtemp(prefix="embrace-"))
    try:
        write(folder / "bundle")
        bundle = Bundle(folder / "bundle")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(bundle, shutil.rmtree, folder, ignore_errors=True)
    return bundle


def open_source(
    model: Module | str | Path,
    *,
    sample: ArrayLike | Mapping[str, ArrayLike] | None = None,
    input_shape: Sequence[int] | None = None,
    dtype: str | None = None,
    vocabulary: int | Mapping[str, int] | None = None,
    loss: LossChoice | None = None,
    labels: Sequence[NamedInput] | None = None,
    label_smoothing: float | None = None,
    ignore_index: int | None = None,
    classes_last: bool | None = None,
    next_token: bool | None = None,
    delta: float | None = None,
    gamma: float | None = None,
    batch: int | None = None,
    seed: int = 0,
    classes: Sequence[str] | str | Path | None = None,
    label: str | None = None,
    preprocessing: Preprocessing | None = None,
    output: str | None = None,
    new_head: int | None = None,
    inputs: Sequence[NamedInput] | None = None,
    lora: Lora | None = None,
    frozen: str | None = None,
    tokenizer: str | Path | None = None,
) -> ModelSource:
    """Return a model before it is captured, with everything that is known about its use."""
    from model_export.source import load_source, module_source

    if isinstance(sample, Mapping):
        inputs = named_inputs(sample, vocabulary)
    elif sample is not None:
        rows = np.asarray(sample)
        input_shape = rows.shape[1:]
        dtype = dtype or ("int64" if rows.dtype.kind in "iu" else "float32")
    chosen, own, heads = parse_loss(loss, labels)
    known: dict[str, Any] = {
        "input_shape": None if input_shape is None else tuple(input_shape),
        "input_dtype": dtype,
        "vocabulary": vocabulary,
        "loss": chosen,
        "batch": batch,
        "seed": seed,
        "inputs": None if inputs is None else tuple(inputs),
    }
    if inputs is not None:
        _refuse_single(input_shape, dtype, vocabulary if sample is None else None, preprocessing)
        known["vocabulary"] = None
    named = isinstance(model, (str, Path))
    source = load_source(str(model), **known) if named else module_source(model, **known)  # type: ignore[arg-type]
    takes_head = source.origin.kind == "onnx" or source.build_head is not None
    if new_head is not None and (not takes_head or not 1 <= new_head <= MOST_CLASSES):
        raise InputError(
            f"new head of {new_head}: expected an ONNX file or minilm, and a number of classes from 1 to "
            f"{MOST_CLASSES:,}; of a PyTorch model change the last layer before it is exported"
        )
    if frozen is not None and frozen not in get_args(Storage):
        raise InputError(f"frozen: expected {', '.join(get_args(Storage))}, got {frozen!r}")
    if frozen is not None and lora is None and source.origin.kind == "onnx":
        raise InputError("frozen: an ONNX file does not say which weights are frozen; give a rank of adapters, too")
    storage = frozen or ("float32" if lora is not None else None)
    given: dict[str, Any] = {
        "label_smoothing": label_smoothing,
        "ignore_index": ignore_index,
        "classes_last": classes_last or None,
        "next_token": next_token or None,
        "delta": delta,
        "gamma": gamma,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if changes and (own is not None or heads):
        what = "several heads: say it of each, as in tags=cross_entropy:1.0:ignore_index=-1" if heads else "this loss"
        raise InputError(f"{next(iter(changes))} is not for {what}")
    if heads and output is not None:
        raise InputError(f"output {output}: the heads {', '.join(heads)} are the outputs; leave it out")
    if isinstance(classes, (str, Path)):
        from edge_runtime.data.load import load_classes

        classes = load_classes(str(classes), label)
    if classes is not None and new_head is None and source.build_head is not None:
        new_head = len(classes)
    return replace(
        source,
        origin=replace(
            source.origin,
            output=",".join(heads) or output,
            new_head=new_head,
            seed=seed,
            lora=lora,
            storage=storage,  # type: ignore[arg-type]
        ),
        loss=replace(source.loss, **changes),
        own=own,
        classes=None if classes is None else tuple(map(str, classes)),
        preprocessing=None if preprocessing == PLAIN else preprocessing,
        tokenizer=source.tokenizer if tokenizer is None else Path(tokenizer),
    )


def named_labels(labels: ArrayLike | Mapping[str, ArrayLike]) -> list[NamedInput]:
    """Describe labels by a batch of them; nothing is said of how many classes there are."""
    arrays = labels if isinstance(labels, Mapping) else {"labels": labels}
    return named_inputs(arrays, None)


def parse_lora(rank: int | None, layers: str | None, alpha: float | None, full: str | None) -> Lora | None:
    """Return the adapters that are asked for; their patterns mean nothing without a rank."""
    if rank is None:
        if layers is not None or alpha is not None or full is not None:
            raise InputError("lora: say the rank of the adapters, too, such as 8")
        return None
    try:
        return Lora(rank, float(rank) if alpha is None else alpha, layers, full)
    except BundleError as error:
        raise InputError(str(error)) from None


def describe_layer(layer: Layer) -> dict[str, Any]:
    """Return the figures of one layer, per sample."""
    return {
        "name": layer.name,
        "input": list(layer.input.shape),
        "output": list(layer.output.shape),
        "parameters": sum(p.size for p in layer.parameters if p.kind == "weight"),
        "statistics": sum(p.size for p in layer.parameters if p.kind == "statistic"),
        "activations": layer.activations,
        "macs": layer.macs,
        "graph_bytes": layer.forward.bytes,
    }


def describe_boundary(manifest: Manifest, boundary: Boundary, batch: int | None = None) -> dict[str, Any]:
    """Return what training from a boundary needs, at a batch size."""
    memory = predicted_memory(manifest, boundary, batch)
    return {
        "name": boundary.name,
        "tiers": [tier for tier, name in manifest.tiers.items() if name == boundary.name],
        "width": boundary.width,
        "parameters": manifest.weights_of(boundary),
        "statistics": manifest.statistics_of(boundary),
        "activations": boundary.activations * (batch or manifest.batch),
        "capacity": capacity(manifest, boundary, batch),
        "train_bytes": boundary.train.bytes if boundary.train else None,
        "engines": [*(["portable"] if boundary.train else []), *(["ort-training"] if boundary.ort_training else [])],
        "last_steps": boundary.last_steps,
        "memory": {**asdict(memory), "total": memory.total},
        "peak": predicted_peak(manifest, boundary, batch),
        "forward_macs": forward_macs(manifest, boundary),
        "training_macs": training_macs(manifest, boundary),
        "ort_training_bytes": sum(ref.bytes for ref in boundary.ort_training),
    }


def named_inputs(sample: Mapping[str, ArrayLike], vocabulary: int | Mapping[str, int] | None) -> list[NamedInput]:
    """Describe inputs by a batch of each. `vocabulary` bounds the ids of those that are whole numbers but no masks."""
    found = []
    for name, value in sample.items():
        array = np.asarray(value)
        dtype = {"b": "bool", "i": "int64", "u": "int64"}.get(array.dtype.kind, "float32")
        is_mask = "mask" in name and array.max(initial=0) <= 1
        own = vocabulary.get(name) if isinstance(vocabulary, Mapping) else 2 if is_mask else vocabulary
        ids = own if dtype == "int64" else None
        found.append(NamedInput(str(name), dtype, array.shape[1:], ids))
    return found


def _refuse_single(
    shape: Sequence[int] | None, dtype: str | None, vocabulary: Any, preprocessing: Preprocessing | None
) -> None:
    """Refuse what is said of one input beside several."""
    said = {"input shape": shape, "--dtype": dtype, "--vocabulary": vocabulary}
    wrong = [name for name, value in said.items() if value is not None]
    wrong += ["--scale, --mean and --std"] if preprocessing not in (None, PLAIN) else []
    if wrong:
        raise InputError(f"{wrong[0]}: with several inputs each says its own, as in --input ids=64:int64:30522")
