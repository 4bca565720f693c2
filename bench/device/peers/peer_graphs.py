"""What all peers share: the forward graphs of a bundle's layers, and the loop that answers lines with lines.

    python NAME_step.py REQUEST.json    {"graphs": [...], "input": "x.npy", "labels": "y.npy", "threads": 1}

A step prints the loss first, then, for every line that it reads, the milliseconds of processor time and of the clock
that one forward and backward pass took. It runs in an environment of its own, where this project is not installed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

Operator = Callable[..., Any]  # attributes, then inputs -> output


class Graphs:
    """Graphs one after the other; weights of all of them by name."""

    def __init__(self, paths: list[str]) -> None:
        self._graphs = [onnx.load(path).graph for path in paths]
        self._nodes = [node for graph in self._graphs for node in graph.node]
        held = {t.name: numpy_helper.to_array(t) for graph in self._graphs for t in graph.initializer}
        statistics = {name for node in self._nodes if node.op_type == "BatchNormalization" for name in node.input[3:]}
        is_weight = {name: value.ndim > 0 and value.dtype == np.float32 for name, value in held.items()}
        self.weights = {name: v for name, v in held.items() if is_weight[name] and name not in statistics}
        self.constants = {name: v for name, v in held.items() if name not in self.weights}

    def check(self, operators: Mapping[str, Operator], engine: str) -> None:
        """End the process if an operator is missing."""
        missing = {node.op_type for node in self._nodes} - operators.keys()
        if missing:
            sys.exit(f"{', '.join(sorted(missing))} is not written for {engine} here")

    def run(self, operators: Mapping[str, Operator], held: Mapping[str, Any], x: Any) -> Any:
        """Compute the last graph's output; `held` are the engine's weights and constants."""
        for graph in self._graphs:
            values = {**held, graph.input[0].name: x}
            for node in graph.node:
                attrs = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
                inputs = [values[name] if name else None for name in node.input]
                values[node.output[0]] = operators[node.op_type](attrs, *inputs)
            x = values[graph.output[0].name]
        return x


@dataclass(frozen=True)
class Request:
    """One batch, and the graphs that it goes through."""

    graphs: Graphs
    x: NDArray[Any]
    labels: NDArray[Any]
    threads: int


def read_request() -> Request:
    """Read the request that the command line names."""
    facts = json.loads(Path(sys.argv[1]).read_text())
    return Request(Graphs(facts["graphs"]), np.load(facts["input"]), np.load(facts["labels"]), facts["threads"])


def serve(loss: float, step: Callable[[], object]) -> None:
    """Print the loss, then time a step for every line that comes."""
    print(json.dumps({"loss": loss}), flush=True)
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(json.dumps({"cpu": 1e3 * cpu, "wall": 1e3 * wall}), flush=True)


def same_pads(attrs: dict[str, Any]) -> list[int]:
    """Return the rows and columns of padding, the same at both ends."""
    pads = list(attrs.get("pads", [0, 0, 0, 0]))
    if pads[:2] != pads[2:]:
        sys.exit(f"padding of {pads} is not written here: it differs at the two ends")
    return pads[:2]
