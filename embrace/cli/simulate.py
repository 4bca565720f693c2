"""`embrace simulate`: a whole fleet on this machine, with the code that coordinator and agents run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from embrace.cli import show
from federation.errors import InputError
from federation.traffic import Link


def simulate(
    job: Annotated[Path, typer.Argument(help="The job file; its table [simulate] describes the fleet.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run; without it runs/NAME of the job.")] = None,
    devices: Annotated[int | None, typer.Option(help="How many devices; tiers keep their shares.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Your own: FILE.npz, a folder of images by class, FILE.csv, FILE.jsonl or FILE.py:NAME."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="CSV: the column with the label, by name or number.")] = None,
    tokenizer: show.Tokenizer = None,
    test_data: Annotated[str | None, typer.Option(help="Data to test on, in any of these forms.")] = None,
    test_share: Annotated[
        float | None, typer.Option(help="Without --test-data: share of your data held out. Default: 0.2")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="How samples are dealt: iid; dirichlet,alpha=0.1; shard,shards_per_partition=2.")
    ] = None,
    tiers: Annotated[str | None, typer.Option(help="How many devices are of which tier: strong=2,weak=6")] = None,
    dataset: Annotated[str | None, typer.Option(help="A data set by name: `embrace data list`.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="EMBRACE_DATA_DIR", help="Where data sets lie.", file_okay=False)
    ] = None,
    engine: Annotated[
        str, typer.Option(help="torch (fast), portable (the graphs that devices run), or auto: torch if it can.")
    ] = "auto",
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
    track: show.Track = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record of every round as JSON.")] = False,
) -> None:
    """Run a job on simulated devices. The same seed gives the same result, whatever the number of processes.

    A run that was interrupted goes on where it was. `embrace plot RUN` draws it.

    Example: embrace simulate job.toml --devices 128 --data-dir data --out runs/first

    Example: embrace simulate job.toml --data photos/ --partition dirichlet,alpha=0.1 --tiers strong=2,weak=6
    """
    from functools import partial

    from embrace.trackers import tracked
    from federation.job import plan_to
    from simulation.datasets.load import find_source
    from simulation.fleet import read_job
    from simulation.pool import LocalPool
    from simulation.ray_pool import RayPool
    from simulation.runs import COLUMNS
    from simulation.simulate import OpenPool
    from simulation.simulate import simulate as run_simulation

    pools: dict[str, OpenPool] = {"local": LocalPool, "ray": partial(RayPool, address=ray_address)}
    if engine_pool not in pools:
        raise InputError(f"--engine-pool: expected local or ray, got {engine_pool!r}")
    if data is not None and dataset is not None:
        raise InputError("--data and --dataset: expected one of them")
    if dataset is not None:
        find_source(dataset)
    dealt, constants = _partition(partition)
    plan, bundle = read_job(job, num_rounds=rounds, seed=seed)
    name = plan.name or job.stem
    folder = out or Path("runs") / name
    with show.progress("simulate") as progress, tracked(track, name, plan_to(plan, own_rules=True), folder) as log:
        run = run_simulation(
            plan,
            bundle,
            data or dataset,
            label=label,
            tokenizer=tokenizer,
            test_data=test_data,
            test_share=test_share,
            data_dir=data_dir,
            devices=devices,
            tiers=None if tiers is None else show.pairs("--tiers", tiers),
            partition=dealt,
            partition_constants=constants,
            engine=engine,
            workers=workers,
            pool=pools[engine_pool],
            folder=folder,
            evaluate_every=evaluate_every,
            layers_every=layers_every,
            svcca_every=svcca_every,
            link=_link(link),
            on_progress=progress,
            on_round=log,
        )
    if as_json:
        show.print_json({"folder": str(folder), "rounds": run.rounds})
        return
    show.console().print(show.table(f"{len(run.rounds)} rounds", COLUMNS, run.table()))
    if run.stopped:
        show.console().print(run.stopped, markup=False)
    show.console().print(f"{folder}: run.json, metrics.jsonl, weights.safetensors\nnext: embrace plot {folder}")


def _partition(text: str | None) -> tuple[str | None, dict[str, Any] | None]:
    """Read a partitioner and its constants."""
    if text is None:
        return None, None
    name, _, rest = text.partition(",")
    return name, show.pairs("--partition", rest)


def _link(text: str | None) -> Link | None:
    if text is None:
        return None
    try:
        up, down, trip = map(float, text.split(","))
    except ValueError:
        raise InputError(f"--link: expected UP,DOWN,ROUND_TRIP as in 5,20,60, got {text!r}") from None
    return Link(1e6 * up, 1e6 * down, trip / 1000)
