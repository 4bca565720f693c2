"""Augmentation: what slicing and reversing give, and the same for a sample in whatever batch it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.data import Augmentation, parse_augmentation, shuffled
from edge_runtime.data.prng import below, sample_bits
from federation.errors import InputError

SEEDS = st.integers(0, 2**63 - 1)


def images(count: int, channels: int = 2, height: int = 5, width: int = 7) -> np.ndarray:
    """No two pixels are alike and none is zero, so that an image shows where it was cropped."""
    return np.arange(1, 1 + count * channels * height * width, dtype=np.float32).reshape(count, channels, height, width)


@given(seed=SEEDS, epoch=st.integers(0, 1000), crop=st.integers(1, 4), count=st.integers(1, 9))
def test_a_crop_is_a_slice_of_the_padded_image(seed: int, epoch: int, crop: int, count: int) -> None:
    batch, numbers = images(count), np.arange(count) * 1000
    result = Augmentation(crop=crop).apply(batch, numbers, seed, epoch)
    assert (result.shape, result.dtype, result.flags.c_contiguous) == (batch.shape, batch.dtype, True)
    top, left = (below(sample_bits(seed, epoch, numbers, draw), 2 * crop + 1) for draw in (0, 1))
    for number, image in enumerate(batch):
        padded = np.pad(image, ((0, 0), (crop, crop), (crop, crop)))
        window = padded[:, top[number] : top[number] + 5, left[number] : left[number] + 7]
        assert np.array_equal(result[number], window)


@given(seed=SEEDS, epoch=st.integers(0, 1000), count=st.integers(1, 9))
def test_a_flip_is_the_image_reversed(seed: int, epoch: int, count: int) -> None:
    batch, numbers = images(count), np.arange(count)
    result = Augmentation(flip=True).apply(batch, numbers, seed, epoch)
    flipped = sample_bits(seed, epoch, numbers, 2) >> np.uint64(63)
    for image, expected, mirrored in zip(result, batch, flipped):
        assert np.array_equal(image, expected[..., ::-1] if mirrored else expected)


@given(
    seed=SEEDS,
    epoch=st.integers(0, 1000),
    order=st.permutations(range(12)),
    size=st.integers(1, 12),
    what=st.sampled_from([Augmentation(crop=2), Augmentation(flip=True), Augmentation(crop=1, flip=True)]),
)
def test_a_sample_does_not_notice_its_batch(
    seed: int, epoch: int, order: list[int], size: int, what: Augmentation
) -> None:
    batch, numbers = images(12), np.arange(12)
    together = what.apply(batch, numbers, seed, epoch)
    for start in range(0, 12, size):
        rows = np.array(order[start : start + size])
        assert np.array_equal(what.apply(batch[rows], rows, seed, epoch), together[rows])


def test_the_argument_is_not_changed() -> None:
    batch = images(8)
    batch.flags.writeable = False
    Augmentation(crop=2, flip=True).apply(batch, np.arange(8), 1, 1)
    assert np.array_equal(batch, images(8))


def test_nothing_is_nothing() -> None:
    batch = images(2)
    assert not Augmentation()
    assert Augmentation().apply(batch, np.arange(2), 0, 0) is batch
    Augmentation().check((10,))


def test_seed_epoch_and_number_all_matter_and_choices_are_even() -> None:
    numbers = np.arange(20_000)
    base = sample_bits(1, 2, numbers, 0)
    assert len(np.unique(base)) == len(numbers)
    for other in [sample_bits(2, 2, numbers, 0), sample_bits(1, 3, numbers, 0), sample_bits(1, 2, numbers, 1)]:
        assert not np.isin(other, base).any()
        together = np.bincount(below(base, 5) * 5 + below(other, 5), minlength=25)  # independent of each other
        assert abs(together - 800).max() < 5 * 800**0.5
    assert abs(np.bincount(below(base, 9), minlength=9) - 20_000 / 9).max() < 5 * (20_000 / 9) ** 0.5
    assert 9_600 < int((base >> np.uint64(63)).sum()) < 10_400


def test_the_numbers_are_the_same_everywhere() -> None:
    """Golden numbers: another platform or version of numpy must give them too."""
    assert sample_bits(7, 1, np.array([0, 1, 2**40]), 2).tolist() == [
        13119566962333423783,
        9704416488830244112,
        1713696363391521961,
    ]
    assert shuffled(10, 7, 0).tolist() == [8, 4, 1, 6, 3, 2, 7, 5, 9, 0]
    assert shuffled(10, 7, 1).tolist() == [3, 9, 1, 6, 2, 5, 4, 8, 0, 7]


@given(n=st.integers(0, 300), seed=st.integers(-5, 2**70), epoch=st.integers(0, 2**40))
def test_an_order_has_every_number_once(n: int, seed: int, epoch: int) -> None:
    order = shuffled(n, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, shuffled(n, seed, epoch))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("crop=4,flip", Augmentation(4, True)),
        (" flip , crop = 4", Augmentation(4, True)),
        ("flip", Augmentation(flip=True)),
        ("crop=0", Augmentation()),
        ("none", Augmentation()),
        ("", Augmentation()),
    ],
)
def test_parsing(text: str, expected: Augmentation) -> None:
    assert parse_augmentation(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rotate=3", "augmentation 'rotate=3': 'rotate' is unknown; expected crop=PIXELS, flip or both"),
        ("crop", "augmentation 'crop': crop needs a number of pixels, for example crop=4"),
        ("crop=-1", "crop needs a number of pixels"),
        ("crop=²", "crop needs a number of pixels"),
        ("crop=1e9", "crop needs a number of pixels"),
        ("flip=yes", "flip takes no value"),
        ("flip,flip", "flip is given twice"),
        ("flip,", "'' is unknown"),
    ],
)
def test_what_cannot_be_parsed(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        parse_augmentation(text)


def test_what_cannot_be_augmented() -> None:
    flip, numbers = Augmentation(flip=True), np.arange(2)
    with pytest.raises(InputError, match="images of shape C×H×W, the model takes 784"):
        flip.check((784,))
    with pytest.raises(InputError, match="for images of shape"):
        flip.apply(np.zeros((2, 5), np.float32), numbers, 0, 0)
    with pytest.raises(InputError, match="images of floats, the batch has int64"):
        flip.apply(np.zeros((2, 1, 3, 3), np.int64), numbers, 0, 0)
    with pytest.raises(InputError, match="2 samples got 3 numbers"):
        flip.apply(images(2), np.arange(3), 0, 0)
    with pytest.raises(InputError, match="crop=5 can push an image of 5×7 out of sight"):
        Augmentation(crop=5).apply(images(2), numbers, 0, 0)
    with pytest.raises(InputError, match="crop=-1"):
        Augmentation(crop=-1)
