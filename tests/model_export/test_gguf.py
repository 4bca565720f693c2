"""GGUF files that the tests write themselves: every kind against its definition, and files that lie."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from federation.errors import InputError
from model_export.gguf import GgufFile
from model_export.gguf_tokenizer import tokenizer_json

TEXT, LIST, UINT32, FLOAT32 = 8, 9, 4, 6
F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def fact(value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + text(value)
    if isinstance(value, list):
        kind = TEXT if isinstance(value[0], str) else UINT32
        items = [text(item) if kind == TEXT else struct.pack("<I", item) for item in value]
        return struct.pack("<IIQ", LIST, kind, len(value)) + b"".join(items)
    return struct.pack("<If", FLOAT32, value) if isinstance(value, float) else struct.pack("<II", UINT32, value)


def gguf(facts: dict, tensors: dict[str, tuple[tuple[int, ...], int, bytes]], **changes) -> bytes:
    """A file; shapes as PyTorch has them. `changes` replace numbers of the header."""
    known = {"magic": b"GGUF", "version": 3, "weights": len(tensors), "pairs": len(facts), "offset": None} | changes
    head = known["magic"] + struct.pack("<IQQ", known["version"], known["weights"], known["pairs"])
    head += b"".join(text(name) + fact(value) for name, value in facts.items())
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        offset = len(data) if known["offset"] is None else known["offset"]
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)
        data += raw + bytes(-len(raw) % 32)
    return head + bytes(-len(head) % 32) + data


def q4_1(weight: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Blocks of 32 with scale and least value, and the numbers that they stand for, written out one by one."""
    raw, values = b"", []
    for block in weight.reshape(-1, 32):
        scale, low = np.float16((block.max() - block.min()) / 15), np.float16(block.min())
        numbers = [int(np.clip(round((float(x) - float(low)) / float(scale)), 0, 15)) for x in block]
        raw += scale.tobytes() + low.tobytes() + bytes(numbers[i] | numbers[i + 16] << 4 for i in range(16))
        values += [np.float32(n) * np.float32(scale) + np.float32(low) for n in numbers]
    return raw, np.array(values, np.float32).reshape(weight.shape)


def write(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def weights() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)


