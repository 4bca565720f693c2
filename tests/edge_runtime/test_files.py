"""Files that are there or not, never half; and locks that one process has at a time."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from edge_runtime import files
from edge_runtime.files import disk_errors, publish, rename_flushed, replacing, sole_user
from edge_runtime.system import Linux
from federation.errors import DiskFull, InputError
from tests.edge_runtime.conftest import answer

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs locks and rights of files")


def test_publishing_replaces_at_once(tmp_path: Path) -> None:
    final, draft = tmp_path / "final", tmp_path / "draft"
    final.write_bytes(b"old")
    draft.write_bytes(b"new")
    with final.open("rb") as reader:
        publish(draft, final)
        assert reader.read() == b"old"  # an open file stays what it was
    assert final.read_bytes() == b"new" and not draft.exists()
    with pytest.raises(FileNotFoundError):
        publish(draft, final)
    assert final.read_bytes() == b"new"


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed to the disk, in order: the size of a file, or `folder`."""
    found: list[str] = []

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        found.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else f"{status.st_size} bytes")

    monkeypatch.setattr(os, "fsync", fsync)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what a descriptor is")
def test_what_is_on_the_disk_when(tmp_path: Path, flushed: list[str]) -> None:
    """Every byte before the name, and the name before anything is announced."""
    with replacing(tmp_path / "a") as file:
        file.write(b"abc")
    assert flushed == ["3 bytes", "folder"]
    with replacing(tmp_path / "a", durable=False) as file:
        file.write(b"abcd")
    assert flushed == ["3 bytes", "folder"] and (tmp_path / "a").read_bytes() == b"abcd"
    for name in ("x", "y"):
        (tmp_path / name).write_bytes(name.encode())
        rename_flushed(tmp_path / name, tmp_path / f"{name}.final")
    assert flushed[2:] == ["1 bytes", "1 bytes"]


def test_replacing_makes_the_folder_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    with replacing(path) as file:
        file.write(b"first")
        assert not path.exists()
    assert path.read_bytes() == b"first" and os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_a_block_that_fails_changes_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(error), replacing(path) as file:
        file.write(b"half")
        raise error
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_a_draft_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path, draft=tmp_path / "one") as one, replacing(path, draft=tmp_path / "two") as two:
        one.write(b"one")
        two.write(b"two")
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["file"]


@posix
def test_a_secret_is_never_readable_for_others(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with replacing(path, mode=0o600):
        assert (tmp_path / "secret.new").stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_has_a_name(number: int) -> None:
    with pytest.raises(DiskFull, match=r"^no room here$"), disk_errors(no_room="no room here", otherwise="cannot"):
        raise OSError(number, os.strerror(number))


def test_other_errors_say_why() -> None:
    for error, text in ((PermissionError(errno.EACCES, "Permission denied"), "Permission denied"), (OSError("x"), "x")):
        with pytest.raises(InputError, match=f"^cannot: {text}$"), disk_errors(no_room="", otherwise="cannot"):
            raise error


LOCK = """
import sys
from pathlib import Path
from edge_runtime.files import sole_user
from federation.errors import InputError

try:
    with sole_user(Path(sys.argv[1]), "another process has it"):
        print("mine")
except InputError as error:
    print(error)
"""


@posix
def test_one_process_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "new folder" / "state.lock"
    with sole_user(lock, ""):
        assert answer(LOCK, lock) == f"another process has it, process {os.getpid()}"
        assert (
            answer(LOCK, lock) == f"another process has it, process {os.getpid()}"
        )  # the refused one took nothing away
    assert answer(LOCK, lock) == "mine" and os.listdir(lock.parent) == []


@posix
def test_a_lock_that_was_removed_while_it_was_opened_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder removes the file when it ends: a process that had it open by then must not believe to be alone."""
    import fcntl

    lock, flock, taken = tmp_path / "lock", fcntl.flock, []

    def slow(file: object, operation: int) -> None:
        if not taken:
            lock.unlink()
        taken.append(file)
        flock(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", slow)
    with sole_user(lock, ""):
        assert len(taken) == 2
        monkeypatch.undo()
        assert answer(LOCK, lock) == f"another process has it, process {os.getpid()}"


@posix
def test_a_lock_where_none_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, reason in (("file", "it is a file, expected a directory"), ("file/deep", "Not a directory")):
        with (
            pytest.raises(InputError, match=f"cannot use .*{folder}: {reason}"),
            sole_user(tmp_path / folder / "l", ""),
        ):
            pass


def test_without_locks_nothing_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none."""

    class NoLocks(Linux):
        def lock(self, descriptor: int) -> bool:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "HERE", NoLocks())
    with sole_user(tmp_path / "lock", ""), sole_user(tmp_path / "lock", ""):
        assert os.listdir(tmp_path) == ["lock"]
