"""A benchmark is believed only as far as it makes sense: bounded, printable, finite, and about its own bundle."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from federation.benchmark import Benchmark, BoundaryCost
from federation.decode import decode, encode
from federation.errors import FieldError
from tests import tiny_bundle

SECONDS = {
    "load": 0.5,
    "frozen_forward": 0.0,
    "activation_io": 0.001,
    "training": 0.2,
    "optimiser": 0.01,
    "batch": 0.211,
    "low": 0.2,
    "high": 0.25,
    "backward": 0.15,
}
TOLD: dict[str, Any] = {
    "bundle": "5f" * 32,
    "model": "tiny",
    "batch": 32,
    "iterations": 5,
    "runtime": "onnxruntime 1.31.1, portable",
    "threads": 1,
    "costs": [
        {"boundary": "head", "tiers": ["weak"], "seconds": SECONDS, "memory": 2_000_000},
        {"boundary": "stem", "tiers": ["strong"], "problem": "needs 77 MB, 40 MB are free"},
    ],
    "processor": "a board",
    "system": "Debian 12 (aarch64)",
    "cores": 4,
    "idle": 45_000_000,
}


def read(told: dict[str, Any]) -> Benchmark:
    return decode(Benchmark, told, "benchmark", defaults=True)


def changed(place: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    told = json.loads(json.dumps(TOLD))
    inside = told
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    return told


@pytest.mark.parametrize("backward", [0.15, None])  # not every runtime says how a step divides
def test_it_travels_as_json_without_a_loss(backward: float | None) -> None:
    found = read(changed(("costs", 0, "seconds", "backward"), backward))
    assert read(json.loads(json.dumps(encode(found)))) == found


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("bundle",), "5F" * 32),
        (("bundle",), "../../etc"),
        (("model",), "tiny\x1b[2J"),
        (("processor",), "x" * 201),
        (("runtime",), "on\u202enx"),
        (("batch",), 0),
        (("batch",), 65_537),
        (("threads",), 0),
        (("cores",), 2**40),
        (("iterations",), 0),
        (("idle",), -1),
        (("idle",), 2**51),
        (("costs",), []),
        (("costs",), [TOLD["costs"][0]] * 2),
        (("costs",), [{"boundary": f"b{n}", "problem": "none"} for n in range(257)]),
        (("costs", 0, "boundary"), ""),
        (("costs", 0, "boundary"), "head\n"),
        (("costs", 0, "memory"), -1),
        (("costs", 0, "tiers"), ["weak"] * 17),
        (("costs", 0, "tiers"), ["\x07"]),
        (("costs", 0, "problem"), "it has seconds, too"),
        (("costs", 1, "problem"), ""),
        (("costs", 0, "seconds", "training"), -0.1),
        (("costs", 0, "seconds", "training"), float("nan")),
        (("costs", 0, "seconds", "load"), float("inf")),
        (("costs", 0, "seconds", "load"), 1e7),
        (("costs", 0, "seconds", "low"), 0.22),
        (("costs", 0, "seconds", "high"), 0.2),
        (("costs", 0, "seconds", "backward"), 0.21),
        (("costs", 0, "seconds", "weekend"), 1.0),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(place: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(FieldError) as refused:
        read(changed(place, value))
    assert refused.value.path[:2] == ("benchmark", place[0])


def test_it_names_what_its_bundle_has() -> None:
    layers = [tiny_bundle.layer(name, tiny_bundle.weight(f"{name}.w", 2)) for name in ("stem", "head")]
    boundaries = [tiny_bundle.boundary(name, number, 1) for number, name in enumerate(("stem", "head"))]
    manifest = tiny_bundle.manifest(layers, boundaries, {"strong": "stem", "weak": "head"})
    right = replace(read(TOLD), model=manifest.name)
    right.check_bundle(manifest)
    wrong = {
        "model": replace(right, model="another"),
        r"costs\[0\].boundary": replace(right, costs=(BoundaryCost("tail", problem="none"),)),
        r"costs\[0\].tiers": replace(right, costs=(BoundaryCost("head", ("strong",), problem="none"),)),
    }
    for where, other in wrong.items():
        with pytest.raises(FieldError, match=where):
            other.check_bundle(manifest)
