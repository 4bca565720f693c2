"""Small bundles, exported once, and what tests of the edge runtime share."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from edge_runtime.bundle_files import file_ref, map_weights
from edge_runtime.client import DeviceClient
from edge_runtime.data import Samples, from_arrays
from edge_runtime.engine.choose import EngineName, Step, open_step
from edge_runtime.engine.ort_training import is_available
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.layers import BundleSource
from federation.job import plan_from
from federation.manifest import MANIFEST_NAME, Boundary, Manifest
from federation.narrow import take_corners
from federation.space import Vector
from tests.coordinator.harness import Site, serving

ROOT = Path(__file__).resolve().parents[2]
ENGINES: tuple[EngineName, ...] = ("portable", "ort-training") if is_available() else ("portable",)
both_engines = pytest.mark.skipif(len(ENGINES) < 2, reason="needs onnxruntime-training")

MODELS = """
from torch import nn


def dense():
    return nn.Sequential(
        nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 5)
    )


def dropouts():
    return nn.Sequential(
        nn.Linear(20, 40), nn.Tanh(), nn.Dropout(0.3), nn.Linear(40, 40), nn.Tanh(), nn.Dropout(0.5), nn.Linear(40, 4)
    )
"""


@dataclass(frozen=True)
class Bundle:
    """A bundle directory and the PyTorch module that it was made from."""

    directory: Path
    manifest: Manifest
    source: Any  # model_export.source.ModelSource

    @property
    def weights(self) -> Vector:
        return map_weights(self.directory / self.manifest.weights.name, self.manifest.space)

    def suffix(self, boundary: str) -> Vector:
        """The weights that a device receives which trains from a boundary."""
        found = self.manifest.boundary(boundary)
        if found.narrow is not None:
            return take_corners(self.manifest.space, self.weights, found.space(self.manifest))
        return np.array(self.weights[self.manifest.space.suffix(found.layer)])

    def module(self) -> Any:
        """The PyTorch module with exactly the bundle's weights and statistics."""
        import torch

        module = self.source.module()
        state = module.state_dict()
        for name, value in self.manifest.space.views(np.array(self.weights)).items():
            state[name].copy_(torch.from_numpy(value))
        return module

    def step(self, boundary: str, engine: EngineName = "portable", **more: Any) -> Step:
        """A training step that has the bundle's weights."""
        step = open_step(self.directory, self.manifest, self.manifest.boundary(boundary), engine, **more)
        step.parameters[:] = self.suffix(boundary)
        return step

    def batch(self, boundary: str, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Random inputs of the boundary's training graph, and labels."""
        rng = np.random.default_rng(seed)
        entry = self.manifest.entry(self.manifest.boundary(boundary))
        x = (
            rng.standard_normal((count, *entry.shape)).astype(np.float32)
            if entry.dtype == "float32"
            else rng.integers(0, self.manifest.vocabulary or 2, (count, *entry.shape)).astype(entry.dtype)
        )
        most = self.manifest.output.shape[0] if self.manifest.loss.name == "cross_entropy" else 2
        return x, rng.integers(0, most, (count, *self.manifest.labels.shape)).astype(self.manifest.labels.dtype)


def export(
    directory: Path,
    reference: str,
    *,
    engines: tuple[str, ...] = ENGINES,
    splits: Any = (),
    widths: Any = (),
    **known: Any,
) -> Bundle:
    pytest.importorskip("torch")
    from model_export.bundle import Choices, export_bundle
    from model_export.source import load_source

    source = load_source(reference, **known)
    choices = Choices(splits=splits, engines=engines, widths=widths)
    return Bundle(directory, export_bundle(source, directory, choices), source)


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Bundle:
    return export(tmp_path_factory.mktemp("bundles") / "digits", "digits")


@pytest.fixture(scope="session")
def narrowed(tmp_path_factory) -> Bundle:
    """digits with narrow boundaries."""
    widths = (0.75, 0.45, 0.2)
    return export(tmp_path_factory.mktemp("bundles") / "narrowed", "digits", splits=["classifier"], widths=widths)


def sliced_module(bundle: Bundle, width: float) -> Any:
    """The zoo's own narrow module, with the first elements of the bundle's tensors along every axis."""
    import torch

    module = bundle.source.build(width=width)
    state = module.state_dict()
    for name, value in bundle.manifest.space.views(np.array(bundle.weights)).items():
        state[name].copy_(torch.from_numpy(value)[tuple(slice(size) for size in state[name].shape)])
    return module


@pytest.fixture(scope="session")
def resnet8(tmp_path_factory) -> Bundle:
    return export(tmp_path_factory.mktemp("bundles") / "resnet8", "resnet8", engines=("portable",), splits=["layer3.0"])


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "models.py"
    path.write_text(MODELS)
    return path


@pytest.fixture(scope="session")
def dense(tmp_path_factory, models) -> Bundle:
    """Four dense layers whose weights have very different sizes."""
    return export(tmp_path_factory.mktemp("bundles") / "dense", f"{models}:dense", input_shape=(12,))


@pytest.fixture(scope="session")
def dropouts(tmp_path_factory, models) -> Bundle:
    return export(tmp_path_factory.mktemp("bundles") / "dropouts", f"{models}:dropouts", input_shape=(20,))


@pytest.fixture(scope="session")
def images() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits as the network takes them."""
    data = load_digits()
    return (data.images[:, None] / 16).astype(np.float32), data.target.astype(np.int64)


@pytest.fixture(scope="session")
def samples(digits, images) -> Samples:
    """The first 200 of them."""
    return from_arrays(images[0][:200], images[1][:200], digits.manifest)


@dataclass
class RecordingSource(BundleSource):
    """A bundle directory that remembers what it was asked for."""

    bundle: Bundle
    events: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.bundle.directory, self.bundle.manifest)

    def fetch(self, layer: int, *, measuring: bool = False) -> Path:
        self.events.append(("fetch", layer))
        return super().fetch(layer, measuring=measuring)

    def release(self, layer: int) -> None:
        self.events.append(("release", layer))

    @property
    def fetched(self) -> list[int]:
        return [layer for what, layer in self.events if what == "fetch"]


def relative(found: Any, expected: Any) -> float:
    """Largest difference, relative to the largest value."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-12))


def child(program: str, *arguments: object, **more: Any) -> subprocess.Popen[str]:
    """A Python process of its own that runs a program from the project's root."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


def answer(program: str, *arguments: object) -> str:
    """What a child process prints, which must end well."""
    process = child(program, *arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (process.returncode, err)
    return out.strip()


def boundary_names(manifest: Manifest) -> list[str]:
    return [boundary.name for boundary in manifest.boundaries]


def without_graphs(boundary: Boundary) -> Boundary:
    return replace(boundary, train=None, ort_training=())


LOW_MEMORY = RuntimeSettings(profile="low_memory")


# --- an agent and a real coordinator ---

AGENT_TASK = {"steps": 5, "batch": 16, "rate": "0.1"}


@pytest.fixture(scope="module")
def site(tmp_path_factory, digits) -> Iterator[Site]:
    with serving(tmp_path_factory.mktemp("site")) as found:
        digest = file_ref(digits.directory, MANIFEST_NAME).sha256
        shutil.copytree(digits.directory, found.directory / "bundles" / digest)
        found.bundle = digest  # type: ignore[attr-defined]
        yield found


@pytest.fixture
def make_job(site: Site) -> Iterator[Callable[..., str]]:
    """Jobs that end with their test."""
    service, made = site.server.coordinator, []

    def make(**plan: Any) -> str:
        bounds = {"offer": 0.1, **plan.pop("bounds", {})}
        made.append(
            service.create_job(plan_from({"bundle": "x", "local": AGENT_TASK, "bounds": bounds, **plan}), site.bundle)
        )  # type: ignore[attr-defined]
        return made[-1]

    yield make
    site.settle()
    for row in service.jobs():
        if row["id"] in made and row["state"] == "running":
            service.set_state(row["id"], "stopped")
    for row in service.devices():
        if not row["revoked"]:
            service.revoke(row["id"])


@pytest.fixture
def connect(site: Site) -> Iterator[Callable[[type[DeviceClient], str], DeviceClient]]:
    """Clients that are closed with their test."""
    with contextlib.ExitStack() as stack:
        yield lambda kind, token: stack.enter_context(contextlib.closing(kind(site.url, token)))


@pytest.fixture
def data(tmp_path: Path, images) -> Path:
    np.savez(tmp_path / "data.npz", x=images[0][:100], y=images[1][:100])
    return tmp_path / "data.npz"


def failures(site: Site, job: str) -> list[dict[str, Any]]:
    events = site.server.coordinator.events(job, 0)[0]
    return [event["body"] for event in events if event["kind"] == "TaskFailed"]
