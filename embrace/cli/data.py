"""`embrace data`: data sets of the papers, and how they are dealt to devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show

if TYPE_CHECKING:
    from simulation.datasets import Dataset
    from simulation.partitioners import Numbers

data = typer.Typer(help="Data sets, and how they are dealt to devices.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A data set; `embrace data list` has them.")]
DataDir = Annotated[
    Path, typer.Option(help="Has one folder per data set, or is the data set's own.", envvar="EMBRACE_DATA_DIR")
]
Partitioner = Annotated[str, typer.Option(help="iid, dirichlet, shard, digits, similarity or natural.")]
Devices = Annotated[int, typer.Option(min=1, max=100_000, help="To how many devices it is dealt.")]
Seed = Annotated[int, typer.Option(min=0, help="Another seed deals differently.")]
Alpha = Annotated[float | None, typer.Option(help="dirichlet: concentration; small is uneven.")]
Smallest = Annotated[int | None, typer.Option(help="dirichlet: no device has fewer samples. Default: 10.")]
Shards = Annotated[int | None, typer.Option(help="shard: how many each device gets. Default: 2.")]
Labels = Annotated[int | None, typer.Option(help="digits: how many labels each device has. Default: 2.")]
Similarity = Annotated[float | None, typer.Option(help="similarity: the fraction that is dealt at random.")]
Groups = Annotated[int | None, typer.Option(help="natural: writers or films per device. Default: all are dealt.")]
Out = Annotated[Path, typer.Option(help="Where the result goes: a picture, FILE.png, or a new folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class Dealt:
    """A data set and the samples of each device."""

    data: Dataset
    parts: list[Numbers]
    counts: Numbers  # devices × classes
    facts: dict[str, Any]  # how it was dealt
    title: str  # the same in words


@data.command("list")
def list_(data_dir: DataDir = Path("data"), json_: Json = False) -> None:
    """List the data sets, their sizes, and where they were found.

    Example: embrace data list --data-dir ~/datasets
    """
    from simulation.datasets import DATASETS

    found = [
        {
            "name": source.name,
            "summary": source.summary,
            "samples": source.samples,
            "expected": source.expected,
            "looked_for": [str(data_dir / folder) for folder in (*source.folders, ".")] if source.markers else [],
            "found": str(folder) if (folder := source.find(data_dir)) is not None else None,
        }
        for source in DATASETS.values()
    ]
    if json_:
        show.print_json(found)
        return
    rows = [
        (line["name"], line["summary"], line["samples"], line["found"] or "–" if line["looked_for"] else "comes along")
        for line in found
    ]
    columns = ("data set", "what it is", "train + test", "found in")
    screen = show.console()
    screen.print(show.table(f"data sets below {data_dir}", columns, rows, left=4))
    for line in found:
        if line["looked_for"] and line["found"] is None:
            screen.print(f"{line['name']}: expected {line['expected']} in {line['looked_for'][0]}", markup=False)


def _dealing(use: Callable[[Dealt, Path], dict[str, Any]]) -> Callable[..., None]:
    """Make a subcommand with every option of a partition; `use` takes the partition and returns facts for JSON."""

    def command(
        name: Name,
        out: Out,
        partitioner: Partitioner = "iid",
        devices: Devices = 20,
        seed: Seed = 0,
        alpha: Alpha = None,
        min_partition_size: Smallest = None,
        shards_per_partition: Shards = None,
        labels_per_partition: Labels = None,
        similarity: Similarity = None,
        groups_per_partition: Groups = None,
        data_dir: DataDir = Path("data"),
        json_: Json = False,
    ) -> None:
        constants = {
            "alpha": alpha,
            "min_partition_size": min_partition_size,
            "shards_per_partition": shards_per_partition,
            "labels_per_partition": labels_per_partition,
            "similarity": similarity,
            "groups_per_partition": groups_per_partition,
        }
        given = {key: value for key, value in constants.items() if value is not None}
        dealt = _deal(name, data_dir, partitioner, given, devices, seed)
        result = use(dealt, out)
        if json_:
            show.print_json({**dealt.facts, **result})
            return
        _print_parts(dealt)
        show.console().print(f"written: {out}", markup=False)

    command.__doc__ = use.__doc__
    return command


def _plot(dealt: Dealt, out: Path) -> dict[str, Any]:
    """Draw which device gets which classes: one stacked bar per device.

    Example: embrace data plot mnist --partitioner dirichlet --alpha 0.1 --devices 20 --out parts.png
    """
    from simulation.plots import plot_partition, save

    save(plot_partition(dealt.title, dealt.counts), out)
    return {"counts": dealt.counts.tolist(), "picture": str(out)}


def _split(dealt: Dealt, out: Path) -> dict[str, Any]:
    """Write a folder with one archive per device, device-NNN.npz, which `embrace agent --data` reads, and test.npz.

    Example: embrace data split mnist --partitioner digits --labels-per-partition 2 --devices 100 --out parts
    """
    from simulation.datasets.split import write_split

    with show.progress("split") as bar:
        files = write_split(dealt.data, dealt.parts, dealt.facts, out, bar)
    return {"sizes": [len(part) for part in dealt.parts], "files": [str(file) for file in files]}


data.command("plot")(_dealing(_plot))
data.command("split")(_dealing(_split))


def _deal(name: str, data_dir: Path, partitioner: str, constants: dict[str, Any], devices: int, seed: int) -> Dealt:
    """Partition a data set; options are checked before the data is read."""
    from simulation.datasets import label_counts, load_dataset, make_partitioner

    dealer = make_partitioner(partitioner, constants)
    with show.progress(name) as bar:
        found = load_dataset(name, data_dir, bar)
        parts = dealer.partition(found.y_train, devices, seed, found.groups)
    facts = {"dataset": name, "partitioner": partitioner, **constants, "devices": devices, "seed": seed}
    how = " ".join([partitioner, *(f"{key}={value:g}" for key, value in constants.items())])
    title = f"{name}, {how}, {devices} devices, seed {seed}"
    return Dealt(found, parts, label_counts(parts, found.y_train, found.num_classes), facts, title)


def _print_parts(dealt: Dealt) -> None:
    """Print a few lines: with a hundred devices a table of all says less than the picture."""
    sizes, kinds = dealt.counts.sum(1), (dealt.counts > 0).sum(1)
    rows = [
        (what, show.number(int(values.min())), show.number(int(values.max())), f"{values.mean():,.1f}")
        for what, values in (("samples per device", sizes), ("classes per device", kinds))
    ]
    title = f"{dealt.data.name}: {sizes.sum():,} of {len(dealt.data.y_train):,} samples on {len(sizes)} devices"
    show.console().print(show.table(title, ("", "least", "most", "mean"), rows))
