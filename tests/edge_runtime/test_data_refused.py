"""A device's data: what is refused and in which words, damaged and hostile archives."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.data import load_samples
from edge_runtime.data import user_file as user_file_module
from federation.errors import DataError, EmptyData, InputError
from federation.manifest import Manifest
from tests.edge_runtime.data_files import ROOT, everything, grey, model, write_images, write_npz, write_text


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are named as a user beside them would, so that messages are what the user sees."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# What is refused, in the words that the user reads. docs/guides/data.md shows some of them.

ONES = np.ones((4, 2), np.float32)


def with_value(value: float) -> np.ndarray:
    x = np.ones((2000, 1000))
    x[1999, 7] = value  # behind the first chunk
    return x


REFUSED: list[tuple[Callable[[], str], Manifest, str]] = [
    (
        lambda: write_npz(np.zeros((4, 28, 28, 3), np.uint8), [0] * 4),
        model((3, 32, 32), name="resnet20"),
        "data.npz has samples of 28×28×3 (uint8), the model 'resnet20' takes 3×32×32 (float32)",
    ),
    (
        lambda: write_npz(np.ones((4, 2), complex), [0] * 4),
        model((2,)),
        "data.npz has samples of 2 (complex128), the model 'digits' takes 2 (float32): expected numbers",
    ),
    (
        lambda: write_npz(ONES, [0] * 4),
        model((2,), dtype="int64", vocabulary=5, name="imdb"),
        "data.npz has samples of 2 (float32), the model 'imdb' takes 2 (int64): expected integers",
    ),
    (
        lambda: write_npz(np.array([[4, 4], [0, 5]], np.uint8), [0, 1]),
        model((2,), dtype="int64", vocabulary=5, name="imdb"),
        "data.npz: sample 1 has token id 5, the model 'imdb' takes 0 to 4",
    ),
    (
        lambda: write_npz(np.array([[4, -4]]), [0]),
        model((2,), dtype="int64", vocabulary=5),
        "data.npz: sample 0 has token id -4, the model 'digits' takes 0 to 4",
    ),
    (
        lambda: write_npz(np.array([[4, 2**63]], np.uint64), [0]),
        model((2,), dtype="int64"),
        "data.npz: sample 0 has the value 9223372036854775808, the model 'digits' takes -9223372036854775808 to "
        "9223372036854775807",
    ),
    (
        lambda: write_npz(with_value(np.nan), [0] * 2000),
        model((1000,)),
        "data.npz: sample 1999 has the value nan, the inputs of a model must be finite numbers of type float32",
    ),
    (
        lambda: write_npz(with_value(1e300), [0] * 2000),
        model((1000,)),
        "data.npz: sample 1999 has the value 1e+300, the inputs of a model must be finite numbers of type float32",
    ),
    (lambda: write_npz(ONES, [0, 1, 2]), model((2,)), "data.npz: 4 inputs but 3 labels"),
    (lambda: write_npz(ONES, 0), model((2,)), "data.npz: 4 inputs but no labels"),
    (lambda: write_npz(ONES[:0], []), model((2,)), "data.npz has no samples"),
    (
        lambda: write_npz(5, [0]),
        model((2,)),
        "data.npz: the inputs are a single number, expected an array whose first axis counts samples",
    ),
    (
        lambda: write_npz(ONES, [1, 2, 10, 3]),
        model((2,)),
        "data.npz: sample 2 has label 10, the model 'digits' has classes 0 to 9; are the labels counted from 1?",
    ),
    (
        lambda: write_npz(ONES, [1, 2, -1, 3]),
        model((2,)),
        "data.npz: sample 2 has label -1, the model 'digits' has classes 0 to 9",
    ),
    (
        lambda: write_npz(ONES, np.array([1, 2, 3, 300], np.uint16)),
        model((2,), ignore_index=-100),
        "data.npz: sample 3 has label 300, the model 'digits' has classes 0 to 9, or -100 for none",
    ),
    (
        lambda: write_npz(ONES, [1, 2, 3, 0.5]),
        model((2,)),
        "data.npz: sample 3 has label 0.5, the model 'digits' has classes 0 to 9",
    ),
    (
        lambda: write_npz(ONES, [1, 2, np.nan, 0]),
        model((2,)),
        "data.npz: sample 2 has label nan, the model 'digits' has classes 0 to 9",
    ),
    (
        lambda: write_npz(ONES, np.eye(4, 10)),
        model((2,)),
        "data.npz has labels of 10 per sample, the model 'digits' takes single numbers (cross_entropy): class numbers, "
        "not one-hot rows",
    ),
    (lambda: write_npz(ONES, ["a", "b", "c", "d"]), model((2,)), "data.npz has labels of type <U1, expected numbers"),
    (
        lambda: write_npz(ONES, [0, 1, 2, 0]),
        model((2,), 1, loss="bce_with_logits"),
        "data.npz: sample 2 has label 2, bce_with_logits takes 0 to 1",
    ),
    (
        lambda: write_npz(ONES, [0, 1, np.nan, 0]),
        model((2,), 1, loss="bce_with_logits"),
        "data.npz: sample 2 has label nan, bce_with_logits takes 0 to 1",
    ),
    (
        lambda: write_npz(ONES, [0, 1, 1e300, 0]),
        model((2,), 1, loss="mse"),
        "data.npz: sample 2 has label 1e+300, mse takes finite numbers of type float32",
    ),
    (
        lambda: write_text("data.csv", "a,b,label\n1,2,0\n3,x,1\n"),
        model((2,)),
        "data.csv: line 3, column 2 (b): expected a finite number, got 'x'",
    ),
    (
        lambda: write_text("data.csv", "1,2,0\n\n3,,1\n"),
        model((2,)),
        "data.csv: line 3, column 2: expected a finite number, got ''",
    ),
    (
        lambda: write_text("data.csv", "1,2,0\n3,nan,1\n"),
        model((2,)),
        "data.csv: line 2, column 2: expected a finite number, got 'nan'",
    ),
    (
        lambda: write_text("data.csv", "1,2,0\n3,1e300,1\n"),
        model((2,)),
        "data.csv: line 2, column 2: expected a finite number, got '1e300'",
    ),
    (
        lambda: write_text("data.csv", "1,2,0\n3,4.0,1\n"),
        model((2,), dtype="int64", vocabulary=9),
        "data.csv: line 2, column 2: expected a whole number, got '4.0'",
    ),
    (lambda: write_text("data.csv", "1,2,0\n3,1\n"), model((2,)), "data.csv: line 2 has 2 columns, expected 3"),
    (lambda: write_text("data.csv", "1,2,0\n3,4,1,9\n"), model((2,)), "data.csv: line 2 has 4 columns, expected 3"),
    (
        lambda: write_text("data.csv", "a,b,y\n1,2,3,0\n3,4,5,1\n"),
        model((2,)),
        "data.csv: line 2 has 4 columns, expected 3",
    ),
    (
        lambda: write_text("data.csv", "1\n2\n"),
        model((2,)),
        "data.csv: line 1 has one column, expected features and a label",
    ),
    (lambda: write_text("data.csv", "\n\n"), model((2,)), "data.csv has no samples"),
    (lambda: write_text("data.csv", "a,b,label\n"), model((2,)), "data.csv has no samples"),
    (
        lambda: write_text("data.csv", "1,2,cat\n3,4,7\n"),
        model((2,)),
        "data.csv: line 1, column 3: expected a number, got 'cat'",
    ),
    (
        lambda: write_text("data.csv", "1,2,cat\n3,4,\n"),
        model((2,), 2),
        "data.csv: line 2, column 3: expected a class, got ''",
    ),
    (
        lambda: write_text("data.csv", "1,2,cat\n3,4,dog\n"),
        model((2,), 1, loss="mse"),
        "data.csv: line 1, column 3: expected a number, got 'cat'",
    ),
    (
        lambda: write_text("data.csv", "1,2,cat\n3,4,dog\n"),
        model((2,), 3, name="pets"),
        "data.csv has 2 names of classes (cat, dog), the model 'pets' has 3 classes: classes are "
        "numbered by the order of "
        "their names, so all must be there; or write numbers instead of names",
    ),
    (
        lambda: write_images({"cat": [grey(0)], "bird": []}),
        replace(model(classes=2, name="pets"), classes=("cat", "dog")),
        "photos has sub-folders bird that are no classes of the model 'pets': found bird, cat; expected cat, dog",
    ),
    (
        lambda: write_images({"cat": [grey(0)], "dog": []}),
        model(classes=3, name="pets"),
        "photos has 2 sub-folders (cat, dog), the model 'pets' has 3 classes: classes are numbered by "
        "the order of their "
        "names, so all must be there; an empty sub-folder counts as a class",
    ),
    (
        lambda: write_images({"cat": [], "dog": []}),
        model(classes=2),
        "photos has no images: its sub-folders have no files ending in .bmp .gif .jpeg .jpg .png .ppm .webp",
    ),
    (
        lambda: write_images({"cat": [grey(0)]}),
        model((784,)),
        "photos has images, the model 'digits' takes 784 (float32): expected 1×H×W or 3×H×W of floats",
    ),
    (
        lambda: write_images({"cat": [grey(0)]}),
        model(loss="mse"),
        "photos: sub-folders name classes, but a label of the model 'digits' is 10 (mse)",
    ),
    (
        lambda: write_text("data.npy", ""),
        model(),
        "cannot tell what 'data.npy' is: expected FILE.npz, FILE.csv, FILE.jsonl, FILE.txt, "
        "FILE.py:NAME or a folder with one sub-folder of images per class",
    ),
    (lambda: "data.npz", model(), "no such file: data.npz"),
    (lambda: "photos", model(), "no such file: photos"),
    (lambda: "mine.py:load", model(), "no such file: mine.py"),
    (lambda: write_text("mine.py", "def f(): pass") + ":load", model(), "mine.py has no 'load'; it has: f"),
    (
        lambda: write_text("mine.py", "import nothing_like_it") + ":load",
        model(),
        "mine.py cannot be imported: ModuleNotFoundError: No module named 'nothing_like_it'",
    ),
    (
        lambda: write_text("mine.py", "def load():\n    raise OSError('the disk\\nis gone')") + ":load",
        model(),
        "mine.py:load failed: OSError: the disk is gone",
    ),
    (
        lambda: write_text("mine.py", "def load(): return 5") + ":load",
        model(),
        "mine.py:load: expected (x, y), a mapping with x and y, or batches of them, got int",
    ),
    (
        lambda: write_text("mine.py", "load = {'a': 1, 'y': 2}") + ":load",
        model(),
        "mine.py:load: the mapping: expected arrays named x and y (or x_train and y_train, data and target, images and "
        "labels), found a, y",
    ),
    (lambda: write_text("mine.py", "load = []") + ":load", model(), "mine.py:load has no samples"),
    (
        lambda: write_text("mine.py", "load = [1, 2, 3]") + ":load",
        model(),
        "mine.py:load: batch 0 is int, expected (x, y)",
    ),
    (
        lambda: write_text("mine.py", "load = [([[1]], [0]), ([[1.5]], [0]), ([[1]], [0])]") + ":load",
        model(),
        "mine.py:load: batch 1 has inputs of 1 (float64), the first batch of 1 (int64)",
    ),
    (
        lambda: write_text("mine.py", "load = [([[1]], [0, 1]), ()]") + ":load",
        model(),
        "mine.py:load: batch 0 has 1 inputs but 2 labels",
    ),
]


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


def test_the_messages_of_the_page_are_real() -> None:
    page = (ROOT / "docs" / "guides" / "data.md").read_text()
    shown = page.split("<!-- messages -->\n```\n")[1].split("```")[0].splitlines()
    assert len(shown) > 5
    assert set(shown) <= {message for _, _, message in REFUSED}
