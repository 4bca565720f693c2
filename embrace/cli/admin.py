"""`embrace admin`: look after what a coordinator has stored, also while it is at work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from embrace.cli import show

if TYPE_CHECKING:
    from coordinator.settings import Settings

admin = typer.Typer(help="Look after what a coordinator has stored.", no_args_is_help=True)
Data = Annotated[Path, typer.Option(help="The coordinator's directory, with serve.toml if it has one.")]
Database = Annotated[str | None, typer.Option(help="As the coordinator has it: postgresql+psycopg://USER@HOST/NAME.")]
Blobs = Annotated[str | None, typer.Option(help="As the coordinator has it: s3://BUCKET/PREFIX, or a folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@admin.command()
def prune(
    data: Data,
    database: Database = None,
    blobs: Blobs = None,
    keep_versions: Annotated[int | None, typer.Option(help="Versions that stay of each job.  [default: 2]")] = None,
    keep_events: Annotated[
        int | None, typer.Option(help="Events that stay of each job; 0: all.  [default: 100000]")
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option(help="Days after which versions and events go; 0: never.  [default: 0]")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    json_: Json = False,
) -> None:
    """Remove old events, old versions and bodies that belong to no round. A coordinator does the same by itself.

    What jobs need to go on stays: their newest two versions, the best one, the bodies of rounds that are open.

    Example: embrace admin prune --data coordinator --keep-days 30 --dry-run
    """
    import time

    from coordinator.retention import Keep, Retention, total
    from coordinator.store.open import stores_of

    given = {"keep_versions": keep_versions, "keep_events": keep_events, "keep_days": keep_days}
    settings = _settings(data, database, blobs, **given)
    keep = Keep(settings.keep_versions, settings.keep_events, settings.keep_days)
    with stores_of(data, settings.database, settings.blobs) as (repository, opened):
        retention = Retention(repository, opened, keep, time.time)
        found = list(retention.find())
        for surplus in found if not dry_run else ():
            retention.remove(surplus, surplus.events)
    if json_:
        show.print_json({"removed": not dry_run, "jobs": [vars(own) for own in found]})
        return
    rows = [[own.job, own.events, len(own.versions), len(own.bodies)] for own in found]
    title = "what would go" if dry_run else "removed"
    columns = ("job", "events", "versions", "bodies")
    everything = total(found)
    rows.append(["all", *(everything[name] for name in columns[1:])])
    show.console().print(show.table(title, columns, rows))


@admin.command()
def check(data: Data, database: Database = None, blobs: Blobs = None, json_: Json = False) -> None:
    """Verify what is stored, also while coordinators are at work: nothing is changed.

    Every version has to be what the version before and the sums of its round make, bit for bit; files have to be there
    with their sha256; rows have to refer to rows. Exit code 1 if something is wrong, with a line for each.

    Example: embrace admin check --data coordinator
    """
    from coordinator.check import Check
    from coordinator.store.open import stores_of

    settings = _settings(data, database, blobs)
    with stores_of(data, settings.database, settings.blobs) as (repository, opened):
        looked = Check(repository, opened)
        wrong = [f"database: {line}" for line in looked.rows()]
        found = list(looked.jobs())
    wrong += [f"job {own.job}: {line}" for own in found for line in own.wrong]
    if json_:
        show.print_json({"jobs": [vars(own) for own in found], "wrong": wrong})
    else:
        columns = ("job", "newest version", "stored", "computed again", "blobs read", "wrong")
        rows = [[own.job, own.version, own.versions, own.computed, own.blobs, len(own.wrong)] for own in found]
        show.console().print(show.table("what is stored", columns, rows))
        for line in wrong:
            show.console().print(f"wrong: {line}", markup=False, soft_wrap=True)
    if wrong:
        raise typer.Exit(1)


def _settings(data: Path, database: str | None, blobs: str | None, **given: float | None) -> Settings:
    """Read what the coordinator was told; its address and limits are of no interest here."""
    from coordinator.settings import load_settings

    quiet = {"insecure": True}  # nothing listens
    return load_settings(data, os.environ, {"database": database, "blobs": blobs, **quiet, **given})
