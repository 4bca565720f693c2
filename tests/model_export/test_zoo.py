"""The zoo against the papers' tables: sizes, shapes, tiers, and that every model exports for training."""

from __future__ import annotations

import io
import math

import onnx
import pytest
import torch
from torch import Tensor, nn

from federation.errors import InputError
from federation.parameter_layers import parameter_layers
from federation.space import Parameter, ParameterSpace
from model_export.zoo import ZOO, Tier, ZooModel, zoo_model

PARAMETERS = {
    "digits": 10_402,
    "mnist_lr": 7_850,
    "mnist_2nn": 199_210,
    "mnist_cnn": 582_026,
    "femnist_cnn": 6_603_710,
    "resnet8": 78_330,
    "fashion_resnet8": 78_042,  # the stem sees one channel instead of three
    "resnet20": 272_762,
    "resnet20_keras": 272_762,
    "resnet8_gn": 78_330,
    "resnet56_gn": 856_058,
    "vgg11": 9_224_458,
    "vgg16": 14_765_988,
    "mobilenetv2": 587_178,
    "imdb_bilstm": 3_611_137,
    "text_transformer": 748_418,
}

every_model = pytest.mark.parametrize("model", ZOO.values(), ids=ZOO.keys())


def parameters_from(network: nn.Module, boundary: str) -> int:
    """Trainable parameters of the modules from the boundary on; modules are registered in running order."""
    modules = [name for name, _ in network.named_modules()]
    trained = set(modules[modules.index(boundary) :])
    return sum(
        parameter.numel()
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and name.rpartition(".")[0] in trained
    )


def activations_from(network: nn.Module, boundary: str, example: Tensor) -> int:
    """Outputs of convolutions and dense layers from the boundary on, counted while running, without ONNX."""
    modules = list(network.named_modules())
    first = [name for name, _ in modules].index(boundary)
    sizes: list[int] = []
    for _, module in modules[first:]:
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.numel()))
    network(example)
    return sum(sizes)


def example(model: ZooModel, batch: int) -> Tensor:
    shape = (batch, *model.input_shape)
    return torch.randint(0, model.vocabulary, shape) if model.vocabulary else torch.randn(shape)


def test_the_list_is_complete() -> None:
    assert set(ZOO) == set(PARAMETERS)
    assert all(name == model.name for name, model in ZOO.items())


@every_model
def test_parameter_count(model: ZooModel) -> None:
    network = model.build()
    assert sum(p.numel() for p in network.parameters() if p.requires_grad) == PARAMETERS[model.name]


@every_model
def test_output_shape(model: ZooModel) -> None:
    outputs = model.build()(example(model, batch=2))
    assert outputs.shape == (2, model.num_outputs)
    assert torch.isfinite(outputs).all()


@every_model
def test_the_seed_decides_the_weights(model: ZooModel) -> None:
    torch.manual_seed(7)
    first = model.build().state_dict()
    torch.manual_seed(7)
    second = model.build().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_model
def test_every_tier_names_a_module_and_trains_less_than_the_one_above(model: ZooModel) -> None:
    network = model.build()
    sizes = [PARAMETERS[model.name]]
    for tier in model.tiers.values():
        sizes.append(parameters_from(network, tier.boundary))
        steps = tier.last_steps
        assert sizes[-1] < sizes[-2] or (steps is not None and steps < model.input_shape[0])
    assert list(model.tiers) == ([] if model.name == "mnist_lr" else ["moderate", "weak"])


@pytest.mark.parametrize(
    ("name", "tier", "parameters"),
    [
        ("resnet20", "moderate", 257_994),
        ("resnet20", "weak", 206_346),
        ("femnist_cnn", "moderate", 6_551_614),
        ("femnist_cnn", "weak", 127_038),
        ("imdb_bilstm", "moderate", 1_051_137),
        ("imdb_bilstm", "weak", 1_051_137),
    ],
)
def test_tier_parameters_are_those_of_embracing_fl(name: str, tier: str, parameters: int) -> None:
    model = zoo_model(name)
    assert parameters_from(model.build(), model.tiers[tier].boundary) == parameters


