"""The body of an update: its bytes, every chunking, other writers, and attacks."""

from __future__ import annotations

import io
import math
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from federation.errors import InputError
from federation.layout import MODEL, layers_layout
from federation.region import Span, whole
from federation.space import Parameter, ParameterSpace
from federation.wire import (
    BLOCK,
    PIECE,
    CheckedTrack,
    CheckedUpdate,
    Limits,
    UpdateDecoder,
    WireError,
    encode_layers,
    read_blocks,
)
from tests.federation.wire_bodies import (
    BIG,
    BIG_BODY,
    BIG_SORTED,
    BIG_VALUES,
    GOLDEN,
    SPACE,
    TINY,
    VALUES,
    body,
    collected,
    decode,
)


def test_golden_bytes() -> None:
    assert body(TINY, 0, np.array([1, -2, 0.5], np.float32)) == GOLDEN
    checked = decode(GOLDEN, TINY, 0)
    track = CheckedTrack(
        region=whole(TINY),
        places=((128, Span(0, 1, 2, 2)), (136, Span(2, 1, 1, 1))),
        squares={p.name: square for p, square in zip(TINY, (5.0, 0.25))},
        norm=math.sqrt(5.25),
        largest=2.0,
    )
    assert checked == CheckedUpdate(tracks={MODEL: track}, size=140)


def test_the_data_is_the_slice_of_the_flat_vector() -> None:
    data = body(SPACE, 1, VALUES)
    assert data == layers_layout(SPACE, 1).header + VALUES.tobytes()
    checked = decode(data)
    places = [(run.start, run.start + run.size) for _, run in checked.model.places]
    assert places == [(5, 9), (9, 11), (11, 11), (11, 14), (14, 15)]
    assert np.array_equal(collected(data, checked, SPACE.size)[5:], VALUES)
    assert len(list(read_blocks(io.BytesIO(data), checked.model))) == 1  # neighbours are read together


def test_a_range_in_the_middle() -> None:
    data = body(SPACE, 1, VALUES[:6], end=2)
    decoder = UpdateDecoder(layers_layout(SPACE, 1, 2), Limits())
    decoder.feed(data)
    checked = decoder.finish()
    assert checked.model.squares == {"b": float(np.square(VALUES[:4]).sum()), "none": 0.0}
    assert checked.model.norm == math.sqrt(float(np.square(VALUES[:6]).sum()))
    assert np.array_equal(collected(data, checked, SPACE.size)[5:11], VALUES[:6])


def test_nothing_is_copied() -> None:
    vector = np.zeros(3 * PIECE + 5, np.float32)
    pieces = list(encode_layers(ParameterSpace([[Parameter("w", "weight", vector.shape)]]), 0, vector))
    assert all(np.shares_memory(np.frombuffer(piece, np.uint8), vector) for piece in pieces[1:])
    assert sum(map(len, pieces[1:])) == vector.nbytes


@pytest.mark.parametrize("bad", [np.zeros(10), np.zeros(9, np.float32), np.zeros((2, 5), np.float32)])
def test_encoding_refuses_another_vector(bad: Any) -> None:
    with pytest.raises(InputError, match="expected 10 float32 values"):
        list(encode_layers(SPACE, 1, bad))


@pytest.mark.parametrize(("first", "end"), [(-1, None), (3, None), (1, 1), (0, 4)])
def test_layers_that_do_not_exist(first: int, end: int | None) -> None:
    with pytest.raises(InputError, match="the model has 3"):
        layers_layout(SPACE, first, end)


def test_a_layer_without_parameters() -> None:
    space = ParameterSpace([[]])
    checked = decode(body(space, 0, np.zeros(0, np.float32)), space, 0)
    assert (checked.model.squares, checked.model.norm, checked.model.largest) == ({}, 0.0, 0.0)
    assert list(read_blocks(io.BytesIO(), checked.model)) == []


