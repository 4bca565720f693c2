"""A small model with ordinary and narrow boundaries, for tests of who trains what."""

from __future__ import annotations

from federation.manifest import Boundary, FileRef, Layer, Loss, Manifest, Source, TensorSpec
from federation.space import Parameter

SPEC = TensorSpec("float32", (1,))
FILE = FileRef("f", "0" * 64, 1)


def _layer(name: str, *shapes: tuple[int, ...]) -> Layer:
    parameters = tuple(Parameter(f"{name}.{number}", "weight", shape) for number, shape in enumerate(shapes))
    return Layer(name, SPEC, SPEC, parameters, 100, 0, 0, FILE)


LAYERS = (_layer("stem", (40, 25)), _layer("pool"), _layer("middle", (12, 40), (20,)), _layer("head", (1, 12)))
WHOLE = Boundary("stem", 0, None, 400, FILE, (FILE,))
HALF = Boundary("stem@0.5", 0, None, 200, FILE, (FILE,), 0.5, (((20, 25),), (), ((6, 20), (10,)), ((1, 6),)))
QUARTER = Boundary("stem@0.25", 0, None, 100, FILE, (), 0.25, (((10, 25),), (), ((3, 10), (5,)), ((1, 3),)))
BOUNDARIES = (
    WHOLE,
    Boundary("stem@8", 0, 8, 300, FILE, (FILE,)),
    Boundary("middle", 2, None, 200, FILE, ()),
    Boundary("head", 3, None, 100, None, (FILE,)),
    HALF,
    QUARTER,
)
MODEL = Manifest(
    1,
    "x",
    Source("zoo", "x"),
    18,
    Loss("mse"),
    SPEC,
    SPEC,
    SPEC,
    None,
    2,
    False,
    LAYERS,
    BOUNDARIES,
    {"strong": "stem", "moderate": "middle", "weak": "head"},
    FILE,
)
