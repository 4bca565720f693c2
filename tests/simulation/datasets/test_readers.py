"""Data sets in their original formats: small ones written here byte by byte, the real ones where somebody has them."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from federation.errors import DataError, InputError
from simulation.datasets import DATASETS, load_dataset
from simulation.datasets.imdb import LENGTH, encode, number_words, split_words

RNG = np.random.default_rng(7)


def write_idx(path: Path, values: np.ndarray) -> None:
    body = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)


def write_mnist(folder: Path, ending: str = ".gz", train: int = 6, test: int = 3) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for part, count in (("train", train), ("t10k", test)):
        made[f"x_{part}"] = RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        made[f"y_{part}"] = RNG.integers(0, 10, count, dtype=np.uint8)
        write_idx(folder / f"{part}-images-idx3-ubyte{ending}", made[f"x_{part}"])
        write_idx(folder / f"{part}-labels-idx1-ubyte{ending}", made[f"y_{part}"])
    return made


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("ending", [".gz", ""])
def test_idx_files_raw_and_compressed(tmp_path: Path, name: str, ending: str):
    made = write_mnist(tmp_path / name, ending)
    found = load_dataset(name, tmp_path)
    assert found.x_train.dtype == np.uint8 and found.y_train.dtype == np.int64 and found.groups is None
    assert np.array_equal(found.x_train[:, 0], made["x_train"]) and np.array_equal(found.y_train, made["y_train"])
    assert np.array_equal(found.x_test[:, 0], made["x_t10k"]) and np.array_equal(found.y_test, made["y_t10k"])


def test_a_writer_for_each_digit(tmp_path: Path):
    write_mnist(tmp_path / "mnist")
    np.savez(tmp_path / "mnist" / "writers_qmnist.npz", writer_train=np.array([5, 5, 9, 9, 9, 1], np.int16))
    assert load_dataset("mnist", tmp_path).groups.tolist() == [5, 5, 9, 9, 9, 1]
    np.savez(tmp_path / "mnist" / "writers_qmnist.npz", writer_train=np.array([5], np.int16))
    with pytest.raises(DataError, match="6 training samples but 1 groups"):
        load_dataset("mnist", tmp_path)


def test_the_data_folder_may_be_the_data_set_itself(tmp_path: Path):
    write_mnist(tmp_path / "mnist")
    write_mnist(tmp_path / "elsewhere", train=4)
    assert len(load_dataset("mnist", tmp_path / "mnist").y_train) == 6
    assert len(load_dataset("fashion_mnist", tmp_path / "elsewhere").y_train) == 4
    with pytest.raises(DataError, match=r"fashion_mnist is neither in .*mnist nor in"):  # clothes would be digits
        load_dataset("fashion_mnist", tmp_path / "mnist")


def damage_header(file: Path) -> None:
    file.write_bytes(bytes([0, 0, 13, 3]) + file.read_bytes()[4:])


def promise_more(file: Path) -> None:
    file.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**31, 28, 28))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damage_header, "expected an idx file of bytes with 3 axes, it begins with 00 00 0d 03"),
        (promise_more, "expected at most 1073741824"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "says it is 6×28×28 bytes, but has 4703"),
        (lambda file: file.write_bytes(file.read_bytes() + b"!"), "but has more"),
        (lambda file: file.write_bytes(b""), "it begins with"),
        (lambda file: file.unlink(), "has no train-images-idx3-ubyte|is neither in"),
        (lambda file: write_idx(file, np.zeros((6, 27, 28), np.uint8)), r"expected uint8 images of \(28, 28\)"),
        (lambda file: write_idx(file, np.zeros((5, 28, 28), np.uint8)), "5 training inputs but labels of shape"),
    ],
)
def test_damaged_idx_files(tmp_path: Path, spoil: Callable[[Path], object], message: str):
    write_mnist(tmp_path / "mnist", "")
    spoil(tmp_path / "mnist" / "train-images-idx3-ubyte")
    with pytest.raises(DataError, match=message) as error:
        load_dataset("mnist", tmp_path)
    assert "\n" not in str(error.value)


def test_a_damaged_gz_file(tmp_path: Path):
    write_mnist(tmp_path)
    file = tmp_path / "t10k-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    for body in (whole[: len(whole) // 2], b"no gzip at all", whole[:40] + bytes(8) + whole[48:]):
        file.write_bytes(body)
        with pytest.raises(DataError, match="cannot read"):
            load_dataset("mnist", tmp_path)


def test_labels_beyond_the_classes(tmp_path: Path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.array([0, 10, 1], np.uint8))
    with pytest.raises(DataError, match="expected labels from 0 to 9, the test part has 0 to 10"):
        load_dataset("mnist", tmp_path)


def write_cifar(folder: Path, per_batch: int = 2) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True)
    records = RNG.integers(0, 256, (6 * per_batch, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for name, part in zip(names, np.split(records, 6)):
        (folder / name).write_bytes(part.tobytes())
    return records[: 5 * per_batch], records[5 * per_batch :]


@pytest.mark.parametrize("folder", ["cifar10", "cifar-10-batches-bin", "."])
def test_cifar10_binary(tmp_path: Path, folder: str):
    train, test = write_cifar(tmp_path / "data" / folder)
    found = load_dataset("cifar10", tmp_path / "data")
    assert found.y_train.tolist() == train[:, 0].tolist() and found.y_test.tolist() == test[:, 0].tolist()
    assert found.x_train[3, 2, 5, 7] == train[3, 1 + 2 * 1024 + 5 * 32 + 7]  # blue, row 5, column 7
    assert found.x_test.reshape(2, -1).tolist() == test[:, 1:].tolist()


def test_cifar10_mosaics_hold_the_same_pixels(tmp_path: Path):
    train, test = write_cifar(tmp_path / "binary" / "cifar10", per_batch=6)
    folder = tmp_path / "mosaics" / "cifar10"
    folder.mkdir(parents=True)
    for part, records in (("train", train), ("test", test)):
        for number, tiles in enumerate(np.split(records[:, 1:].reshape(-1, 3, 32, 32), len(records) // 6)):
            picture = np.zeros((64, 96, 3), np.uint8)  # two rows of three
            for place, tile in enumerate(tiles):
                row, column = divmod(place, 3)
                picture[32 * row : 32 * row + 32, 32 * column : 32 * column + 32] = tile.transpose(1, 2, 0)
            Image.fromarray(picture).save(folder / f"{part}_{number:02}.webp", lossless=True)
    np.savez(folder / "labels.npz", y_train=train[:, 0], y_test=test[:, 0])
    left, right = load_dataset("cifar10", tmp_path / "binary"), load_dataset("cifar10", tmp_path / "mosaics")
    for field in ("x_train", "y_train", "x_test", "y_test"):
        assert np.array_equal(getattr(left, field), getattr(right, field))
    Image.fromarray(np.zeros((30, 32, 3), np.uint8)).save(folder / "train_00.webp", lossless=True)
    with pytest.raises(DataError, match="32×30 pixels, expected a grid of 32×32 tiles"):
        load_dataset("cifar10", tmp_path / "mosaics")
    (folder / "train_00.webp").write_bytes(b"RIFF")
    with pytest.raises(DataError, match="cannot read"):
        load_dataset("cifar10", tmp_path / "mosaics")


def test_pickles_are_not_opened(tmp_path: Path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "opened",))

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match=r"pickled, which is not read .* expected the binary version"):
        load_dataset("cifar10", tmp_path)
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize(("size", "message"), [(3072, "expected records of 3073"), (None, "No such file")])
def test_damaged_cifar10(tmp_path: Path, size: int | None, message: str):
    write_cifar(tmp_path / "cifar10")
    file = tmp_path / "cifar10" / "data_batch_4.bin"
    file.unlink() if size is None else file.write_bytes(bytes(size))
    with pytest.raises(DataError, match=message):
        load_dataset("cifar10", tmp_path)


def write_leaf(folder: Path, shards: list[dict[str, tuple[np.ndarray, list[int]]]]) -> None:
    folder.mkdir(parents=True)
    for number, users in enumerate(shards):
        data = {user: {"x": (x / 255).tolist(), "y": y} for user, (x, y) in users.items()}
        counts = [len(y) for _, y in users.values()]
        text = json.dumps({"users": list(users), "num_samples": counts, "user_data": data})
        (folder / f"all_data_{number}.json").write_text(text)


def test_femnist_as_leaf_writes_it(tmp_path: Path):
    every = np.arange(784 * 5).astype(np.uint8).reshape(5, 784)  # each byte appears
    none: tuple[np.ndarray, list[int]] = (np.zeros((0, 784)), [])
    write_leaf(tmp_path / "femnist" / "train", [{"f1": (every[:2], [0, 61]), "f2": (every[2:3], [7])}, {"f3": none}])
    write_leaf(tmp_path / "femnist" / "test", [{"f1": (every[3:4], [5]), "f3": (every[4:], [10])}])
    found = load_dataset("femnist", tmp_path)
    assert found.x_train.dtype == np.uint8 and found.x_train.shape == (3, 1, 28, 28) and found.num_classes == 62
    assert np.array_equal(found.x_train.reshape(3, 784), 255 - every[:3])  # LEAF has brightness, a sample has ink
    assert np.array_equal(found.x_test.reshape(2, 784), 255 - every[3:])
    assert (found.y_train.tolist(), found.y_test.tolist(), found.groups.tolist()) == ([0, 61, 7], [5, 10], [0, 0, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected LEAF's json"),
        ("[]", "expected LEAF's json"),
        ('{"user_data": {"f1": {"x": []}}}', "expected LEAF's json.*KeyError 'y'"),
        ('{"user_data": {"f1": {"x": [[0.5]], "y": [1]}}}', "f1: expected images of 784 pixels"),
        ('{"user_data": {"f1": {"x": [[0.5], 1], "y": [1]}}}', "f1: expected lists of 784 numbers"),
        (json.dumps({"user_data": {"f1": {"x": [[0.3331] * 784], "y": [1]}}}), "steps of 1/255"),
        (json.dumps({"user_data": {"f1": {"x": [[2] * 784], "y": [1]}}}), "from 0 to 1"),
        (json.dumps({"user_data": {"f1": {"x": [[float("nan")] * 784], "y": [1]}}}), "from 0 to 1"),
        (json.dumps({"user_data": {"f1": {"x": [[0] * 784], "y": [1, 2]}}}), "f1 has 1 images but 2 labels"),
        (json.dumps({"user_data": {"f1": {"x": [[0] * 784], "y": [0.5]}}}), "expected one integer per sample"),
        (json.dumps({"user_data": {"f1": {"x": [[0] * 784], "y": [[1], 2]}}}), "expected one integer per sample"),
    ],
)
def test_damaged_leaf(tmp_path: Path, text: str, message: str):
    write_leaf(tmp_path / "train", [{"f1": (np.zeros((1, 784)), [0])}])
    write_leaf(tmp_path / "test", [{"f1": (np.zeros((1, 784)), [0])}])
    (tmp_path / "train" / "all_data_1.json").write_text(text)
    with pytest.raises(DataError, match=message) as error:
        load_dataset("femnist", tmp_path)
    assert "all_data_1.json" in str(error.value)


def test_femnist_archive(tmp_path: Path):
    x = RNG.integers(0, 256, (4, 28, 28), dtype=np.uint8)
    parts = {"x_train": x[:3], "y_train": np.array([1, 2, 61], np.uint8), "w_train": np.array([4, 4, 0], np.uint16)}
    np.savez_compressed(tmp_path / "femnist_leaf.npz", **parts, x_test=x[3:], y_test=np.array([9], np.uint8))
    found = load_dataset("femnist", tmp_path)
    assert np.array_equal(found.x_train[:, 0], 255 - x[:3]) and found.groups.tolist() == [4, 4, 0]
    np.savez_compressed(tmp_path / "femnist_leaf.npz", **parts)
    with pytest.raises(DataError, match="expected arrays named x_test, y_test, found w_train, x_train, y_train"):
        load_dataset("femnist", tmp_path)


def test_a_letter_of_femnist_is_ink_on_nothing(tmp_path: Path):
    paper = np.full((1, 28, 28), 255, np.uint8)
    paper[:, 10:18, 13:15] = 0  # a stroke of black ink
    parts = {"x_train": paper, "y_train": np.array([1]), "w_train": np.array([0]), "x_test": paper, "y_test": [1]}
    np.savez_compressed(tmp_path / "femnist_leaf.npz", **parts)
    write_leaf(tmp_path / "json" / "femnist" / "train", [{"f1": (paper.reshape(1, 784), [1])}])
    write_leaf(tmp_path / "json" / "femnist" / "test", [{"f1": (paper.reshape(1, 784), [1])}])
    for folder in (tmp_path, tmp_path / "json"):
        found = load_dataset("femnist", folder)
        assert found.x_train[0, 0, 10:18, 13:15].min() == 255 and int(found.x_train.sum()) == 16 * 255
        assert np.array_equal(found.x_test, found.x_train)


def write_reviews(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


REVIEWS = {
    "train/pos/0_9.txt": "A film, a FILM!<br /><br />Don't miss it",
    "train/pos/10_7.txt": "a great film",
    "train/pos/2_10.txt": "a film",
    "train/neg/0_1.txt": "it bored me in '95",
    "test/neg/0_2.txt": "great? No",
    "test/pos/0_8.txt": "A film",
}


def test_reviews_as_texts(tmp_path: Path):
    folder = tmp_path / "aclImdb"
    write_reviews(folder, REVIEWS)
    found = load_dataset("imdb", tmp_path)
    assert found.groups is None and found.y_train.tolist() == [1, 1, 1, 0] and found.y_test.tolist() == [1, 0]
    # a and film 4 times, it 2, the rest once in the order of the alphabet: 95 bored don't great in me miss
    a, film, it, bored, dont, great, miss = 3, 4, 5, 7, 8, 9, 12
    assert found.x_train.shape == (4, 256)
    assert found.x_train[0, -9:].tolist() == [0, 1, a, film, a, film, dont, miss, it]
    assert found.x_train[1, -4:].tolist() == [0, 1, a, film]  # number 2 comes before number 10
    assert found.x_train[2, -5:].tolist() == [0, 1, a, great, film]
    assert found.x_train[3, -6:-3].tolist() == [1, it, bored]
    assert found.x_test[1, -4:].tolist() == [0, 1, great, 2]  # 'no' was not seen in training

    urls = {"pos": [f"http://www.imdb.com/title/tt{number:07}/usercomments" for number in range(100, 111)]}
    write_reviews(folder / "train", {"urls_pos.txt": "\n".join(urls["pos"]), "urls_neg.txt": "x/title/tt0000007/"})
    assert load_dataset("imdb", tmp_path).groups.tolist() == [100, 102, 110, 7]
    write_reviews(folder / "train", {"urls_pos.txt": "\n".join(urls["pos"][:10])})
    with pytest.raises(DataError, match=r"urls_pos.txt, line 11: expected an address with /title/tt"):
        load_dataset("imdb", tmp_path)


def test_the_last_words_of_a_long_review_are_kept():
    words = [f"w{number}" for number in range(300)]
    numbers = {word: 3 + rank for rank, word in enumerate(words)}
    assert encode(words, numbers).tolist() == [numbers[word] for word in words[-LENGTH:]]
    assert encode(words[:255], numbers)[0] == 1 and encode(words[:256], numbers)[0] == numbers["w0"]


def test_the_vocabulary_has_ten_thousand_numbers():
    words = [f"w{number:05}" for number in range(11_000)]
    numbers = number_words([words, words[5_000:]])
    assert len(numbers) == 9_997 and max(numbers.values()) == 9_999
    assert numbers["w05000"] == 3 and "w03996" in numbers and "w03997" not in numbers
    assert split_words("It's O'Neil's \"x-y\" '80s") == ["it's", "o'neil", "s", "x", "y", "80s"]


def test_damaged_reviews(tmp_path: Path):
    write_reviews(tmp_path, {"train/pos/first_9.txt": "a"})
    with pytest.raises(DataError, match=r"expected a name like 0_9.txt"):
        load_dataset("imdb", tmp_path)
    (tmp_path / "train/pos/first_9.txt").rename(tmp_path / "train/pos/0_9.txt")
    with pytest.raises(DataError, match=r"test has no reviews, expected pos/NUMBER_RATING.txt"):
        load_dataset("imdb", tmp_path)


def test_imdb_archive(tmp_path: Path):
    x = RNG.integers(1, 10_000, (4, 256)).astype(np.uint16)
    x[1, 3], x[1, 200:] = 0, 0  # a zero inside of a text stays, those behind it go to its front
    x[3, :50] = 0  # as it should be
    parts = {"y_train": np.array([1, 0], np.uint8), "movie_train": np.array([70_000, 3], np.uint32), "x_test": x[2:]}
    np.savez(tmp_path / "imdb_10k_256.npz", x_train=x[:2], y_test=np.array([0, 0], np.uint8), **parts)
    found = load_dataset("imdb", tmp_path)
    turned = np.concatenate([x[1, 200:], x[1, :200]])
    assert np.array_equal(found.x_train, [x[0], turned]) and np.array_equal(found.x_test, x[2:])
    assert found.groups.tolist() == [70_000, 3] and found.num_classes == 2
    np.savez(tmp_path / "imdb_10k_256.npz", x_train=x[:2] + 10_000, y_test=np.array([0, 0], np.uint8), **parts)
    with pytest.raises(DataError, match="token numbers from 0 to 9999"):
        load_dataset("imdb", tmp_path)


def test_digits_need_nothing_and_are_scikit_learns():
    from sklearn.datasets import load_digits

    theirs, found = load_digits(), load_dataset("digits")
    assert len(found.y_train) == 1437 and len(found.y_test) == 360 and found.x_train.dtype == np.float32
    both = np.concatenate([found.x_train, found.x_test]).reshape(1797, 64) * 16
    labels = np.concatenate([found.y_train, found.y_test])
    rows = {(*image.tolist(), label) for image, label in zip(both, labels)}
    assert rows == {(*image.tolist(), label) for image, label in zip(theirs.data, theirs.target)}
    assert np.bincount(found.y_test).min() > 20


def test_what_is_not_there(tmp_path: Path):
    with pytest.raises(InputError, match=r"no data set named 'mnits', expected one of digits, .*did you mean 'mnist'"):
        load_dataset("mnits", tmp_path)
    with pytest.raises(DataError, match=r"cifar10 needs a data folder \(--data-dir\) with data_batch_1.bin"):
        load_dataset("cifar10")
    with pytest.raises(DataError, match=r"no such folder: .*nowhere; expected imdb in it"):
        load_dataset("imdb", tmp_path / "nowhere")
    with pytest.raises(DataError, match="femnist is neither in"):
        load_dataset("femnist", tmp_path)


REAL = os.environ.get("EMBRACE_DATA_DIR", "")


@pytest.mark.skipif(not REAL, reason="EMBRACE_DATA_DIR names no folder with the real data sets")
@pytest.mark.parametrize("name", [name for name in DATASETS if name != "digits"])
def test_the_real_ones(name: str):
    """Sizes, class counts, digests and moments that were published for each."""
    place = DATASETS[name].find(Path(REAL))
    if place is None:
        pytest.skip(f"no {name} in EMBRACE_DATA_DIR")
    found = load_dataset(name, REAL)
    match name:
        case "mnist":
            counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
            assert np.bincount(found.y_train).tolist() == counts
            assert found.x_train.mean() / 255 == pytest.approx(0.1307, abs=5e-5)
            assert found.x_train.std() / 255 == pytest.approx(0.3081, abs=5e-5)
        case "fashion_mnist":
            assert np.bincount(found.y_train).tolist() == [6000] * 10
            assert found.x_train.mean() / 255 == pytest.approx(0.2860, abs=5e-5)
            assert found.x_train.std() / 255 == pytest.approx(0.3530, abs=5e-5)
        case "cifar10":
            assert np.bincount(found.y_train).tolist() == [5000] * 10
            assert found.x_train.mean((0, 2, 3)) / 255 == pytest.approx([0.49139968, 0.48215841, 0.44653091], abs=1e-8)
            assert found.x_train.std((0, 2, 3)) / 255 == pytest.approx([0.24703223, 0.24348513, 0.26158784], abs=1e-8)
        case "femnist":
            assert found.x_train.shape[1:] == (1, 28, 28) and set(found.y_train) == set(range(62))
            assert found.x_train.mean() / 255 < 0.25  # most of a sheet is paper
            if (place / "femnist_leaf.npz").is_file():
                raw = np.load(place / "femnist_leaf.npz")["x_train"].mean()
                assert found.x_train.mean() == pytest.approx(255 - raw, abs=1e-6)
        case "imdb":
            assert np.bincount(found.y_train).tolist() == np.bincount(found.y_test).tolist() == [12_500, 12_500]
            assert found.x_train.max() == 9_999
