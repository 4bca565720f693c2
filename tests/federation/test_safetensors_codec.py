"""The header of a safetensors file: its bytes, there and back, and what is refused. Attacks: test_wire_attacks.py."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from federation.errors import InputError
from federation.safetensors_codec import PREFIX, SafetensorsError, decode_header, encode_header, header_length

TENSORS = [("w", (2, 3)), ("none", (0,)), ("s", ())]
GOLDEN = (
    b'"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
    b'"none":{"dtype":"F32","shape":[0],"data_offsets":[24,24]},'
    b'"s":{"dtype":"F32","shape":[],"data_offsets":[24,28]}}'
)


def test_golden_bytes() -> None:
    assert encode_header(TENSORS, 64) == b"\xb8\0\0\0\0\0\0\0{" + GOLDEN + b" " * 15
    noted = encode_header(TENSORS, 8, {"k": "\u00fc"})
    assert noted == b"\xc8\0\0\0\0\0\0\0" + b'{"__metadata__":{"k":"\\u00fc"},' + GOLDEN + b" "
    assert encode_header([], 8) == b"\x08\0\0\0\0\0\0\0{}      "
    assert encode_header([], 8, {}) == b'\x18\0\0\0\0\0\0\0{"__metadata__":{}}     '


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")


@given(st.dictionaries(NAMES, SHAPES, max_size=6), st.none() | st.dictionaries(NAMES, NAMES, max_size=2))
@settings(max_examples=100, deadline=None)
def test_there_and_back(shapes: dict[str, tuple[int, ...]], notes: dict[str, str] | None) -> None:
    data = encode_header(shapes.items(), 64, notes)
    assert len(data) % 64 == 0 and header_length(data[:PREFIX], len(data)) == len(data) - PREFIX
    found = decode_header(data[PREFIX:])
    assert (found.notes, {name: tuple(shape) for name, shape in found.shapes.items()}) == (notes or {}, shapes)
    assert found.size == 4 * sum(map(math.prod, shapes.values()))
    assert decode_header(data[PREFIX:], shapes).offsets == found.offsets
    assert {name: tensor.shape for name, tensor in load(data + bytes(found.size)).items()} == shapes


def entries(**changed: Any) -> dict[str, Any]:
    found = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [3], "data_offsets": [8, 20]},
    }
    return {**found, "b": {**found["b"], **changed}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": "F16"}, "'b' is described as .*'F16'"),
        ({"shape": [4]}, r"'b' is described as .*\[4\]"),
        ({"shape": None}, "expected a shape"),
        ({"shape": ["3"]}, "expected a shape"),
        ({"shape": [1] * 33}, "expected a shape"),
        ({"shape": [1, True, 3]}, "'b' is described as"),
        ({"data_offsets": [4, 16]}, "'b' is described as"),  # overlaps
        ({"data_offsets": [12, 24]}, "'b' is described as"),  # leaves a hole
        ({"data_offsets": [20, 8]}, "'b' is described as"),
        ({"data_offsets": [0, 12]}, "is described as"),
        ({"data_offsets": None}, "two integers"),
        ({"stride": [1]}, "'b' is described as"),
    ],
)
def test_entries_that_contradict_themselves(changed: dict[str, Any], message: str) -> None:
    """Without expected shapes, the header's own have to fit together."""
    assert decode_header(json.dumps(entries()).encode()).offsets == {"a": 0, "b": 8}
    with pytest.raises(SafetensorsError, match=message):
        decode_header(json.dumps(entries(**changed)).encode())


def test_any_order_without_holes_can_be_read() -> None:
    found = {"b": {**entries()["b"], "data_offsets": [0, 12]}, "a": {**entries()["a"], "data_offsets": [12, 20]}}
    assert list(decode_header(json.dumps(found).encode()).offsets.items()) == [("b", 0), ("a", 12)]


def test_a_product_of_huge_sizes_takes_no_time() -> None:
    shape = [10**15 - 1] * 32
    with pytest.raises(SafetensorsError, match="is described as"):
        decode_header(json.dumps(entries(shape=shape)).encode())


def test_caps() -> None:
    text = json.dumps(entries()).encode()
    with pytest.raises(SafetensorsError, match="more than 1 tensors"):
        decode_header(text, max_tensors=1)
    with pytest.raises(SafetensorsError, match="a name above 0 characters"):
        decode_header(text, max_name_length=0)
    for prefix in (b"", bytes(7), bytes(8), b"\x01" + bytes(7), b"\x65" + bytes(7), b"\xff" * 8):
        with pytest.raises(SafetensorsError, match="expected from 2 to 100"):
            header_length(prefix, 100)
    assert header_length(b"\x64" + bytes(7), 100) == 100


@pytest.mark.parametrize("tensors", [[("__metadata__", (1,))], [("a", (1,)), ("a", (1,))]])
def test_names_that_cannot_be_written(tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    with pytest.raises(InputError, match="cannot be called"):
        encode_header(tensors, 8)
