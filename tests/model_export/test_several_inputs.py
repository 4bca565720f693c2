"""Models of several inputs become bundles of one row per sample, and agree with PyTorch at every boundary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from federation.errors import InputError
from federation.inputs import NamedInput, columns, pack, row_dtype
from federation.manifest import Loss
from model_export.bundle import export_bundle
from model_export.inputs import sample_row
from model_export.source import load_source
from model_export.verify import TOLERANCE, verify_bundle
from tests.model_export import several_inputs

MODELS = Path(several_inputs.__file__)
CASES = {
    "Recommender": (
        (
            NamedInput("user", "int64", (), 20),
            NamedInput("item", "int64", (), 30),
            NamedInput("numbers", "float32", (3,)),
        ),
        Loss("bce_with_logits"),
    ),
    "MaskedTagger": (
        (NamedInput("input_ids", "int64", (5,), 13), NamedInput("attention_mask", "int64", (5,), 2)),
        Loss("cross_entropy"),
    ),
    "EncoderDecoder": (
        (NamedInput("input_ids", "int64", (4,), 11), NamedInput("decoder_input_ids", "int64", (3,), 11)),
        Loss("cross_entropy"),
    ),
    "Twins": (
        (NamedInput("left", "float32", (1, 8, 8)), NamedInput("right", "float32", (1, 8, 8))),
        Loss("cross_entropy"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_agrees_with_pytorch_at_every_boundary(name, tmp_path):
    inputs, loss = CASES[name]
    manifest = export_bundle(load_source(f"{MODELS}:{name}", inputs=inputs, loss=loss), tmp_path / "bundle")
    assert manifest.inputs == inputs and manifest.input.shape == (sum(item.size for item in inputs),)
    assert len(manifest.boundaries) >= 4
    results = verify_bundle(tmp_path / "bundle")
    assert not [result for result in results if result.skipped]
    worst = max(results, key=lambda result: result.largest())
    assert worst.largest() < TOLERANCE, (worst.boundary, worst.worst)


def test_the_module_gets_the_inputs_that_were_packed():
    """Not by the code that takes rows apart for verify, but by a call of the user's own module."""
    inputs, loss = CASES["Recommender"]
    source = load_source(f"{MODELS}:Recommender", inputs=inputs, loss=loss)
    rng = np.random.default_rng(5)
    arrays = {"user": rng.integers(0, 20, 4), "item": rng.integers(0, 30, 4), "numbers": rng.standard_normal((4, 3))}
    row = pack(inputs, arrays)
    torch.manual_seed(source.origin.seed)
    own = several_inputs.Recommender()
    expected = own(**{name: torch.from_numpy(value.astype(row.dtype)) for name, value in arrays.items()} | {
        name: torch.from_numpy(arrays[name]) for name in ("user", "item")
    })  # fmt: skip
    assert torch.equal(source.module()(torch.from_numpy(row)), expected)


def test_an_onnx_file_with_several_inputs(tmp_path):
    example = (torch.tensor([1, 2]), torch.tensor([3, 4]), torch.randn(2, 3))
    names = ["user", "item", "numbers"]
    file = tmp_path / "recommender.onnx"
    torch.onnx.export(
        several_inputs.Recommender(),
        example,
        str(file),
        dynamo=False,
        input_names=names,
        dynamic_axes={name: {0: "batch"} for name in names},
    )
    said = (NamedInput("user", "int64", (), 20), NamedInput("item", "int64", (), 30))
    manifest = export_bundle(load_source(str(file), inputs=said, loss=Loss("bce_with_logits")), tmp_path / "bundle")
    assert manifest.inputs == (*said, NamedInput("numbers", "float32", (3,)))
    assert max(result.largest() for result in verify_bundle(tmp_path / "bundle")) < TOLERANCE
    with pytest.raises(InputError, match="has no input age; its inputs are user, item, numbers"):
        load_source(str(file), inputs=(NamedInput("age", "float32", ()),))
    with pytest.raises(InputError, match="say the shape of each by its name: --input NAME="):
        load_source(str(file), input_shape=(3,))


def test_samples_keep_to_types_and_ranges():
    inputs = (NamedInput("ids", "int64", (4,), 9), NamedInput("mask", "bool", (4,)), NamedInput("age", "float32", ()))
    rows = sample_row(inputs, 50)
    assert rows.dtype == row_dtype(inputs) == "float32" and rows.shape == (50, 9)
    where = columns(inputs)
    assert set(np.unique(rows[:, where["ids"]])) == set(range(9))
    masks = rows[:, where["mask"]]
    assert (np.diff(masks, axis=1) <= 0).all() and (masks[:, 0] == 1).all() and (masks == 0).any()
    assert row_dtype(inputs[:2]) == "int64"
