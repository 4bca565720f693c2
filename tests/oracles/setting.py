"""What the tests of the oracles share: a problem, a start, who takes part, and what counts as the same."""

from __future__ import annotations

import numpy as np
import torch

from tests.oracles.model import Model, flat
from tests.oracles.problem import make_model, make_problem

PROBLEM = make_problem(batch=4)
START = make_model()
DEVICES = range(PROBLEM.devices)
EVERYONE = [list(DEVICES)] * 3
SOME = [[0, 2], [3, 1, 2], [1], [0, 3]]
STEPS, RATE = 4, 0.2


def assert_same(one: Model, other: Model, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(flat(one), flat(other), rtol=tolerance, atol=tolerance)


def assert_same_models(one: list, other: list) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other):
        assert_same(mine.model, theirs.model)


def torch_loss(module: torch.nn.Module, device: int, step: int) -> torch.Tensor:
    inputs, labels = PROBLEM.batch_of(device, step)
    return torch.nn.functional.cross_entropy(module(torch.tensor(inputs)), torch.tensor(labels))
