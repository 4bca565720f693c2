"""Open frozen layers in 8 bits: measure ranges with the float graph, write the other (int8_graph.py), open that.

Ranges are those of some samples of the device, spread over its data, because data may be sorted. Fewer samples than
later go through the float graph at once, so that measuring takes no more memory than running it. Weights and ranges are
those of one round; the next round makes its own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.portable import LayerForward, open_beside
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.int8_graph import Int8Graph, NotInEightBits, Range
from edge_runtime.join_layers import join_layers
from edge_runtime.logs import get_logger
from federation.errors import BundleError

log = get_logger("embrace.agent")
SAMPLES = 16  # that ranges are measured with
AT_ONCE = 4
Rows = Callable[[int, int], NDArray[Any]]  # numbers of the first and last sample -> what enters the layers


class Int8Forward(LayerForward):
    """Layers in 8 bits. What is not finite has no byte: of such a sample nothing finite comes out, as in float32."""

    def __call__(self, batch: NDArray[Any]) -> NDArray[Any]:
        output = super().__call__(batch)
        output[~np.isfinite(batch.reshape(len(batch), -1).sum(axis=1))] = np.nan
        return output


def open_int8(
    graphs: Sequence[Path], name: str, settings: RuntimeSettings, rows: Rows, count: int, at_once: int
) -> LayerForward | None:
    """Open consecutive layers as one graph in 8 bits; None, and a line in the log, where they have to stay float32.

    `rows` gives what enters them for `count` samples, of which at most `at_once` may pass at the same time.
    """
    folder = graphs[0].parent
    try:
        if any(path.parent != folder for path in graphs):
            raise NotInEightBits("they lie in several folders")
        graph = Int8Graph(join_layers([path.read_bytes() for path in graphs]), folder)
        ranges = _measure(graph, folder, settings, rows, count, min(AT_ONCE, at_once, count))
        opened = open_beside(Int8Forward, graph.write(ranges), folder, settings)
    except (NotInEightBits, BundleError, OSError) as error:
        tell_float(name, str(error))
        return None
    rest = ", ".join(graph.float_operators)
    _tell(logging.INFO, f"frozen layers {name} run in int8" + (f", but for the operators {rest}" if rest else ""))
    return opened


def _measure(
    graph: Int8Graph, folder: Path, settings: RuntimeSettings, rows: Rows, count: int, at_once: int
) -> dict[str, Range]:
    """Find the least and the largest of each value that takes bytes."""
    written, names = graph.measuring()
    measuring = open_beside(LayerForward, written, folder, settings)
    starts = np.unique(np.linspace(0, count - at_once, max(1, SAMPLES // at_once)).astype(int))
    found = np.array([measuring.outputs(rows(start, start + at_once)) for start in starts.tolist()], np.float64)
    least, most = found[:, 0::2].min(axis=0), found[:, 1::2].max(axis=0)
    return dict(zip(names, zip(least.tolist(), most.tolist(), strict=True), strict=True))


def tell_float(name: str, why: str) -> None:
    """Say that layers are not in 8 bits, although their owner asked for it."""
    _tell(logging.WARNING, f"frozen layers {name} stay float32: {why}")


@functools.cache
def _tell(level: int, text: str) -> None:
    """Say something once: it is the same in every round."""
    log.log(level, "%s", text)
