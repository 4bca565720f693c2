"""`embrace job` and `embrace device`: what an administrator does with a coordinator."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show
from federation.errors import InputError
from federation.printable import printable

if TYPE_CHECKING:
    from embrace.client import Client

job = typer.Typer(help="Training jobs of a coordinator.", no_args_is_help=True)
device = typer.Typer(help="Devices of a coordinator.", no_args_is_help=True)

Server = Annotated[str, typer.Option(help="The coordinator's address.", envvar="EMBRACE_SERVER")]
Token = Annotated[
    str | None, typer.Option(help="The administrator's token, or @FILE with it.", envvar="EMBRACE_ADMIN_TOKEN")
]
Certificate = Annotated[
    Path | None, typer.Option(help="PEM file of the authority to trust, for TLS.", envvar="EMBRACE_CERTIFICATE")
]


def _words(text: str) -> str:
    if not 1 <= len(text) <= 200:
        raise InputError(f"{text[:20]!r} is no id and no name: expected something like 1f2e3d4c5b6a7988 or kitchen")
    return text


JobName = Annotated[str, typer.Argument(help="The job's id, the beginning of it, or its name.", callback=_words)]
DeviceName = Annotated[str, typer.Argument(help="The device's id, the beginning of it, or its name.", callback=_words)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LOCAL = "http://127.0.0.1:8470"


def connect(server: str, token: str | None, certificate: Path | None = None) -> Client:
    from embrace.client import Client

    if token is None:
        raise InputError("give the administrator's token: --token TOKEN, --token @FILE or EMBRACE_ADMIN_TOKEN")
    if token.startswith("@"):
        try:
            token = Path(token[1:]).read_text().strip()
        except OSError as error:
            raise InputError(f"cannot read the token from {token[1:]}: {error.strerror}") from None
    return Client(server, token, certificate=certificate)


@job.command()
def create(
    file: Annotated[Path, typer.Argument(help="The job file (TOML).")],
    server: Server = LOCAL,
    token: Token = None,
    certificate: Certificate = None,
    json_: Json = False,
) -> None:
    """Send a bundle and start a job.

    Example: embrace job create job.toml --token @coordinator/admin.token
    """
    with connect(server, token, certificate) as client, show.progress("send the bundle"):
        made = client.create(file)
    if json_:
        show.print_json({"id": made})
    else:
        show.console().print(printable(f"job {made}: embrace job watch {made}"), markup=False, soft_wrap=True)


@job.command("list")
def list_jobs(
    server: Server = LOCAL, token: Token = None, certificate: Certificate = None, json_: Json = False
) -> None:
    """List all jobs.

    Example: embrace job list --token @coordinator/admin.token
    """
    with connect(server, token, certificate) as client:
        found = client.jobs()
    if json_:
        show.print_json(found)
        return
    rows = [(row["id"], row["name"], row["state"], row["version"], row["plan"]["num_rounds"]) for row in found]
    show.console().print(show.table("jobs", ("job", "name", "state", "version", "rounds"), rows, left=3))


@job.command("show")
def show_job(
    job: JobName,
    server: Server = LOCAL,
    token: Token = None,
    certificate: Certificate = None,
    json_: Json = False,
) -> None:
    """Show a job: its state and its rounds.

    Example: embrace job show 1f2e3d4c5b6a7988 --token @coordinator/admin.token
    """
    with connect(server, token, certificate) as client:
        job = client.find_job(job)
        found, rounds = client.job(job), client.rounds(job)
        metrics = client.metrics(job)
        names = {row["id"]: row["name"] for row in client.devices()} if found["unfit"] else {}
    if json_:
        show.print_json({**found, "rounds": rounds})
        return
    from embrace.cli.watch import rounds_table, score_lines, scores_of, unfit_lines, waiting_lines

    screen = show.console()
    told = f": {found['message']}" if found["message"] else ""
    screen.print(f"{found['name'] or job}: {found['state']}, version {found['version']}{told}", markup=False)
    for line in score_lines(found, rounds):
        screen.print(line, markup=False, soft_wrap=True)
    screen.print(rounds_table(rounds, scores_of(metrics), samples=True))
    for line in (*waiting_lines(found), *unfit_lines(found, names)):
        screen.print(line, markup=False, soft_wrap=True)


@job.command()
def watch(
    job: JobName,
    server: Server = LOCAL,
    token: Token = None,
    certificate: Certificate = None,
    track: show.Track = None,
    json_: Annotated[bool, typer.Option("--json", help="One event per line.")] = False,
) -> None:
    """Follow a job as it goes; ends with it, with exit code 1 if it failed.

    Example: embrace job watch 1f2e3d4c5b6a7988 --token @coordinator/admin.token --track tensorboard
    """
    from embrace.cli.watch import watch_json, watch_lines, watch_live
    from embrace.following import record_of
    from embrace.trackers import tracked

    with connect(server, token, certificate) as client:
        job = client.find_job(job)  # says what is wrong at once; an outage later on is waited for
        found = client.job(job)
        with tracked(track, found["name"] or job, found["plan"]) as log:

            def keep(event: Mapping[str, Any]) -> None:
                record = record_of(event)
                if record is not None:
                    log(record)

            on_pipe = watch_json if json_ else watch_lines
            state = (watch_live if show.console().is_terminal and not json_ else on_pipe)(client, job, keep)
    if state == "failed":
        raise typer.Exit(1)


@job.command()
def export(
    job: JobName,
    out: Annotated[Path, typer.Option(help="Directory to write; absent or empty.")],
    bundle: Annotated[Path | None, typer.Option(help="The bundle, if it is not where the job file said.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The version with the best score instead of the newest.")
    ] = False,
    sign: Annotated[Path | None, typer.Option(help="Sign the trained bundle with this private key.")] = None,
    server: Server = LOCAL,
    token: Token = None,
    certificate: Certificate = None,
    json_: Json = False,
) -> None:
    """Fetch the trained model: a bundle (safetensors), model.onnx and, with PyTorch, model.pt with the state dict.

    Example: embrace job export 1f2e3d4c5b6a7988 --out trained --token @coordinator/admin.token
    """
    from embrace.client import exported_version

    with connect(server, token, certificate) as client, show.progress("fetch the weights"):
        job = client.find_job(job)
        found = client.job(job)
        version = exported_version(found, best)
        trained = client.export(job, out, bundle=bundle, best=best, sign=sign)
    notes = []
    try:
        trained.to_onnx(out / "model.onnx")
        trained.to_torch(out / "model.pt")
    except ModuleNotFoundError as missing:
        notes.append(f"{missing.name} is not installed here: the bundle was written, model.onnx and model.pt were not")
    if json_:
        show.print_json({"out": str(out), "version": version, "notes": notes})
        return
    for line in (f"version {version} of {found['name']}: {out}", *notes):
        show.console().print(line, markup=False)


def _action(name: str, does: str) -> Any:
    def act(
        job: JobName,
        server: Server = LOCAL,
        token: Token = None,
        certificate: Certificate = None,
        json_: Json = False,
    ) -> None:
        with connect(server, token, certificate) as client:
            changed = getattr(client, name)(client.find_job(job))
        show.print_json(changed) if json_ else show.console().print(_changed(changed), markup=False, soft_wrap=True)

    act.__doc__ = f"""{does}

    Example: embrace job {name} digits --token @coordinator/admin.token
    """
    return act


for _name, _does in {
    "pause": "Pause a job: it hands out no tasks until it is resumed, and what is under way still counts.",
    "resume": "Let a paused job go on where it was.",
    "stop": "Stop a job for good; its weights stay.",
}.items():
    job.command(_name)(_action(_name, _does))


def _changed(change: dict[str, Any]) -> str:
    """Say what became of a job, and of the tasks of its open round."""
    name, before, state = f"{change['name']} {change['id']}", change["before"], change["state"]
    if before == state:
        return f"{name} is {state} already: nothing changed"
    running, arrived = (show.plural(change[key], word) for key, word in (("under_way", "task"), ("arrived", "update")))
    if state == "paused":
        effect = f"no task is handed out; {running} under way may still be answered"
    elif state == "running":
        effect = f"it goes on with round {change['round']}, {running} under way"
    elif change["closing"]:
        effect = f"round {change['round']} is closing and still makes a version; the weights stay"
    else:
        effect = f"{running} under way and {arrived} of round {change['round']} are given up; the weights stay"
    return f"{name}: {before} -> {state} at version {change['version']}; {effect}"


@job.command()
def delete(
    job: JobName,
    force: Annotated[bool, typer.Option("--force", help="Stop it first, if it is not over.")] = False,
    server: Server = LOCAL,
    token: Token = None,
    certificate: Certificate = None,
    json_: Json = False,
) -> None:
    """Delete a job that is over: its versions and results, and the bundle and data that no other job uses.

    Example: embrace job delete 1f2e3d4c5b6a7988 --token @coordinator/admin.token
    """
    with connect(server, token, certificate) as client:
        job = client.find_job(job)
        freed = client.delete(job, force=force)
    if json_:
        show.print_json(freed)
        return
    also = [name for name, key in (("its bundle", "bundle"), ("its evaluation data", "data")) if freed[key]]
    beside = f" with {' and '.join(also)}" if also else ""
    show.console().print(f"job {job} deleted{beside}: {show.size(freed['bytes'])} free", markup=False)


@device.command("list")
def list_devices(
    server: Server = LOCAL, token: Token = None, certificate: Certificate = None, json_: Json = False
) -> None:
    """List all devices, and when they were last heard of.

    Example: embrace device list --token @coordinator/admin.token
    """
    with connect(server, token, certificate) as client:
        found = client.devices()
    if json_:
        show.print_json(found)
        return
    rows = [
        (
            row["id"],
            row["name"],
            row["state"],
            row["profile"].get("tier") or "",
            row["profile"].get("runtime", ""),
            _ago(row["seen_at"]),
        )
        for row in found
    ]
    screen = show.console()
    screen.print(show.table("devices", ("device", "name", "state", "tier", "runtime", "heard of"), rows, left=5))
    for row in found:
        if row["unfit"]:
            screen.print(f"no job can use {row['name']}: {row['unfit']}", markup=False, soft_wrap=True)


@device.command("show")
def show_device(
    device: DeviceName,
    server: Server = LOCAL,
    token: Token = None,
    certificate: Certificate = None,
    json_: Json = False,
) -> None:
    """Show a device: memory, tasks and failures, the last error, where its time goes, and how it does in each job.

    Example: embrace device show kitchen --token @coordinator/admin.token
    """
    with connect(server, token, certificate) as client:
        found = client.device(client.find_device(device))
    if json_:
        show.print_json(found)
        return
    screen = show.console()
    for line in _device_lines(found):
        screen.print(printable(line), markup=False, soft_wrap=True)
    columns = ("job", "name", "trains from", "task", "done", "failed", "benched for")
    rows = [
        (
            *(row[name] for name in ("job", "name", "boundary", "task", "done", "failed")),
            _for(row["benched_until"]) or "–",
        )
        for row in found["jobs"]
    ]
    if rows:
        screen.print(show.table("jobs", columns, rows, left=4))
    if found["seconds"]:
        parts = [(part, f"{value:.3f}") for part, value in found["seconds"].items()]
        screen.print(show.table("seconds of its last updates, medians", ("part", "seconds"), parts))


def _device_lines(found: dict[str, Any]) -> list[str]:
    profile, error = found["profile"], found["last_error"]
    room = profile.get("memory")
    memory = "all that training takes" if room is None else f"{show.size(room)} beside the idle process"
    words = [f"{found['name']} {found['id']}: {found['state']}", f"heard of {_ago(found['seen_at'])}"]
    words += [f"benched for {_for(found['benched_until'])}"] if _for(found["benched_until"]) else []
    needs = [
        f"{show.size(need['bytes'])} with graph {need['graph'][:8]} at batch {need['batch']}"
        for need in profile.get("needs", ())[:4]
    ]
    engine = f"{profile.get('runtime') or 'unknown runtime'}, {', '.join(profile.get('engines', ()))}"
    where = f"tier {profile.get('tier') or 'by memory'}"
    if profile.get("boundary"):
        where = f"from {profile['boundary']}, as its owner decided"
    lines = [
        ", ".join(words),
        f"memory: {memory}" + (f"; measured: {', '.join(needs)}" if needs else ""),
        f"runs: {engine}, {show.plural(profile.get('threads', 1), 'thread')}, {where}",
        f"tasks: {found['tasks_done']} done, {found['tasks_failed']} failed",
    ]
    if error:
        message = f": {error['message']}" if error["message"] else ""
        lines.append(f"last error: {error['reason']}{message} ({_ago(error['at'])}, job {error['job']})")
    return lines + ([f"no job can use it: {found['unfit']}"] if found["unfit"] else [])


def _ago(at: float) -> str:
    return f"{max(0.0, time.time() - at):.0f} s ago"


def _for(until: float | None) -> str:
    return "" if until is None or until <= time.time() else f"{until - time.time():.0f} s"


@device.command()
def revoke(
    device: DeviceName,
    server: Server = LOCAL,
    token: Token = None,
    certificate: Certificate = None,
    json_: Json = False,
) -> None:
    """Shut a device out: its token is worth nothing from now on.

    Example: embrace device revoke kitchen --token @coordinator/admin.token
    """
    with connect(server, token, certificate) as client:
        changed = client.revoke(client.find_device(device))
    if json_:
        show.print_json(changed)
        return
    name = f"{changed['name']} {changed['id']}"
    freed = (
        f"; {show.plural(changed['freed'], 'task')} that it held can go to other devices" if changed["freed"] else ""
    )
    done = "is revoked already: nothing changed" if changed["before"] else f"is revoked: its token is void{freed}"
    show.console().print(f"{name} {done}", markup=False, soft_wrap=True)


@device.command()
def invite(
    uses: Annotated[int, typer.Option(min=1, help="Devices that it enrols.")] = 1,
    hours: Annotated[float, typer.Option(min=0.01, help="How long it lasts.")] = 24.0,
    link: Annotated[
        bool, typer.Option("--link", help="Print the link for browsers, on a terminal with a QR code.")
    ] = False,
    server: Server = LOCAL,
    token: Token = None,
    certificate: Certificate = None,
    json_: Json = False,
) -> None:
    """Make an enrolment token.

    Example: embrace device invite --uses 10 --token @coordinator/admin.token

    Example: embrace device invite --uses 20 --link --server https://192.168.1.7:8470 --certificate authority.pem
    """
    from embrace.join_link import join_link, qr_code

    if not math.isfinite(hours):
        raise InputError(f"--hours: expected a number, got {hours}")
    with connect(server, token, certificate) as client:
        made = client.invite(uses, 3600 * hours)
    address = join_link(server.rstrip("/"), made)
    if json_:
        show.print_json({"token": made, **({"link": address} if link else {})})
        return
    screen = show.console()
    screen.print(address if link else made, markup=False, soft_wrap=True)
    if link and screen.is_terminal:
        screen.print(qr_code(address), markup=False, highlight=False)
