"""The loop that `embrace bench simulate` compares with: PyTorch's module, PyTorch's SGD, nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from bench.simulation.case import DECAY, MOMENTUM, SpeedCase
from bench.simulation.meter import Meter
from edge_runtime.bundle_files import map_weights, read_manifest
from simulation.pool import Arrays, ArraySpec, Json, LocalPool, Work, WorkerSpec


def run_bare(case: SpeedCase, folder: Path, meter: Meter) -> list[float]:
    """Run all rounds: deal the cohort to the processes, average what they give. Return the losses."""
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("inputs", "labels", "numbers")}
    manifest = read_manifest(Path(case.bundle))
    shared = {name: ArraySpec(array.shape, str(array.dtype)) for name, array in arrays.items()}
    size = ArraySpec((manifest.space.size,))
    spec = WorkerSpec(
        "bench.simulation.bare:build", {"case": vars(case)}, {"global": size, **shared}, {"updates": size}
    )
    weights = np.array(map_weights(Path(case.bundle) / manifest.weights.name, manifest.space))
    found = []
    with LocalPool(spec, case.workers) as pool:
        for name, array in arrays.items():
            pool.share(name, array)
        for number, seats in enumerate(json.loads((folder / "seats.json").read_text())):
            meter.round()
            pool.share("global", weights)
            total, losses, part = np.zeros(weights.size), [], -(-len(seats) // case.workers)
            jobs = [{"round": number, "seats": seats[at : at + part]} for at in range(0, len(seats), part)]
            for answer, rows in pool.map(jobs):
                total += rows["updates"]
                losses += answer["losses"]
            weights = (weights + total / case.cohort).astype(np.float32)
            found.append(float(np.mean(losses)))
        meter.end()
    return found


def build(settings: Json, shared: Arrays) -> Work:
    """The loop that one writes without any of this: load, SGD, subtract."""
    import torch

    from edge_runtime.trainer import batches
    from federation.messages import Task
    from model_export.source import load_source

    torch.set_num_threads(1)
    case = SpeedCase(**settings["case"])
    manifest = read_manifest(Path(case.bundle))
    module = load_source(manifest.source.reference).module().train()
    state, where = module.state_dict(), manifest.space.views(shared["global"])
    inputs, labels = torch.from_numpy(shared["inputs"]), torch.from_numpy(shared["labels"])

    def work(job: Json, slot: Arrays) -> Json:
        losses = []
        slot["updates"].fill(0.0)
        total = manifest.space.views(slot["updates"])
        for device, seed in job["seats"]:
            for name, value in where.items():
                state[name].copy_(torch.from_numpy(value))
            optimiser = torch.optim.SGD(module.parameters(), case.rate, MOMENTUM, weight_decay=DECAY)
            task = Task("", case.steps, case.batch, case.rate, seed=seed, round=job["round"])
            own = []
            for _, indices in batches(case.samples, case.batch, task):
                chosen = torch.from_numpy(shared["numbers"][device, indices])
                optimiser.zero_grad()
                loss = torch.nn.functional.cross_entropy(module(inputs[chosen]), labels[chosen])
                loss.backward()
                optimiser.step()
                own.append(loss.item())
            losses.append(float(np.mean(own)))
            for name, value in where.items():
                total[name] += state[name].numpy() - value
        return {"losses": losses}

    return work
