"""`embrace inspect`: what a bundle consists of and what training it costs. Needs neither torch nor onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from embrace.bundles import Bundle, describe_boundary, describe_layer
from embrace.cli import show
from federation.manifest import Manifest

MEMORY = ("parameters", "gradients", "optimiser", "activations", "total")


def inspect(
    directory: Annotated[Path, typer.Argument(help="A bundle, as 'embrace export' wrote it.")],
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size for activations and memory.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw memory and arithmetic per boundary: FILE.png")] = None,
) -> None:
    """Show a bundle's layers and boundaries, and the memory that training from each boundary needs.

    Twice: by the papers' formula (parameters to total), and the peak that follows from the lifetimes of the graph's
    own values, which decides what fits a budget.

    Example: embrace inspect bundles/resnet20 --batch 16 --plot resnet20.png
    """
    bundle = Bundle(directory)
    manifest = bundle.manifest
    if plot is not None:
        bundle.plot(plot, batch)
    if json_:
        show.print_json(bundle.inspect(batch))
        return
    screen = show.console()
    screen.print(layers_table(manifest))
    screen.print(boundaries_table(manifest, batch))
    if manifest.memory_plan is not None:
        screen.print(f"memory plan: {manifest.memory_plan}", markup=False)
    if manifest.classes is not None:
        screen.print(f"classes: {', '.join(manifest.classes)}", markup=False)
    if manifest.tokenizer is not None:
        screen.print(f"takes texts by its own {manifest.tokenizer.name}", markup=False)
    if manifest.preprocessing is not None:
        screen.print(f"stored values become inputs by: {manifest.preprocessing.describe()}", markup=False)
    screen.print(f"signed by {bundle.signer}" if bundle.signer else "not signed", markup=False, soft_wrap=True)
    for note in manifest.notes:
        screen.print(f"note: {note}", markup=False)
    if plot is not None:
        screen.print(f"picture: {plot}", markup=False)


def layers_table(manifest: Manifest) -> Any:
    rows = [
        (
            layer["name"],
            show.shape(layer["input"]),
            show.shape(layer["output"]),
            *(show.number(layer[key]) for key in ("parameters", "statistics", "activations", "macs")),
            show.size(layer["graph_bytes"]),
        )
        for layer in map(describe_layer, manifest.layers)
    ]
    columns = ("layer", "input", "output", "parameters", "statistics", "activations", "MACs", "graph")
    origin = f"{manifest.source.kind} {manifest.source.reference}"
    title = f"{manifest.name} ({origin}): layers, activations and multiply-accumulates per sample"
    return show.table(title, columns, rows)


def boundaries_table(manifest: Manifest, batch: int | None = None) -> Any:
    """Tabulate what training from each boundary needs; engines have a column only where they differ."""
    described = [describe_boundary(manifest, boundary, batch) for boundary in manifest.boundaries]
    engines = [", ".join(found["engines"]) for found in described]
    alike = len(set(engines)) == 1
    rows = [
        (
            *_first_cells(found),
            *(show.size(found["memory"][key]) for key in MEMORY),
            show.size(found["peak"]),
            show.size(found["train_bytes"]) if found["train_bytes"] is not None else "–",
            *([] if alike else [names]),
        )
        for found, names in zip(described, engines, strict=True)
    ]
    columns = ("boundary", "tier", "p", "a", "capacity", *MEMORY, "peak", "graph", *([] if alike else ["engines"]))
    title = f"training from a boundary at batch {batch or manifest.batch}: predicted memory"
    title += " (total: the papers' formula; peak: lifetimes of the graph's values)"
    return show.table(f"{title}; engines: {engines[0]}" if alike else title, columns, rows, left=2)


def _first_cells(found: dict[str, Any]) -> tuple[str, ...]:
    numbers = (show.number(found[key]) for key in ("parameters", "activations"))
    return found["name"], ", ".join(found["tiers"]), *numbers, f"{found['capacity']:.3f}"
