"""`embrace device bench` and `embrace device compare`: what training costs on a device, and on which device less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show
from embrace.cli.bench.report import check_targets, megabytes, milliseconds, threads_of
from embrace.cli.job import LOCAL, Certificate, Json, Server, Token, connect, device
from federation.benchmark import Benchmark, BoundaryCost, PartSeconds
from federation.decode import decode, encode
from federation.errors import InputError

if TYPE_CHECKING:
    from edge_runtime.device_bench import JobBundle, LocalBundle

# Of a batch, in the order in which they happen; the last three repeat in every local step.
PARTS = ("frozen forward", "I/O", "forward", "backward", "optimiser")


@device.command()
def bench(
    bundle: Annotated[
        Path | None, typer.Argument(help="A bundle on this device. Default: that of a job that runs there.")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Send the result to the coordinator.")] = False,
    server: Annotated[
        str | None, typer.Option(help="The coordinator's address: http://HOST:8470", envvar="EMBRACE_SERVER")
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="Enrolment token, if this device has not enrolled yet.", envvar="EMBRACE_TOKEN")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Name or id of the job whose bundle is measured.")] = None,
    boundaries: Annotated[str, typer.Option(help="NAME,… or 'tiers' or 'all'.")] = "tiers",
    batch: Annotated[
        int | None, typer.Option(min=1, max=65536, help="Samples per step. Default: the job's, or the bundle's.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads of the runtime.")] = 1,
    iterations: Annotated[int, typer.Option(min=1, max=1000, help="Timed iterations per boundary.")] = 10,
    engine: Annotated[str, typer.Option(help="auto, portable or ort-training.")] = "auto",
    profile: Annotated[str, typer.Option(help="fast or low_memory.")] = "fast",
    name: Annotated[str | None, typer.Option(help="What this device is called, if it enrols now.")] = None,
    work: Annotated[Path | None, typer.Option(help="Where graphs and the credential are kept.")] = None,
    certificate: Certificate = None,
    trust: Annotated[
        list[str] | None, typer.Option(help="Measure bundles signed by this key (or in this file) only; repeatable.")
    ] = None,
    json_: Json = False,
) -> None:
    """Measure what training costs on this device: seconds by part and peak memory, for each tier of a bundle.

    Needs nothing but embrace-fl[edge]. Every boundary runs in a fresh process, the weakest first; what does not fit
    the free memory is not tried. With --submit the coordinator keeps the result for 'embrace device compare'.

    Example: embrace device bench --server http://127.0.0.1:8470 --token TOKEN --submit
    """
    if server is None and (submit or bundle is None):
        raise InputError("give --server, or a bundle to measure without --submit")
    if bundle is not None and job is not None:
        raise InputError("a bundle and --job both say what is measured; give one of them")
    from edge_runtime.device_bench import (
        BenchSettings,
        JobBundle,
        LocalBundle,
        bench_device,
        check_runtime_profile,
        connected,
        find_job,
    )
    from edge_runtime.places import default_work
    from edge_runtime.signing import read_public
    from edge_runtime.trust import Trust

    settings = BenchSettings(boundaries, batch, threads, iterations, engine, check_runtime_profile(profile))
    folder = work or default_work()
    with ExitStack() as stack:
        client = None
        measured: LocalBundle | JobBundle | None = None if bundle is None else LocalBundle(bundle)
        if server is not None and (submit or bundle is None):
            options = {"name": name, "work": folder, "certificate": certificate, "engine": engine, "notify": _notice}
            client = stack.enter_context(connected(server, token, **options))  # type: ignore[arg-type]
        progress = stack.enter_context(show.progress("bench"))
        if measured is None:
            assert client is not None
            trusted = Trust(client.server, folder, [read_public(key) for key in trust or ()])
            measured = JobBundle(client, find_job(client.open_jobs(), job), folder, trusted, progress)
        found = bench_device(measured, settings, progress=progress)
        if submit:
            assert client is not None
            client.send_benchmark(found)
    if json_:
        show.print_json(encode(found))
        return
    screen = show.console()
    screen.print(_table(_title(found), ("boundary",), [((_place(cost),), cost) for cost in found.costs]))
    words = f"{found.processor}, {show.plural(found.cores, 'core')}, {found.system}, {found.runtime}"
    screen.print(words, markup=False)
    if submit and client is not None:
        screen.print(f"sent as {client.name}: embrace device compare", markup=False)


def _notice(text: str) -> None:
    show.Screen(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Measured:
    """A benchmark and the device that made it."""

    device: str
    name: str
    at: float
    found: Benchmark

    @property
    def label(self) -> str:
        return f"{self.name}, {self.found.runtime}, {threads_of(self.found.threads)}"


@device.command()
def compare(
    bundle: Annotated[
        str | None, typer.Option(help="A model's name, or the beginning of a bundle's sha256. Default: the newest.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per step. Default: those of the newest.")] = None,
    server: Server = LOCAL,
    token: Token = None,
    certificate: Certificate = None,
    json_: Json = False,
    out: Annotated[Path | None, typer.Option(help="Draw it: FILE.png")] = None,
) -> None:
    """Compare what training costs on the devices that measured it with 'embrace device bench --submit' or in a page.

    Milliseconds of one batch, part by part, and peak memory, boundary by boundary, the quickest device first.

    Example: embrace device compare --out devices.png --token @coordinator/admin.token
    """
    check_targets(out, None)
    with connect(server, token, certificate) as client:
        rows = [
            Measured(row["device"], row["name"], row["at"], decode(Benchmark, row["benchmark"], defaults=True))
            for row in client.benchmarks()
        ]
    chosen, others = choose(rows, bundle, batch)
    if json_:
        kept = [{"device": m.device, "name": m.name, "at": m.at, "benchmark": encode(m.found)} for m in chosen]
        show.print_json(kept)
    else:
        screen = show.console()
        screen.print(_table(_title(chosen[0].found, "on each device"), ("boundary", "device"), _lines(chosen)))
        for line in others:
            screen.print(f"also measured: {line}", markup=False)
    if out is not None:
        draw(chosen, out)
        if not json_:
            show.console().print(f"picture: {out}", markup=False)


def choose(rows: Sequence[Measured], bundle: str | None, batch: int | None) -> tuple[list[Measured], list[str]]:
    """Choose the measurements of one bundle at one batch, those of the newest that fits; say in words what else is."""
    fitting = [
        row
        for row in rows
        if (bundle is None or row.found.model == bundle or row.found.bundle.startswith(bundle))
        and batch in (None, row.found.batch)
    ]
    if not rows:
        raise InputError("no device has measured anything yet: run 'embrace device bench --submit' on one")
    groups: dict[tuple[str, int], list[Measured]] = {}
    for row in rows:
        groups.setdefault((row.found.bundle, row.found.batch), []).append(row)
    known = {
        key: f"{own[0].found.model} {key[0][:8]} at batch {key[1]}, {show.plural(len(own), 'measurement')}"
        for key, own in groups.items()
    }
    if not fitting:
        raise InputError(f"nothing was measured with that bundle and batch; there is: {'; '.join(known.values())}")
    newest = max(fitting, key=lambda row: row.at)
    key = (newest.found.bundle, newest.found.batch)
    return groups[key], [words for other, words in known.items() if other != key]


def _lines(rows: Sequence[Measured]) -> list[tuple[tuple[str, ...], BoundaryCost]]:
    return [((_place(cost), row.label), cost) for _, group in by_boundary(rows) for row, cost in group]


def by_boundary(rows: Sequence[Measured]) -> list[tuple[str, list[tuple[Measured, BoundaryCost]]]]:
    """Sort measurements by boundary, most work first; within each the quickest device first, failures last."""
    found: dict[str, list[tuple[Measured, BoundaryCost]]] = {}
    for row in rows:
        for cost in row.found.costs:
            found.setdefault(cost.boundary, []).append((row, cost))

    def seconds(one: tuple[Measured, BoundaryCost]) -> float:
        return float("inf") if one[1].seconds is None else one[1].seconds.batch

    return [(name, sorted(group, key=seconds)) for name, group in found.items()]


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[tuple[str, ...], BoundaryCost]]) -> Any:
    heads = (*columns, *PARTS, "batch ms (quartiles)", "peak MB", "load ms")
    return show.table(title, heads, [(*words, *_cells(cost)) for words, cost in rows], left=len(columns))


def _cells(cost: BoundaryCost) -> list[str]:
    seconds = cost.seconds
    if seconds is None:
        return [*("–" for _ in PARTS), cost.problem, "–", "–"]
    parts = ["–" if value is None else milliseconds(1e3 * value) for value in divided(seconds).values()]
    parts[2] += " with backward" if seconds.backward is None else ""
    low, high = (milliseconds(1e3 * value) for value in (seconds.low, seconds.high))
    whole = f"{milliseconds(1e3 * seconds.batch)} ({low}–{high})"
    return [*parts, whole, megabytes(cost.memory), milliseconds(1e3 * seconds.load)]


def divided(seconds: PartSeconds) -> Mapping[str, float | None]:
    """Divide a batch into its parts. Where the runtime does not tell, forward has what backward takes, too."""
    forward = seconds.training - (seconds.backward or 0.0)
    found = (seconds.frozen_forward, seconds.activation_io, forward, seconds.backward, seconds.optimiser)
    return dict(zip(PARTS, found, strict=True))


def _place(cost: BoundaryCost) -> str:
    return f"{cost.boundary} ({', '.join(cost.tiers)})" if cost.tiers else cost.boundary


def _title(found: Benchmark, where: str = "") -> str:
    how = where or threads_of(found.threads)
    return f"{found.model}: one batch of {found.batch}, {how}; ms, medians of the iterations"


def draw(rows: Sequence[Measured], file: Path) -> None:
    """Draw a bar for each device, a panel for each boundary."""
    from bench.plots import Stack, plot_stacks

    panels: dict[str, list[Stack]] = {}
    for _, group in by_boundary(rows):
        stacks = [
            Stack(row.label, [1e3 * (value or 0.0) for value in divided(cost.seconds).values()], _written(cost))
            for row, cost in group
            if cost.seconds is not None
        ]
        if stacks:
            panels[f"from {_place(group[0][1])}"] = stacks
    if not panels:
        raise InputError("there is nothing to draw: no boundary could be measured")
    found = rows[0].found
    plot_stacks(f"{found.model}: one batch of {found.batch} on each device", PARTS, panels, "ms (medians)", file)


def _written(cost: BoundaryCost) -> str:
    assert cost.seconds is not None
    words = [f"{milliseconds(1e3 * cost.seconds.batch)} ms"]
    words += [] if cost.memory is None else [f"{megabytes(cost.memory)} MB"]
    words += ["backward is in forward"] if cost.seconds.backward is None else []
    return ", ".join(words)
