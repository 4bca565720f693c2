"""`embrace data`: data sets of the papers, and how they are dealt to devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import show
from federation.errors import InputError

if TYPE_CHECKING:
    from bench.data import Dataset
    from bench.data.partition import Numbers

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
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@data.command("list")
def list_(data_dir: DataDir = Path("data"), json_: Json = False) -> None:
    """What is known, how large it is, and where it was found.

    Example: embrace data list --data-dir ~/datasets
    """
    from bench.data import DATASETS

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


@data.command()
def plot(
    name: Name,
    out: Annotated[Path, typer.Option(help="Where to draw: FILE.png")],
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
    """Draw which device gets which classes: one stacked bar per device.

    Example: embrace data plot mnist --partitioner dirichlet --alpha 0.1 --devices 20 --out parts.png
    """
    if out.is_dir() or not out.parent.is_dir():
        raise InputError(f"--out {out}: expected a file in a directory that exists")
    constants = _given(
        alpha, min_partition_size, shards_per_partition, labels_per_partition, similarity, groups_per_partition
    )
    found, parts = _deal(name, data_dir, partitioner, constants, devices, seed)
    from bench.data import label_counts
    from bench.data.plot import plot_partition

    counts = label_counts(parts, found.y_train, found.num_classes)
    how = " ".join([partitioner, *(f"{key}={value:g}" for key, value in constants.items())])
    plot_partition(f"{name}, {how}, {devices} devices, seed {seed}", counts, out)
    if json_:
        facts = _facts(name, partitioner, constants, devices, seed)
        show.print_json({**facts, "counts": counts.tolist(), "picture": str(out)})
        return
    _print_parts(found, counts)
    show.console().print(f"picture: {out}", markup=False)


@data.command()
def split(
    name: Name,
    out: Annotated[Path, typer.Option(help="A new folder for device-NNN.npz and test.npz.")],
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
    """Write one archive per device, which `embrace agent --data` reads, and test.npz.

    Example: embrace data split mnist --partitioner digits --labels-per-partition 2 --devices 100 --out parts
    """
    constants = _given(
        alpha, min_partition_size, shards_per_partition, labels_per_partition, similarity, groups_per_partition
    )
    found, parts = _deal(name, data_dir, partitioner, constants, devices, seed)
    from bench.data import label_counts
    from bench.data.split import write_split

    facts = _facts(name, partitioner, constants, devices, seed)
    with show.progress("split") as bar:
        files = write_split(found, parts, facts, out, bar)
    if json_:
        show.print_json({**facts, "sizes": [len(part) for part in parts], "files": [str(file) for file in files]})
        return
    _print_parts(found, label_counts(parts, found.y_train, found.num_classes))
    show.console().print(f"written: {files[0]} … {files[-1].name}, test.npz", markup=False)


def _given(
    alpha: float | None,
    min_partition_size: int | None,
    shards_per_partition: int | None,
    labels_per_partition: int | None,
    similarity: float | None,
    groups_per_partition: int | None,
) -> dict[str, float | int]:
    """The constants that were asked for: a partitioner refuses those that are not its own."""
    return {key: value for key, value in locals().items() if value is not None}


def _facts(name: str, partitioner: str, constants: dict[str, Any], devices: int, seed: int) -> dict[str, Any]:
    return {"dataset": name, "partitioner": partitioner, **constants, "devices": devices, "seed": seed}


def _deal(
    name: str, data_dir: Path, partitioner: str, constants: dict[str, Any], devices: int, seed: int
) -> tuple[Dataset, list[Numbers]]:
    """Everything that can be wrong with the words is found before the data is read."""
    from bench.data import load_dataset, make_partitioner

    dealer = make_partitioner(partitioner, constants)
    with show.progress(name) as bar:
        found = load_dataset(name, data_dir, bar)
        return found, dealer.partition(found.y_train, devices, seed, found.groups)


def _print_parts(found: Dataset, counts: Numbers) -> None:
    """A few lines: with a hundred devices a table of all says less than the picture."""
    sizes, kinds = counts.sum(1), (counts > 0).sum(1)
    rows = [
        (what, *(show.number(int(function(0))) for function in (values.min, values.max)), f"{values.mean():.1f}")
        for what, values in (("samples per device", sizes), ("classes per device", kinds))
    ]
    left_out = len(found.y_train) - int(sizes.sum())
    title = f"{found.name}: {sizes.sum():,} samples on {len(sizes)} devices" + (
        f", {left_out:,} left out" if left_out else ""
    )
    show.console().print(show.table(title, ("", "least", "most", "mean"), rows))
