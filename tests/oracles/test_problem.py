"""The gradient written out by hand is the one of PyTorch, for the wide and for the narrow model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.oracles.heterofl import cut
from tests.oracles.model import flat, size
from tests.oracles.problem import make_model, make_problem, model_of, narrow_shapes, torch_module


@pytest.mark.parametrize("width", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("batch", [None, 4])
def test_loss_and_gradient_are_those_of_torch(width, batch):
    problem = make_problem(batch=batch)
    model = cut(make_model(), narrow_shapes(width))
    for device in range(problem.devices):
        module = torch_module(model)
        inputs, labels = problem.batch_of(device, step=3)
        loss = torch.nn.functional.cross_entropy(module(torch.tensor(inputs)), torch.tensor(labels))
        loss.backward()
        expected = np.concatenate([parameter.grad.numpy().ravel() for parameter in module.parameters()])
        np.testing.assert_allclose(problem.loss(device, model, 3), loss.item(), rtol=1e-12)
        np.testing.assert_allclose(flat(problem.gradient(device, model, 3)), expected, rtol=1e-10, atol=1e-14)


def test_the_problem_is_heterogeneous_and_its_layers_differ_in_size():
    problem, model = make_problem(), make_model()
    gradients = [flat(problem.gradient(device, model)) for device in range(problem.devices)]
    assert len(set(problem.samples)) == problem.devices
    assert len({size(layer) for layer in model}) == len(model)
    average = np.mean(gradients, axis=0)
    assert all(np.linalg.norm(g - average) > 0.2 * np.linalg.norm(average) for g in gradients)


def test_batches_go_round_the_samples():
    problem = make_problem(batch=4)  # device 0 has 6 samples
    rows = np.concatenate([problem.batch_of(0, step)[0] for step in range(3)])
    np.testing.assert_array_equal(rows, np.concatenate([problem.inputs[0], problem.inputs[0]]))


def test_a_module_becomes_the_model_it_was_made_of():
    model = make_model()
    back = model_of(torch_module(model))
    assert [list(layer) for layer in back] == [list(layer) for layer in model]
    np.testing.assert_array_equal(flat(back), flat(model))
