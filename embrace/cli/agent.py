"""`embrace agent`: let this device take part in training."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embrace.cli import show
from embrace.cli.train import default_work
from federation.data_reference import file_of
from federation.errors import InputError

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
    from edge_runtime.agent import Agent, Device, describe
    from edge_runtime.client import Client
    from edge_runtime.engine.session import Settings

    folder = work or default_work()
    device = Device(data, folder, memory, tier, engine, profile, Settings(threads, spinning))
    _check_places(data, folder)
    verify: str | bool = str(certificate) if certificate else True
    own = _credential(server, token, name or socket.gethostname(), describe(device), folder, verify)
    with Client(server, own, verify=verify) as client, show.progress("agent") as bar:
        client.set_profile(describe(device))
        worker = Agent(client, device, progress=bar, on_report=_json_line if json_ else _line)
        worker.run(most_tasks=tasks)


def _check_places(data: str, work: Path) -> None:
    """Before anything is asked of a coordinator: an enrolment token has only so many uses."""
    source = file_of(data)
    if not source.exists():
        raise InputError(f"no such file: {source}")
    try:
        work.mkdir(parents=True, exist_ok=True)
        (work / "writable").touch()
        (work / "writable").unlink()
    except OSError as error:
        raise InputError(f"cannot use {work}: {error.strerror}") from None


def _credential(
    server: str, token: str | None, name: str, profile: dict[str, object], work: Path, verify: str | bool
) -> str:
    """The device's own token: kept from last time, or from enrolling now."""
    from edge_runtime.client import Client

    file = work / "credentials.json"
    try:
        known = json.loads(file.read_text()) if file.is_file() else {}
    except (ValueError, OSError):
        known = None
    if not isinstance(known, dict):
        raise InputError(f"{file} is damaged: expected tokens as JSON; delete it and enrol again")
    if server not in known:
        if token is None:
            raise InputError(f"this device is not enrolled at {server}: give --token with an enrolment token")
        with Client(server, token, verify=verify) as enrolling:
            _, known[server] = enrolling.enrol(name, profile)
        draft = file.with_suffix(".new")
        draft.touch(0o600)
        draft.write_text(json.dumps(known))
        draft.replace(file)
    return str(known[server])


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
