"""The tokenizer inside a GGUF file, as the `tokenizer.json` that the tokenizers library reads."""

from __future__ import annotations

import json
from typing import Any

from federation.errors import InputError
from model_export.gguf import GgufFile

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens that are never put together from pieces
# How text is parted before pairs are merged, by the name that the file gives it.
_DIGITS = {"type": "Digits", "individual_digits": True}
_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PARTING = {"smollm": [_DIGITS, _WORDS], "gpt-2": [_WORDS], "default": [_WORDS]}


def tokenizer_json(file: GgufFile) -> str:
    """Write the byte-pair tokenizer of a file as JSON."""
    model, parting = file.facts.get(f"{_PREFIX}model"), file.facts.get(f"{_PREFIX}pre", "default")
    if model != "gpt2" or parting not in _PARTING:
        raise InputError(
            f"{file.path.name} has the tokenizer {model!r:.20} ({parting!r:.20}); these can be written: gpt2 with "
            f"{', '.join(_PARTING)}"
        )
    tokens, merges, kinds = (file.fact(f"{_PREFIX}{name}", list) for name in ("tokens", "merges", "token_type"))
    if len(kinds) != len(tokens) or not all(isinstance(text, str) for text in (*tokens, *merges)):
        raise InputError(f"{file.path.name}: expected a kind for each of its {len(tokens)} tokens, and texts")
    added = [_added(i, text, kind == _CONTROL) for i, (text, kind) in enumerate(zip(tokens, kinds)) if _whole(kind)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PARTING[parting]},
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(tokens)}, "merges": merges},
        }
    )


def _whole(kind: Any) -> bool:
    return kind in (_CONTROL, _USER_DEFINED)


def _added(number: int, text: str, special: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": special, **plain}
