"""Keys that become paths, and blobs that are there or not, never half."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.store.blobs import DirectoryBlobs
from coordinator.store.bodies import Bodies
from coordinator.store.bundles import Bundles
from coordinator.store.schema import UpdateRecord
from coordinator.store.versions import Versions
from federation.errors import InputError


def an_update(task: str, sha256: str) -> UpdateRecord:
    return UpdateRecord(task, "job", 0, 0, "device", sha256, 1, 1, 1.0, {}, 0.0)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "a\0b", "a b", "ü", "x" * 121])
def test_what_cannot_be_part_of_a_path(tmp_path: Path, name: str) -> None:
    blobs = DirectoryBlobs(tmp_path)
    bodies = Bodies(blobs)
    places = (
        Bundles(blobs).directory,
        bodies.arriving,
        lambda name: Versions(blobs).weights(name, 0),
        lambda name: bodies.file(an_update(name, "0" * 64)),
        lambda name: bodies.file(an_update("job-0-0-1", name)),
    )
    for place in places:
        with pytest.raises(InputError):
            place(name)


def test_everything_lies_in_the_directory_and_attempts_apart(tmp_path: Path) -> None:
    bodies = Bodies(DirectoryBlobs(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"bundles", "data", "jobs", "spool"}
    first, second = bodies.arriving("job-0-0-1"), bodies.arriving("job-0-0-1")
    assert first != second and first.parent == second.parent == tmp_path / "spool"
    update = an_update("job-0-0-1", "0" * 64)
    for path in (first, second, bodies.file(update), bodies.file(an_update("job-0-0-2", "1" * 64))):
        path.write_bytes(b"x")
    bodies.keep_only([update])
    assert {bodies.file(update)} == set((tmp_path / "spool").iterdir())


def test_a_body_that_cannot_be_kept_stops_no_other(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path)
    bodies = Bodies(blobs)
    there, missing = bodies.arriving("job-0-0-1"), bodies.arriving("job-0-1-1")
    there.write_bytes(b"x")
    answers = bodies.commit_all([(missing, "job-0-1-1", "1" * 64), (there, "job-0-0-1", "0" * 64)])
    assert isinstance(answers[0], FileNotFoundError) and answers[1] is None
    assert [path.name for path in (tmp_path / "spool").iterdir()] == [f"job-0-0-1.{'0' * 64}.body"]
    blobs.close()


def test_what_lies_below_a_key_goes_with_it(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path)
    for key in ("jobs/a/versions/0.x", "jobs/b/versions/0.x"):
        blobs.file(key).parent.mkdir(parents=True)
        blobs.draft(key).write_bytes(b"x")
        blobs.commit(blobs.draft(key), key)
    blobs.link("jobs/a/versions/0.x", "jobs/b/versions/1.x")
    blobs.delete("jobs/a", "jobs/b/versions/0.x", "jobs/b/versions/0.x")
    assert blobs.list("jobs") == ["jobs/b"] and blobs.list("jobs/b/versions") == ["jobs/b/versions/1.x"]
    assert blobs.list("jobs/a/versions") == []
