"""Parts that are not trained: parameters without gradients, batch norm and whole backbones in inference mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import embrace
from embrace.bundles import Bundle
from embrace.errors import InputError
from model_export.verify import TOLERANCE
from simulation.torch_model import build_module
from tests.model_export.autodiff.module_harness import check_module

IMAGES = torch.randn(2, 3, 6, 6)


class Classifier(nn.Module):
    """A backbone with batch norm and dropout, and a head."""

    def __init__(self, *, frozen: bool = False, still: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(0.5), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
        for norm in (self.backbone[1], self.backbone[5]):
            nn.init.uniform_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            nn.init.uniform_(norm.weight, 0.5, 2.0)
        self.backbone.requires_grad_(not frozen)
        self.backbone.train(not still)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class KeepsStill(Classifier):
    """Its own `train` leaves the backbone in inference mode, as fine-tuning code does it."""

    def train(self, mode: bool = True) -> KeepsStill:
        super().train(mode)
        self.backbone.eval()
        return self


def verified(module: nn.Module, folder) -> Bundle:
    bundle = embrace.export(module, folder / "bundle", input_shape=(3, 6, 6))
    assert max(result.largest() for result in bundle.verify()) < TOLERANCE
    return bundle


@pytest.mark.parametrize("kind", [Classifier, KeepsStill])
def test_batch_norm_that_stays_in_inference_mode_trains_its_scale_only(kind: type[Classifier]) -> None:
    torch.manual_seed(0)
    exported = check_module(kind(still=True), IMAGES)
    parameters = [p for layer in exported.layers for p in layer.parameters]
    assert {p.kind for p in parameters} == {"weight"} and "backbone.1.weight" in {p.name for p in parameters}


def test_a_model_in_inference_mode_as_a_whole_is_trained_as_a_whole() -> None:
    torch.manual_seed(0)
    exported = check_module(Classifier().eval(), IMAGES)
    assert "backbone.1.running_mean" in {p.name for layer in exported.layers for p in layer.parameters}


@pytest.mark.parametrize("still", [False, True])
def test_a_frozen_backbone_is_a_layer_of_its_own_where_nothing_moves(still: bool, tmp_path) -> None:
    torch.manual_seed(0)
    bundle = verified(Classifier(frozen=True, still=still), tmp_path)
    first, *rest = bundle.manifest.layers
    assert {p.kind for p in first.parameters} == (set() if still else {"statistic"})
    assert [p.name for layer in rest for p in layer.parameters] == [
        f"head.{number}.{kind}" for number in (1, 3) for kind in ("weight", "bias")
    ]
    assert len(bundle.manifest.boundaries) == 3


def test_a_fleet_trains_the_head_of_a_frozen_backbone() -> None:
    torch.manual_seed(0)
    module = Classifier(frozen=True, still=True)
    bundle = embrace.export(module, input_shape=(3, 6, 6), tiers={"weak": 0.6})
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((60, 3, 6, 6)).astype(np.float32), rng.integers(0, 3, 60)
    before = bundle.state_dict()
    run = embrace.simulate(
        embrace.Job(bundle, num_rounds=2), data=(x, y), devices=4, tiers={"strong": 2, "weak": 2}, engine="portable"
    )
    after = run.weights
    assert set(before) == {name for name, _ in module.named_parameters() if name.startswith("head")} == set(after)
    assert all((before[name] != after[name]).any() for name in before)


def test_a_simulation_by_pytorch_says_that_it_does_not_keep_parts_in_inference_mode(tmp_path) -> None:
    (tmp_path / "model.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    still = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()\n"
        "    return nn.Sequential(still, nn.Linear(4, 3))\n"
    )
    bundle = embrace.export(f"{tmp_path}/model.py:build", tmp_path / "bundle", input_shape=(4,))
    with pytest.raises(InputError, match=r"model\.build keeps '0' in inference mode; use the engine portable for it"):
        build_module(bundle.manifest)
