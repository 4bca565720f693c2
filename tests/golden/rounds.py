"""Whole rounds of small bundles, trained by onnxruntime: what a device sends. Runtimes agree within a tolerance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.bundle_files import map_weights, read_manifest
from edge_runtime.data.samples import from_arrays
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.evaluate import score_received
from edge_runtime.forward import ForwardPlan
from edge_runtime.layers import BundleSource
from edge_runtime.participant import begin, finish
from edge_runtime.timing import Stopwatch
from edge_runtime.trainer import Trainer
from federation.axes.local import LocalRule, Momentum, Proximal, WeightDecay
from federation.device_task import Kept, Part
from federation.layout import MODEL
from federation.manifest import Manifest
from federation.messages import Task, encode_task
from federation.region import Region
from federation.space import Vector
from tests.golden.pure import of_one_output
from tests.golden.values import base64_of, pattern
from tests.stock_python import ROOT

FOLDER = Path(__file__).parent / "files"
DIGITS = ROOT / "embrace" / "demo" / "digits" / "model"
SAMPLES = 13
_SGD: tuple[LocalRule, ...] = (WeightDecay(1e-3), Momentum(0.9))


def _task(boundary: str, **more: Any) -> Task:
    return Task(**{"boundary": boundary, "steps": 4, "batch": 4, "rate": 0.05, "rules": _SGD, "seed": 5, **more})


CASES: dict[str, tuple[str, Task]] = {
    "cnn strong": ("cnn", _task("stem")),
    "cnn strong, augmented": ("cnn", _task("stem", crop=1, flip=True, epochs=2, round=3)),
    "cnn weak": ("cnn", _task("head", rules=(Proximal(0.1),), batch=32)),
    "cnn weak, float16, augmented": ("cnn", _task("head", activations="float16", crop=1, flip=True)),
    "cnn narrow": ("cnn", _task("stem@0.5")),
    "cnn ordered dropout": ("cnn", _task("stem|stem@0.5", steps=6)),
    "cnn input side": ("cnn", _task("..head")),
    "depthwise strong": ("depthwise", _task("stem")),
    "mlp strong": ("mlp", _task("first", rate=0.1)),
    "mlp weak": ("mlp", _task("last", rate=0.1)),
    "text strong": ("text", _task("embedding")),
    "text weak": ("text", _task("classifier")),
    "text last steps": ("text", _task("lstm@2")),
    "digits strong": ("digits", _task("strong")),
    "digits weak": ("digits", _task("weak")),
}


def bundle(name: str) -> Path:
    return DIGITS if name == "digits" else FOLDER / name


def sample_arrays(manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels that both implementations make."""
    count = SAMPLES * int(np.prod(manifest.input.shape))
    if manifest.vocabulary is not None:
        inputs = (np.arange(count) * 7 % manifest.vocabulary).astype(np.int64)
    else:
        inputs = pattern(count, 1, 2.0)
    if manifest.loss.name == "mse":
        labels = pattern(SAMPLES * manifest.labels.shape[0], 2).reshape(SAMPLES, -1)
    else:
        classes = manifest.output.shape[0] if manifest.loss.name == "cross_entropy" else 2
        labels = np.arange(SAMPLES) * 5 % classes
    return inputs.reshape(SAMPLES, *manifest.input.shape), labels


class _Server:
    """Version 0: the bundle's own weights."""

    def __init__(self, weights: Vector) -> None:
        self.weights = weights

    def model(self, part: Part) -> Vector:
        return np.array(part.region.gather(self.weights))

    def before(self, part: Part) -> Vector:
        raise AssertionError

    def state(self, name: str, part: Part) -> Vector:
        raise AssertionError

    def inherited(self) -> tuple[Region, Vector]:
        raise AssertionError


class _Nothing:
    def load(self, task: str) -> Kept | None:
        return None


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run one case; `folder` is scratch space."""
    which, task = CASES[name]
    directory = bundle(which)
    manifest = read_manifest(directory)
    x, y = sample_arrays(manifest)
    samples = from_arrays(x, y, manifest)
    begun = begin(
        task, manifest, _Server(np.array(map_weights(directory / "weights.safetensors", manifest.space))), _Nothing()
    )
    trainer = Trainer(
        directory,
        BundleSource(directory, manifest),
        samples,
        settings=RuntimeSettings(),
        plan=ForwardPlan(batch=5, folder=folder),
        measures_memory=False,
    )
    try:
        outcome = trainer.run(task, begun.received)
        sent = finish(begun, outcome).tracks[MODEL][1]
        update = base64_of(sent)
    finally:
        trainer.close()
    report = outcome.report
    version = score_received(
        directory,
        BundleSource(directory, manifest),
        samples,
        trainer.plan,
        trainer.settings,
        Stopwatch(),
        lambda *_: None,
    )
    return {
        "bundle": which,
        "task": encode_task(task),
        "steps": report.steps,
        "loss": report.loss,
        "last_loss": report.last_loss,
        "score": of_one_output(version),
        "update": update,
    }


def everything(folder: Path) -> dict[str, Any]:
    return {name: run(name, folder) for name in CASES}


def kept() -> dict[str, Any]:
    """Read the rounds of the file."""
    found: dict[str, Any] = json.loads((FOLDER / "rounds.json").read_text())
    return found
