"""`embrace train`: a device's own fine-tuning, with its checkpoint, its reports and its refusals."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from edge_runtime.bundle_files import map_weights, read_manifest
from tests.embrace.cli.conftest import Embrace
from tests.stock_python import ROOT


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's handwritten digits, as a person would save them."""
    digits = load_digits()
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(path, x=(digits.images / 16).astype(np.float32), y=digits.target)
    return path


@pytest.fixture
def options(digits: Path, data: Path, tmp_path: Path) -> list[object]:
    return ["train", digits, "--data", data, "--work", tmp_path / "work", "--out", tmp_path / "out", "--json"]


def weights(directory: Path) -> np.ndarray:
    manifest = read_manifest(directory)
    return np.array(map_weights(directory / manifest.weights.name, manifest.space))


@pytest.mark.parametrize("tier", ["strong", "weak"])
def test_training_helps_and_leaves_the_rest_alone(
    embrace: Embrace, options: list[object], digits: Path, tmp_path: Path, tier: str
) -> None:
    answer = embrace(*options, "--boundary", tier, "--rounds", 3, "--epochs", 2, "--rate", "0.1")
    assert answer.code == 0, answer.err
    found = answer.json
    assert found["status"] == "done" and len(found["rounds"]) == 3
    assert found["after"]["mean_loss"] < found["before"]["mean_loss"]
    assert tier == "weak" or found["after"]["accuracy"] > 0.9
    manifest, out = read_manifest(digits), tmp_path / "out"
    first = manifest.space.suffix(manifest.boundary(tier).layer).start
    before, after = weights(digits), weights(out)
    assert np.array_equal(before[:first], after[:first])
    assert not np.array_equal(before[first:], after[first:])
    assert not (tmp_path / "out.checkpoint").exists()
    assert embrace("inspect", out).code == 0


