"""`embrace inspect`: what a bundle consists of and what training it costs. Needs neither torch nor onnxruntime."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import show
from cli.export import describe
from federation.capacity import forward_macs, predicted_memory, training_macs
from federation.manifest import Boundary, Layer, Manifest, read_manifest


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
        from bench.plots import plot_boundaries

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


def boundaries_table(manifest: Manifest, batch: int | None = None, only: set[str] | None = None) -> Any:
    """Boundaries with their predicted memory; `only` names those to show."""
    rows = []
    for boundary in manifest.boundaries:
        if only is not None and boundary.name not in only:
            continue
        found = _boundary(manifest, boundary, batch)
        memory = found["memory"]
        rows.append(
            (
                found["name"],
                ", ".join(found["tiers"]),
                ", ".join(found["engines"]),
                show.number(found["parameters"]),
                show.number(found["activations"]),
                f"{found['capacity']:.3f}",
                *(show.size(memory[key]) for key in ("parameters", "gradients", "optimiser", "activations", "total")),
                show.size(found["train_bytes"]) if found["train_bytes"] is not None else "–",
            )
        )
    columns = (
        *("boundary", "tier", "engines", "p", "a", "capacity"),
        *("parameters", "gradients", "optimiser", "activations", "total", "graph"),
    )
    title = f"training from a boundary at batch {batch or manifest.batch}: predicted memory in bytes"
    return show.table(title, columns, rows, left=3)
