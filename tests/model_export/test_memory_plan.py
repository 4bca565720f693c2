"""Memory plans: convolutions in parts where the peak lies, and fewer nodes, without another result."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import embrace
from embrace.bundles import TOLERANCE
from model_export.bundle import load_graph
from model_export.half_store import store_halves
from model_export.lifetimes import NODE_BYTES, sizes_of, touched
from model_export.memory_plan import Parts, plan_memory
from model_export.recompute import SLOWER, choose_remade, remake
from model_export.shared_values import share_values
from model_export.source import module_source
from model_export.training import training_graph
from tests.model_export.test_recompute import QUICK, plain_graph, run

BATCH = 32


def wide() -> nn.Module:
    """Images large enough that tiles of one convolution are the peak."""
    layers: list[nn.Module] = []
    for channels in (3, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


def test_parts_lower_the_peak_and_keep_the_gradients() -> None:
    torch.manual_seed(0)
    source = module_source(wide(), input_shape=(3, 32, 32), batch=BATCH)
    graph, layers = load_graph(source)

    def write(parts: Parts, alone: bool) -> onnx.ModelProto:
        return training_graph(graph, layers, source.loss, parts=parts, alone=alone)

    def memory(model: onnx.ModelProto) -> int:
        return touched(model, sizes_of(model), BATCH) + NODE_BYTES * len(model.graph.node)

    plain = write({}, False)
    whole = remake(plain, choose_remade(plain, sizes_of(plain), BATCH, SLOWER["balanced"]))
    planned = plan_memory(write, BATCH, "balanced")
    onnx.checker.check_model(planned.model)
    assert max(planned.parts.values()) > 1
    assert memory(planned.model) < memory(whole)
    before, after = run(whole), run(planned.model)
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-5, atol=1e-6 * np.abs(value).max(), err_msg=name)


def test_no_time_means_no_parts() -> None:
    source = module_source(wide(), input_shape=(3, 32, 32), batch=BATCH)
    graph, layers = load_graph(source)
    write = partial(training_graph, graph, layers, source.loss)
    assert not plan_memory(lambda parts, alone: write(parts=parts, alone=alone), BATCH, "fast").parts


@pytest.mark.parametrize("name", QUICK)
def test_values_kept_as_float16_take_less_and_give_nearly_the_same_gradients(name: str) -> None:
    plain = plain_graph(name)
    sizes = sizes_of(plain)
    halved = store_halves(plain, sizes, BATCH)
    onnx.checker.check_model(halved)
    assert touched(halved, sizes_of(halved), BATCH) < touched(plain, sizes, BATCH)
    before, after = run(plain), run(halved)
    assert np.array_equal(before["loss"], after["loss"]), "the forward pass is what it was"
    for output, value in before.items():
        assert np.linalg.norm(after[output] - value) <= 2e-2 * np.linalg.norm(value), output
    assert any(not np.array_equal(after[output], value) for output, value in before.items())


def test_a_bundle_with_halves_says_so_and_verifies(tmp_path: Path) -> None:
    torch.manual_seed(0)
    exported = embrace.export(wide(), tmp_path / "half", input_shape=(3, 16, 16), tiers={}, memory_plan="half")
    assert exported.manifest.memory_plan == "half"
    errors = [one.largest() for one in exported.verify()]
    assert TOLERANCE < max(errors) < exported.tolerance


@pytest.mark.parametrize("name", QUICK)
def test_sharing_small_values_takes_nodes_away_and_keeps_every_bit(name: str) -> None:
    plain = plain_graph(name)
    shared = share_values(plain, sizes_of(plain), BATCH)
    onnx.checker.check_model(shared)
    assert len(shared.graph.node) < len(plain.graph.node) or name == "attentive"  # it has nothing to share
    before, after = run(plain), run(shared)
    for output, value in before.items():
        np.testing.assert_array_equal(after[output], value, err_msg=output)