def test_every_kind_is_read_as_it_is_defined(tmp_path: Path) -> None:
    weight = weights()
    half, byte = np.float16(0.25), np.arange(-96, 96, dtype=np.int8)
    nibbles = bytes(range(16))
    raw41, of41 = q4_1(weight)
    file = GgufFile(
        write(
            tmp_path / "m.gguf",
            gguf(
                {"general.name": "tiny", "sizes": [1, 2, 3], "rate": 0.5},
                {
                    "a": ((3, 64), F32, weight.tobytes()),
                    "b": ((3, 64), F16, weight.astype(np.float16).tobytes()),
                    "c": ((3, 64), Q4_1, raw41),
                    "d": (
                        (6, 32),
                        Q8_0,
                        b"".join(half.tobytes() + byte[i : i + 32].tobytes() for i in range(0, 192, 32)),
                    ),
                    "e": ((32,), Q4_0, half.tobytes() + nibbles),
                },
            ),
        )
    )
    assert file.facts == {"general.name": "tiny", "sizes": [1, 2, 3], "rate": 0.5}
    np.testing.assert_array_equal(file.tensor("a"), weight)
    np.testing.assert_array_equal(file.tensor("b"), weight.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(file.tensor("c"), of41)
    np.testing.assert_array_equal(file.tensor("d"), byte.astype(np.float32).reshape(6, 32) / 4)
    np.testing.assert_array_equal(file.tensor("e"), np.array([*(n - 8 for n in range(16)), *[-8] * 16]) / 4)
    with pytest.raises(InputError, match="has no tensor 'f'"):
        file.tensor("f")
    with pytest.raises(InputError, match=r"'rate' is 0\.5, expected int"):
        file.fact("rate", int)


def sound() -> bytes:
    return gguf({"name": "x", "list": ["a", "b"]}, {"w": ((3, 64), Q4_1, q4_1(weights())[0])})


ATTACKS = {
    "does not begin with": gguf({}, {}, magic=b"PKGG"),
    "version 9": gguf({}, {}, version=9),
    "tensors; expected at most": gguf({}, {}, weights=1 << 60),
    "facts; expected at most": gguf({}, {}, pairs=1 << 60),
    "lie outside the file": gguf({}, {"w": ((3, 64), F32, weights().tobytes())}, offset=1 << 40),
    "does not fit into the file": gguf({}, {"w": ((1 << 40, 1 << 40), F32, b"")}),
    "a tensor of 9 dimensions": gguf({}, {"w": ((1,) * 9, F32, b"")}),
    "no multiple of 32": gguf({}, {"w": ((40,), Q4_1, bytes(64))}),
    "weights of kind 99": gguf({}, {"w": ((3, 64), 99, bytes(999))}),
    "is there twice": gguf({}, {"w": ((2,), F32, bytes(8))}, weights=2)[:24]
    + b"".join([text("w") + struct.pack("<IQIQ", 1, 2, F32, 0)] * 2)
    + bytes(64),
    "unknown type 77": gguf({}, {}, pairs=1)[:24] + text("k") + struct.pack("<I", 77),
    "a text of": gguf({}, {}, pairs=1)[:24] + struct.pack("<Q", 1 << 62),
    "items; expected at most": gguf({}, {}, pairs=1)[:24] + text("k") + struct.pack("<IIQ", LIST, UINT32, 1 << 60),
    "lists in lists": gguf({}, {}, pairs=1)[:24]
    + text("k")
    + struct.pack("<I", LIST)
    + struct.pack("<IQ", LIST, 1) * 9,
    "general.alignment": gguf({"general.alignment": 24}, {}),
}


@pytest.mark.parametrize("problem", ATTACKS)
def test_a_file_that_lies_is_refused_in_one_line(tmp_path: Path, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        GgufFile(write(tmp_path / "bad.gguf", ATTACKS[problem]))
    assert "\n" not in str(caught.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = sound()
    GgufFile(write(tmp_path / "m.gguf", whole))
    for length in range(len(whole) - 8):  # a few bytes of padding at the end belong to no weight
        with pytest.raises(InputError):
            GgufFile(write(tmp_path / "short.gguf", whole[:length]))


def test_no_changed_byte_leads_to_anything_but_an_error_or_weights(tmp_path: Path) -> None:
    whole, rng = sound(), np.random.default_rng(1)
    for _ in range(300):
        changed = bytearray(whole)
        changed[rng.integers(0, 200)] = rng.integers(0, 256)
        try:
            file = GgufFile(write(tmp_path / "changed.gguf", bytes(changed)))
        except InputError:
            continue
        assert all(file.tensor(name).shape == entry.shape for name, entry in file.entries.items())


TOKENS = ["<|end|>", "a", "b", "ab", "Ġ", "1", "2"]


def with_tokenizer(path: Path, **changes) -> GgufFile:
    facts = {"model": "gpt2", "pre": "smollm", "tokens": TOKENS, "merges": ["a b"], "token_type": [3, 1, 1, 1, 1, 1, 1]}
    facts |= changes
    return GgufFile(
        write(path / "t.gguf", gguf({f"tokenizer.ggml.{name}": value for name, value in facts.items()}, {}))
    )


def test_the_tokenizer_inside(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    found = tokenizers.Tokenizer.from_str(tokenizer_json(with_tokenizer(tmp_path)))
    assert found.encode("ab<|end|>12 ba").ids == [3, 0, 5, 6, 4, 2, 1]  # digits stand alone
    assert found.decode([3, 5, 6, 4, 2, 1]) == "ab12 ba"


@pytest.mark.parametrize("changes", [{"model": "llama"}, {"pre": "other"}, {"token_type": [1, 2]}, {"tokens": [1, 2]}])
def test_a_tokenizer_that_cannot_be_written(tmp_path: Path, changes: dict) -> None:
    with pytest.raises(InputError):
        tokenizer_json(with_tokenizer(tmp_path, **changes))
