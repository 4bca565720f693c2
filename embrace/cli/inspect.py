"""`embrace inspect`: what a bundle consists of and what training it costs. Needs neither torch nor onnxruntime."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from embrace.cli import show
from embrace.cli.export import describe
from federation.capacity import forward_macs, predicted_memory, training_macs
from federation.manifest import Boundary, Layer, Manifest, read_manifest

MEMORY = ("parameters", "gradients", "optimiser", "activations", "total")


def inspect(
    directory: Annotated[Path, typer.Argument(help="A bundle, as 'embrace export' wrote it.")],
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size for activations and memory.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw memory and arithmetic per boundary: FILE.png")] = None,
) -> None:
    """Show a bundle's layers and boundaries, and the memory that training from each boundary needs.

    Example: embrace inspect bundles/resnet20 --batch 16 --plot resnet20.png
    """
    manifest = read_manifest(directory)
    if plot is not None:
        from embrace.boundary_plot import plot_boundaries

        plot_boundaries(manifest, batch or manifest.batch, plot)
    if json_:
        show.print_json(facts(manifest, batch))
        return
    screen = show.console()
    screen.print(layers_table(manifest))
    screen.print(boundaries_table(manifest, batch))
    for note in manifest.notes:
        screen.print(f"note: {note}", markup=False)
    if plot is not None:
        screen.print(f"picture: {plot}", markup=False)


def facts(manifest: Manifest, batch: int | None = None) -> dict[str, Any]:
    """All figures, as `--json` prints them; MACs, shapes and layers' activations are per sample."""
    return {
        "name": manifest.name,
        "source": asdict(manifest.source),
        "loss": asdict(manifest.loss),
        "input": asdict(manifest.input),
        "output": asdict(manifest.output),
        "batch": batch or manifest.batch,
        "layers": [_layer(layer) for layer in manifest.layers],
        "boundaries": [_boundary(manifest, boundary, batch) for boundary in manifest.boundaries],
        "tiers": manifest.tiers,
        "notes": list(manifest.notes),
        "bytes": sum(ref.bytes for ref in manifest.files()),
    }


def _layer(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "input": list(layer.input.shape),
        "output": list(layer.output.shape),
        "parameters": sum(p.size for p in layer.parameters if p.kind == "weight"),
        "statistics": sum(p.size for p in layer.parameters if p.kind == "statistic"),
        "activations": layer.activations,
        "macs": layer.macs,
        "graph_bytes": layer.forward.bytes,
    }


def _boundary(manifest: Manifest, boundary: Boundary, batch: int | None) -> dict[str, Any]:
    memory = predicted_memory(manifest, boundary, batch)
    return {
        **describe(manifest, boundary, batch),
        "last_steps": boundary.last_steps,
        "memory": {**asdict(memory), "total": memory.total},
        "forward_macs": forward_macs(manifest, boundary),
        "training_macs": training_macs(manifest, boundary),
        "ort_training_bytes": sum(ref.bytes for ref in boundary.ort_training),
    }


def layers_table(manifest: Manifest) -> Any:
    rows = [
        (
            layer["name"],
            show.shape(layer["input"]),
            show.shape(layer["output"]),
            *(show.number(layer[key]) for key in ("parameters", "statistics", "activations", "macs")),
            show.size(layer["graph_bytes"]),
        )
        for layer in map(_layer, manifest.layers)
    ]
    columns = ("layer", "input", "output", "parameters", "statistics", "activations", "MACs", "graph")
    origin = f"{manifest.source.kind} {manifest.source.reference}"
    title = f"{manifest.name} ({origin}): layers, activations and multiply-accumulates per sample"
    return show.table(title, columns, rows)


def boundaries_table(manifest: Manifest, batch: int | None = None) -> Any:
    """Every boundary with what training from it needs; engines have a column only where they differ."""
    described = [_boundary(manifest, boundary, batch) for boundary in manifest.boundaries]
    engines = [", ".join(found["engines"]) for found in described]
    alike = len(set(engines)) == 1
    rows = [
        (
            *_first_cells(found),
            *(show.size(found["memory"][key]) for key in MEMORY),
            show.size(found["train_bytes"]) if found["train_bytes"] is not None else "–",
            *([] if alike else [names]),
        )
        for found, names in zip(described, engines, strict=True)
    ]
    columns = ("boundary", "tier", "p", "a", "capacity", *MEMORY, "graph", *([] if alike else ["engines"]))
    title = f"training from a boundary at batch {batch or manifest.batch}: predicted memory"
    return show.table(f"{title}; engines: {engines[0]}" if alike else title, columns, rows, left=2)


def short_table(manifest: Manifest) -> Any:
    """The same for a narrow screen: only the total of the memory."""
    rows = [
        (*_first_cells(found), show.size(found["memory"]["total"]))
        for found in (_boundary(manifest, boundary, None) for boundary in manifest.boundaries)
    ]
    columns = ("boundary", "tier", "parameters p", "activations a", "capacity", "memory")
    return show.table(f"training from a boundary at batch {manifest.batch}", columns, rows, left=2)


def _first_cells(found: dict[str, Any]) -> tuple[str, ...]:
    numbers = (show.number(found[key]) for key in ("parameters", "activations"))
    return found["name"], ", ".join(found["tiers"]), *numbers, f"{found['capacity']:.3f}"
