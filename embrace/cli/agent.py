"""`embrace agent`: let this device take part in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embrace.cli import show

if TYPE_CHECKING:
    from federation.messages import Report


def agent(
    server: Annotated[str, typer.Option(help="The coordinator's address: http://HOST:8470", envvar="EMBRACE_SERVER")],
    data: Annotated[str, typer.Option(help="FILE.npz, a folder of images by class, FILE.csv or FILE.py:NAME.")],
    token: Annotated[
        str | None, typer.Option(help="Enrolment token; needed the first time.", envvar="EMBRACE_TOKEN")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory budget: 64MB. Default: what is free.")] = None,
    tier: Annotated[str | None, typer.Option(help="Train as this tier, whatever the memory.")] = None,
    name: Annotated[str | None, typer.Option(help="What this device is called. Default: its host name.")] = None,
    engine: Annotated[str, typer.Option(help="auto, portable or ort-training.")] = "auto",
    profile: Annotated[str, typer.Option(help="auto, fast or low_memory.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads of the runtime.")] = 1,
    spinning: Annotated[bool, typer.Option(help="Idle threads wait actively.")] = False,
    work: Annotated[Path | None, typer.Option(help="Where graphs, activations and the credential are kept.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file of the authority to trust, for TLS.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="End after so many tasks.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One line of JSON per task.")] = False,
) -> None:
    """Wait for tasks, train, send updates; until it is stopped. The data stays here.

    Example: embrace agent --server http://127.0.0.1:8470 --token TOKEN --data digits.npz --memory 64MB
    """
    from edge_runtime.agent import Agent

    with (
        show.progress("agent") as bar,
        Agent.join(
            server,
            data,
            token=token,
            name=name,
            memory=memory,
            tier=tier,
            engine=engine,
            profile=profile,
            threads=threads,
            spinning=spinning,
            work=work,
            certificate=certificate,
            progress=bar,
            on_report=_json_line if json_ else _line,
        ) as worker,
    ):
        worker.run(most_tasks=tasks)


def _line(report: Report) -> None:
    peak = show.size(report.memory["anonymous"]) if report.memory else "–"
    show.console().print(
        f"round {report.round}: trained from {report.boundary!r}, {report.steps} steps, loss {report.loss:.4f}, "
        f"{report.seconds['wall']:.1f} s, peak {peak}, sent {show.size(report.bytes['uploaded'])}",
        markup=False,
    )


def _json_line(report: Report) -> None:
    from dataclasses import asdict

    print(json.dumps(asdict(report)), flush=True)
