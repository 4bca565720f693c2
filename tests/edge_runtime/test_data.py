"""Local data from real files: what is converted, what is refused and in which words, and that it stays where it is."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from edge_runtime.data import check_trainable, load_samples
from federation.errors import DataError, MissingPackage
from federation.manifest import LossName
from tests.edge_runtime.data_files import everything, grey, model, write_images, write_npz, write_text


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are named as a user beside them would, so that messages are what the user sees."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    return load_digits(return_X_y=True)


# Digits in every form are the same samples.


def digits_npz(x: np.ndarray, y: np.ndarray) -> str:
    return write_npz(x.reshape(-1, 8, 8), y)


def digits_compressed(x: np.ndarray, y: np.ndarray) -> str:
    np.savez_compressed("small.npz", data=x, target=y.astype(np.uint8))
    return "small.npz"


def digits_csv(x: np.ndarray, y: np.ndarray) -> str:
    np.savetxt("digits.csv", np.column_stack([x, y]), fmt="%g", delimiter=",")
    return "digits.csv"


def digits_function(x: np.ndarray, y: np.ndarray) -> str:
    program = "from sklearn.datasets import load_digits\ndef load():\n    return load_digits(return_X_y=True)\n"
    return write_text("mine.py", program) + ":load"


@pytest.mark.parametrize("write", [digits_npz, digits_compressed, digits_csv, digits_function])
def test_digits(write: Callable[..., str], digits: tuple[np.ndarray, np.ndarray]) -> None:
    samples = load_samples(write(*digits), model())
    assert len(samples) == 1797
    numbers = np.array([1796, 0, 5])
    x, y = samples.batch(numbers)
    assert (x.dtype, x.shape, x.flags.c_contiguous, y.dtype) == (np.float32, (3, 1, 8, 8), True, np.int64)
    assert np.array_equal(x.reshape(3, 64), digits[0][numbers])
    assert np.array_equal(y, digits[1][numbers])
    assert np.array_equal(samples.labels, digits[1])
    assert samples.describe()["classes"] == {str(n): int(count) for n, count in enumerate(np.bincount(digits[1]))}
    check_trainable(samples)


def test_digits_as_images(digits: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = digits
    classes: dict[str, list[Image.Image]] = {str(n): [] for n in range(10)}
    for row, label in zip(x[:60], y[:60]):
        classes[str(label)].append(Image.fromarray(row.reshape(8, 8).astype(np.uint8)))
    samples = load_samples(write_images(classes), model())
    order = np.argsort(y[:60], kind="stable")
    assert np.array_equal(samples.labels, y[order])
    assert np.array_equal(everything(samples)[0].reshape(60, 64), (x[order] / np.float32(255)).astype(np.float32))
    assert samples.describe()["resized"] is None


# What is converted.


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float16", "float64", ">f4", "bool"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 5, 3), (60,)])
def test_types_and_shapes(dtype: str, shape: tuple[int, ...]) -> None:
    x = (np.arange(2 * 60) % 2).astype(dtype).reshape(2, *shape)
    samples = load_samples(write_npz(x, [0, 1]), model((3, 4, 5)))
    expected = x.transpose(0, 3, 1, 2) if shape == (4, 5, 3) else x.reshape(2, 3, 4, 5)
    got = everything(samples)[0]
    assert (got.dtype, got.flags.c_contiguous) == (np.float32, True)
    assert np.array_equal(got, expected.astype(np.float32))


def test_bytes_become_brightness_for_floats_only() -> None:
    x = np.arange(256, dtype=np.uint8).reshape(2, 128)
    floats = load_samples(write_npz(x, [0, 1]), model((128,)))
    assert np.array_equal(everything(floats)[0], x.astype(np.float32) / np.float32(255))
    assert floats.describe()["input"] == "uint8 128 → float32 128, divided by 255"
    tokens = load_samples("data.npz", model((128,), dtype="int64", vocabulary=256))
    assert np.array_equal(everything(tokens)[0], x)
    assert everything(tokens)[0].dtype == np.int64


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_large_archive_is_mapped_not_read(order: Any) -> None:
    x = np.zeros((4000, 3, 32, 32), np.float32, order)  # 47 MiB
    x[1234] = 7
    reference = write_npz(x, np.arange(4000) % 10)
    del x
    tracemalloc.start()
    samples = load_samples(reference, model((3, 32, 32)))
    train, _ = samples.split(0.1, 0)
    got = samples.batch(np.array([1234, 0]))[0]
    train.batch(np.arange(32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (got[0] == 7).all()
    assert (got[1] == 0).all()
    assert isinstance(samples._rows, np.memmap)
    assert samples.describe()["stored"] == "npz, mapped"
    assert peak < 12 << 20


@pytest.mark.parametrize("names", [("x", "y"), ("x_train", "y_train"), ("data", "target"), ("images", "labels")])
def test_names_of_arrays(names: tuple[str, str]) -> None:
    np.savez("data.npz", **{names[0]: np.ones((2, 4)), names[1]: [1, 0], "other": [1, 2, 3]})
    assert load_samples("data.npz", model((4,))).labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "label", "labels", "column"),
    [
        ("1,2,0\n3,4,1\n", None, [0, 1], "column 3"),
        ("0,1,2\n1,3,4\n", "1", [0, 1], "column 1"),
        ("a,b,c\n1,2,0\n3,4,1\n", None, [0, 1], "column 3 (c)"),
        ("a,LABEL,b\n1,0,2\n3,1,4\n", None, [0, 1], "column 2 (LABEL)"),
        ("kind,a,b\n0,1,2\n1,3,4\n", "kind", [0, 1], "column 1 (kind)"),
        ("\ufeffy;a;b\r\n0;1;2\r\n\r\n1;3;4\r\n", None, [0, 1], "column 1 (y)"),
        ("1,2,the dog\n3,4,cat\n", None, [1, 0], "column 3"),
        ('a,b,class\n1,2,"the dog"\n3,"4",cat', None, [1, 0], "column 3 (class)"),
    ],
)
def test_tables(text: str, label: str | None, labels: list[int], column: str) -> None:
    samples = load_samples(write_text("data.csv", text), model((2,), 2), label=label)
    assert np.array_equal(everything(samples)[0], [[1, 2], [3, 4]])
    assert samples.labels.tolist() == labels
    assert samples.describe()["label"] == column
    assert list(samples.describe()["classes"]) == (["cat", "the dog"] if "dog" in text else ["0", "1"])


def test_a_first_line_of_data_is_not_taken_for_names() -> None:
    samples = load_samples(write_text("data.csv", "1,2,y\n3,4,n\n"), model((2,), 1, loss="bce_with_logits"))
    assert samples.labels.tolist() == [[1], [0]]


def test_a_table_of_tokens_keeps_integers() -> None:
    samples = load_samples(write_text("t.csv", "16777217,2,0.5\n"), model((2,), 1, dtype="int64", loss="mse"))
    assert everything(samples)[0].tolist() == [[16777217, 2]]
    assert samples.labels.tolist() == [[0.5]]


@pytest.mark.parametrize(
    "program",
    [
        "def load(): return np.ones((4, 2), np.uint8), [0, 1, 0, 1]",
        "load = {'x': np.ones((4, 2), np.uint8), 'y': np.array([0, 1, 0, 1])}",
        "def load():\n    for n in range(2): yield np.ones((2, 2), np.uint8), np.array([0, 1])",
        "load = [(np.ones((2, 2), np.uint8), [0, 1]), (np.ones((2, 2), np.uint8), [0, 1])]",
        "load = [[np.ones((2, 2), np.uint8), [0, 1]]] * 2",
        "class load:\n    def __getitem__(self, n): return np.ones(2, np.uint8), [0, 1, 0, 1][n]",
        "from torch import tensor, uint8\ndef load(): return tensor([[1, 1]] * 4, dtype=uint8), tensor([0, 1, 0, 1])",
        "from beside import load",
    ],
)
def test_a_function_of_the_user(program: str) -> None:
    sys.modules.pop("beside", None)
    write_text("beside.py", "import numpy as np\nload = np.ones((4, 2), np.uint8), np.array([0, 1, 0, 1])\n")
    samples = load_samples(write_text("mine.py", f"import numpy as np\n{program}\n") + ":load", model((2,)))
    x, y = everything(samples)
    assert np.array_equal(x, np.full((4, 2), np.float32(1) / np.float32(255)))
    assert y.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("loss", "output", "y", "expected"),
    [
        ("bce_with_logits", (1,), [True, False], [[1], [0]]),
        ("bce_with_logits", (1,), np.array([[1], [0]], np.uint8), [[1], [0]]),
        ("bce_with_logits", (2,), [[0.25, 1], [0, 0]], [[0.25, 1], [0, 0]]),
        ("mse", (1,), [1.5, -2], [[1.5], [-2]]),
        ("cross_entropy", (3,), [[2.0], [-1.0]], [2, -1]),
        ("cross_entropy", (3, 2), [[2, 0], [-1, 1]], [[2, 0], [-1, 1]]),
    ],
)
def test_labels(loss: LossName, output: tuple[int, ...], y: Any, expected: Any) -> None:
    samples = load_samples(write_npz(np.ones((2, 4)), y), model((4,), loss=loss, output=output, ignore_index=-1))
    assert samples.labels[:].tolist() == expected
    assert samples.labels.dtype == (np.int64 if loss == "cross_entropy" else np.float32)


# Folders of images.


@pytest.mark.parametrize("ending", ["png", "jpg", "jpeg", "bmp", "webp", "ppm", "gif", "PNG"])
def test_kinds_of_images(ending: str) -> None:
    red = Image.new("RGB", (6, 5), (255, 0, 0))
    reference = write_images({"b": [red], "a": []}, ending)
    write_text("photos/.hidden.png", "")
    write_text("photos/b/.hidden.png", "")
    write_text("photos/b/notes.txt", "")
    colour = load_samples(reference, model((3, 5, 6), 2))
    x, y = everything(colour)
    assert (x.shape, y.tolist()) == ((1, 3, 5, 6), [1])
    assert x[0, 0].min() > 0.97
    assert x[0, 1:].max() < 0.02
    assert everything(load_samples(reference, model((1, 5, 6), 2)))[0] == pytest.approx(76 / 255, abs=0.01)


def test_classes_in_order_of_numbers_and_sizes_made_equal() -> None:
    reference = write_images({str(n): [grey(n, (8, 8 + n % 2))] for n in range(12)})
    samples = load_samples(reference, model(classes=12))
    assert (everything(samples)[0][:, 0, 0, 0] * 255).round().tolist() == list(range(12))
    assert list(samples.describe()["classes"]) == [str(n) for n in range(12)]
    assert samples.describe()["resized"] == "9×8 → 8×8, bilinear"


def test_unusual_pixels() -> None:
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 255, 255, 255])
    palette.info["transparency"] = b"\x00\xff"
    turned = grey(0)
    turned.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 3  # the camera was upside down
    write_images({"a": [Image.fromarray(np.full((8, 8), 0x8001, np.uint16)), palette], "b": []})
    turned.save("photos/b/0.png", exif=exif)
    x = everything(load_samples("photos", model(classes=2)))[0]
    assert (x[:, 0, 0, 0] * 255).round().tolist() == [128, 255, 0]
    assert x[2, 0, 7, 7] == 1


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = write_images({"a": [grey(0)], "b": []})
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingPackage, match=r"pip install 'embrace-fl\[images\]'"):
        load_samples(reference, model(classes=2))


def test_a_broken_image_is_named_when_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = write_images({"a": [grey(0), grey(1), grey(2, (30, 30))], "b": []})
    whole = Path("photos/a/1.png").read_bytes()
    Path("photos/a/1.png").write_bytes(whole[: len(whole) // 2])
    samples = load_samples(reference, model(classes=2))
    samples.batch(np.array([0, 2]))
    with pytest.raises(DataError, match=r"photos/a/1\.png cannot be read as an image: \w+: "):
        samples.batch(np.array([0, 1]))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(DataError, match=r"photos/a/2\.png cannot be read as an image: .*900 pixels"):
        samples.batch(np.array([2]))
