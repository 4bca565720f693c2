"""The body of an update: its bytes, every chunking, other writers, and attacks."""

from __future__ import annotations

import io
import json
import math
import tracemalloc
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from federation.errors import InputError
from federation.region import Run, whole
from federation.space import Parameter, ParameterSpace, Vector
from federation.wire import (
    MODEL,
    PIECE,
    CheckedTrack,
    CheckedUpdate,
    Limits,
    UpdateDecoder,
    WireError,
    encode_layers,
    layers_layout,
    read_blocks,
)

SPACE = ParameterSpace(
    [
        [Parameter("z", "weight", (5,))],
        [Parameter("b", "weight", (2, 2)), Parameter("b.mean", "statistic", (2,)), Parameter("none", "weight", (0, 3))],
        [Parameter("a", "weight", (3,)), Parameter("s", "weight", ())],
    ]
)
VALUES = np.array([1, -2, 3, 0.5, 0, -0.25, 4, 1, 2, -8], np.float32)
TINY = ParameterSpace([[Parameter("w", "weight", (2,))], [Parameter("v", "weight", (1,))]])

GOLDEN = (
    b"\x78\x00\x00\x00\x00\x00\x00\x00"
    b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"v":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}            '
    b"\x00\x00\x80\x3f\x00\x00\x00\xc0\x00\x00\x00\x3f"
)


def body(space: ParameterSpace, first_layer: int, vector: Vector, end: int | None = None) -> bytes:
    return b"".join(encode_layers(space, first_layer, vector, end=end))


def decode(
    data: bytes, space: ParameterSpace = SPACE, first_layer: int = 1, limits: Limits | None = None, chunk: int = 1 << 16
) -> CheckedUpdate:
    decoder = UpdateDecoder(layers_layout(space, first_layer), limits or Limits())
    for start in range(0, len(data), chunk):
        decoder.feed(memoryview(data)[start : start + chunk])
    return decoder.finish()


def collected(data: bytes, checked: CheckedUpdate, size: int, block: int = 1 << 16) -> Vector:
    """The flat vector of the model, nan where nothing came; blocks have to ascend."""
    vector, last = np.full(size, np.nan, np.float32), 0
    for run, values in read_blocks(io.BytesIO(data), checked.model, block):
        assert run.start >= last and run.rows == 1 and 0 < values.size == run.size <= block
        vector[run.start : run.stop] = values
        last = run.stop
    return vector


def framed(header: bytes | dict[str, Any], data: bytes = VALUES.tobytes()) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entries() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(layers_layout(SPACE, 1).header[8:])
    return found


def test_golden_bytes() -> None:
    assert body(TINY, 0, np.array([1, -2, 0.5], np.float32)) == GOLDEN
    checked = decode(GOLDEN, TINY, 0)
    track = CheckedTrack(
        region=whole(TINY),
        places=((128, Run(0, 1, 2, 2)), (136, Run(2, 1, 1, 1))),
        squares=(5.0, 0.25),
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
    assert checked.model.squares == (0.0, float(np.square(VALUES[:4]).sum()), 0.0)
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
    assert (checked.model.squares, checked.model.norm, checked.model.largest) == ((0.0,), 0.0, 0.0)
    assert list(read_blocks(io.BytesIO(), checked.model)) == []


def big_space(order: Sequence[int]) -> ParameterSpace:
    """Three layers whose parameters do not end where blocks do; names sort as `order` says."""
    sizes = [(3, 5000), (20_000, 1), (7, 30_011)]
    names = iter(order)
    return ParameterSpace([[Parameter(f"p{next(names)}", "weight", (size,)) for size in layer] for layer in sizes])


BIG = big_space([4, 0, 5, 1, 3, 2])
BIG_VALUES = np.random.default_rng(1).standard_normal(BIG.size).astype(np.float32)
BIG_BODY = body(BIG, 0, BIG_VALUES)
BIG_SORTED = save(dict(BIG.views(BIG_VALUES)))


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
    expected = [math.fsum(exact[BIG.layer(layer)]) for layer in range(3)]
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


def changed(name: str, **fields: Any) -> dict[str, Any]:
    found = entries()
    found[name] = {**found[name], **fields}
    return found


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in entries().items() if key != name}


