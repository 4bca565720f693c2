"""A small model with ordinary and narrow boundaries, for tests of who trains what."""

from __future__ import annotations

from federation.manifest import Layer
from tests.tiny_bundle import FILE, boundary, layer, manifest, weight


def _layer(name: str, *shapes: tuple[int, ...]) -> Layer:
    parameters = [weight(f"{name}.{number}", *shape) for number, shape in enumerate(shapes)]
    return layer(name, *parameters, activations=100, macs=0)


LAYERS = (_layer("stem", (40, 25)), _layer("pool"), _layer("middle", (12, 40), (20,)), _layer("head", (1, 12)))
WHOLE = boundary("stem", 0, 400, ort_training=(FILE,))
HALF = boundary(
    "stem@0.5", 0, 200, ort_training=(FILE,), width=0.5, narrow=(((20, 25),), (), ((6, 20), (10,)), ((1, 6),))
)
QUARTER = boundary("stem@0.25", 0, 100, width=0.25, narrow=(((10, 25),), (), ((3, 10), (5,)), ((1, 3),)))
BOUNDARIES = (
    WHOLE,
    boundary("stem@8", 0, 300, last_steps=8, ort_training=(FILE,)),
    boundary("middle", 2, 200),
    boundary("head", 3, 100, train=None, ort_training=(FILE,)),
    HALF,
    QUARTER,
)
MODEL = manifest(LAYERS, BOUNDARIES, {"strong": "stem", "moderate": "middle", "weak": "head"}, name="x")
