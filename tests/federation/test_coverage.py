"""What a device trains, from its text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from federation.coverage import Coverage, coverage, width_of
from federation.errors import BundleError
from tests.federation.narrow_model import HALF, MODEL, QUARTER, WHOLE


def test_boundaries_and_tiers() -> None:
    assert coverage(MODEL, "stem") == Coverage(WHOLE, range(4))
    assert coverage(MODEL, "weak") == Coverage(MODEL.boundary("head"), range(3, 4))
    assert coverage(MODEL, "stem@0.5") == Coverage(HALF, range(4))
    assert coverage(MODEL, "stem@0.5").graphs == (HALF,)


def test_the_front_of_the_model_is_trained_with_the_graph_of_all_of_it() -> None:
    assert coverage(MODEL, "..middle") == Coverage(WHOLE, range(2))
    assert coverage(MODEL, "..head") == Coverage(WHOLE, range(3))


def test_several_widths() -> None:
    found = coverage(MODEL, "stem|stem@0.5|stem@0.25")
    assert found == Coverage(WHOLE, range(4), (WHOLE, HALF, QUARTER))
    assert found.graphs == (WHOLE, HALF, QUARTER)
    assert coverage(MODEL, "stem@0.5|stem@0.25").boundary == HALF
    assert [width_of(boundary) for boundary in found.ordered] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tail", "no boundary or tier named 'tail'"),
        ("stem@0.3", "no boundary or tier named 'stem@0.3'"),
        ("..stem", "expected a layer behind the first: pool, middle, head"),
        ("..", "expected a layer behind the first"),
        ("..weak", "expected a layer behind the first"),
        ("stem@0.25|stem@0.5", "widest first, each once"),
        ("stem|stem", "widest first, each once"),
        ("stem|middle", "expected the whole model or narrow boundaries"),
        ("stem|stem@8", "expected the whole model or narrow boundaries"),
        ("stem|", "no boundary or tier named ''"),
        ("", "no boundary or tier named ''"),
    ],
)
def test_what_stands_for_nothing(text: str, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        coverage(MODEL, text)


def test_a_bundle_without_the_whole_model() -> None:
    few = replace(MODEL, boundaries=MODEL.boundaries[1:], tiers={})
    with pytest.raises(BundleError, match="no boundary that trains the whole model"):
        coverage(few, "..head")
