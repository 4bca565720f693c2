"""Data of models with several inputs: from arrays, archives, tables and functions, and what is wrong with some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.data import load_samples
from edge_runtime.sample_file import open_samples, write_samples
from federation.errors import BundleError, DataError
from federation.inputs import EXACT, NamedInput, pack
from federation.manifest import Loss, Manifest, TensorSpec, dumps, loads
from tests import tiny_bundle

INPUTS = (NamedInput("ids", "int64", (2,), 50), NamedInput("keep", "bool", (2,)), NamedInput("age", "float32", ()))
COUNT = 6


def model(inputs: tuple[NamedInput, ...] = INPUTS, dtype: str = "float32") -> Manifest:
    plain = tiny_bundle.manifest(
        [tiny_bundle.layer("first", tiny_bundle.weight("w", 2))],
        [tiny_bundle.boundary("first", 0, 1)],
        {},
        loss=Loss("cross_entropy"),
        labels=TensorSpec("int64", ()),
        output=TensorSpec("float32", (3,)),
    )
    size = sum(item.size for item in inputs)
    return replace(plain, input=TensorSpec(dtype, (size,)), inputs=inputs)


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {
        "ids": rng.integers(0, 50, (COUNT, 2)),
        "keep": rng.random((COUNT, 2)) > 0.5,
        "age": rng.random(COUNT).astype(np.float32),
    }


LABELS = np.array([0, 1, 2, 0, 1, 2])


def check(samples) -> None:
    found, labels = samples.batch(np.array([4, 1]))
    given = arrays()
    np.testing.assert_array_equal(found, pack(INPUTS, {name: value[[4, 1]] for name, value in given.items()}))
    np.testing.assert_array_equal(labels, LABELS[[4, 1]])
    assert found.dtype == np.float32 and found.shape == (2, 5)
    np.testing.assert_array_equal(found[:, :2], given["ids"][[4, 1]])
    np.testing.assert_array_equal(found[:, 4], given["age"][[4, 1]])


def test_arrays_by_name() -> None:
    check(load_samples((arrays(), LABELS), model()))


@pytest.mark.parametrize(
    ("save", "stored"), [(np.savez, "npz, mapped"), (np.savez_compressed, "npz, read into memory")]
)
def test_an_archive_with_an_array_for_each(save, stored: str, tmp_path: Path) -> None:
    save(tmp_path / "data.npz", **arrays(), labels=LABELS)
    samples = load_samples(tmp_path / "data.npz", model())
    check(samples)
    assert samples.describe()["stored"] == stored


def test_an_archive_of_whole_rows(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=pack(INPUTS, arrays()), y=LABELS)
    check(load_samples(tmp_path / "data.npz", model()))


def test_a_table_has_the_columns_of_all_inputs_in_their_order(tmp_path: Path) -> None:
    lines = [
        ",".join([*(repr(float(value)) for value in row), str(label)])
        for row, label in zip(pack(INPUTS, arrays()), LABELS)
    ]
    (tmp_path / "data.csv").write_text("\n".join(["id1,id2,keep1,keep2,age,label", *lines]))
    check(load_samples(tmp_path / "data.csv", model()))


@pytest.mark.parametrize(
    "returned",
    [
        "given, labels",
        "{**given, 'y': labels}",
        "[(({name: value[:4] for name, value in given.items()}), labels[:4]), "
        "({name: value[4:] for name, value in given.items()}, labels[4:])]",
    ],
)
def test_a_function(returned: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "kept.npz", **arrays(), y=LABELS)
    (tmp_path / "own.py").write_text(
        "import numpy as np\n"
        "def data():\n"
        f"    kept = np.load({str(tmp_path / 'kept.npz')!r})\n"
        "    given, labels = {name: kept[name] for name in ('ids', 'keep', 'age')}, kept['y']\n"
        f"    return {returned}\n"
    )
    check(load_samples(f"{tmp_path / 'own.py'}:data", model()))


def test_samples_that_travel_to_a_coordinator(tmp_path: Path) -> None:
    write_samples(load_samples((arrays(), LABELS), model()), tmp_path / "samples")
    check(open_samples(tmp_path / "samples", model(), "evaluate.data"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": None}, "has no ids; the model 'tiny' takes the inputs ids, keep, age"),
        ({"ids": np.full((COUNT, 2), 50)}, "ids: sample 0 has token id 50, the model takes 0 to 49"),
        ({"ids": np.zeros((COUNT, 3), int)}, "ids has samples of 3 .int64., the model takes 2 .int64."),
        ({"ids": np.zeros((COUNT, 2))}, "ids has samples of 2 .float64., the model takes 2 .int64.: expected integers"),
        ({"keep": np.full((COUNT, 2), 3)}, "keep: sample 0 has the value 3, the model takes 0 to 1"),
        ({"age": np.full(COUNT, np.nan)}, "age: sample 0 has the value nan"),
        ({"age": np.zeros(COUNT - 1)}, "expected as many samples of every input, got 6 of ids, 6 of keep, 5 of age"),
    ],
)
def test_what_does_not_fit_is_named(change, message: str) -> None:
    given = {name: value for name, value in {**arrays(), **change}.items() if value is not None}
    with pytest.raises(DataError, match=message):
        load_samples((given, LABELS), model())


def test_a_model_of_one_input_takes_no_names() -> None:
    one = replace(model(), inputs=None)
    with pytest.raises(DataError, match="has arrays by name, the model 'tiny' takes a single input"):
        load_samples((arrays(), LABELS), one)


def test_the_manifest_keeps_them_and_refuses_what_is_no_row() -> None:
    made = model()
    assert loads(dumps(made)) == made
    with pytest.raises(BundleError, match="expected an input of"):
        replace(made, input=TensorSpec("int64", (5,)))
    with pytest.raises(BundleError, match="different names"):
        model((INPUTS[0], INPUTS[0]))
    with pytest.raises(BundleError, match="beside inputs of floats token ids must be at most"):
        model((NamedInput("ids", "int64", (4,), EXACT + 1), INPUTS[2]))
    with pytest.raises(BundleError, match="expected the type"):
        NamedInput("ids", "complex64", ())
