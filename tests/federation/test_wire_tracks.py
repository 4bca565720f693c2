"""Bodies with several tracks, of regions of any kind: the way there and back, other writers, limits, attacks."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from federation.errors import InputError
from federation.layout import MODEL, Layout
from federation.region import Region, of_layers, whole
from federation.space import Parameter, ParameterSpace, Vector
from federation.wire import (
    CheckedTrack,
    CheckedUpdate,
    Limits,
    UpdateDecoder,
    WireError,
    check_data,
    encode,
    read_blocks,
    within,
)
from tests.federation.regions import Known, part_of, regions, spaces, vector_of

TRACKS = (MODEL, "control", "momentum")
SPACE = ParameterSpace(
    [
        [Parameter("a", "weight", (4, 2)), Parameter("a.mean", "statistic", (2,))],
        [Parameter("b", "weight", (3,))],
    ]
)
Vectors = dict[str, tuple[Region, Vector]]


def body(vectors: Vectors) -> bytes:
    return b"".join(map(bytes, encode(vectors)))


def decode(layout: Layout, data: bytes, limits: Limits | None = None, chunk: int = 1 << 16) -> CheckedUpdate:
    decoder = UpdateDecoder(layout, limits or Limits())
    for start in range(0, len(data), chunk):
        decoder.feed(data[start : start + chunk])
    return decoder.finish()


def read(data: bytes, track: CheckedTrack, size: int, block: int = 1 << 16) -> Vector:
    """The flat vector of the model, nan where nothing came."""
    vector = np.full(size, np.nan, np.float32)
    for run, values in read_blocks(io.BytesIO(data), track, block):
        view = run.view(vector)
        assert np.isnan(view).all() and values.size == run.size > 0
        view[...] = values.reshape(view.shape)
    return vector


def tensors(vectors: Vectors) -> dict[str, Vector]:
    """As somebody else would write them."""
    found = {}
    for track, (region, vector) in vectors.items():
        for name, view in region.space.views(vector).items():
            found[name if track == MODEL else f"{track}/{name}"] = np.array(view, order="C")
    return found


@st.composite
def several(draw: st.DrawFn, space: ParameterSpace) -> dict[str, tuple[Known, Vector]]:
    """Some tracks, each with a region of its own; no value twice."""
    names, found, first = draw(st.lists(st.sampled_from(TRACKS), min_size=1, unique=True)), {}, 1
    for name in names:
        known = draw(regions(space))
        found[name] = (known, np.arange(first, first + known.places.size, dtype=np.float32))
        first += known.places.size
    return found


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_there_and_back(data: st.DataObject) -> None:
    space = data.draw(spaces())
    drawn = data.draw(several(space))
    vectors = {name: (known.region, values) for name, (known, values) in drawn.items()}
    layout = Layout({name: region for name, (region, _) in vectors.items()})
    ours, theirs = body(vectors), save(tensors(vectors), metadata={"by": "somebody"})
    assert ours.startswith(layout.header) and layout.space.size == sum(v.size for _, v in vectors.values())
    for written in (ours, theirs):
        checked = decode(layout, written, chunk=data.draw(st.sampled_from([1, 7, 1 << 16])))
        assert checked.tracks.keys() == vectors.keys() and checked.size == len(written)
        for name, (known, values) in drawn.items():
            track = checked.tracks[name]
            expected = np.full(space.size, np.nan, np.float32)
            expected[known.places] = values
            np.testing.assert_array_equal(read(written, track, space.size, data.draw(st.integers(1, 9))), expected)
            assert track.region == known.region and track.largest == values.max(initial=0)
            assert track.norm == pytest.approx(math.sqrt(math.fsum(values.astype(np.float64) ** 2)), rel=1e-14)
            assert track.squares.keys() == {p.name for p in known.region.space if p.kind == "weight"}
            for weight, square in track.squares.items():
                own = expected[space.slice_of(weight)][known.masks[weight].ravel()].astype(np.float64)
                assert square == pytest.approx(math.fsum(own**2), rel=1e-14)
    for name, tensor in tensors(vectors).items():
        np.testing.assert_array_equal(load(ours)[name], tensor)
    assert_same_without_header(layout, ours)


def assert_same_without_header(layout: Layout, written: bytes) -> None:
    """Whoever has the data in memory finds what a decoder finds in the body, bit for bit."""
    start = len(layout.header)
    expected, found = decode(layout, written), check_data(layout, Limits(), written[start:])
    assert found.size == expected.size - start
    for name, track in expected.tracks.items():
        places = tuple((offset - start, run) for offset, run in track.places)
        assert found.tracks[name] == replace(track, places=places)


def test_blocks_of_data_without_a_header_are_those_of_the_body() -> None:
    """Sums of squares depend on where blocks begin."""
    space = ParameterSpace([[Parameter("w", "weight", (7, 2001)), Parameter("s", "statistic", (5,))]])
    rng = np.random.default_rng(0)
    vectors = {name: (whole(space), rng.standard_normal(space.size).astype(np.float32)) for name in TRACKS}
    assert_same_without_header(Layout(dict.fromkeys(TRACKS, whole(space))), body(vectors))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_part_of_a_checked_vector(data: st.DataObject) -> None:
    space = data.draw(spaces())
    known, other = data.draw(regions(space)), data.draw(regions(space))
    values = vector_of(space)[known.places]
    written = body({"momentum": (known.region, values), MODEL: (known.region, -values)})
    track = decode(Layout(dict.fromkeys(("momentum", MODEL), known.region)), written).model
    both = known & other
    columns = {p.parameter.name: p.columns for layer in known.region.layers for p in layer}
    if any(p.columns != columns[p.parameter.name] for layer in both.region.layers for p in layer):
        with pytest.raises(InputError, match="a part of every row cannot be taken"):
            within(track, other.region)
        return
    part = within(track, other.region)
    expected = np.full(space.size, np.nan, np.float32)
    expected[both.places] = -vector_of(space)[both.places]
    np.testing.assert_array_equal(read(written, part, space.size, data.draw(st.integers(1, 9))), expected)
    assert (part.norm, part.largest) == (track.norm, track.largest)
    entire = {
        p.parameter.name for mine, theirs in zip(both.region.layers, known.region.layers) for p in mine if p in theirs
    }
    assert part.squares == {name: square for name, square in track.squares.items() if name in entire}


PART = part_of(SPACE, 1, 2).region  # rows 2 and 3 of a, the second mean, the last two of b
LAYOUT = Layout({MODEL: PART, "control": PART})
VALUES = np.array([1, -2, 3, -4, 0.5, 2, 1], np.float32)
GOOD = body({MODEL: (PART, VALUES), "control": (PART, 100 * VALUES)})


def header_of(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


def framed(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def renamed(old: str, new: str) -> bytes:
    header = {new if name == old else name: entry for name, entry in header_of(GOOD).items()}
    return framed(header, GOOD[-4 * 2 * VALUES.size :])


def test_the_names_of_a_body() -> None:
    assert list(header_of(GOOD)) == ["a", "a.mean", "b", "control/a", "control/a.mean", "control/b"]
    assert header_of(GOOD)["control/a"] == {"dtype": "F32", "shape": [2, 2], "data_offsets": [28, 44]}
    checked = decode(LAYOUT, GOOD)
    assert checked.model.norm == pytest.approx(np.linalg.norm(VALUES))
    assert checked.model.squares == {"a": 30.0, "b": 5.0}
    assert checked.tracks["control"].squares == {"a": 300000.0, "b": 50000.0}
    assert (checked.model.largest, checked.tracks["control"].largest) == (4.0, 400.0)


ATTACKS: dict[str, tuple[bytes, str]] = {
    "a track is missing": (body({MODEL: (PART, VALUES)}), "lacks the names .*'control/a'"),
    "a track too many": (body({t: (PART, VALUES) for t in TRACKS}), r"\['momentum/a', .* are not expected"),
    "another track": (body({MODEL: (PART, VALUES), "momentum": (PART, VALUES)}), "'control/a'.*'momentum/a'"),
    "the other track alone": (body({"control": (PART, VALUES)}), r"lacks the names \['a', 'a.mean', 'b'\]"),
    "the model by its name": (renamed("a", "model/a"), r"lacks the names \['a'\], and those of \['model/a'\]"),
    "no track": (renamed("control/a", "/a"), r"\['/a'\] are not expected"),
    "a track in a track": (renamed("control/a", "control/control/a"), r"\['control/control/a'\] are not expected"),
    "another case": (renamed("control/a", "Control/a"), r"\['Control/a'\] are not expected"),
    "a way up": (renamed("control/a", "control/../a"), r"\['control/../a'\] are not expected"),
    "a nul": (renamed("control/a", "control/a\0"), "are not expected"),
    "the whole instead of the part": (
        body(dict.fromkeys((MODEL, "control"), (whole(SPACE), vector_of(SPACE)))),
        r"'a' is described as .*\[4, 2\].*; expected .*\[2, 2\]",
    ),
    "the other part": (
        body(dict.fromkeys((MODEL, "control"), (of_layers(SPACE, [0]), vector_of(SPACE)[:10]))),
        r"lacks the names \['b', 'control/b'\]",
    ),
    "one place for two tracks": (
        framed({**header_of(GOOD), "control/a": header_of(GOOD)["a"]}, GOOD[-56:]),
        "is described as",
    ),
    "cut in the second track": (GOOD[:-1], "ends too early; expected at least 1 more"),
}


@pytest.mark.parametrize("chunk", [1 << 20, 7], ids=["at once", "in pieces"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks(attack: str, chunk: int) -> None:
    data, message = ATTACKS[attack]
    with pytest.raises(WireError, match=message) as caught:
        decode(LAYOUT, data, chunk=chunk)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(max_value=3), "'a': element 3 is -4; expected magnitudes up to 3"),
        (Limits(max_other_value=399), "'control/a': element 3 is -400; expected magnitudes up to 399"),
        (Limits(max_value=1000, max_other_value=3), "'control/a': element 0 is 100; expected magnitudes up to 3"),
        (Limits(max_norm=5.9), "the norm is .*; expected at most 5.9"),
    ],
)
def test_each_track_has_its_own_limits(limits: Limits, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode(LAYOUT, GOOD, limits)
    with pytest.raises(WireError, match=message):
        check_data(LAYOUT, limits, GOOD[len(LAYOUT.header) :])


@pytest.mark.parametrize("missing", [-4, 4])
def test_data_of_another_length(missing: int) -> None:
    data = GOOD[len(LAYOUT.header) :]
    with pytest.raises(WireError, match=f"the data has {len(data) - missing} bytes; expected {len(data)}"):
        check_data(LAYOUT, Limits(), data[:-4] if missing > 0 else data + bytes(4))


def test_limits_are_reached_but_not_passed_and_the_norm_is_that_of_the_model() -> None:
    free = decode(LAYOUT, GOOD)
    assert decode(LAYOUT, GOOD, Limits(max_value=4, max_other_value=400, max_norm=free.model.norm)) == free
    still = body({MODEL: (PART, 0 * VALUES), "control": (PART, VALUES)})
    found = decode(LAYOUT, still, Limits(max_norm=1e-9, max_value=1e-9))
    assert found.model.norm == 0 < found.tracks["control"].norm


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 6])
def test_values_of_other_tracks_have_to_be_numbers_too(at: int, value: float) -> None:
    values = VALUES.copy()
    values[at] = value
    name = {0: "'control/a': element 0", 6: "'control/b': element 1"}[at]
    with pytest.raises(WireError, match=f"{name} is .*; expected finite values"):
        decode(LAYOUT, body({MODEL: (PART, VALUES), "control": (PART, values)}))


def test_a_model_whose_names_look_like_tracks_is_refused_before_anything_is_mixed_up() -> None:
    space = ParameterSpace([[Parameter("a", "weight", (2,)), Parameter("control/a", "weight", (2,))]])
    layout = Layout(dict.fromkeys((MODEL, "control"), whole(space)))
    with pytest.raises(InputError, match="control/a"):
        _ = layout.space


@pytest.mark.parametrize("bad", [np.zeros(7), np.zeros(6, np.float32), np.zeros((7, 1), np.float32)])
def test_encoding_refuses_another_vector(bad: Any) -> None:
    with pytest.raises(InputError, match="control: expected 7 float32 values"):
        list(encode({MODEL: (PART, VALUES), "control": (PART, bad)}))


def test_a_body_of_nothing() -> None:
    """A weak device that trains none of the layers that are due."""
    nothing = of_layers(SPACE, ())
    data = body(dict.fromkeys((MODEL, "control"), (nothing, np.zeros(0, np.float32))))
    checked = decode(Layout(dict.fromkeys((MODEL, "control"), nothing)), data)
    assert (checked.model.norm, checked.model.largest, checked.size) == (0.0, 0.0, len(data))
    assert list(read_blocks(io.BytesIO(data), checked.model)) == []
    assert_same_without_header(Layout(dict.fromkeys((MODEL, "control"), nothing)), data)