@pytest.mark.parametrize(
    ("name", "boundary", "activations"),
    [
        ("resnet20", "", 6_947_136),
        ("resnet20", "layer2.0", 2_752_832),
        ("resnet20", "layer3.0", 917_824),
        ("femnist_cnn", "", 39_742),
        ("femnist_cnn", "dense", 2_110),
        ("femnist_cnn", "classifier", 62),
    ],
)
def test_activations_are_those_of_embracing_fl(name: str, boundary: str, activations: int) -> None:
    model = zoo_model(name)
    assert activations_from(model.build(), boundary, example(model, model.batch)) == activations


def test_the_lstm_has_one_bias_per_gate() -> None:
    biases = {n: p for n, p in zoo_model("imdb_bilstm").build().named_parameters() if ".bias_hh" in n}
    assert len(biases) == 2
    assert not any(p.requires_grad or p.any() for p in biases.values())


@every_model
def test_exports_for_training_from_standard_operators(model: ZooModel) -> None:
    file = io.BytesIO()
    torch.onnx.export(
        model.build(),
        (example(model, batch=2),),
        file,
        dynamo=False,
        opset_version=18,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        input_names=["input"],
        output_names=["logits"],
        dynamic_axes={"input": {0: "batch"}, "logits": {0: "batch"}},
    )
    exported = onnx.load_from_string(file.getvalue())
    onnx.checker.check_model(exported, full_check=True)
    assert {node.domain for node in exported.graph.node} == {""}


def test_an_unknown_name_suggests_the_closest() -> None:
    with pytest.raises(InputError, match=r"'resnet21'; did you mean resnet20"):
        zoo_model("resnet21")


def test_a_name_like_no_other_gets_the_whole_list() -> None:
    with pytest.raises(InputError, match=r"there are digits, mnist_lr, .*text_transformer"):
        zoo_model("qqq")


def test_a_tier_backpropagates_through_at_least_one_step() -> None:
    with pytest.raises(InputError, match="at least 1"):
        Tier("recurrence", last_steps=0)


@pytest.mark.parametrize(("name", "last"), [("femnist_cnn", "classifier"), ("vgg11", "classifier")])
def test_networks_without_normalisation_begin_with_weights_of_he(name, last):
    """Their deviation is √(2 / outputs per input), as He et al. have it; nothing is added at first."""
    torch.manual_seed(0)
    for layer, module in zoo_model(name).build().named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)) and layer != last:
            fan_out = module.weight.shape[0] * math.prod(module.weight.shape[2:])
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.1), layer
            assert not module.bias.any()


def test_the_resnet_of_keras_has_its_constants_and_begins_with_its_shortcuts():
    """Keras: momentum 0.99 of what was, ε = 0.001, kernels uniform within ±√(6 / (inputs + outputs))."""
    torch.manual_seed(0)
    network = zoo_model("resnet20_keras").build().train()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.momentum, module.eps) == (pytest.approx(1 - 0.99), 1e-3)
        if isinstance(module, nn.Conv2d):
            area = math.prod(module.kernel_size)
            bound = math.sqrt(6 / (area * (module.in_channels + module.out_channels)))
            assert bound * 0.9 < module.weight.abs().max() <= bound
    x = torch.rand(4, 16, 8, 8)
    plain = [block for stage in (network.layer1, network.layer2, network.layer3) for block in stage][1]
    assert torch.equal(plain(x), x)  # which is not negative


def test_the_lstm_begins_by_remembering():
    torch.manual_seed(0)
    model = zoo_model("imdb_bilstm").build()
    for name, bias in model.recurrence.lstm.named_parameters():
        if name.startswith("bias_ih"):  # input, forget, cell, output
            assert [gate.unique().tolist() for gate in bias.detach().chunk(4)] == [[0], [1], [0], [0]]
        if name.startswith("bias_hh"):
            assert not bias.any() and not bias.requires_grad
    bound = math.sqrt(6 / (10_000 + 256))  # Glorot's
    assert bound * 0.99 < model.embedding.weight.abs().max() <= bound


@pytest.mark.parametrize(("name", "layers"), [("resnet20", 23), ("femnist_cnn", 4), ("imdb_bilstm", 3)])
def test_parameter_layers_are_the_papers(name: str, layers: int) -> None:
    """ResNet20: 19 convolutions, the dense layer, and the projections on three shortcuts."""
    state = zoo_model(name).build().state_dict()
    kinds = {key: "statistic" if "running" in key else "weight" for key in state if "num_batches" not in key}
    space = ParameterSpace([[Parameter(key, kind, tuple(state[key].shape)) for key, kind in kinds.items()]])
    assert len(parameter_layers(space)) == layers
