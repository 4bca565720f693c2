"""Which models of other people's libraries become bundles: exported, verified, and with how many boundaries.

Small configurations with random weights; nothing is downloaded. Each model is verified at its first, middle and last
boundary (at all of them if it has three or fewer).

    pip install transformers timm
    python -m bench.models --out docs/results/models.md [NAME...]
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.textbook import TEXTBOOK
from federation.inputs import NamedInput
from federation.manifest import Loss
from model_export.bundle import Choices, export_bundle, load_graph
from model_export.quiet import silence
from model_export.source import ModelSource, module_source
from model_export.verify import TOLERANCE, verify_bundle

TOKENS = 24  # the vocabulary of every text model here
TEXT: dict[str, Any] = {"input_shape": (8,), "input_dtype": "int64", "vocabulary": TOKENS}
IMAGE: dict[str, Any] = {"input_shape": (3, 64, 64)}
SMALL = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
DECODER = {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False}
VISION = {**SMALL, "image_size": 32, "patch_size": 8, "num_labels": 4}


@dataclass(frozen=True)
class Subject:
    """A model to try: how it is built and what it takes."""

    name: str
    build: Callable[[], nn.Module]
    takes: dict[str, Any]

    def source(self) -> ModelSource:
        torch.manual_seed(0)
        return module_source(self.build(), **{"input_shape": None, **self.takes})


@dataclass(frozen=True)
class Outcome:
    """What became of it."""

    name: str
    boundaries: int = 0
    error: float | None = None  # the largest of all, None if it was not verified
    seconds: float = 0.0
    reason: str = ""

    @property
    def verified(self) -> bool:
        return self.error is not None and self.error <= TOLERANCE


def transformer(kind: str, **changes: Any) -> Callable[[], nn.Module]:
    """A model of the package transformers by the name of its class, with a small configuration."""

    def build() -> nn.Module:
        library: Any = importlib.import_module("transformers")
        chosen = getattr(library, kind)
        built: nn.Module = chosen(chosen.config_class(**changes))
        return built

    return build


def image_model(library: str, name: str, **changes: Any) -> Callable[[], nn.Module]:
    """A model of timm or torchvision by its name."""

    def build() -> nn.Module:
        package: Any = importlib.import_module(library)
        built: nn.Module = package.create_model(name, num_classes=4, **changes)
        return built

    return build


def _texts() -> list[Subject]:
    gpt = {"vocab_size": TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "use_cache": False}
    distil = {"vocab_size": TOKENS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    kinds: dict[str, dict[str, Any]] = {
        "BertForSequenceClassification": SMALL,
        "RobertaForSequenceClassification": {**SMALL, "pad_token_id": 1},
        "DistilBertForSequenceClassification": distil,
        "AlbertForSequenceClassification": {**SMALL, "embedding_size": 8},
        "ElectraForSequenceClassification": {**SMALL, "embedding_size": 8},
        "MPNetForSequenceClassification": SMALL,
        "CamembertForSequenceClassification": {**SMALL, "pad_token_id": 1},
        "DebertaV2ForSequenceClassification": SMALL,
        "MobileBertForSequenceClassification": {**SMALL, "embedding_size": 8, "intra_bottleneck_size": 16},
        "ConvBertForSequenceClassification": {**SMALL, "embedding_size": 16},
        "FNetForSequenceClassification": {k: v for k, v in SMALL.items() if k != "num_attention_heads"},
        "RoFormerForSequenceClassification": {**SMALL, "embedding_size": 16},
        "BertForMaskedLM": SMALL,
        "BertForTokenClassification": SMALL,
        "GPT2LMHeadModel": gpt,
        "GPTNeoXForCausalLM": {**SMALL, "use_cache": False},
        "OPTForCausalLM": {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 16, "use_cache": False},
        "LlamaForCausalLM": DECODER,
        "MistralForCausalLM": DECODER,
        "Qwen2ForCausalLM": DECODER,
        "Qwen3ForCausalLM": DECODER,
        "GemmaForCausalLM": DECODER,
        "PhiForCausalLM": {**SMALL, "use_cache": False},
        "MambaForCausalLM": {"vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "use_cache": False},
        "ErnieForSequenceClassification": SMALL,
        "MegatronBertForSequenceClassification": SMALL,
        "NystromformerForSequenceClassification": {**SMALL, "segment_means_seq_len": 8, "num_landmarks": 4},
        "SqueezeBertForSequenceClassification": {**SMALL, "embedding_size": 16},
        "XLNetForSequenceClassification": {
            "vocab_size": TOKENS,
            "d_model": 16,
            "n_layer": 2,
            "n_head": 2,
            "d_inner": 32,
        },
        "GPTNeoForCausalLM": {
            **SMALL,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "use_cache": False,
        },
        "GPTJForCausalLM": {**gpt, "rotary_dim": 4},
        "CodeGenForCausalLM": {**gpt, "rotary_dim": 4, "n_head": 4},
        "FalconForCausalLM": {**SMALL, "use_cache": False},
        "StableLmForCausalLM": {**DECODER, "num_key_value_heads": 2},
        "Olmo2ForCausalLM": DECODER,
        "Phi3ForCausalLM": {**DECODER, "num_key_value_heads": 2},
        "CohereForCausalLM": DECODER,
        "BloomForCausalLM": {"vocab_size": TOKENS, "hidden_size": 16, "n_layer": 2, "n_head": 2, "use_cache": False},
    }
    lm = {**TEXT, "loss": Loss("mse")}  # every logit of every position takes part
    per_position = ("LMHeadModel", "CausalLM", "MaskedLM", "TokenClassification")
    return [
        Subject(name, transformer(name, **settings), lm if name.endswith(per_position) else TEXT)
        for name, settings in kinds.items()
    ]


def _several() -> list[Subject]:
    """Models of several inputs: a mask beside the tokens, an encoder and a decoder."""
    masked = {"inputs": (_tokens("input_ids"), NamedInput("attention_mask", "int64", (8,), 2))}
    both = {"inputs": (_tokens("input_ids"), _tokens("decoder_input_ids", 6)), "loss": Loss("mse")}
    seq = {"vocab_size": TOKENS, "d_model": 16, "use_cache": False, "pad_token_id": 0, "decoder_start_token_id": 0}
    t5 = {**seq, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
    bart = {**seq, **sides, **heads, "eos_token_id": 2, "bos_token_id": 1, "forced_eos_token_id": None}
    lm = {**masked, "loss": Loss("mse")}
    gpt = {"vocab_size": TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "use_cache": False}
    kinds: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("BertForSequenceClassification", SMALL, masked),
        ("RobertaForSequenceClassification", {**SMALL, "pad_token_id": 1}, masked),
        ("DebertaV2ForSequenceClassification", SMALL, masked),
        ("ElectraForTokenClassification", {**SMALL, "embedding_size": 8}, lm),
        ("GPT2LMHeadModel", gpt, lm),
        ("LlamaForCausalLM", DECODER, lm),
        ("Qwen2ForCausalLM", DECODER, lm),
        ("T5ForConditionalGeneration", t5, both),
        ("MT5ForConditionalGeneration", t5, both),
        ("BartForConditionalGeneration", bart, both),
        ("MarianMTModel", bart, both),
    ]
    return [Subject(f"{name}, several inputs", transformer(name, **own), takes) for name, own, takes in kinds]


def _tokens(name: str, length: int = 8) -> NamedInput:
    return NamedInput(name, "int64", (length,), TOKENS)


def _images() -> list[Subject]:
    stages = {"hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 1, 1], "num_labels": 4}
    kinds: dict[str, dict[str, Any]] = {
        "ViTForImageClassification": VISION,
        "DeiTForImageClassification": VISION,
        "BeitForImageClassification": VISION,
        "SwinForImageClassification": {
            "image_size": 32,
            "drop_path_rate": 0.0,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        "ConvNextForImageClassification": stages,
        "ResNetForImageClassification": {**stages, "embedding_size": 8, "layer_type": "basic"},
        "RegNetForImageClassification": {**stages, "embedding_size": 8, "groups_width": 8},
        "Dinov2ForImageClassification": VISION,
        "PoolFormerForImageClassification": {**stages, "num_encoder_blocks": 4},
        "SegformerForImageClassification": {**stages, "num_attention_heads": [1, 2, 2, 2], "drop_path_rate": 0.0},
        "PvtForImageClassification": {
            "image_size": 32,
            "hidden_sizes": [8, 16, 16, 24],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 2],
            "sequence_reduction_ratios": [4, 2, 1, 1],
            "drop_path_rate": 0.0,
            "num_labels": 4,
        },
        "Wav2Vec2ForSequenceClassification": {
            **SMALL,
            "conv_dim": [8, 8],
            "conv_stride": [4, 4],
            "conv_kernel": [8, 4],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "num_feat_extract_layers": 2,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
            "classifier_proj_size": 8,
        },
    }
    small, wave = {"input_shape": (3, 32, 32)}, {"input_shape": (256,)}
    found = [
        Subject(name, transformer(name, **settings), wave if name.startswith("Wav2Vec2") else small)
        for name, settings in kinds.items()
    ]
    names = (
        "resnet18 mobilenetv2_050 mobilenetv3_small_050 efficientnet_b0 repvgg_a0 regnetx_002 densenet121 ghostnet_050 "
        "convnext_atto mixer_s32_224 vit_tiny_patch16_224 poolformer_s12 inception_v3"
    )
    sized = {"mixer_s32_224": {"img_size": 64}, "vit_tiny_patch16_224": {"img_size": 64}}
    for name in names.split():
        takes = {"input_shape": (3, 96, 96)} if name == "inception_v3" else IMAGE
        found.append(Subject(f"timm {name}", image_model("timm", name, **sized.get(name, {})), takes))
    return found


class TiedLanguageModel(nn.Module):
    """An embedding, a recurrent layer and an output that is the embedding again."""

    def __init__(self, kind: type[nn.RNN] | type[nn.LSTM]) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 16, padding_idx=0)
        self.reader = kind(16, 16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence: torch.Tensor = self.reader(self.words(x))[0]
        return sequence @ self.words.weight.T


class Critic(nn.Sequential):
    """The discriminator of a GAN with spectral norm."""

    def __init__(self) -> None:
        norm = nn.utils.parametrizations.spectral_norm
        parts = [norm(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2), norm(nn.Conv2d(8, 8, 4, 2, 1)), nn.LeakyReLU(0.2)]
        super().__init__(*parts, nn.Flatten(), norm(nn.Linear(8 * 16 * 16, 1)))


def _textbook() -> list[Subject]:
    lm = {**TEXT, "loss": Loss("mse")}
    return [
        Subject("tied language model, RNN", lambda: TiedLanguageModel(nn.RNN), lm),
        Subject("tied language model, LSTM", lambda: TiedLanguageModel(nn.LSTM), lm),
        Subject("critic with spectral norm", Critic, {**IMAGE, "loss": Loss("bce_with_logits")}),
        *(Subject(*each) for each in TEXTBOOK),
    ]


def try_model(subject: Subject) -> Outcome:
    """Export and verify one model; a failure is an outcome, too."""
    started = time.perf_counter()

    def outcome(boundaries: int, error: float | None, reason: str) -> Outcome:
        return Outcome(subject.name, boundaries, error, time.perf_counter() - started, reason)

    try:
        with silence(1, 2):
            source = subject.source()
            names = [layer.name for layer in load_graph(source)[1]]
    except Exception as error:  # whatever a library raises about itself
        return outcome(0, None, _line(error))
    chosen = sorted({0, len(names) // 2, len(names) - 1})
    with tempfile.TemporaryDirectory() as folder:
        try:
            bundle = Path(folder) / "bundle"
            with silence(1, 2):
                export_bundle(source, bundle, Choices(splits=[names[i] for i in chosen]))
                results = verify_bundle(bundle, source=source)
        except Exception as error:
            return outcome(0, None, _line(error))
    worst = max(results, key=lambda result: result.largest())
    return outcome(
        len(names), worst.largest(), "" if worst.largest() <= TOLERANCE else f"{worst.boundary}: {worst.worst}"
    )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160].replace("|", "/")


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """The outcomes as a table of Markdown."""
    rows = ["| model | boundaries | largest error | seconds | |", "|---|---|---|---|---|"]
    for one in outcomes:
        error = "–" if one.error is None else f"{one.error:.1e}"
        rows.append(f"| {one.name} | {one.boundaries or '–'} | {error} | {one.seconds:.0f} | {one.reason} |")
    return rows


def main() -> None:
    """Try the models and print, or write into a page, what became of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of models; default: all")
    parser.add_argument("--out", type=Path, help="a page: its table is replaced")
    options = parser.parse_args()
    torch.set_num_threads(1)
    subjects = [*_textbook(), *_texts(), *_several(), *_images()]
    outcomes = []
    for subject in subjects:
        if not options.names or any(name in subject.name for name in options.names):
            outcomes.append(try_model(subject))
            print(table(outcomes)[-1], flush=True)
    verified = [one for one in outcomes if one.verified]
    several = sum(one.boundaries >= 3 for one in verified)
    total = (
        f"{len(outcomes)} models: {sum(one.boundaries > 0 for one in outcomes)} exported, {len(verified)} verified, "
    )
    total += f"{several} verified with three boundaries or more."
    print(total)
    if options.out:
        start, end = "<!-- models: python -m bench.models -->", "<!-- end of models -->"
        before, _, rest = options.out.read_text().partition(start)
        options.out.write_text("\n".join([before + start, total, "", *table(outcomes), end]) + rest.partition(end)[2])


if __name__ == "__main__":
    main()
