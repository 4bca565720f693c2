"""`embrace job` and `embrace device`: what an administrator does with a coordinator."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show
from federation.errors import InputError

if TYPE_CHECKING:
    from embrace.client import Client

job = typer.Typer(help="Training jobs of a coordinator.", no_args_is_help=True)
device = typer.Typer(help="Devices of a coordinator.", no_args_is_help=True)

Server = Annotated[str, typer.Option(help="The coordinator's address.", envvar="EMBRACE_SERVER")]
Token = Annotated[
    str | None, typer.Option(help="The administrator's token, or @FILE with it.", envvar="EMBRACE_ADMIN_TOKEN")
]


def _id(text: str) -> str:
    """Refuse what is no id: ids are parts of addresses, and another text could lead elsewhere."""
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,100}", text):
        raise InputError(f"{text!r} is no id: expected something like 1f2e3d4c5b6a7988")
    return text


JobId = Annotated[str, typer.Argument(help="The job's id.", callback=_id)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LOCAL = "http://127.0.0.1:8470"


def connect(server: str, token: str | None) -> Client:
    from embrace.client import Client

    if token is None:
        raise InputError("give the administrator's token: --token TOKEN, --token @FILE or EMBRACE_ADMIN_TOKEN")
    if token.startswith("@"):
        try:
            token = Path(token[1:]).read_text().strip()
        except OSError as error:
            raise InputError(f"cannot read the token from {token[1:]}: {error.strerror}") from None
    return Client(server, token)


@job.command()
def create(
    file: Annotated[Path, typer.Argument(help="The job file (TOML).")],
    server: Server = LOCAL,
    token: Token = None,
    json_: Json = False,
) -> None:
    """Send a bundle and start a job.

    Example: embrace job create job.toml --token @coordinator/admin.token
    """
    with connect(server, token) as client, show.progress("send the bundle"):
        made = client.create(file)
    show.print_json({"id": made}) if json_ else show.console().print(f"job {made}: embrace job watch {made}")


@job.command("list")
def list_jobs(server: Server = LOCAL, token: Token = None, json_: Json = False) -> None:
    """List all jobs.

    Example: embrace job list --token @coordinator/admin.token
    """
    with connect(server, token) as client:
        found = client.jobs()
    if json_:
        show.print_json(found)
        return
    rows = [(row["id"], row["name"], row["state"], row["version"], row["plan"]["num_rounds"]) for row in found]
    show.console().print(show.table("jobs", ("job", "name", "state", "version", "rounds"), rows, left=3))


@job.command("show")
def show_job(
    job: JobId,
    server: Server = LOCAL,
    token: Token = None,
    json_: Json = False,
) -> None:
    """Show a job: its state and its rounds.

    Example: embrace job show 1f2e3d4c5b6a7988 --token @coordinator/admin.token
    """
    with connect(server, token) as client:
        found, rounds = client.job(job), client.rounds(job)
        metrics = client.metrics(job)
        names = {row["id"]: row["name"] for row in client.devices()} if found["unfit"] else {}
    if json_:
        show.print_json({**found, "rounds": rounds})
        return
    from embrace.cli.watch import rounds_table, scores_of, unfit_lines

    screen = show.console()
    told = f": {found['message']}" if found["message"] else ""
    screen.print(f"{found['name'] or job}: {found['state']}, version {found['version']}{told}", markup=False)
    screen.print(rounds_table(rounds, scores_of(metrics), samples=True))
    for line in unfit_lines(found, names):
        screen.print(line, markup=False, soft_wrap=True)


@job.command()
def watch(
    job: JobId,
    server: Server = LOCAL,
    token: Token = None,
    json_: Annotated[bool, typer.Option("--json", help="One event per line.")] = False,
) -> None:
    """Follow a job as it goes; ends with it, with exit code 1 if it failed.

    Example: embrace job watch 1f2e3d4c5b6a7988 --token @coordinator/admin.token
    """
    import json

    from embrace.cli.watch import follow, watch_lines, watch_live

    with connect(server, token) as client:
        client.job(job)  # says what is wrong at once; an outage later on is waited for
        if json_:
            for event in follow(client, job):
                if isinstance(event, dict):
                    print(json.dumps(event), flush=True)
            state = client.job(job)["state"]
        else:
            state = (watch_live if show.console().is_terminal else watch_lines)(client, job)
    if state == "failed":
        raise typer.Exit(1)


@job.command()
def export(
    job: JobId,
    out: Annotated[Path, typer.Option(help="Directory to write; absent or empty.")],
    bundle: Annotated[Path | None, typer.Option(help="The bundle, if it is not where the job file said.")] = None,
    server: Server = LOCAL,
    token: Token = None,
    json_: Json = False,
) -> None:
    """Fetch the trained model: a bundle (safetensors), model.onnx and, with PyTorch, model.pt with the state dict.

    Example: embrace job export 1f2e3d4c5b6a7988 --out trained --token @coordinator/admin.token
    """
    with connect(server, token) as client, show.progress("fetch the weights"):
        found = client.job(job)
        trained = client.export(job, out, bundle=bundle)
    notes = []
    try:
        trained.to_onnx(out / "model.onnx")
        trained.to_torch(out / "model.pt")
    except ModuleNotFoundError as missing:
        notes.append(f"{missing.name} is not installed here: the bundle was written, model.onnx and model.pt were not")
    if json_:
        show.print_json({"out": str(out), "version": found["version"], "notes": notes})
        return
    for line in (f"version {found['version']} of {found['name']}: {out}", *notes):
        show.console().print(line, markup=False)


def _action(name: str) -> Any:
    def act(job: JobId, server: Server = LOCAL, token: Token = None) -> None:
        with connect(server, token) as client:
            getattr(client, name)(job)

    act.__doc__ = f"""{name.capitalize()} a job.

    Example: embrace job {name} 1f2e3d4c5b6a7988 --token @coordinator/admin.token
    """
    return act


for _name in ("pause", "resume", "stop"):
    job.command(_name)(_action(_name))


@device.command("list")
def list_devices(server: Server = LOCAL, token: Token = None, json_: Json = False) -> None:
    """List all devices, and when they were last heard of.

    Example: embrace device list --token @coordinator/admin.token
    """
    with connect(server, token) as client:
        found = client.devices()
    if json_:
        show.print_json(found)
        return
    rows = [
        (
            row["id"],
            row["name"],
            "revoked" if row["revoked"] else row["profile"].get("tier") or "",
            row["profile"].get("runtime", ""),
            f"{max(0.0, time.time() - row['seen_at']):.0f} s ago",
        )
        for row in found
    ]
    screen = show.console()
    screen.print(show.table("devices", ("device", "name", "tier", "runtime", "heard of"), rows, left=4))
    for row in found:
        if row["unfit"]:
            screen.print(f"no job can use {row['name']}: {row['unfit']}", markup=False, soft_wrap=True)


@device.command()
def revoke(
    device: Annotated[str, typer.Argument(help="The device's id.", callback=_id)],
    server: Server = LOCAL,
    token: Token = None,
) -> None:
    """Shut a device out: its token is worth nothing from now on.

    Example: embrace device revoke 1f2e3d4c5b6a7988 --token @coordinator/admin.token
    """
    with connect(server, token) as client:
        client.revoke(device)


@device.command()
def invite(
    uses: Annotated[int, typer.Option(min=1, help="Devices that it enrols.")] = 1,
    hours: Annotated[float, typer.Option(min=0.01, help="How long it lasts.")] = 24.0,
    server: Server = LOCAL,
    token: Token = None,
    json_: Json = False,
) -> None:
    """Make an enrolment token.

    Example: embrace device invite --uses 10 --token @coordinator/admin.token
    """
    if not math.isfinite(hours):
        raise InputError(f"--hours: expected a number, got {hours}")
    with connect(server, token) as client:
        made = client.invite(uses, 3600 * hours)
    show.print_json({"token": made}) if json_ else show.console().print(made, markup=False)
