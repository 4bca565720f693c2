"""Open the database and the blobs that settings name: for a coordinator, or beside those that may be at work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.scratch import scratch_folder
from coordinator.store.blobs import Blobs, DirectoryBlobs
from coordinator.store.database import open_database, sqlite_url
from coordinator.store.repository import Repository
from coordinator.store.s3 import S3Blobs
from federation.errors import InputError


def open_blobs(given: str | None, directory: Path, cache: Path, storage_url: str | None = None) -> Blobs:
    """Open the bucket or the folder that is given, or the coordinator's own directory; `cache` is emptied.

    Devices reach the bucket's server at `storage_url`, if that is another address.
    """
    if given is None or Path(given).is_absolute():
        return DirectoryBlobs(Path(given or directory))
    return S3Blobs(given, cache, storage_url)


@contextmanager
def stores_of(directory: Path, database: str | None, blobs: str | None) -> Iterator[tuple[Repository, Blobs]]:
    """Open what a coordinator has, which may be at work on it. No table is made or changed by this."""
    if database is None and not (directory / "coordinator.db").is_file():
        raise InputError(f"there is no coordinator.db in {directory}: expected the directory of a coordinator")
    if blobs is not None and Path(blobs).is_absolute() and not Path(blobs).is_dir():
        raise InputError(f"there is no folder {blobs}: expected the one that the coordinator uses")
    repository = Repository(open_database(database or sqlite_url(directory), migrate=False))
    try:
        with scratch_folder("embrace-admin") as cache:
            opened = open_blobs(blobs, directory, cache / "blobs")
            try:
                yield repository, opened
            finally:
                opened.close()
    except OSError as error:
        raise InputError(f"cannot use {blobs or directory}: {error.strerror or error}") from None
    finally:
        repository.close()