TEXT = json.dumps(entries())
GOOD = framed(entries())
ATTACKS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "ends too early; expected at least 8 more"),
    "half a length": (GOOD[:5], "at least 3 more"),
    "half a header": (GOOD[:50], "ends too early"),
    "no data": (GOOD[:-40], "ends too early; expected at least 40 more"),
    "cut": (GOOD[:-1], "ends too early; expected at least 1 more"),
    "trailing": (GOOD + b"\0", "goes on after its"),
    "twice": (GOOD + GOOD, "goes on after its"),
    "huge length": (b"\xff" * 8 + GOOD[8:], "said to have 18446744073709551615 bytes; expected from 2 to 1048576"),
    "no length": (bytes(8) + GOOD[8:], "said to have 0 bytes"),
    "large header": (framed(TEXT.encode() + b" " * (1 << 20)), "expected from 2 to 1048576"),
    "not JSON": (framed(b"{]"), "not JSON"),
    "not UTF-8": (framed(TEXT.replace("b.mean", "\udcff").encode("utf-8", "surrogateescape")), "not JSON: 'utf-8'"),
    "UTF-16": (framed(TEXT.encode("utf-16")), "not JSON"),
    "BOM": (framed(b"\xef\xbb\xbf" + TEXT.encode()), "not JSON"),
    "two values": (framed(TEXT.encode() + b"{}"), "not JSON"),
    "a list": (framed(b"[]"), "must be an object"),
    "null": (framed(b"null"), "must be an object"),
    "deep list": (framed(b"[" * 100_000 + b"]" * 100_000), "not JSON"),
    "deep object": (framed(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "not JSON"),
    "deep shape": (framed(TEXT.replace("[3]", "[" * 400 + "]" * 400).encode()), "'a' is described as"),
    "deep offsets": (framed(changed("a", data_offsets=[[[[[[[[[1]]]]]]]]])), "two integers as its data_offsets"),
    "long number": (framed(TEXT.replace("[3]", "[" + "9" * 100_000 + "]").encode()), "the number 9999"),
    "metadata number": (framed({**entries(), "__metadata__": {"a": 1}}), "strings only"),
    "metadata list": (framed({**entries(), "__metadata__": []}), "strings only"),
    "missing": (framed(without("a")), r"lacks the names \['a'\]"),
    "extra": (framed({**entries(), "x": entries()["a"]}), r"\['x'\] are not expected"),
    "of another layer": (framed({**entries(), "z": entries()["a"]}), r"\['z'\] are not expected"),
    "lone surrogate": (framed(TEXT.replace("b.mean", "\\ud800").encode()), r"'\\ud800'"),
    "duplicate": (framed((TEXT[:-1] + ", " + TEXT[1:]).encode()), "same name twice"),
    "duplicate field": (framed(TEXT.replace('"dtype"', '"dtype": "F32", "dtype"', 1).encode()), "same name twice"),
    "half precision": (framed(changed("a", dtype="F16")), "'a' is described as .*'F16'.*; expected .*'F32'"),
    "no text as dtype": (framed(changed("a", dtype=[])), "'a' is described as"),
    "other shape": (framed(changed("b", shape=[4])), r"'b' is described as .*\[4\].*; expected .*\[2, 2\]"),
    "true as a size": (framed(changed("s", shape=[True])), "'s' is described as"),
    "shape of text": (framed(changed("a", shape="3")), "'a' is described as"),
    "an entry is null": (framed({**entries(), "a": None}), "two integers"),
    "an entry is a list": (framed({**entries(), "a": [0, 12]}), "two integers"),
    "no offsets": (framed({**entries(), "a": {"dtype": "F32", "shape": [3]}}), "two integers"),
    "offsets are null": (framed(changed("a", data_offsets=None)), "two integers"),
    "one offset": (framed(changed("a", data_offsets=[24])), "'a' is described as"),
    "three offsets": (framed(changed("a", data_offsets=[24, 36, 36])), "'a' is described as"),
    "field too many": (framed(changed("a", stride=[1])), "'a' is described as"),
    "overlap": (framed(changed("a", data_offsets=[20, 32])), "'a' is described as"),
    "the same place": (framed(changed("a", data_offsets=[0, 16])), "is described as"),
    "hole": (framed(changed("s", data_offsets=[40, 44])), "'s' is described as"),
    "reversed": (framed(changed("a", data_offsets=[36, 24])), "is described as"),
    "too short": (framed(changed("a", data_offsets=[24, 32])), "'a' is described as"),
    "out of range": (framed(changed("s", data_offsets=[10**14, 10**14 + 4])), "'s' is described as"),
    "overflowing": (framed(changed("s", data_offsets=[2**64 - 4, 2**64])), "the number 18446744073709551612"),
    "negative": (framed(changed("b", data_offsets=[-16, 0])), "the number -16"),
    "real": (framed(changed("b", data_offsets=[0.0, 16.0])), "the number 0.0"),
    "NaN": (framed(changed("b", data_offsets=[math.nan, 16])), "the number NaN"),
    "true": (framed(TEXT.replace("[0, 16]", "[false, 16]").encode()), "'b' is described as"),
    "text": (framed(changed("b", data_offsets=["0", "16"])), "two integers"),
}


