"""Train a model of the zoo on all of its data at once: whether model and preprocessing learn at all, before devices do.

    python -m bench.papers.central femnist_cnn@0.125 femnist --data-dir data --steps 400 --rate 0.04 --seeds 2

A gate for tables that would take hours: where this fails, no algorithm can be judged. One thread, PyTorch alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from model_export.zoo import zoo_model
from simulation.datasets import Dataset, load_dataset

SCORED_AT_ONCE = 500
TOLD_EVERY = 100  # steps


def train(data: Dataset, model: nn.Module, steps: int, batch: int, rate: float, momentum: float, seed: int) -> None:
    """Take steps of stochastic gradient descent over batches drawn epoch by epoch; tell the loss on the way."""
    rule = torch.optim.SGD(model.parameters(), rate, momentum)
    model.train()
    recent = 0.0
    for number, numbers in zip(range(1, steps + 1), _batches(len(data.y_train), batch, seed)):
        loss = _loss(model(_inputs(data.x_train[numbers])), torch.from_numpy(data.y_train[numbers]))
        rule.zero_grad()
        loss.backward()
        rule.step()
        recent += loss.item()
        if number % TOLD_EVERY == 0:
            print(f"  step {number}: loss {recent / TOLD_EVERY:.3f}", file=sys.stderr, flush=True)
            recent = 0.0


@torch.no_grad()
def accuracy(data: Dataset, model: nn.Module) -> float:
    """Score the model on the whole test set."""
    model.eval()
    right = 0
    for start in range(0, len(data.y_test), SCORED_AT_ONCE):
        outputs = model(_inputs(data.x_test[start : start + SCORED_AT_ONCE]))
        found = outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()
        right += int((found == torch.from_numpy(data.y_test[start : start + SCORED_AT_ONCE])).sum())
    return right / len(data.y_test)


def _batches(samples: int, batch: int, seed: int) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(samples)
        yield from (order[at : at + batch] for at in range(0, samples - batch + 1, batch))


def _inputs(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    """Convert as a device does: bytes become numbers from 0 to 1, token numbers stay."""
    if values.ndim == 2:
        return torch.from_numpy(values.astype(np.int64))
    scale = 255 if values.dtype == np.uint8 else 1
    return torch.from_numpy(values.astype(np.float32) / scale)


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    if outputs.shape[1] > 1:
        return functional.cross_entropy(outputs, labels)
    return functional.binary_cross_entropy_with_logits(outputs[:, 0], labels.float())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="of the zoo")
    parser.add_argument("dataset")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.04)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    data = load_dataset(asked.dataset, asked.data_dir)
    for seed in range(asked.seeds):
        torch.manual_seed(seed)
        model = zoo_model(asked.model).build()
        train(data, model, asked.steps, asked.batch, asked.rate, asked.momentum, seed)
        print(f"seed {seed}: {accuracy(data, model):.1%} of {len(data.y_test):,} test samples")


if __name__ == "__main__":
    main()
