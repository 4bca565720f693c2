"""Texts from the command line: export with a tokenizer, train, agents over a socket, simulate; held to PyTorch."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from edge_runtime.bundle_files import map_weights, read_manifest
from embrace.client import Client
from tests import text_models, tiny_tokenizer
from tests.embrace.cli.conftest import Embrace, run
from tests.live_server import live_server
from tests.tiny_tokenizer import VOCABULARY, write_lines
from tests.waiting import wait_until

LENGTH, STEPS, RATE = 8, 4, 0.5
INPUTS = (f"input_ids={LENGTH}:int64:{VOCABULARY}", f"attention_mask={LENGTH}:int64:2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, texts, and two bundles: a classifier that carries the tokenizer, a language model that does not."""
    folder = tmp_path_factory.mktemp("text")
    tokenizer = tiny_tokenizer.write(folder)
    write_lines(folder / "reviews.jsonl", *tiny_tokenizer.reviews(8))
    names = [part for text in INPUTS for part in ("--input", text)]
    own = ("--tokenizer", tokenizer, "--classes", folder / "reviews.jsonl", "--out", folder / "classifier")
    answer = run("export", f"{text_models.__file__}:Classifier", *names, *own)
    assert answer.code == 0, answer.err
    shape = ("--input", LENGTH, "--dtype", "int64", "--vocabulary", VOCABULARY, "--classes-last", "--next-token")
    answer = run("export", f"{text_models.__file__}:Language", *shape, "--out", folder / "language")
    assert answer.code == 0, answer.err
    return folder


def trained_by_pytorch(bundle: Path) -> dict[str, np.ndarray]:
    """Gradient descent on all reviews, tokenised by the library itself."""
    library = tiny_tokenizer.build()
    library.enable_truncation(LENGTH)
    library.enable_padding(length=LENGTH, pad_id=0, pad_token="[PAD]")
    rows = tiny_tokenizer.reviews(8)
    encoded = [library.encode(row["text"]) for row in rows]
    ids, mask = (torch.tensor([getattr(one, name) for one in encoded]) for name in ("ids", "attention_mask"))
    labels = torch.tensor([["bad", "good"].index(row["label"]) for row in rows])
    manifest = read_manifest(bundle)
    start = manifest.space.views(np.array(map_weights(bundle / manifest.weights.name, manifest.space)))
    module = text_models.Classifier()
    module.load_state_dict({name: torch.tensor(value) for name, value in start.items()})
    for _ in range(STEPS):
        module.zero_grad()
        F.cross_entropy(module(ids, mask), labels).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= RATE * parameter.grad
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


def weights(bundle: Path, file: Path | None = None) -> dict[str, np.ndarray]:
    manifest = read_manifest(bundle)
    return dict(manifest.space.views(np.array(map_weights(file or bundle / manifest.weights.name, manifest.space))))


def test_train_takes_texts(embrace: Embrace, folder: Path, tmp_path: Path) -> None:
    bundle = folder / "classifier"
    shown = embrace("inspect", bundle, "--json").json
    assert shown["tokenizer"]["name"] == "tokenizer.json" and shown["classes"] == ["bad", "good"]
    assert "takes texts by its own tokenizer.json" in embrace("inspect", bundle).out
    options = ("--rounds", 1, "--steps", STEPS, "--batch", 16, "--rate", RATE, "--rule", "sgd", "--holdout", 0)
    places = ("--work", tmp_path / "w", "--out", tmp_path / "o")
    answer = embrace("train", bundle, "--data", folder / "reviews.jsonl", *options, *places, "--json")
    assert answer.code == 0, answer.err
    for name, value in trained_by_pytorch(bundle).items():
        np.testing.assert_allclose(weights(tmp_path / "o")[name], value, atol=1e-5, err_msg=name)
    assert (tmp_path / "o" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_agents_take_texts_with_the_bundles_tokenizer(embrace: Embrace, folder: Path, tmp_path: Path) -> None:
    bundle, data = folder / "classifier", folder / "reviews.jsonl"
    with live_server(tmp_path / "server") as server, closing(Client(server.url, server.admin)) as client:
        file = tmp_path / "job.toml"
        file.write_text(
            f"bundle = '{bundle}'\nnum_rounds = 1\n[evaluate]\ndata = '{data}'\n"
            f"[local]\nsteps = {STEPS}\nbatch = 16\nrate = '{RATE}'\nrules = []\n"
        )
        job = client.create(file)
        told = ("--server", server.url, "--token", server.enrolment, "--work", tmp_path / "work", "--data", data)
        answer = embrace("agent", *told, "--tasks", 1, "--json")
        assert answer.code == 0, answer.err
        wait_until(lambda: client.job(job)["state"] == "done")
        client.save_weights(job, 1, tmp_path / "weights.safetensors")
    found = weights(bundle, tmp_path / "weights.safetensors")
    for name, value in trained_by_pytorch(bundle).items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)


def test_simulations_take_texts(embrace: Embrace, folder: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "texts.jsonl", *tiny_tokenizer.reviews(40))
    (tmp_path / "job.toml").write_text(
        f"bundle = '{folder / 'language'}'\nnum_rounds = 2\n[local]\nsteps = 4\nbatch = 4\nrate = '0.5'\n"
        "[simulate]\ndata = 'texts.jsonl'\ntokenizer = 'tokenizer.json'\ndevices = 2\n"
    )
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    answer = embrace("simulate", tmp_path / "job.toml", "--out", tmp_path / "run", "--workers", 1, "--json")
    assert answer.code == 0, answer.err
    losses = [record["test_loss"] for record in answer.json["rounds"]]
    assert losses[-1] < losses[0]


def test_language_models_take_documents(embrace: Embrace, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the film was good and it was fine\n" * 40)
    options = ("--rounds", 2, "--steps", 10, "--batch", 8, "--rate", "0.5", "--work", tmp_path / "w", "--json")
    told = ("train", folder / "language", "--data", tmp_path / "a.txt", *options)
    answer = embrace(*told, "--tokenizer", folder / "tokenizer.json", "--out", tmp_path / "o")
    assert answer.code == 0, answer.err
    assert answer.json["after"]["mean_loss"] < answer.json["before"]["mean_loss"]
    refused = embrace(*told, "--out", tmp_path / "other")
    assert refused.code == 2 and "give --tokenizer tokenizer.json" in refused.out + refused.err


def test_a_wrong_tokenizer_is_told_before_the_export(embrace: Embrace, tmp_path: Path) -> None:
    answer = embrace("export", "digits", "--tokenizer", tmp_path / "none.json", "--out", tmp_path / "b")
    assert answer.code == 2 and "no such file" in answer.error and not (tmp_path / "b").exists()


def test_a_file_that_is_no_tokenizer_does_not_travel(embrace: Embrace, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    shape = ("--input", LENGTH, "--dtype", "int64", "--vocabulary", VOCABULARY, "--classes-last", "--next-token")
    answer = embrace("export", f"{text_models.__file__}:Language", *shape, "--tokenizer", file, "--out", tmp_path / "b")
    assert answer.code == 2 and not (tmp_path / "b").exists()
    assert "it is no tokenizer.json that can be read" in answer.err
