"""Random layers besides dropout: noise and stochastic depth from the device's seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_export.autodiff.rules.dropout import reference_normal, reference_uniform
from model_export.errors import ExportError
from tests.model_export.autodiff.harness import operator, run
from tests.model_export.autodiff.module_harness import check_module, forward, prepare_step, seed_input

Draw = Callable[[Tensor], Tensor]


class Drawing(nn.Module):
    """Something random between two dense layers while training; `exact` is its mean."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(6, 8), nn.Linear(8, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        told: Tensor = self.second(self.draw(torch.tanh(self.first(x))))
        return told


def drop_path(x: Tensor) -> Tensor:
    """As transformers writes it."""
    kept = (0.7 + torch.rand((x.shape[0], 1), dtype=x.dtype)).floor()
    return x.div(0.7) * kept


def stochastic_depth(x: Tensor) -> Tensor:
    """As timm and torchvision write it."""
    noise = x.new_empty((x.shape[0], 1)).bernoulli_(0.7)
    noise.div_(0.7)
    return x * noise


def ignoring_the_result(x: Tensor) -> Tensor:
    noise = torch.zeros_like(x)
    noise.normal_(0.0, 0.1)
    return x + noise


EXACT: dict[str, Draw] = {
    "noise": lambda x: x + 0.3 * torch.randn_like(x),
    "drop path": drop_path,
    "stochastic depth": stochastic_depth,
    "comparison": lambda x: x * (torch.rand_like(x) < 0.8).float() / 0.8,
    "normal distribution": lambda x: torch.distributions.Normal(x, 0.1 + x.abs()).rsample(),
    "drawn in place": ignoring_the_result,
}


@pytest.mark.parametrize(
    "name",
    [pytest.param("noise", marks=operator("RandomNormalLike")), "normal distribution", "drawn in place"],
)
def test_noise_has_the_gradient_of_autograd(name: str) -> None:
    exported = check_module(Drawing(EXACT[name]), torch.randn(2, 6))
    assert seed_input(exported.train)


@operator("RandomUniformLike")
def test_uniform_numbers_have_the_gradient_of_autograd() -> None:
    check_module(Drawing(lambda x: x * (0.5 + torch.rand(8)) + torch.rand_like(x)), torch.randn(2, 6))


@pytest.mark.parametrize("name", ["drop path", "stochastic depth", "comparison"])
def test_layers_that_are_left_out_at_times(name: str) -> None:
    check_module(Drawing(EXACT[name]), torch.randn(2, 6))


def test_channels_that_are_dropped_whole() -> None:
    check_module(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.5), nn.Conv2d(4, 2, 3)), torch.randn(2, 2, 6, 6))


@pytest.mark.parametrize("name", sorted(EXACT))
def test_the_finished_model_has_the_mean(name: str) -> None:
    module = Drawing(EXACT[name])
    step = prepare_step(module, torch.randn(2, 6))
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    found = forward(step.exported.graph, step.exported.layers, x)
    module.draw = lambda value: value
    np.testing.assert_allclose(found, module(torch.from_numpy(x)).detach().numpy(), atol=1e-5)


def test_another_seed_draws_other_numbers() -> None:
    step = prepare_step(Drawing(EXACT["noise"]), torch.randn(2, 6), seed=7)
    losses = [float(run(step.exported.train, {**step.feed, "seed": np.array(seed)})["loss"]) for seed in (7, 7, 8)]
    assert losses[0] == losses[1] != losses[2]


def test_numbers_are_as_random_as_they_should_be() -> None:
    normal, uniform = reference_normal(1, 0, (400, 50)), reference_uniform(1, 0, (400, 50))
    assert abs(normal.mean()) < 0.03 and abs(normal.std() - 1) < 0.03
    assert abs(np.corrcoef(normal[:, 0], normal[:, 1])[0, 1]) < 0.2
    assert 0 <= uniform.min() < 0.001 and 0.999 < uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.01
    other = reference_normal(1, 1, (400, 50))
    assert abs(np.corrcoef(normal.ravel(), other.ravel())[0, 1]) < 0.03


def test_what_no_seed_reaches_is_refused_in_one_line() -> None:
    module = Drawing(lambda x: x * torch.multinomial(F.softmax(x, 1), 1))
    with pytest.raises(ExportError, match=r"Multinomial.*draw with torch\.rand"):
        check_module(module, torch.randn(2, 6))
