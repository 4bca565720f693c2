"""`embrace data`: what it prints, draws and writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_runtime.bundle_files import read_manifest
from edge_runtime.data import load_samples
from simulation.datasets import label_counts, load_dataset, make_partitioner


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has data sets must not change what these tests see."""
    monkeypatch.setenv("EMBRACE_DATA_DIR", str(tmp_path / "nothing"))


def test_list_says_what_is_there_and_what_was_expected(embrace, tmp_path: Path):
    (tmp_path / "somewhere" / "femnist").mkdir(parents=True)
    (tmp_path / "somewhere" / "femnist" / "femnist_leaf.npz").touch()
    lines = embrace("data", "list", "--data-dir", tmp_path / "somewhere", "--json").json
    found = {line["name"]: line for line in lines}
    assert set(found) == {"digits", "mnist", "fashion_mnist", "cifar10", "femnist", "imdb"}
    assert found["femnist"]["found"] == str(tmp_path / "somewhere" / "femnist")
    assert found["cifar10"]["found"] is None and "data_batch_1.bin" in found["cifar10"]["expected"]
    text = embrace("data", "list").out
    assert "comes along" in text and "imdb: expected aclImdb" in text


def test_a_picture_of_a_partition(embrace, tmp_path: Path):
    out = tmp_path / "parts.png"
    answer = embrace(
        *("data", "plot", "digits", "--partitioner", "dirichlet", "--alpha", 0.3, "--min-partition-size", 7),
        *("--devices", 6, "--seed", 3, "--out", out, "--json"),
    )
    data = load_dataset("digits")
    parts = make_partitioner("dirichlet", {"alpha": 0.3, "min_partition_size": 7}).partition(data.y_train, 6, 3)
    assert answer.json["counts"] == label_counts(parts, data.y_train, 10).tolist()
    assert (answer.json["alpha"], answer.json["devices"], answer.json["seed"]) == (0.3, 6, 3)
    with Image.open(out) as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    classes_present = {(0x1F, 0x77, 0xB4), (0xD6, 0x27, 0x28), (0x17, 0xBE, 0xCF)}  # 0, 3 and 9
    assert classes_present <= colours
    words = embrace("data", "plot", "digits", "--out", out)
    assert words.code == 0 and "1,437 of 1,437 samples on 20 devices" in words.out and str(out) in words.out


def test_a_split_is_what_agents_read(embrace, digits: Path, tmp_path: Path):
    out = tmp_path / "parts"
    answer = embrace("data", "split", "digits", "--partitioner", "digits", "--devices", 10, "--out", out, "--json")
    manifest = read_manifest(digits)
    samples = [load_samples(file, manifest) for file in answer.json["files"]]
    assert [len(own) for own in samples] == answer.json["sizes"]
    assert all(len(own.describe()["classes"]) == 2 for own in samples)
    data = load_dataset("digits")
    assert len(load_samples(str(out / "test.npz"), manifest)) == 360
    together = np.concatenate([own.batch(np.arange(len(own)))[0] for own in samples])
    assert sorted(map(bytes, together)) == sorted(map(bytes, data.x_train))
    record = json.loads((out / "split.json").read_text())
    assert record["partitioner"] == "digits" and record["numpy"] == np.__version__ and len(record["sizes"]) == 10
    again = embrace("data", "split", "digits", "--devices", 10, "--out", out)
    assert again.code == 2 and "is not empty; expected a folder that is new or empty" in again.error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plot", "mnits"), "no data set named 'mnits'"),
        (("plot", "mnist"), "no such folder: "),
        (("plot", "digits", "--partitioner", "fair"), "no partitioner named 'fair', expected one of iid, dirichlet"),
        (("plot", "digits", "--alpha", "1"), "the partitioner 'iid' takes no constants, got alpha"),
        (("plot", "digits", "--partitioner", "dirichlet"), "alpha: required, and not given"),
        (("plot", "digits", "--partitioner", "natural"), "the data has no natural groups"),
        (("plot", "digits", "--devices", "2000"), "1437 samples are too few for 2000 devices"),
        (("split", "digits", "--devices", "2000"), "1437 samples are too few for 2000 devices"),
    ],
)
def test_what_cannot_be_done(embrace, tmp_path: Path, arguments: tuple[str, ...], message: str):
    answer = embrace("data", *arguments, "--out", tmp_path / "out.png")
    assert answer.code == 2 and message in answer.error


def test_pictures_need_a_place(embrace, tmp_path: Path):
    assert "cannot draw" in embrace("data", "plot", "digits", "--out", tmp_path / "no" / "x.png").error
    assert "cannot draw" in embrace("data", "plot", "digits", "--out", tmp_path / "x.nothing").error
    (tmp_path / "file").touch()
    assert "cannot write" in embrace("data", "split", "digits", "--out", tmp_path / "file" / "below").error
