"""Names of classes and scaling of inputs that a bundle has: applied to every form of data, and checked against it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.data import load_samples
from edge_runtime.data.load import load_classes
from edge_runtime.sample_file import open_samples, write_samples
from federation.errors import DataError
from federation.manifest import Manifest, TensorSpec
from federation.preprocessing import Preprocessing
from tests.edge_runtime.data_files import everything, grey, model, write_images, write_npz, write_text

NAMES = ("zebra", "ant", "mole")  # not sorted: the bundle's order decides


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def named(shape: tuple[int, ...] = (1, 8, 8), **more: Any) -> Manifest:
    return replace(model(shape, 3, name="zoo"), classes=NAMES, **more)


def test_a_folder_is_numbered_by_the_bundles_list_and_need_not_have_every_class():
    data = write_images({"ant": [grey(10)], "zebra": [grey(200), grey(201)]})
    samples = load_samples(data, named())
    x, y = everything(samples)
    assert y.tolist() == [0, 0, 1] and (255 * x[:, 0, 0, 0]).round().tolist() == [200, 201, 10]
    assert samples.describe()["classes"] == {"zebra": 2, "ant": 1}


def test_a_folder_of_other_classes_is_refused_with_both_lists():
    data = write_images({"ant": [grey(1)], "bee": [grey(2)], "zebra": [grey(3)]})
    with pytest.raises(DataError) as refused:
        load_samples(data, named())
    assert str(refused.value) == (
        "photos has sub-folders bee that are no classes of the model 'zoo': "
        "found ant, bee, zebra; expected zebra, ant, mole"
    )


@pytest.mark.parametrize(("labels", "numbers"), [("mole ant mole", [2, 1, 2]), ("2 0 1", [2, 0, 1])])
def test_labels_of_a_table_are_names_or_numbers(labels: str, numbers: list[int]):
    lines = "".join(f"1,2,{label}\n" for label in labels.split())
    _, y = everything(load_samples(write_text("data.csv", lines), named((2,))))
    assert y.tolist() == numbers


def test_names_that_are_numbers_are_names():
    manifest = replace(named((2,)), classes=("10", "20", "30"))
    _, y = everything(load_samples(write_text("data.csv", "1,2,30\n1,2,10\n"), manifest))
    assert y.tolist() == [2, 0]


def test_a_table_of_other_classes_is_refused_with_both_lists():
    with pytest.raises(DataError, match=r"names of classes bee that are no classes .* expected zebra, ant, mole"):
        load_samples(write_text("data.csv", "1,2,bee\n1,2,ant\n"), named((2,)))


def test_names_are_read_from_data_in_the_order_that_devices_use():
    write_images({"10": [], "9": [], "b": []})
    assert load_classes("photos") == ["9", "10", "b"]
    write_text("data.csv", "kind,size\nrose,1\niris,2\nrose,3\n")
    assert load_classes("data.csv", "kind") == ["iris", "rose"]
    with pytest.raises(DataError, match="has numbers; expected names"):
        load_classes("data.csv", "size")
    with pytest.raises(DataError, match="has no names of classes"):
        load_classes("data.npz")


# --- scaling: against PyTorch's own arithmetic, as torchvision's Normalize does it ------------------------------------

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalised(values: np.ndarray) -> np.ndarray:
    """ToTensor and Normalize of N×C×H×W bytes, or of floats from 0 to 1."""
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(values)
    tensor = tensor.to(torch.float32).div(255) if tensor.dtype == torch.uint8 else tensor
    mean, std = (torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (MEAN, STD))
    return tensor.sub(mean).div(std).numpy()


@pytest.mark.parametrize("stored", ["bytes", "bytes, channels last", "floats"])
def test_every_way_of_storing_gives_the_same_inputs(stored: str):
    manifest = replace(model((3, 4, 5), 3), preprocessing=Preprocessing(mean=MEAN, std=STD))
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 5)).astype(np.uint8)
    given = {
        "bytes": pixels,
        "bytes, channels last": np.moveaxis(pixels, 1, -1),
        "floats": pixels.astype(np.float32) / np.float32(255),
    }[stored]
    kept = given.copy()
    samples = load_samples((given, np.zeros(6, int)), manifest)
    x, _ = everything(samples)
    assert np.array_equal(x, normalised(pixels)) and x.dtype == np.float32 and x.flags.c_contiguous
    assert np.array_equal(given, kept), "the user's own array is not written to"
    assert "− 0.485 0.456 0.406, ÷ 0.229 0.224 0.225" in samples.describe()["input"]


def test_a_scale_of_the_bundles_takes_the_place_of_the_usual_one():
    raw = replace(model((2,), 3), preprocessing=Preprocessing(scale=1.0))
    assert everything(load_samples((np.array([[0, 255]], np.uint8), [0]), raw))[0].tolist() == [[0, 255]]
    half = replace(model((2,), 3), preprocessing=Preprocessing(scale=0.5, mean=(1.0, 2.0)))
    assert everything(load_samples(write_text("data.csv", "4,8,0\n"), half))[0].tolist() == [[1, 2]]
    assert everything(load_samples(write_npz(np.array([[4, 8]]), [0]), half))[0].tolist() == [[1, 2]]


def test_samples_that_travel_are_scaled_once(tmp_path: Path):
    """`job create` converts evaluation data; the coordinator takes the numbers as they come."""
    manifest = named(preprocessing=Preprocessing(mean=(0.5,), std=(0.25,)))
    rng = np.random.default_rng(0)
    samples = load_samples((rng.integers(0, 256, (5, 8, 8), np.uint8), np.arange(5) % 3), manifest)
    write_samples(samples, tmp_path / "file")
    again = open_samples(tmp_path / "file", manifest, "evaluate.data")
    for expected, found in zip(everything(samples), everything(again)):
        np.testing.assert_array_equal(found, expected)


def test_samples_of_another_type_do_not_travel(tmp_path: Path):
    samples = load_samples((np.zeros((5, 8, 8), np.float32), np.arange(5) % 3), named())
    write_samples(samples, tmp_path / "file")
    other = named(input=TensorSpec("float64", (1, 8, 8)))
    with pytest.raises(DataError, match=r"evaluate\.data has inputs of type float32, the model takes float64"):
        open_samples(tmp_path / "file", other, "evaluate.data")
