"""What a device keeps between tasks: whenever it dies, what counts is there, or is known to be lost."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.device_state import KeptFiles
from edge_runtime.participant import Contribution
from federation.device_task import Kept
from federation.errors import DiskFull, InputError
from federation.messages import TaskOffer
from federation.space import Vector


def contribution(value: float, walked: tuple[float, ...] = (0.3,)) -> Contribution:
    vectors = {"model": np.full(5, value, np.float32), "momentum": np.arange(5, dtype=np.float32) * value}
    return Contribution({}, vectors, walked)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def kept(tmp_path: Path) -> KeptFiles:
    return KeptFiles(tmp_path / "kept" / "job")


def check(found: Kept | None, task: str, value: float) -> None:
    assert found is not None and (found.task, found.boundary) == (task, "stem@0.5")
    expected: dict[str, Vector] = contribution(value).kept
    assert found.vectors.keys() == expected.keys()
    for name, vector in expected.items():
        np.testing.assert_array_equal(found.vectors[name], vector)


def test_what_is_kept_comes_back(kept: KeptFiles) -> None:
    kept.save("job-0-1-1", "stem@0.5", contribution(2.0, walked=(0.1 + 0.2, 1e-30)))
    again = KeptFiles(kept.folder)  # after a restart
    check(again.load("job-0-1-1"), "job-0-1-1", 2.0)
    assert again.load("job-0-1-1").walked == (0.1 + 0.2, 1e-30)  # every bit of it


def test_between_saving_and_the_acknowledgement_both_are_there(kept: KeptFiles) -> None:
    """The device dies after it has saved: the coordinator has the update or not, and names the task that counts."""
    kept.save("job-0-1-1", "stem@0.5", contribution(1.0))
    kept.acknowledged("job-0-1-1")
    kept.save("job-1-1-1", "stem@0.5", contribution(2.0))
    again = KeptFiles(kept.folder)
    check(again.load("job-0-1-1"), "job-0-1-1", 1.0)  # it never arrived
    check(again.load("job-1-1-1"), "job-1-1-1", 2.0)  # only the answer was lost
    again.acknowledged("job-1-1-1")
    assert names(kept.folder) == ["job-1-1-1.kept"] and again.load("job-0-1-1") is None


def test_a_second_attempt_replaces_the_first(kept: KeptFiles) -> None:
    kept.save("job-1-1-1", "stem@0.5", contribution(2.0))
    kept.save("job-1-1-1", "stem@0.5", contribution(3.0))
    check(kept.load("job-1-1-1"), "job-1-1-1", 3.0)


def test_an_algorithm_that_keeps_nothing_has_no_files(kept: KeptFiles) -> None:
    kept.save("job-0-1-1", "stem", Contribution({}, {}, 1.0))
    kept.acknowledged("job-0-1-1")
    assert not kept.folder.exists() and kept.load("job-0-1-1") is None


def test_jobs_do_not_touch_each_other(tmp_path: Path) -> None:
    one, other = KeptFiles(tmp_path / "a"), KeptFiles(tmp_path / "b")
    one.save("a-0-0-1", "stem@0.5", contribution(1.0))
    other.save("b-0-0-1", "stem@0.5", contribution(2.0))
    other.acknowledged("b-0-0-1")
    check(one.load("a-0-0-1"), "a-0-0-1", 1.0)


def test_a_file_that_was_cut_anywhere_is_lost_and_said_to_be(kept: KeptFiles, caplog: pytest.LogCaptureFixture) -> None:
    kept.save("job-0-1-1", "stem@0.5", contribution(1.0))
    path = kept.folder / "job-0-1-1.kept"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert kept.load("job-0-1-1") is None, size
        assert "what was kept of task job-0-1-1 is lost" in caplog.text
    path.write_bytes(whole)
    check(kept.load("job-0-1-1"), "job-0-1-1", 1.0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"boundary"', b'"bondarry!'),
        (b'"walked":"0.3"', b'"walked":"xyz"'),
        (b'"F32"', b'"F16"'),
        (b"[0,20]", b"[0,90]"),
    ],
    ids=["no boundary", "no number", "other type", "outside"],
)
def test_a_file_that_says_something_else_is_lost(kept: KeptFiles, old: bytes, new: bytes) -> None:
    kept.save("job-0-1-1", "stem@0.5", contribution(1.0))
    path = kept.folder / "job-0-1-1.kept"
    whole = path.read_bytes()
    assert old in whole and len(old) == len(new)
    path.write_bytes(whole.replace(old, new, 1))
    assert kept.load("job-0-1-1") is None


@pytest.mark.parametrize("task", ["../job", "..", "", "a/b", "a\\b", "a\0b", ".hidden", "x" * 300])
def test_no_name_leads_out_of_the_folder(kept: KeptFiles, task: str) -> None:
    kept.save("inside", "stem@0.5", contribution(1.0))
    (kept.folder.parent / "job.kept").write_bytes((kept.folder / "inside.kept").read_bytes())
    assert kept.load(task) is None
    for place in ("id", "job", "bundle"):
        right = {"id": "t", "job": "j", "bundle": "b", "version": 0, "lease_until": 0.0, "work": {}}
        TaskOffer(**right).check()
        offer = TaskOffer(**{**right, place: task})
        with pytest.raises(InputError, match="expected letters, digits"):
            offer.check()


def test_a_full_disk_leaves_what_was_there(kept: KeptFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.save("job-0-1-1", "stem@0.5", contribution(1.0))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskFull, match="no room to keep"):
        kept.save("job-1-1-1", "stem@0.5", contribution(2.0))
    monkeypatch.undo()
    assert names(kept.folder) == ["job-0-1-1.kept"]
    check(kept.load("job-0-1-1"), "job-0-1-1", 1.0)
