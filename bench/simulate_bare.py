"""The loop that `embrace bench simulate` compares with: PyTorch's module, PyTorch's SGD, nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.simulate.pool import Arrays, Job, Work
from federation.manifest import read_manifest

MOMENTUM, DECAY = 0.9, 1e-4


def build(settings: Job, shared: Arrays) -> Work:
    """The loop that one writes without any of this: load, SGD, subtract."""
    import torch

    from edge_runtime.trainer import batches
    from federation.messages import decode_task
    from model_export.source import load_source

    torch.set_num_threads(1)
    manifest = read_manifest(Path(settings["bundle"]))
    module = load_source(manifest.source.reference).module().train()
    state, where = module.state_dict(), manifest.space.views(shared["global"])
    inputs, labels = torch.from_numpy(shared["inputs"]), torch.from_numpy(shared["labels"])

    def work(job: Job, slot: Arrays) -> Job:
        task, losses = decode_task(job["task"]), []
        slot["updates"].fill(0.0)
        total = manifest.space.views(slot["updates"][0])
        for device in job["devices"]:
            for name, value in where.items():
                state[name].copy_(torch.from_numpy(value))
            optimiser = torch.optim.SGD(module.parameters(), task.rate, MOMENTUM, weight_decay=DECAY)
            first, count = int(shared["starts"][device]), int(np.diff(shared["starts"][device : device + 2])[0])
            own = []
            for _, indices in batches(count, task.batch, replace(task, seed=task.seed + device)):
                chosen = torch.from_numpy(indices + first)
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
