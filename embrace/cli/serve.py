"""`embrace serve`: run a coordinator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embrace.cli import show

if TYPE_CHECKING:
    from rich.console import Console

    from coordinator.lan_certificate import LanCertificate
    from coordinator.server import Server
    from coordinator.settings import Settings


def serve(
    data: Annotated[Path, typer.Option(help="The coordinator's directory: database, weights, bodies.")],
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1; with --tls auto every address]")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.  [default: 8470]")] = None,
    public_url: Annotated[
        str | None,
        typer.Option(help="Address under which devices reach it, if that is another: https://fleet.example."),
    ] = None,
    tls: Annotated[
        str | None,
        typer.Option(help="auto: make a certificate for the private network, so that phones can join by the link."),
    ] = None,
    tls_certificate: Annotated[str | None, typer.Option(help="PEM file.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file.")] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="Serve other machines without TLS.")] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of a page elsewhere that may call this API, such as https://lab.example; repeatable."
        ),
    ] = None,
    proxy: Annotated[
        str | None, typer.Option(help="Address of a proxy in front, whose X-Forwarded-For is believed.")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="postgresql+psycopg://USER@HOST/NAME instead of SQLite in the directory.")
    ] = None,
    blobs: Annotated[
        str | None,
        typer.Option(help="s3://BUCKET/PREFIX, or a folder that coordinators share, for weights and bodies."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, max=1, help="0: leave folding to `embrace worker`, on a shared database.  [default: 1]", metavar="N"
        ),
    ] = None,
    storage_url: Annotated[
        str | None,
        typer.Option(
            help="Address at which devices reach the bucket's server, if it is another; none: bytes go through here."
        ),
    ] = None,
    evaluation_data: Annotated[
        str | None, typer.Option(help="Folder with evaluation data; jobs name it coordinator:NAME.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    devices: Annotated[int, typer.Option(min=0, help="Devices that the printed token enrols; 0: no token.")] = 100,
    backup: Annotated[
        Path | None, typer.Option(help="Write an archive (tar) of the directory and end; a coordinator may run on it.")
    ] = None,
) -> None:
    """Run a coordinator: the REST service that hands out tasks and aggregates updates. Ctrl-C ends it cleanly.

    Settings may also stand in DIR/serve.toml or in the environment (EMBRACE_PORT=8470).

    Example: embrace serve --data coordinator

    Example: embrace serve --data coordinator --tls auto

    Example: embrace serve --data coordinator --backup coordinator.tar
    """
    from coordinator.credentials import read_token
    from coordinator.server import Server
    from coordinator.settings import load_settings
    from edge_runtime.files import sole_user

    given = {
        "host": host,
        "port": port,
        "public_url": public_url,
        "tls": tls,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "insecure": insecure,
        "allow_origin": tuple(allow_origin) if allow_origin else None,
        "proxy": proxy,
        "database": database,
        "blobs": blobs,
        "workers": workers,
        "storage_url": storage_url,
        "evaluation_data": evaluation_data,
        "log_level": log_level,
    }
    settings = load_settings(data, os.environ, given)
    if backup is not None:
        _back_up(data, settings, backup)
        return
    secret = None if settings.admin_token_file is None else read_token(Path(settings.admin_token_file))
    with sole_user(data / "coordinator.lock", f"{data} is in use: another coordinator runs on it"):
        server = Server(data, settings)
        server.run(lambda url: _welcome(server, data, secret, devices, url))  # tokens are made once it listens


def _back_up(data: Path, settings: Settings, file: Path) -> None:
    from coordinator.backup import write_backup
    from federation.errors import InputError

    if settings.database is not None or settings.blobs is not None:
        raise InputError(
            "--backup copies the SQLite database and the files of the directory; these are elsewhere: stop the "
            f"coordinator, then back up database and bucket with their own tools (pg_dump) and copy {data}"
        )
    made = write_backup(data, file)
    show.console().print(
        f"backup of {data}: {file}, {show.size(made.bytes)} with {made.jobs} jobs and {made.devices} devices; it holds "
        "the administrator's token, so keep it as you keep that",
        markup=False,
        soft_wrap=True,
    )


def _welcome(server: Server, data: Path, secret: str | None, devices: int, url: str) -> None:
    from coordinator.settings import is_exposed

    screen = show.console()
    if is_exposed(server.settings):
        screen.print(
            f"warning: {server.settings.host} is visible to other machines and there is no TLS: the network between "
            "can read the tokens, and browsers other than this machine's do not train (--tls auto)",
            style="yellow",
        )
    screen.print(f"administrator's token, {_set_admin_token(server, data / 'admin.token', secret)}", markup=False)
    if devices:
        enrolment = server.registry.invite(devices, 7 * 86400)
        screen.print(f"enrolment token for {devices} devices, valid for 7 days: {enrolment}", markup=False)
        _show_link(screen, url, enrolment)
    if server.lan is not None:
        _explain_trust(screen, server.lan, url)
    screen.print(f"coordinator: {url}\ndashboard: {url}/\nAPI documentation: {url}/docs", markup=False)


def _set_admin_token(server: Server, file: Path, secret: str | None) -> str:
    """Take the administrator's token that was given, or make one if there is none; say where it is."""
    from edge_runtime.files import replacing

    if secret is not None:
        server.registry.take_admin_token(secret)
        return f"as given: {server.settings.admin_token_file}"
    made = server.registry.set_admin_token()
    if made is not None:
        with replacing(file, mode=0o600) as draft:
            draft.write(f"{made}\n".encode())
        return f"made now and kept only here: {file}"
    if file.exists() and server.registry.is_known_admin(file.read_text("utf-8", "replace").strip()):
        return f"as before: {file}"
    return f"as before; it is not in {file} any more"  # the administrator may keep it elsewhere


def _explain_trust(screen: Console, lan: LanCertificate, url: str) -> None:
    """Say how devices come to trust the coordinator's own authority."""
    from coordinator.api.pages import AUTHORITY_PATH

    new = "made now" if lan.is_new else "as before"
    screen.print(
        f"authority that devices have to trust, {new}: {lan.authority}\n"
        f"  SHA-256 {lan.fingerprint}\n"
        f"  agents: give a copy of it with --certificate\n"
        f"  phones: accept the warning of the page, or install {url}{AUTHORITY_PATH} (docs/guides/browser.md)",
        markup=False,
        soft_wrap=True,
    )


def _show_link(screen: Console, url: str, enrolment: str) -> None:
    """Print the link for browsers; on a terminal also as a QR code, if a phone that scans it can train."""
    from embrace.join_link import describe_link, join_link, qr_code

    screen.print(describe_link(url, enrolment), markup=False, soft_wrap=True)
    if not url.startswith("https:"):
        hint = "  on this machine only; phones need https: --tls auto in a private network, --public-url behind a proxy"
        screen.print(hint, markup=False, soft_wrap=True)
    elif screen.is_terminal and (code := qr_code(join_link(url, enrolment))):
        screen.print(code, markup=False, highlight=False)
