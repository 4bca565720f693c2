"""A tokenizer of a few words that tests make themselves, and texts for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WORDS = ("a", "film", "the", "was", "good", "bad", "fine", "dull", "and", "not", "very", "it")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCABULARY = len(SPECIAL) + len(WORDS)


def require() -> Any:
    """Return the library, or skip the test."""
    return pytest.importorskip("tokenizers", reason="the extra `text` is not installed: pip install tokenizers")


def build() -> Any:
    library = require()
    ids = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = library.Tokenizer(library.models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.Lowercase()
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    ends = [("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    return tokenizer


def write(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    build().save(str(path))
    return path


def write_lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def reviews(count: int) -> list[dict[str, Any]]:
    """Texts of two classes, some longer than eight tokens."""
    kinds = {"bad": "it was bad and dull", "good": "the film was very good and fine and it was good"}
    return [
        {"text": f"{'A ' * (number % 3)}{kinds[label]}", "label": label} for number in range(count) for label in kinds
    ]
