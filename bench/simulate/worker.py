"""The work of a process that trains groups of devices: the simplest one, FedAvg's device without a memory.

    settings    {"bundle": directory}
    shared      global [P], inputs [N, ...], labels [N, ...], starts [devices + 1]: whose samples begin where
    job         {"devices": [...], "task": a task}
    slot        updates [GROUP, P], in the order of the devices
    answer      {"losses": [...], "failures": {device: why}}
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.simulate.group_engine import GroupTrainer
from bench.simulate.pool import Arrays, Job, Work
from bench.simulate.ready import ReadySamples
from bench.simulate.torch_engine import GlobalSource, TorchEngine
from edge_runtime.trainer import Received
from federation.errors import NonFiniteLoss
from federation.manifest import read_manifest
from federation.messages import decode_task


def build(settings: Job, shared: Arrays) -> Work:
    """The work, with modules and data that stay from job to job."""
    torch.set_num_threads(1)
    directory = Path(settings["bundle"])
    manifest = read_manifest(directory)
    source = GlobalSource(manifest)
    trainer = GroupTrainer(TorchEngine(directory, manifest, shared["global"]), source)

    def work(job: Job, slot: Arrays) -> Job:
        base = decode_task(job["task"])
        source.version = str(base.round)
        space, boundary = manifest.space, manifest.boundary(base.boundary)
        suffix = space.suffix(boundary.layer)
        starts = shared["starts"]
        samples = [
            ReadySamples(shared["inputs"], shared["labels"], np.arange(starts[d], starts[d + 1]))
            for d in job["devices"]
        ]
        tasks = [replace(base, seed=base.seed + device) for device in job["devices"]]
        received = [Received(shared["global"][suffix])] * len(tasks)
        losses: list[float | None] = []
        failures: dict[str, str] = {}
        slot["updates"].fill(0.0)
        for row, outcome in enumerate(trainer.train_group(tasks, received, samples)):
            if isinstance(outcome, NonFiniteLoss):
                failures[str(job["devices"][row])] = str(outcome)
                losses.append(None)
                continue
            slot["updates"][row, suffix] = outcome.local.update()
            losses.append(outcome.report.loss)
        return {"losses": losses, "failures": failures}

    return work
