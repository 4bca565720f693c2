"""`embrace simulate`: a whole fleet on this machine, with the code that coordinator and agents run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from embrace.cli import show
from federation.errors import InputError
from federation.traffic import Link


def simulate(
    job: Annotated[Path, typer.Argument(help="The job file; its table [simulate] describes the fleet.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run; without it runs/NAME of the job.")] = None,
    devices: Annotated[int | None, typer.Option(help="How many devices; tiers keep their shares.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Instead of the job's: `embrace data list`.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="EMBRACE_DATA_DIR", help="Where data sets lie.", file_okay=False)
    ] = None,
    engine: Annotated[str, typer.Option(help="torch (fast) or portable (the graphs that devices run).")] = "torch",
    workers: Annotated[int | None, typer.Option(help="Processes; without it one for each core.")] = None,
    engine_pool: Annotated[str, typer.Option(help="local, or ray: a cluster, or this machine's own.")] = "local",
    ray_address: Annotated[str | None, typer.Option(help="Of a running Ray cluster.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Instead of the job's num_rounds.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the job's: data, cohorts, order of samples.")] = None,
    evaluate_every: Annotated[int, typer.Option(help="Rounds between scores on the test data; 0: none.", min=0)] = 1,
    layers_every: Annotated[int, typer.Option(help="Rounds between measurements of every layer.", min=0)] = 0,
    svcca_every: Annotated[int, typer.Option(help="Rounds between comparisons of all local models.", min=0)] = 0,
    link: Annotated[
        str | None, typer.Option(help="5,20,60: Mbit/s up, down, round trip in ms; adds the seconds of each exchange.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record of every round as JSON.")] = False,
) -> None:
    """Run a job on simulated devices. The same seed gives the same result, whatever the number of processes.

    A run that was interrupted goes on where it was. `embrace plot RUN` draws it.

    Example: embrace simulate job.toml --devices 128 --data-dir data --out runs/first
    """
    import os
    from functools import partial

    from simulation.pool import LocalPool
    from simulation.ray_pool import RayPool
    from simulation.run import Options, Simulation, open_job

    pools: dict[str, Any] = {"local": LocalPool, "ray": partial(RayPool, address=ray_address)}
    if engine_pool not in pools:
        raise InputError(f"--engine-pool: expected local or ray, got {engine_pool!r}")
    options = Options(
        engine,
        workers or os.cpu_count() or 1,
        pools[engine_pool],
        evaluate_every,
        layers_every,
        svcca_every,
        _link(link),
    )
    given = {"devices": devices, "dataset": dataset}
    with show.progress("simulate") as progress:
        progress("read the data", 0, 1)
        scene = open_job(job, given, data_dir, num_rounds=rounds, seed=seed)
        folder = out or Path("runs") / (scene.plan.name or job.stem)
        lines = Simulation(scene, folder, options).run(progress)
    if as_json:
        show.print_json({"folder": str(folder), "rounds": lines})
        return
    show.console().print(_table(scene.plan.num_rounds, lines))
    show.console().print(f"{folder}: run.json, metrics.jsonl, weights.safetensors\nnext: embrace plot {folder}")


def _link(text: str | None) -> Link | None:
    if text is None:
        return None
    try:
        up, down, trip = map(float, text.split(","))
    except ValueError:
        raise InputError(f"--link: expected UP,DOWN,ROUND_TRIP as in 5,20,60, got {text!r}") from None
    return Link(1e6 * up, 1e6 * down, trip / 1000)


def _table(rounds: int, lines: list[dict[str, Any]]) -> Table:
    """Tabulate the rounds that were scored, at most about twenty of them."""
    scored = [line for line in lines if line.get("accuracy") is not None or line["round"] + 1 == rounds]
    shown = scored[:: max(1, len(scored) // 20)]
    shown += [] if not scored or shown[-1] is scored[-1] else [scored[-1]]
    rows, up = [], 0
    sent = {line["round"]: (up := up + line["bytes_up"]) for line in lines}
    for line in shown:
        accuracy = line.get("accuracy")
        rows.append(
            [
                line["round"] + 1,
                "–" if accuracy is None else f"{accuracy:.1%}",
                "–" if line["loss"] is None else f"{line['loss']:.4f}",
                line["devices"],
                line["failures"] or "–",
                show.size(sent[line["round"]]),
                f"{line['seconds']:.2f}",
            ]
        )
    columns = ["round", "accuracy", "training loss", "devices", "failed", "sent so far", "seconds"]
    return show.table(f"{len(lines)} rounds", columns, rows)