def test_the_account_of_a_round(embrace: Embrace, options: list[object], digits: Path) -> None:
    found = embrace(*options, "--boundary", "weak", "--rounds", 1, "--epochs", 4).json
    (one,) = found["rounds"]
    seconds = one["seconds"]
    manifest = read_manifest(digits)
    frozen = manifest.layers[: manifest.boundary("weak").layer]
    assert list(seconds["forward"]) == [f"{frozen[0].name} to {frozen[-1].name}"]  # they run as one graph
    parts = ("download", "load", "activation_io", "training", "optimiser", "upload", "state", "evaluation", "other")
    assert sum(seconds[name] for name in parts) + sum(seconds["forward"].values()) == pytest.approx(seconds["wall"])
    assert seconds["training_forward"] + seconds["backward"] == pytest.approx(seconds["training"])
    assert one["samples"] == 1617 and one["steps"] == 4 * (1617 // 32)
    assert one["bytes"]["stored_activations"] == 4 * 1617 * int(np.prod(frozen[-1].output.shape))


def test_a_person_reads_a_table(embrace: Embrace, options: list[object]) -> None:
    answer = embrace(*[option for option in options if option != "--json"], "--boundary", "weak", "--rounds", 2)
    assert answer.code == 0 and answer.err == ""
    for words in ("1,617 samples, 180 held out", "training from 'dense' on: 2 of 5 layers", "where the time went"):
        assert words in answer.out


def test_a_killed_run_goes_on_where_it_was_and_ends_with_the_same_bits(
    embrace: Embrace, options: list[object], digits: Path, data: Path, tmp_path: Path
) -> None:
    same = ["--boundary", "moderate", "--rounds", 6, "--augment", "crop=1", "--rule", "momentum=0.9", "--seed", 7]
    assert embrace(*options, *same).code == 0
    broken = tmp_path / "broken"
    command = ["train", digits, "--data", data, "--work", tmp_path / "work", "--out", broken, "--json", *same]
    checkpoint = tmp_path / "broken.checkpoint"
    child = subprocess.Popen([sys.executable, "-m", "embrace", *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL)
    while not checkpoint.exists() and child.poll() is None:
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    if broken.exists():  # it was quicker: nothing to go on with
        pytest.skip("the run ended before it could be killed")
    answer = embrace(*command)
    assert answer.code == 0, answer.err
    assert 1 <= answer.json["resumed_at"] < 6 and len(answer.json["rounds"]) == 6
    assert np.array_equal(weights(broken), weights(tmp_path / "out"))


def test_a_checkpoint_of_another_run_is_not_continued(embrace: Embrace, options: list[object], tmp_path: Path) -> None:
    checkpoint = tmp_path / "kept"
    interrupted = [*options, "--boundary", "weak", "--checkpoint", checkpoint]
    assert embrace(*interrupted, "--rate", "1e38", "--rule", "sgd", "--steps", 3).code == 1
    assert not checkpoint.exists()  # nothing half-written
    checkpoint.write_bytes(b"something else")
    assert "is no saved state" in embrace(*interrupted).error
    assert embrace(*interrupted, "--fresh", "--rounds", 1).code == 0


def test_other_options_do_not_continue_a_checkpoint(
    embrace: Embrace, options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embrace import fine_tuning
    from federation.errors import DiskFull

    checkpoint = tmp_path / "out.checkpoint"

    def full(*_: object) -> None:
        raise DiskFull("no room for the trained bundle")

    monkeypatch.setattr(fine_tuning, "write_trained", full)
    assert embrace(*options, "--boundary", "weak", "--rounds", 1).code == 1
    assert checkpoint.exists()
    refused = embrace(*options, "--boundary", "weak", "--rounds", 2, "--batch", 16)
    assert refused.code == 2 and "another batch" in refused.error and "--fresh" in refused.error
    with np.load(options[3]) as found:
        others = save(tmp_path / "others.npz", found["x"][::-1], found["y"][::-1])
    refused = embrace(*options[:3], others, *options[4:], "--boundary", "weak", "--rounds", 2)
    assert refused.code == 2 and "another data, held-out data" in refused.error
    monkeypatch.undo()
    done = embrace(*options, "--rounds", 2)  # the boundary is the checkpoint's, whatever memory is free today
    assert done.code == 0 and done.json["resumed_at"] == 1


def test_a_run_that_diverges_says_so_and_leaves_nothing(
    embrace: Embrace, options: list[object], tmp_path: Path
) -> None:
    answer = embrace(*options, "--boundary", "weak", "--rate", "1e30")
    assert answer.code == 1 and answer.json["status"] == "non_finite_loss"
    assert "smaller rate" in answer.error
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.checkpoint").exists()


def save(path: Path, x: np.ndarray, y: np.ndarray) -> Path:
    np.savez(path, x=x, y=y)
    return path


IMAGES = np.zeros((20, 8, 8), np.float32)


@pytest.mark.parametrize(
    ("x", "y", "status", "words"),
    [
        (np.zeros((20, 9, 9), np.float32), np.arange(20) % 10, "data", "9×9"),
        (IMAGES, np.arange(20), "data", "label"),
        (IMAGES, np.zeros(20, np.int64), "single_class", "label 0"),
        (IMAGES[:0], np.zeros(0, np.int64), "empty_data", ""),
        (IMAGES * np.nan, np.arange(20) % 10, "data", ""),
    ],
    ids=["wrong shape", "label out of range", "one class", "nothing", "not numbers"],
)
def test_data_that_does_not_fit(
    embrace: Embrace, options: list[object], tmp_path: Path, x: np.ndarray, y: np.ndarray, status: str, words: str
) -> None:
    options[3] = save(tmp_path / "bad.npz", x, y)
    answer = embrace(*options, "--boundary", "weak")
    assert answer.code == 2 and answer.json["status"] == status
    assert words in answer.error
    assert not (tmp_path / "out").exists()


def test_one_class_may_be_asked_for(embrace: Embrace, options: list[object], tmp_path: Path) -> None:
    options[3] = save(tmp_path / "one.npz", IMAGES, np.zeros(20, np.int64))
    assert embrace(*options, "--boundary", "weak", "--rounds", 1, "--allow-single-class").code == 0


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--memory", "lots"], "64MB"),
        (["--boundary", "nowhere"], "weak"),
        (["--rate", "fast"], "RATE"),
        (["--rule", "adam=1"], "momentum"),
        (["--augment", "blur"], "crop"),
        (["--activations", "int8"], "float16"),
        (["--engine", "torch"], "portable"),
        (["--profile", "tiny"], "low_memory"),
        (["--holdout", "1.5"], "[0, 1)"),
    ],
)
def test_words_that_are_not_understood(embrace: Embrace, options: list[object], extra: list[str], words: str) -> None:
    boundary = [] if "--boundary" in extra else ["--boundary", "weak"]
    answer = embrace(*options, *boundary, *extra)
    assert answer.code == 2 and words in answer.error


def test_a_target_that_is_there_is_refused_before_the_work(
    embrace: Embrace, options: list[object], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    answer = embrace(*options)
    assert answer.code == 2 and "not empty" in answer.error
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


def test_places_that_cannot_be_used(embrace: Embrace, options: list[object], tmp_path: Path) -> None:
    """A message and a code; no traceback."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for extra, words in (
        (["--checkpoint", tmp_path / "file" / "kept"], "file: it is a file, expected a directory"),
        (["--checkpoint", tmp_path / "folder", "--fresh"], "--fresh cannot remove"),
    ):
        answer = embrace(*options, "--boundary", "weak", "--rounds", 1, *extra)
        assert answer.code == 2 and words in answer.error


def test_the_bundle_may_be_the_current_directory(
    embrace: Embrace, digits: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(digits, tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    answer = embrace("train", ".", "--data", data, "--work", tmp_path / "work", "--boundary", "weak", "--rounds", 1)
    assert answer.code == 0 and (tmp_path / "mine-trained" / "manifest.json").exists()


def test_less_memory_than_the_idle_process_has(embrace: Embrace, options: list[object]) -> None:
    answer = embrace(*options, "--memory", "1MB")
    assert answer.code == 1 and answer.json["status"] == "out_of_memory"
    assert "1.0 MB allowed, the idle process takes" in answer.error


def test_float16_activations_and_a_test_set(
    embrace: Embrace, options: list[object], data: Path, tmp_path: Path
) -> None:
    answer = embrace(*options, "--boundary", "weak", "--rounds", 1, "--activations", "float16", "--test", data)
    assert answer.code == 0
    (one,) = answer.json["rounds"]
    assert one["samples"] == 1797 and answer.json["after"]["counted"] == 1797
    full = embrace(
        *[o if o != tmp_path / "out" else tmp_path / "two" for o in options],
        "--boundary",
        "weak",
        "--rounds",
        1,
        "--test",
        data,
    ).json["rounds"][0]
    assert 2 * one["bytes"]["stored_activations"] == full["bytes"]["stored_activations"]
    assert one["loss"] == pytest.approx(full["loss"], rel=1e-3)
