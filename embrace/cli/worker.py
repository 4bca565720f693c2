"""`embrace worker`: fold updates for coordinators that share a database."""

from __future__ import annotations

import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from embrace.cli import show


def worker(
    database: Annotated[
        str,
        typer.Option(
            envvar="EMBRACE_DATABASE", help="The coordinators' database: postgresql+psycopg://USER@HOST/NAME."
        ),
    ],
    blobs: Annotated[
        str,
        typer.Option(envvar="EMBRACE_BLOBS", help="The coordinators' blobs: s3://BUCKET/PREFIX, or their folder."),
    ],
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder for copies of what is in object storage, in embrace-worker/.  [default: a temporary one]"
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(envvar="EMBRACE_LOG_LEVEL", help="debug, info, warning or error.")] = "info",
) -> None:
    """Fold the updates of coordinators that share a PostgreSQL database into partial sums. Any number may run.

    Each coordinator is such a worker, too, unless it is started with --workers 0. The weights are the same bits however
    many there are. SIGTERM and Ctrl-C end a worker after the batch that it is at; kill -9 loses nothing either.

    Example: embrace worker --database postgresql+psycopg://embrace@db/embrace --blobs s3://fleet/embrace
    """
    from coordinator.logs import configure_logging
    from coordinator.scratch import scratch_folder
    from coordinator.worker import Worker
    from federation.errors import InputError

    if log_level not in ("debug", "info", "warning", "error"):
        raise InputError(f"--log-level: expected debug, info, warning or error, got {log_level!r}")
    configure_logging(log_level)
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:  # until there is a worker
        signal.signal(number, lambda *_: sys.exit())
    with nullcontext(cache) if cache else scratch_folder("embrace-fold") as own:
        found = Worker(database, blobs, own / "embrace-worker")  # which is emptied
        for number in signals:
            signal.signal(number, lambda *_: found.end())
        found.run(lambda: show.console().print("worker: waiting for updates", markup=False))
