"""Texts as samples, against the library called directly and a naive loop."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.data import check_trainable, load_samples, token_file
from edge_runtime.data.load import load_classes
from edge_runtime.data.text import LONGEST_LINE, text_form
from federation.errors import DataError, EmptyData, MissingPackage
from federation.inputs import NamedInput, columns
from federation.manifest import Loss, Manifest, TensorSpec
from tests import tiny_tokenizer
from tests.edge_runtime.data_files import model
from tests.tiny_tokenizer import VOCABULARY, write_lines

LENGTH = 8
INPUTS = (
    NamedInput("input_ids", "int64", (LENGTH,), VOCABULARY),
    NamedInput("attention_mask", "bool", (LENGTH,)),
    NamedInput("token_type_ids", "int64", (LENGTH,), 2),
)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return tiny_tokenizer.write(tmp_path)


def classifier(inputs: tuple[NamedInput, ...] | None = None) -> Manifest:
    plain = model((LENGTH,), 2, dtype="int64", vocabulary=VOCABULARY)
    if inputs is None:
        return plain
    row = TensorSpec("int64", (sum(item.size for item in inputs),))
    return replace(plain, input=row, inputs=inputs, vocabulary=None)


def language(next_token: bool = False) -> Manifest:
    output, labels = TensorSpec("float32", (LENGTH, VOCABULARY)), TensorSpec("int64", (LENGTH,))
    loss = Loss("cross_entropy", classes_last=True, next_token=next_token or None)
    return replace(classifier(), loss=loss, output=output, labels=labels)


def reviews() -> str:
    return write_lines(Path("reviews.jsonl"), *tiny_tokenizer.reviews(4))


def test_lines_are_samples_cut_and_padded(tokenizer: Path) -> None:
    samples = load_samples(reviews(), classifier(), tokenizer=tokenizer)
    library = tiny_tokenizer.build()
    library.enable_truncation(LENGTH)
    library.enable_padding(length=LENGTH, pad_id=0, pad_token="[PAD]")
    rows = tiny_tokenizer.reviews(4)
    inputs, labels = samples.batch(np.arange(len(rows)))
    np.testing.assert_array_equal(inputs, [library.encode(row["text"]).ids for row in rows])
    assert labels.tolist() == [int(row["label"] == "good") for row in rows]
    assert samples.class_names == ["bad", "good"]
    assert samples.describe()["classes"] == {"bad": 4, "good": 4}
    check_trainable(samples)


def test_mask_and_types_come_beside_the_tokens(tokenizer: Path) -> None:
    samples = load_samples(reviews(), classifier(INPUTS), tokenizer=tokenizer)
    library = tiny_tokenizer.build()
    library.enable_truncation(LENGTH)
    library.enable_padding(length=LENGTH, pad_id=0, pad_token="[PAD]")
    encoded = [library.encode(row["text"]) for row in tiny_tokenizer.reviews(4)]
    inputs, _ = samples.batch(np.arange(len(encoded)))
    where = columns(INPUTS)
    np.testing.assert_array_equal(inputs[:, where["input_ids"]], [found.ids for found in encoded])
    np.testing.assert_array_equal(inputs[:, where["attention_mask"]], [found.attention_mask for found in encoded])
    assert not inputs[:, where["token_type_ids"]].any()


@pytest.mark.parametrize("next_token", [False, True])
def test_documents_are_packed(tokenizer: Path, next_token: bool) -> None:
    rows = tiny_tokenizer.reviews(6)
    samples = load_samples(write_lines(Path("texts.jsonl"), *rows), language(next_token), tokenizer=tokenizer)
    library, stream = tiny_tokenizer.build(), []
    for row in rows:
        for token in library.encode(row["text"], add_special_tokens=False).ids:
            stream.append(token)
        stream.append(library.token_to_id("[SEP]"))
    inputs, labels = [], []
    for start in range(0, len(stream) - LENGTH + int(next_token), LENGTH):
        inputs.append(stream[start : start + LENGTH])
        labels.append(stream[start : start + LENGTH] if next_token else stream[start + 1 : start + 1 + LENGTH])
    found = samples.batch(np.arange(len(samples)))
    np.testing.assert_array_equal(found[0], inputs)
    np.testing.assert_array_equal(found[1], labels)
    check_trainable(samples)
    train, held_out = samples.split(0.2, seed=0)
    assert len(train) + len(held_out) == len(samples)
    np.testing.assert_array_equal(train.labels[:], np.array(labels)[train.numbers])
    np.testing.assert_array_equal(train.labels[1], np.array(labels)[train.numbers[1]])


def test_files_of_text_are_documents(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_runtime.data.text._PIECE", 40)  # a long file goes through in pieces
    Path("texts").mkdir()
    for name in ("b", "a"):
        Path(f"texts/{name}.txt").write_text(f"{name} film\nit was good\n" * 6)
    samples = load_samples("texts", language(True), tokenizer=tokenizer)
    library = tiny_tokenizer.build()
    stream = [
        token
        for name in "ab"
        for token in [*library.encode(Path(f"texts/{name}.txt").read_text(), add_special_tokens=False).ids, 3]
    ]
    count = len(stream) // LENGTH
    found, _ = samples.batch(np.arange(len(samples)))
    np.testing.assert_array_equal(found.reshape(-1), stream[: count * LENGTH])
    assert len(load_samples("texts/a.txt", language(True), tokenizer=tokenizer)) > 0


def test_folders_of_texts_are_classes(tokenizer: Path) -> None:
    for label in ("neg", "pos"):
        Path("reviews", label).mkdir(parents=True)
        Path("reviews", label, "1.txt").write_text(f"it was {'good' if label == 'pos' else 'bad'}\n")
    samples = load_samples("reviews", classifier(), tokenizer=tokenizer)
    assert samples.class_names == ["neg", "pos"] and samples.labels[:].tolist() == [0, 1]


def test_fields_are_chosen_by_name(tokenizer: Path) -> None:
    file = write_lines(Path("r.jsonl"), {"review": "good", "stars": 1}, {"review": "bad", "stars": 0})
    samples = load_samples(f"{file}:review:stars", classifier(), tokenizer=tokenizer)
    assert samples.labels[:].tolist() == [1, 0] and samples.class_names is None


def test_classes_come_from_lines() -> None:
    assert load_classes(reviews()) == ["bad", "good"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "good"', "line 2 is no JSON"),
        ("[1]", "line 2 is no JSON object"),
        ('{"label": "good"}', "line 2 has no field 'text', it has label; others are chosen by FILE.jsonl:TEXT:LABEL"),
        ('{"text": 3, "label": "good"}', "line 2: text: expected a text, got '3'"),
        ('{"text": "a", "label": null}', "line 2: label: expected a name or a number, got 'None'"),
        ('{"text": "a", "label": NaN}', "line 2: label: expected a name or a number, got 'nan'"),
        ('{"text": "a", "label": "meh"}', "line 2 has the label 'meh'; expected bad, good"),
        ('{"text": "\\ud83d", "label": "good"}', "line 2: text: expected text in UTF-8"),
        ("[" * 100_000, "line 2 is no JSON"),
        ("\xff", "line 2 is no text in UTF-8"),
    ],
)
def test_a_wrong_line_is_named(tokenizer: Path, line: str, message: str) -> None:
    first = json.dumps({"text": "good", "label": "good"}).encode()
    Path("r.jsonl").write_bytes(first + b"\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError) as caught:
        load_samples("r.jsonl", replace(classifier(), classes=("bad", "good")), tokenizer=tokenizer)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_line_has_a_limit(tokenizer: Path) -> None:
    write_lines(Path("r.jsonl"), {"text": "a" * LONGEST_LINE, "label": 0})
    with pytest.raises(DataError, match="line 1 has more than 4 MiB"):
        load_samples("r.jsonl", classifier(), tokenizer=tokenizer)


def test_other_data_is_refused(tokenizer: Path) -> None:
    Path("empty.jsonl").write_text("\n")
    Path("a.txt").write_text("good film")
    with pytest.raises(EmptyData, match="no samples"):
        load_samples("empty.jsonl", classifier(), tokenizer=tokenizer)
    with pytest.raises(EmptyData, match="has 3 tokens, and a sample"):
        load_samples("a.txt", language(), tokenizer=tokenizer)
    with pytest.raises(DataError, match="no labels"):
        load_samples("a.txt", classifier(), tokenizer=tokenizer)
    with pytest.raises(DataError, match="expected tokens"):
        load_samples("a.txt", model(), tokenizer=tokenizer)
    with pytest.raises(DataError, match="give --tokenizer"):
        load_samples("a.txt", language())
    with pytest.raises(DataError, match=r"no such file: none\.jsonl"):
        load_samples("none.jsonl:a:b", classifier(), tokenizer=tokenizer)
    mixed = write_lines(Path("m.jsonl"), {"text": "a", "label": 1}, {"text": "a", "label": "x"})
    with pytest.raises(DataError, match="some labels are words"):
        load_samples(mixed, classifier(), tokenizer=tokenizer)


def test_what_a_model_takes_of_a_text() -> None:
    assert text_form(model()) is None
    assert text_form(classifier(INPUTS)).tokens == "input_ids"
    assert text_form(classifier((*INPUTS, NamedInput("answer", "int64", (LENGTH,), VOCABULARY)))) is None


def change(tokenizer: Path, **parts: object) -> Path:
    found = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps({**found, **parts}))
    return tokenizer


@pytest.mark.skipif(sys.platform != "linux", reason="this system does not bound the memory of a process")
def test_a_tokenizer_that_swells_is_ended(tokenizer: Path) -> None:
    swell = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    change(tokenizer, normalizer={"type": "Sequence", "normalizers": [swell] * 60})
    with pytest.raises(DataError, match=r"tokenizer.json failed: it took more than the \d+ MiB"):
        load_samples(reviews(), classifier(), tokenizer=tokenizer)


def test_a_tokenizer_that_multiplies_tokens_is_refused(tokenizer: Path) -> None:
    change(tokenizer, normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": " a" * 5000})
    with pytest.raises(DataError, match="makes 5000 tokens of a text of 1 characters"):
        load_samples(write_lines(Path("a.jsonl"), {"text": "a", "label": 0}), language(), tokenizer=tokenizer)


def test_a_tokenizer_without_progress_is_ended(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "PATIENCE", -1.0)
    ended, kill = threading.Event(), token_file.subprocess.Popen.kill
    monkeypatch.setattr(token_file.subprocess.Popen, "kill", lambda process: (kill(process), ended.set()))

    def texts() -> Iterator[tuple[str, bool]]:
        yield "good", True
        ended.wait(60)  # on a quick machine the process would be through before the first look

    with pytest.raises(DataError, match="made no progress"):
        token_file.write_ids(tokenizer, texts(), np.uint16, LENGTH)


@pytest.mark.skipif(sys.platform == "win32", reason="this system does not bound what a process writes")
def test_ids_that_take_too_much_room_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    long = classifier(tuple(replace(item, shape=(20_000,)) for item in INPUTS))
    space = token_file.TokenSpace(tmp_path, 1000)
    with pytest.raises(DataError, match="the ids that it makes take more than the 1000 bytes that are left"):
        load_samples(reviews(), long, tokenizer=tokenizer, space=space)


def test_a_wrong_tokenizer_is_refused(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer.write_text("{}")
    with pytest.raises(DataError, match=r"it is no tokenizer.json that can be read"):
        load_samples(reviews(), classifier(), tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"no such file: none.json; expected a tokenizer.json"):
        load_samples(reviews(), classifier(), tokenizer=Path("none.json"))
    monkeypatch.setattr(token_file, "MAX_TOKENIZER_BYTES", 1)
    with pytest.raises(DataError, match="this is no tokenizer"):
        load_samples(reviews(), classifier(), tokenizer=tokenizer)


def test_ids_beyond_the_vocabulary_are_refused(tokenizer: Path) -> None:
    small = replace(classifier(), vocabulary=5)
    with pytest.raises(DataError, match=r"token id .* takes 0 to 4"):
        load_samples(reviews(), small, tokenizer=tokenizer)


def test_without_the_library_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(token_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"pip install 'embrace-fl\[text\]'"):
        load_samples(reviews(), classifier(), tokenizer=tmp_path / "tokenizer.json")
