"""Print the table of docs/reference/zoo.md, computed from the models: `python -m bench.device.zoo_table`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from model_export.bundle import load_graph
from model_export.capacity import layer_activations
from model_export.layers import find_layer
from model_export.source import load_source
from model_export.zoo import ZOO, Tier

HEAD = ("model", "layers", "batch", "tier", "boundary", "parameters", "activations", "capacity")


@dataclass(frozen=True)
class ZooRow:
    """One tier of one model; activations at the model's own batch."""

    model: str
    layers: int
    batch: int
    tier: str
    boundary: str
    parameters: int
    activations: int
    capacity: float

    def markdown(self) -> str:
        cells = (
            *(self.model, self.layers, self.batch, self.tier, f"`{self.boundary}`"),
            *(f"{self.parameters:,}", f"{self.activations:,}", f"{self.capacity:.3f}"),
        )
        return f"| {' | '.join(map(str, cells))} |"


def rows(name: str) -> Iterator[ZooRow]:
    """Every tier of a model, the whole of it first."""
    source = load_source(name)
    graph, layers = load_graph(source)
    sizes = [sum(p.size for p in layer.parameters if p.kind == "weight") for layer in layers]

    def cost(first: int, last_steps: int | None) -> tuple[int, int]:
        activations = sum(layer_activations(graph, layer, last_steps) for layer in layers[first:])
        return sum(sizes[first:]), activations * source.batch

    full = sum(cost(0, None))
    for tier, place in {"strong": Tier(layers[0].name), **source.tiers}.items():
        first = find_layer(layers, place.boundary)
        steps = f"@{place.last_steps}" if place.last_steps else ""
        parameters, activations = cost(first, place.last_steps)
        share = (parameters + activations) / full
        boundary = f"{layers[first].name}{steps}"
        yield ZooRow(name, len(layers), source.batch, tier, boundary, parameters, activations, share)


def table() -> str:
    """The whole table as markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---|" + "---:|" * 2 + "---|---|" + "---:|" * 3]
    lines += [row.markdown() for name in ZOO for row in rows(name)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
