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
    data: Annotated[str, typer.Option(help=show.DATA)],
    tokenizer: show.Tokenizer = None,
    token: Annotated[
        str | None, typer.Option(help="Enrolment token; needed the first time.", envvar="EMBRACE_TOKEN")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory budget of the whole process: 64MB. Default: what is free.")
    ] = None,
    tier: Annotated[str | None, typer.Option(help="Train as this tier, if it fits.")] = None,
    boundary: Annotated[str | None, typer.Option(help="Train from this boundary on, if it fits.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="At most so many samples of a batch at once: less memory.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What this device is called. Default: its host name.")] = None,
    engine: Annotated[str, typer.Option(help="auto, portable or ort-training.")] = "auto",
    profile: Annotated[str, typer.Option(help="auto, fast or low_memory.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads of the runtime.")] = 1,
    spinning: Annotated[bool, typer.Option(help="Several threads wait actively within a step.")] = True,
    frozen: show.Frozen = "float32",
    work: Annotated[Path | None, typer.Option(help="Where graphs, activations and the credential are kept.")] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="PEM file of the authority to trust, for TLS.", envvar="EMBRACE_CERTIFICATE")
    ] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(help="Train bundles signed by this key (or the key in this file) only; repeatable."),
    ] = None,
    max_disk: Annotated[str, typer.Option(help="The most that the work folder takes.")] = "4GB",
    max_task_time: Annotated[float, typer.Option(min=1.0, help="Seconds for one task.")] = 6 * 3600.0,
    max_steps: Annotated[int, typer.Option(min=1, help="Steps of one task.")] = 1_000_000,
    tasks: Annotated[int | None, typer.Option(min=1, help="End after so many tasks.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One line of JSON per task.")] = False,
) -> None:
    """Wait for tasks, train, send updates; until it is stopped. The data stays here.

    Example: embrace agent --server http://127.0.0.1:8470 --token TOKEN --data digits.npz --memory 64MB
    """
    from edge_runtime.agent import Agent
    from edge_runtime.budget import parse_size
    from edge_runtime.own_limits import OwnLimits

    with (
        show.progress("agent") as bar,
        Agent.join(
            server,
            data,
            token=token,
            tokenizer=tokenizer,
            name=name,
            memory=memory,
            tier=tier,
            boundary=boundary,
            micro_batch=micro_batch,
            engine=engine,
            profile=profile,
            threads=threads,
            spinning=spinning,
            frozen=frozen,  # type: ignore[arg-type]
            work=work,
            certificate=certificate,
            trust=trust or (),
            limits=OwnLimits(parse_size(max_disk), max_task_time, max_steps),
            progress=bar,
            on_report=_json_line if json_ else _line,
            on_notice=_to_stderr if json_ else _notice,
        ) as worker,
    ):
        worker.run(most_tasks=tasks)


def _line(report: Report) -> None:
    show.console().print(
        f"round {report.round}: trained from {report.boundary!r}, {report.steps} steps, loss {report.loss:.4f}, "
        f"{report.seconds['wall']:.1f} s, peak {show.peak(report.memory)}, sent {show.size(report.bytes['uploaded'])}",
        markup=False,
    )


def _notice(text: str) -> None:
    show.console().print(text, markup=False, soft_wrap=True)


def _to_stderr(text: str) -> None:
    show.Screen(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


def _json_line(report: Report) -> None:
    from dataclasses import asdict

    print(json.dumps(asdict(report)), flush=True)
