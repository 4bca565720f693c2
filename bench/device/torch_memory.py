"""Peak memory of PyTorch eager when it trains what stands behind a boundary. Runs in a process of its own:

    python -m bench.device.torch_memory < request.json > answer.json

Only the trained part is in memory, as on a device; its parameters, gradients, momentum and inputs all count. Idle is
the process after importing everything and a tiny step.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.device.torch_step import TimedTorchStep, suffix_module
from edge_runtime.bundle_files import read_manifest
from edge_runtime.engine.portable import LayerForward
from edge_runtime.measure import RATE, answer_request, random_inputs, random_labels_of
from edge_runtime.memory import PeakMeter, current_memory
from federation.errors import BundleError
from federation.manifest import Boundary, Manifest
from model_export.verify import rebuild_source

SAMPLES = 2  # enough to find out which modules stand behind the boundary


def measure_torch(request: dict[str, Any]) -> dict[str, Any]:
    """Measure idle bytes and peak bytes on top of them."""
    torch.set_num_threads(request["threads"])
    directory = Path(request["bundle"])
    manifest = read_manifest(directory)
    boundary = manifest.boundary(request["boundary"])
    part = _trained_part(directory, manifest, boundary).to("meta")  # shapes only: nothing is held
    _warm_up()
    _give_back()
    idle = current_memory()
    with PeakMeter() as meter:
        entry = manifest.entry(boundary)
        x = random_inputs(entry, request["batch"], manifest.vocabulary)
        labels = random_labels_of(manifest, request["batch"])
        step = TimedTorchStep(_filled(part), manifest.loss, x, labels, boundary)
        optimiser = torch.optim.SGD(part.parameters(), RATE, momentum=0.9, weight_decay=1e-4)
        for _ in range(request["iterations"]):
            step()
            optimiser.step()
    return {
        "idle": {"resident": idle.resident, "anonymous": idle.anonymous, "file_backed": idle.file_backed}
        if idle
        else {},
        "memory": asdict(meter.peak) if meter.peak else {},
    }


def _trained_part(directory: Path, manifest: Manifest, boundary: Boundary) -> nn.Module:
    source = rebuild_source(manifest)
    first = entering = source.sample(SAMPLES)
    for layer in manifest.layers[: boundary.layer]:
        entering = LayerForward(directory / layer.forward.name)(entering)
    part = suffix_module(source.module(), first, entering, boundary.layer)
    if part is None:
        raise BundleError("no part of the module starts there")
    return part


def _filled(part: nn.Module) -> nn.Module:
    """Give the part memory of its own. Any weights do, as long as they are numbers and the memory is touched."""
    part.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_(0.0, 0.02)
        for buffer in part.buffers():
            buffer.fill_(1)
    return part


def _warm_up() -> None:
    """Train something tiny: what PyTorch sets up once counts as idle."""
    tiny = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 4, 2))
    optimiser = torch.optim.SGD(tiny.parameters(), RATE, momentum=0.9, weight_decay=1e-4)
    nn.functional.cross_entropy(tiny(torch.rand(2, 1, 4, 4)), torch.tensor([0, 1])).backward()
    optimiser.step()


def _give_back() -> None:
    """Return freed memory to the system: it would hide as much of the peak."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    answer_request(measure_torch)
