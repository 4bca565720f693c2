"""Names of files, and files that are there or not, never half."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.store.files import Files
from federation.errors import InputError


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "a\0b", "a b", "ü", "x" * 121])
def test_what_cannot_be_part_of_a_path(tmp_path: Path, name: str) -> None:
    files = Files(tmp_path)
    for place in (files.bundle, files.arriving, lambda n: files.version(n, 0), lambda n: files.arrived(n, "0" * 64)):
        with pytest.raises(InputError):
            place(name)
    with pytest.raises(InputError):
        files.arrived("job-0-0-1", name)


def test_everything_lies_in_the_directory_and_attempts_apart(tmp_path: Path) -> None:
    files = Files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"bundles", "jobs", "spool"}
    first, second = files.arriving("job-0-0-1"), files.arriving("job-0-0-1")
    assert first != second and first.parent == second.parent == tmp_path / "spool"
    body = files.arrived("job-0-0-1", "0" * 64)
    for path in (first, second, body):
        path.write_bytes(b"x")
    files.forget_arriving()
    assert files.spooled() == {body} == set((tmp_path / "spool").iterdir())


def test_what_waits_for_a_score_is_found(tmp_path: Path) -> None:
    files = Files(tmp_path)
    path = files.version("job", 12)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    path.with_suffix(".evaluated").write_bytes(b"")
    older = files.unscored("job", 3)
    older.write_bytes(b"")
    files.state("job", 12).write_bytes(b"")
    path.with_suffix(".draft").write_bytes(b"")
    assert older.name == "3.evaluated" and files.versions("job") == [3, 12] and files.versions("other") == []