@pytest.mark.parametrize("chunk", [1 << 20, 7], ids=["at once", "in pieces"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks(attack: str, chunk: int) -> None:
    data, message = ATTACKS[attack]
    with pytest.raises(WireError, match=message) as caught:
        decode(data, chunk=chunk)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_the_good_one_is_good() -> None:
    assert decode(GOOD).model.norm == decode(body(SPACE, 1, VALUES)).model.norm


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000])
@pytest.mark.parametrize("at", [0, 5, 9])
def test_values_that_are_no_numbers(bits: int, at: int) -> None:
    values = VALUES.copy()
    values.view(np.uint32)[at] = bits
    name, element = {0: ("b", 0), 5: ("b.mean", 1), 9: ("s", 0)}[at]
    with pytest.raises(WireError, match=rf"'{name}': element {element} is (nan|-?inf); expected finite values"):
        decode(body(SPACE, 1, values))


def test_the_largest_float_is_a_number() -> None:
    values = np.full(BIG.size, np.finfo(np.float32).max, np.float32)
    checked = decode(body(BIG, 0, values), BIG, 0)
    assert math.isfinite(checked.model.norm) and checked.model.largest == values[0]


def test_too_many_bytes_are_seen_at_once_and_for_good() -> None:
    decoder = UpdateDecoder(layers_layout(SPACE, 1), Limits())
    decoder.feed(GOOD)
    for _ in range(2):
        with pytest.raises(WireError, match="goes on"):
            decoder.feed(b"\0")
    with pytest.raises(WireError, match="goes on"):
        decoder.finish()


def test_a_refusal_is_for_good() -> None:
    decoder = UpdateDecoder(layers_layout(SPACE, 1), Limits())
    with pytest.raises(WireError, match="not JSON"):
        decoder.feed(framed(b"{]"))
    for call in (lambda: decoder.feed(GOOD), decoder.finish):
        with pytest.raises(WireError, match="not JSON"):
            call()


def test_a_bad_header_needs_no_data() -> None:
    decoder = UpdateDecoder(layers_layout(SPACE, 1), Limits())
    with pytest.raises(WireError, match="described as"):
        decoder.feed(framed(changed("a", dtype="F64"), b""))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(max_header_bytes=100), "expected from 2 to 100"),
        (Limits(max_tensors=4), "more than 4 tensors"),
        (Limits(max_name_length=5), "a name above 5 characters"),
        (Limits(max_norm=9.5), "the norm is above .*; expected at most 9.5"),
        (Limits(max_norm=np.nextafter(decode(GOOD).model.norm, 0)), "the norm is .*; expected at most"),
        (Limits(max_value=7), "'s': element 0 is -8; expected magnitudes up to 7"),
    ],
)
def test_limits(limits: Limits, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode(GOOD, limits=limits)


def test_limits_are_reached_but_not_passed() -> None:
    norm = decode(GOOD).model.norm
    decode(GOOD, limits=Limits(max_tensors=5, max_name_length=6, max_norm=norm, max_value=8))


def test_a_norm_far_too_large_is_refused_before_the_end() -> None:
    decoder = UpdateDecoder(layers_layout(BIG, 0), Limits(max_norm=1.0))
    with pytest.raises(WireError, match="the norm is above"):
        decoder.feed(BIG_BODY[: len(BIG_BODY) // 2])


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_refused(data: bytes) -> None:
    for attempt in (data, framed(data), framed(data, b"")):
        with pytest.raises(WireError):
            decode(attempt)


def corrupted(data: bytes, changes: Iterable[tuple[int, int]]) -> bytes:
    copy = bytearray(data)
    for at, byte in changes:
        copy[at % len(copy)] = byte
    return bytes(copy)


@given(changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_changed_bytes_are_refused_or_are_another_good_body(changes: list[tuple[int, int]]) -> None:
    data = corrupted(GOOD, changes)
    try:
        checked = decode(data)
    except WireError:
        return
    assert sorted(load(data)) == sorted(entries())  # the library finds it good as well
    assert np.isfinite(collected(data, checked, SPACE.size)[5:]).all()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@given(name=st.sampled_from(sorted(entries())), field=st.sampled_from(["dtype", "shape", "data_offsets"]), value=JSON)
@settings(max_examples=100, deadline=None)
def test_any_other_field_is_refused(name: str, field: str, value: Any) -> None:
    right = entries()[name][field]
    if json.dumps(value) != json.dumps(right):
        with pytest.raises(WireError):
            decode(framed(changed(name, **{field: value})))


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
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


PAGE = Path(__file__).resolve().parents[2] / "docs" / "wire.md"


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
