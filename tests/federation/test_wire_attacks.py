"""The body of an update: whatever is not one is refused, and what is random never gets through."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from federation.layout import layers_layout
from federation.wire import Limits, UpdateDecoder, WireError
from tests.federation.wire_bodies import (
    BIG,
    BIG_BODY,
    SPACE,
    VALUES,
    body,
    collected,
    decode,
    entries,
    framed,
)


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
    free = decode(GOOD)
    limits = Limits(max_tensors=5, max_name_length=6, max_norm=free.model.norm, max_value=8)
    assert decode(GOOD, limits=limits) == free
    below = np.nextafter(free.model.norm, 0)
    for less in ({"max_tensors": 4}, {"max_name_length": 5}, {"max_norm": below}, {"max_value": 7.9}):
        with pytest.raises(WireError):
            decode(GOOD, limits=replace(limits, **less))


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
