"""Local data from real files: what is converted, what is refused and in which words, and that it stays where it is."""

from __future__ import annotations

import re
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from edge_runtime.data import Samples, check_trainable, from_arrays, load_samples
from edge_runtime.data import user_file as user_file_module
from federation.errors import DataError, EmptyData, InputError, MissingPackage, SingleClass
from federation.manifest import FileRef, Layer, Loss, LossName, Manifest, Source, TensorSpec, dumps

ROOT = Path(__file__).resolve().parents[2]
FILE = FileRef("file", "0" * 64, 1)


def model(
    shape: tuple[int, ...] = (1, 8, 8),
    classes: int = 10,
    *,
    name: str = "digits",
    dtype: str = "float32",
    loss: LossName = "cross_entropy",
    output: tuple[int, ...] | None = None,
    vocabulary: int | None = None,
    ignore_index: int | None = None,
) -> Manifest:
    output = (classes,) if output is None else output
    labels = TensorSpec("int64", output[1:]) if loss == "cross_entropy" else TensorSpec("float32", output)
    given, made = TensorSpec(dtype, shape), TensorSpec("float32", output)
    layer = Layer("all", given, made, (), activations=1, macs=1, dropouts=0, forward=FILE)
    return Manifest(
        version=1, name=name, source=Source("zoo", name), opset=18, loss=Loss(loss, ignore_index=ignore_index),
        input=given, labels=labels, output=made, vocabulary=vocabulary, batch=32, uses_seed=False, layers=(layer,),
        boundaries=(), tiers={}, weights=FILE,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are named as a user beside them would, so that messages are what the user sees."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    return load_digits(return_X_y=True)


def write_npz(x: Any, y: Any, **more: Any) -> str:
    np.savez("data.npz", x=x, y=y, **more)
    return "data.npz"


def write_text(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def write_images(classes: dict[str, list[Image.Image]], ending: str = "png") -> str:
    for name, images in classes.items():
        (Path("photos") / name).mkdir(parents=True)
        for number, image in enumerate(images):
            image.save(Path("photos") / name / f"{number}.{ending}")
    return "photos"


def grey(value: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.new("L", size, value)


def everything(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    return samples.batch(np.arange(len(samples)))


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
    assert samples.labels.tolist() == expected
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
    with pytest.raises(MissingPackage, match=r"pip install 'embrace\[images\]'"):
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


# What is refused, in the words that the user reads. docs/data.md shows some of them.

ONES = np.ones((4, 2), np.float32)


def with_value(value: float) -> np.ndarray:
    x = np.ones((2000, 1000))
    x[1999, 7] = value  # behind the first chunk
    return x


REFUSED: list[tuple[Callable[[], str], Manifest, str]] = [
    (lambda: write_npz(np.zeros((4, 28, 28, 3), np.uint8), [0] * 4), model((3, 32, 32), name="resnet20"),
     "data.npz has samples of 28×28×3 (uint8), the model 'resnet20' takes 3×32×32 (float32)"),
    (lambda: write_npz(np.ones((4, 2), complex), [0] * 4), model((2,)),
     "data.npz has samples of 2 (complex128), the model 'digits' takes 2 (float32): expected numbers"),
    (lambda: write_npz(ONES, [0] * 4), model((2,), dtype="int64", vocabulary=5, name="imdb"),
     "data.npz has samples of 2 (float32), the model 'imdb' takes 2 (int64): expected integers"),
    (lambda: write_npz(np.array([[4, 4], [0, 5]], np.uint8), [0, 1]),
     model((2,), dtype="int64", vocabulary=5, name="imdb"),
     "data.npz: sample 1 has token id 5, the model 'imdb' takes 0 to 4"),
    (lambda: write_npz(np.array([[4, -4]]), [0]), model((2,), dtype="int64", vocabulary=5),
     "data.npz: sample 0 has token id -4, the model 'digits' takes 0 to 4"),
    (lambda: write_npz(np.array([[4, 2**63]], np.uint64), [0]), model((2,), dtype="int64"),
     "data.npz: sample 0 has the value 9223372036854775808, the model 'digits' takes -9223372036854775808 to "
     "9223372036854775807"),
    (lambda: write_npz(with_value(np.nan), [0] * 2000), model((1000,)),
     "data.npz: sample 1999 has the value nan, the inputs of a model must be finite numbers of type float32"),
    (lambda: write_npz(with_value(1e300), [0] * 2000), model((1000,)),
     "data.npz: sample 1999 has the value 1e+300, the inputs of a model must be finite numbers of type float32"),
    (lambda: write_npz(ONES, [0, 1, 2]), model((2,)), "data.npz: 4 inputs but 3 labels"),
    (lambda: write_npz(ONES, 0), model((2,)), "data.npz: 4 inputs but no labels"),
    (lambda: write_npz(ONES[:0], []), model((2,)), "data.npz has no samples"),
    (lambda: write_npz(5, [0]), model((2,)),
     "data.npz: the inputs are a single number, expected an array whose first axis counts samples"),
    (lambda: write_npz(ONES, [1, 2, 10, 3]), model((2,)),
     "data.npz: sample 2 has label 10, the model 'digits' has classes 0 to 9; are the labels counted from 1?"),
    (lambda: write_npz(ONES, [1, 2, -1, 3]), model((2,)),
     "data.npz: sample 2 has label -1, the model 'digits' has classes 0 to 9"),
    (lambda: write_npz(ONES, np.array([1, 2, 3, 300], np.uint16)), model((2,), ignore_index=-100),
     "data.npz: sample 3 has label 300, the model 'digits' has classes 0 to 9, or -100 for none"),
    (lambda: write_npz(ONES, [1, 2, 3, 0.5]), model((2,)),
     "data.npz: sample 3 has label 0.5, the model 'digits' has classes 0 to 9"),
    (lambda: write_npz(ONES, [1, 2, np.nan, 0]), model((2,)),
     "data.npz: sample 2 has label nan, the model 'digits' has classes 0 to 9"),
    (lambda: write_npz(ONES, np.eye(4, 10)), model((2,)),
     "data.npz has labels of 10 per sample, the model 'digits' takes single numbers (cross_entropy): class numbers, "
     "not one-hot rows"),
    (lambda: write_npz(ONES, ["a", "b", "c", "d"]), model((2,)), "data.npz has labels of type <U1, expected numbers"),
    (lambda: write_npz(ONES, [0, 1, 2, 0]), model((2,), 1, loss="bce_with_logits"),
     "data.npz: sample 2 has label 2, bce_with_logits takes 0 to 1"),
    (lambda: write_npz(ONES, [0, 1, np.nan, 0]), model((2,), 1, loss="bce_with_logits"),
     "data.npz: sample 2 has label nan, bce_with_logits takes 0 to 1"),
    (lambda: write_npz(ONES, [0, 1, 1e300, 0]), model((2,), 1, loss="mse"),
     "data.npz: sample 2 has label 1e+300, mse takes finite numbers of type float32"),
    (lambda: write_text("data.csv", "a,b,label\n1,2,0\n3,x,1\n"), model((2,)),
     "data.csv: line 3, column 2 (b): expected a finite number, got 'x'"),
    (lambda: write_text("data.csv", "1,2,0\n\n3,,1\n"), model((2,)),
     "data.csv: line 3, column 2: expected a finite number, got ''"),
    (lambda: write_text("data.csv", "1,2,0\n3,nan,1\n"), model((2,)),
     "data.csv: line 2, column 2: expected a finite number, got 'nan'"),
    (lambda: write_text("data.csv", "1,2,0\n3,1e300,1\n"), model((2,)),
     "data.csv: line 2, column 2: expected a finite number, got '1e300'"),
    (lambda: write_text("data.csv", "1,2,0\n3,4.0,1\n"), model((2,), dtype="int64", vocabulary=9),
     "data.csv: line 2, column 2: expected a whole number, got '4.0'"),
    (lambda: write_text("data.csv", "1,2,0\n3,1\n"), model((2,)), "data.csv: line 2 has 2 columns, expected 3"),
    (lambda: write_text("data.csv", "1,2,0\n3,4,1,9\n"), model((2,)), "data.csv: line 2 has 4 columns, expected 3"),
    (lambda: write_text("data.csv", "a,b,y\n1,2,3,0\n3,4,5,1\n"), model((2,)),
     "data.csv: line 2 has 4 columns, expected 3"),
    (lambda: write_text("data.csv", "1\n2\n"), model((2,)),
     "data.csv: line 1 has one column, expected features and a label"),
    (lambda: write_text("data.csv", "\n\n"), model((2,)), "data.csv has no samples"),
    (lambda: write_text("data.csv", "a,b,label\n"), model((2,)), "data.csv has no samples"),
    (lambda: write_text("data.csv", "1,2,cat\n3,4,7\n"), model((2,)),
     "data.csv: line 1, column 3: expected a number, got 'cat'"),
    (lambda: write_text("data.csv", "1,2,cat\n3,4,\n"), model((2,), 2),
     "data.csv: line 2, column 3: expected a class, got ''"),
    (lambda: write_text("data.csv", "1,2,cat\n3,4,dog\n"), model((2,), 1, loss="mse"),
     "data.csv: line 1, column 3: expected a number, got 'cat'"),
    (lambda: write_text("data.csv", "1,2,cat\n3,4,dog\n"), model((2,), 3, name="pets"),
     "data.csv has 2 names of classes (cat, dog), the model 'pets' has 3 classes: classes are numbered by the order of "
     "their names, so all must be there; or write numbers instead of names"),
    (lambda: write_images({"cat": [grey(0)], "dog": []}), model(classes=3, name="pets"),
     "photos has 2 sub-folders (cat, dog), the model 'pets' has 3 classes: classes are numbered by the order of their "
     "names, so all must be there; an empty sub-folder counts as a class"),
    (lambda: write_images({"cat": [], "dog": []}), model(classes=2),
     "photos has no images: its sub-folders have no files ending in .bmp .gif .jpeg .jpg .png .ppm .webp"),
    (lambda: write_images({"cat": [grey(0)]}), model((784,)),
     "photos has images, the model 'digits' takes 784 (float32): expected 1×H×W or 3×H×W of floats"),
    (lambda: write_images({"cat": [grey(0)]}), model(loss="mse"),
     "photos: sub-folders name classes, but a label of the model 'digits' is 10 (mse)"),
    (lambda: "data.npy", model(),
     "cannot tell what 'data.npy' is: expected FILE.npz, FILE.csv, FILE.py:NAME or a folder with one "
     "sub-folder of images per class"),
    (lambda: "data.npz", model(), "no such file: data.npz"),
    (lambda: "mine.py:load", model(), "no such file: mine.py"),
    (lambda: write_text("mine.py", "def f(): pass") + ":load", model(), "mine.py has no 'load'; it has: f"),
    (lambda: write_text("mine.py", "import nothing_like_it") + ":load", model(),
     "mine.py cannot be imported: ModuleNotFoundError: No module named 'nothing_like_it'"),
    (lambda: write_text("mine.py", "def load():\n    raise OSError('the disk\\nis gone')") + ":load", model(),
     "mine.py:load failed: OSError: the disk is gone"),
    (lambda: write_text("mine.py", "def load(): return 5") + ":load", model(),
     "mine.py:load: expected (x, y), a mapping with x and y, or batches of them, got int"),
    (lambda: write_text("mine.py", "load = {'a': 1, 'y': 2}") + ":load", model(),
     "mine.py:load: expected x and y (or x_train and y_train, data and target, images and labels), got a mapping with "
     "a, y"),
    (lambda: write_text("mine.py", "load = []") + ":load", model(), "mine.py:load has no samples"),
    (lambda: write_text("mine.py", "load = [1, 2, 3]") + ":load", model(),
     "mine.py:load: batch 0 is int, expected (x, y)"),
    (lambda: write_text("mine.py", "load = [([[1]], [0]), ([[1.5]], [0]), ([[1]], [0])]") + ":load", model(),
     "mine.py:load: batch 1 has inputs of 1 (float64), the first batch of 1 (int64)"),
    (lambda: write_text("mine.py", "load = [([[1]], [0, 1]), ()]") + ":load", model(),
     "mine.py:load: batch 0 has 1 inputs but 2 labels"),
]  # fmt: skip


@pytest.mark.parametrize(("write", "manifest", "message"), REFUSED, ids=lambda value: "" if callable(value) else None)
def test_refused(write: Callable[[], str], manifest: Manifest, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_samples(write(), manifest)
    assert str(caught.value) == message
    assert isinstance(caught.value, EmptyData) == ("no samples" in message or "no images" in message)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("kind", "data.csv has no column named 'kind'; its first line has: a, b, c"),
        ("4", "data.csv has no column 4: its columns are 1 to 3"),
        ("0", "data.csv has no column 0: its columns are 1 to 3"),
    ],
)
def test_a_label_column_that_is_not_there(label: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_samples(write_text("data.csv", "a,b,c\n1,2,0\n"), model((2,)), label=label)
    assert str(caught.value) == message
    with pytest.raises(InputError, match=r"only \.csv files have a label column"):
        load_samples("data.npz", model(), label="y")


def test_endless_batches_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_file_module, "MOST_BYTES", 1 << 20)
    endless = "import numpy as np\ndef load():\n    while True: yield np.ones((100, 64)), np.zeros(100)\n"
    with pytest.raises(DataError, match=r"more than 1 MiB, too much to keep in memory; write them to an \.npz file"):
        load_samples(write_text("mine.py", endless) + ":load", model())


# Damaged and hostile archives.


def npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    text = header.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


HEADER = "{'descr': '%s', 'fortran_order': False, 'shape': %s}\n"


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("member", "message"),
    [
        (npy(HEADER % ("<f4", "(1000000000000, 1000)"), b"1234"), r"x says it is float32 \(.*\), but it has 4 bytes"),
        (npy(HEADER % ("<f4", "(-1, -1)"), b"1234"), r"x says it is float32 \(-1, -1\), but it has 4 bytes"),
        (npy(HEADER % ("|O", "(1,)"), b"1234"), "x holds Python objects, which could run code"),
        (npy(HEADER % ("<f4", "(1,)") + " " * 20_000, b"1234"), "x is no array: Header info length"),
        (npy("open('/etc/passwd')\n"), "x is no array: "),
        (npy(HEADER % ("<f4", "(1,)"), b"1234", version=3), r"x is no array: version \(3, 0\)"),
        (b"no array at all", "x is no array: "),
        (b"", "x is no array: "),
    ],
)
def test_absurd_members(member: bytes, message: str, compression: int) -> None:
    with zipfile.ZipFile("data.npz", "w", compression) as archive:
        archive.writestr("x.npy", member)
        archive.writestr("y.npy", npy(HEADER % ("<i8", "(1,)"), bytes(8)))
    with pytest.raises(DataError, match=rf"^data\.npz: {message}"):
        load_samples("data.npz", model((1,)))


@given(st.data())
def test_a_damaged_archive_is_refused_or_read(data: st.DataObject) -> None:
    """Any byte may be wrong, and the file may end anywhere: never anything but an answer."""
    save = data.draw(st.sampled_from([np.savez, np.savez_compressed]))
    save("good.npz", x=np.arange(8, dtype=np.float32).reshape(4, 2), y=np.array([0, 1, 2, 3]))
    content = bytearray(Path("good.npz").read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        content[place] = data.draw(st.integers(0, 255))
    Path("bad.npz").write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        everything(load_samples("bad.npz", model((2,))))
    except DataError as error:
        assert "\n" not in str(error)


def test_no_archive_at_all() -> None:
    with pytest.raises(DataError, match=r"data\.npz is no \.npz file that can be read: File is not a zip file"):
        load_samples(write_text("data.npz", "x"), model())
    np.savez("data.npz", a=[1], b=[2])
    with pytest.raises(DataError) as caught:
        load_samples("data.npz", model())
    assert str(caught.value) == (
        "data.npz: expected arrays named x and y (or x_train and y_train, data and target, images and labels), "
        "found a, b"
    )


# Splitting, describing, training or not.


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    fraction=st.floats(0, 0.9),
    seed=st.integers(0, 2**32),
)
def test_a_split_has_every_sample_once_and_the_same_share_of_classes(
    labels: list[int], fraction: float, seed: int
) -> None:
    x = np.arange(len(labels), dtype=np.float32)[:, None]
    samples = from_arrays(x, np.array(labels), model((1,), 5))
    train, held = samples.split(fraction, seed)
    rows = np.concatenate([everything(train)[0], everything(held)[0]]).reshape(-1)
    assert sorted(rows.tolist()) == list(range(len(labels)))
    assert np.array_equal(everything(held)[1], np.array(labels)[everything(held)[0].reshape(-1).astype(int)])
    counts, mine = np.bincount(labels, minlength=5), np.bincount(held.labels, minlength=5)
    shared = counts[counts > 1]
    if len(shared):
        share = len(held) / shared.sum()
        assert (abs(mine[counts > 1] - share * shared) < 1 + 1e-9).all()
        assert len(held) == min(round(len(labels) * fraction) or int(fraction > 0), shared.sum(), len(labels) - 1)
    assert (mine[counts == 1] == 0).all()
    again = samples.split(fraction, seed)[1]
    assert np.array_equal(everything(again)[0], everything(held)[0])


def test_splits_of_splits_and_of_numbers() -> None:
    x, y = np.arange(100, dtype=np.float32)[:, None], np.linspace(0, 1, 100)
    for loss in ("mse", "bce_with_logits"):
        train, held = from_arrays(x, y, model((1,), 1, loss=loss)).split(0.2, 3)
        assert (len(train), len(held)) == (80, 20)
        inner, other = train.split(0.5, 3)
        seen = np.concatenate([everything(part)[0].reshape(-1) for part in (inner, other, held)])
        assert sorted(seen.tolist()) == list(range(100))
        assert inner.describe()["classes"] is None
    with pytest.raises(InputError, match=r"must lie in \[0, 1\), got 1"):
        train.split(1, 0)


def test_what_is_trainable() -> None:
    x = np.ones((3, 2), np.float32)
    one = from_arrays(x, np.array([3, 3, 3]), model((2,)), name="data.npz")
    with pytest.raises(SingleClass) as caught:
        check_trainable(one)
    assert str(caught.value) == (
        "data.npz: all 3 samples have label 3, and training on one class makes a model forget the others; "
        "--allow-single-class trains all the same"
    )
    check_trainable(one, allow_single_class=True)
    check_trainable(from_arrays(x, np.array([3.0, 3, 3]), model((2,), 1, loss="mse")))
    with pytest.raises(SingleClass, match="label 1,"):
        check_trainable(from_arrays(x, np.array([1, 1, 1]), model((2,), 1, loss="bce_with_logits")))
    with pytest.raises(SingleClass, match="label 1,"):
        check_trainable(from_arrays(x, np.array([1, 9, 1]), model((2,), ignore_index=9)))
    with pytest.raises(EmptyData, match="every label is 9, which does not count"):
        check_trainable(from_arrays(x, np.array([9, 9, 9]), model((2,), ignore_index=9)), allow_single_class=True)
    with pytest.raises(EmptyData, match="has no samples"):
        check_trainable(one.split(0, 0)[1])


# The page about all this.


def test_the_examples_of_the_page_run(
    digits: tuple[np.ndarray, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bundles/digits").mkdir(parents=True)
    Path("bundles/digits/manifest.json").write_text(dumps(model()))
    page = (ROOT / "docs" / "data.md").read_text()
    blocks = re.findall(r"```(\w*)\n(.*?)```", page, re.DOTALL)
    write_text("mydata.py", next(text for kind, text in blocks if text.startswith("# mydata.py")))
    names: dict[str, Any] = {}
    for (kind, text), (_, after) in zip(blocks, [*blocks[1:], ("", "")]):
        if kind == "python" and not text.startswith("# mydata.py"):
            exec(text, names)
            printed = capsys.readouterr().out
            assert not printed or printed == after


def test_the_messages_of_the_page_are_real() -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    shown = page.split("<!-- messages -->\n```\n")[1].split("```")[0].splitlines()
    assert len(shown) > 5
    assert set(shown) <= {message for _, _, message in REFUSED}
