"""A device's data: splitting, describing, training or not; the page about all of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import embrace
from edge_runtime.data import check_trainable, from_arrays
from federation.errors import EmptyData, InputError, SingleClass
from federation.manifest import dumps
from tests.edge_runtime.data_files import ROOT, everything, model, write_text


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are named as a user beside them would, so that messages are what the user sees."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    pytest.importorskip("torch")
    embrace.export("digits", classes=[str(number) for number in range(10)]).to_onnx("model.onnx")
    page = (ROOT / "docs" / "guides" / "data.md").read_text()
    blocks = re.findall(r"```(\w*)\n(.*?)```", page, re.DOTALL)
    write_text("mydata.py", next(text for kind, text in blocks if text.startswith("# mydata.py")))
    names: dict[str, Any] = {}
    for (kind, text), (_, after) in zip(blocks, [*blocks[1:], ("", "")]):
        if kind == "python" and not text.startswith("# mydata.py"):
            exec(text, names)
            printed = capsys.readouterr().out
            assert not printed or printed == after
