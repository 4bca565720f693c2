"""Bodies of updates as a robust rule reads them."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np

from coordinator.store.bodies import BodyReader
from federation.layout import layers_layout
from federation.robust import robust_moves
from federation.space import Parameter, ParameterSpace
from federation.wire import Limits, UpdateDecoder, encode_layers

SPACE = ParameterSpace([[Parameter("a", "weight", (7,))], [], [Parameter("b", "weight", (4, 5))]])


def test_a_cohort_may_be_larger_than_the_number_of_files_that_may_be_open(tmp_path: Path) -> None:
    updates = []
    for number in range(301):
        decoder, path = UpdateDecoder(layers_layout(SPACE, 0), Limits()), tmp_path / f"{number}.body"
        path.write_bytes(b"".join(map(bytes, encode_layers(SPACE, 0, np.full(27, number, np.float32)))))
        decoder.feed(path.read_bytes())
        updates.append((decoder.finish().model, BodyReader(path)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        assert all((move.values == 150).all() for move in robust_moves(updates, "median", 0.1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
