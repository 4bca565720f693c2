"""What makes a simulation quicker computes the same: against float64 NumPy and plain autograd."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from federation.axes.local import LocalStep, Momentum, Proximal, Start, WeightDecay  # noqa: E402
from simulation.fused_step import FusedStep  # noqa: E402
from simulation.heap import keep_freed_memory  # noqa: E402
from simulation.torch_engine import add_in_place, channels_last, connect_frozen  # noqa: E402
from simulation.torch_model import fold_norms, front_module, work_in_place  # noqa: E402

SIZE, RATE = 1000, 0.1
WEIGHTS, STATISTICS = [slice(0, 400), slice(450, 1000)], [slice(400, 450)]


def walk(kind: type[LocalStep], rules: tuple, steps: int = 4) -> tuple[np.ndarray, LocalStep]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(SIZE).astype(np.float32)
    local = kind(rules, Start(x, steps, RATE, x.copy(), {}), WEIGHTS, STATISTICS)
    for _ in range(steps):
        local.step(rng.standard_normal(SIZE).astype(np.float32), RATE)
    return x, local


def expected(decay: float, momentum: float, nesterov: bool, steps: int = 4) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(SIZE).astype(np.float32).astype(np.float64)
    velocity = np.zeros(SIZE)
    for _ in range(steps):
        given = rng.standard_normal(SIZE).astype(np.float32)
        gradient = given + decay * x
        velocity = momentum * velocity + gradient
        x = x - RATE * (gradient + momentum * velocity if nesterov else velocity)
        x[STATISTICS[0]] = given[STATISTICS[0]]
    return x


@pytest.mark.parametrize(
    "rules, decay, momentum, nesterov",
    [
        ((), 0.0, 0.0, False),
        ((WeightDecay(0.01),), 0.01, 0.0, False),
        ((Momentum(0.9),), 0.0, 0.9, False),
        ((WeightDecay(0.01), Momentum(0.9)), 0.01, 0.9, False),
        ((WeightDecay(0.01), Momentum(0.9, nesterov=True)), 0.01, 0.9, True),
    ],
)
def test_one_pass_is_sgd_and_takes_statistics_as_they_are(rules, decay, momentum, nesterov):
    x, local = walk(FusedStep, rules)
    np.testing.assert_allclose(x, expected(decay, momentum, nesterov), rtol=1e-5, atol=1e-5)
    other, plain = walk(LocalStep, rules)
    np.testing.assert_allclose(x, other, rtol=1e-5, atol=1e-6)
    assert local.rates == plain.rates and local.state().keys() == plain.state().keys()
    for name, buffer in local.state().items():
        for run in WEIGHTS:
            np.testing.assert_allclose(buffer[run], plain.state()[name][run], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rules", [(Proximal(0.1),), (Momentum(0.9), WeightDecay(0.01))])
def test_other_rules_and_orders_are_left_to_numpy(rules):
    assert np.array_equal(walk(FusedStep, rules)[0], walk(LocalStep, rules)[0])


def test_a_convolution_does_the_batch_norm_behind_it_with_weights_as_they_are_now(bundle_of):
    bundle = bundle_of("resnet8")
    manifest, layer = bundle.manifest, bundle.manifest.boundary("weak").layer
    weights = np.array(bundle.weights)
    plain, folded = (
        connect_frozen(front_module(bundle.directory, manifest, layer), manifest.space, weights) for _ in range(2)
    )
    folded = fold_norms(folded)
    assert not any(node.target.startswith("stem.1") for node in folded.graph.nodes if node.op == "call_module")
    x = torch.randn(4, *manifest.input.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for _ in range(2):
        with torch.inference_mode():
            given, wanted = folded(x), plain(x)
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
        results.append(given.clone())
        weights *= 1.01
    assert not torch.equal(*results), "the second round's weights were not read"


def test_additions_and_relus_in_place_change_no_bit(bundle_of):
    bundle = bundle_of("resnet8")
    layer = bundle.manifest.boundary("weak").layer
    x = torch.randn(4, *bundle.manifest.input.shape, generator=torch.Generator().manual_seed(1))
    found = []
    for change in (lambda module: module, work_in_place):
        front = change(front_module(bundle.directory, bundle.manifest, layer, training=True))
        y = front(x)
        y.square().sum().backward()
        found.append((y, *(p.grad for p in front.parameters() if p.grad is not None), *front.buffers()))
    assert sum(node.target is torch.relu_ for node in front.graph.nodes) == 5
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_one_channel_is_put_side_by_side_too():
    x = torch.randn(2, 1, 6, 4, generator=torch.Generator().manual_seed(1))
    pooled = torch.nn.functional.conv2d(channels_last(x), torch.ones(3, 1, 3, 3))
    assert torch.equal(channels_last(x), x) and pooled.stride()[1] == 1
    assert channels_last(x[:, 0]).stride() == x[:, 0].stride()


def test_dense_layers_add_what_autograd_adds_even_if_used_twice():
    layer = torch.nn.Linear(5, 5)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    layer(layer(x)).square().sum().backward()
    wanted = [layer.weight.grad.clone(), layer.bias.grad.clone(), x.grad.clone()]
    memory = layer.weight.grad.data_ptr()
    for tensor in (layer.weight, layer.bias, x):
        tensor.grad.zero_()
    layer = add_in_place(layer)
    layer(layer(x)).square().sum().backward()
    torch.testing.assert_close([layer.weight.grad, layer.bias.grad, x.grad], wanted)
    assert layer.weight.grad.data_ptr() == memory


def test_freed_memory_is_kept_without_harm():
    keep_freed_memory()
    assert float(torch.ones(1 << 20).sum()) == 1 << 20