@pytest.mark.parametrize("data", [BIG_BODY, BIG_SORTED], ids=["ours", "sorted"])
@given(cuts=st.lists(st.integers(0, len(BIG_BODY)), max_size=12))
@settings(max_examples=40, deadline=None)
def test_chunks_do_not_matter(data: bytes, cuts: list[int]) -> None:
    decoder = UpdateDecoder(layers_layout(BIG, 0), Limits())
    edges = [0, *sorted(cuts), len(data)]
    for start, stop in pairwise(edges):
        decoder.feed(data[start:stop])
    assert decoder.finish() == decode(data, BIG, 0)


def test_byte_by_byte() -> None:
    data = body(SPACE, 1, VALUES)
    assert decode(data, chunk=1) == decode(data)


@pytest.mark.parametrize("data", [BIG_BODY, BIG_SORTED], ids=["ours", "sorted"])
def test_squares_against_numpy(data: bytes) -> None:
    checked = decode(data, BIG, 0)
    exact = BIG_VALUES.astype(np.float64) ** 2
    expected = {p.name: math.fsum(exact[BIG.slice_of(p.name)]) for p in BIG if p.kind == "weight"}
    assert checked.model.squares == pytest.approx(expected, rel=1e-14)
    assert checked.model.norm == pytest.approx(math.sqrt(math.fsum(exact)), rel=1e-14)
    assert checked.model.largest == np.abs(BIG_VALUES).max()


@given(
    shapes=st.lists(st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3), min_size=1, max_size=4),
    names=st.permutations(range(12)),
    block=st.integers(1, 9),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_what_the_library_writes_is_read(shapes: list[Any], names: list[int], block: int, data: st.DataObject) -> None:
    order = iter(names)
    space = ParameterSpace([[Parameter(f"p{next(order)}", "weight", tuple(s)) for s in layer] for layer in shapes])
    first = data.draw(st.integers(0, len(shapes) - 1))
    vector = np.arange(1, space.size + 1, dtype=np.float32)
    suffix = space.suffix(first)
    tensors = {p.name: space.views(vector)[p.name] for layer in space.layers[first:] for p in layer}
    written = save(tensors, metadata={"by": "somebody"})
    checked = decode(written, space, first)
    assert checked.size == len(written)
    found = collected(written, checked, space.size, block)
    assert np.array_equal(found[suffix], vector[suffix])
    assert np.isnan(found[: suffix.start]).all()
    ours = load(body(space, first, vector[suffix]))
    assert all(np.array_equal(ours[name], tensor) for name, tensor in tensors.items())


def test_a_file_that_was_cut_after_the_check() -> None:
    data = body(SPACE, 1, VALUES)
    with pytest.raises(WireError, match="has become shorter"):
        list(read_blocks(io.BytesIO(data[:-1]), decode(data).model))


def test_memory_does_not_grow_with_the_body() -> None:
    space = ParameterSpace([[Parameter(f"w{i}", "weight", (1_250_000,))] for i in range(10)])
    header, chunk = layers_layout(space, 0).header, bytes(1 << 16)
    tracemalloc.start()
    try:
        decoder = UpdateDecoder(layers_layout(space, 0), Limits(max_norm=1.0))
        decoder.feed(header)
        left = 4 * space.size
        while left:
            decoder.feed(chunk[:left])
            left -= min(left, len(chunk))
        assert decoder.finish().size == len(header) + 50_000_000
        assert tracemalloc.get_traced_memory()[1] < 3 * 4 * BLOCK  # of 50 MB
    finally:
        tracemalloc.stop()


PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "wire.md"


def block_of_the_page(start: str) -> str:
    return PAGE.read_text().split(start, 1)[1].split("```", 1)[0]


def test_the_snippet_of_the_page_makes_a_valid_body() -> None:
    found: dict[str, Any] = {}
    exec(block_of_the_page("```python\n"), found)
    space = ParameterSpace([[Parameter("fc.weight", "weight", (2, 3)), Parameter("fc.bias", "weight", (2,))]])
    assert decode(found["body"], space, 0).model.norm > 0


def test_the_bytes_shown_on_the_page() -> None:
    lines = block_of_the_page("```hexdump\n").splitlines()
    shown = bytes.fromhex("".join(line[10:58] for line in lines if "|" in line))
    assert shown == GOLDEN
