"""The header of a weights file: its bytes."""

from __future__ import annotations

import json

from federation.space import Parameter, ParameterSpace
from federation.weights import ALIGNMENT, header

SPACE = ParameterSpace(
    [
        [Parameter("b", "weight", (2, 2)), Parameter("b.mean", "statistic", (2,))],
        [Parameter("a", "weight", (3,)), Parameter("s", "weight", ())],
    ]
)
GOLDEN_HEADER = (
    b"\xf8\x00\x00\x00\x00\x00\x00\x00"
    b'{"b":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
    b'"b.mean":{"dtype":"F32","shape":[2],"data_offsets":[16,24]},'
    b'"a":{"dtype":"F32","shape":[3],"data_offsets":[24,36]},'
    b'"s":{"dtype":"F32","shape":[],"data_offsets":[36,40]}}'
)
HEADER_BYTES = 256  # the length in front says 248


def test_golden_bytes() -> None:
    found = header(SPACE)
    assert found == GOLDEN_HEADER + b" " * (HEADER_BYTES - len(GOLDEN_HEADER))
    assert len(found) % ALIGNMENT == 0


def test_the_header_is_json() -> None:
    text = header(SPACE)[8:]
    assert list(json.loads(text)) == ["b", "b.mean", "a", "s"]
