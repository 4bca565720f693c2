"""A model of two inputs with tied weights, from export to rounds over a socket: held to PyTorch step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from edge_runtime.bundle_files import map_weights, read_manifest
from embrace.client import Client
from tests.embrace.cli.conftest import Embrace, run
from tests.live_server import live_server
from tests.model_export import several_inputs
from tests.waiting import wait_until

MODEL = f"{several_inputs.__file__}:MaskedTagger"
INPUTS = ("--input", "input_ids=5:int64:13", "--input", "attention_mask=5:int64:2")
COUNT, STEPS, ROUNDS, RATE = 8, 2, 2, 0.5


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("several") / "tagger"
    assert run("export", MODEL, *INPUTS, "--out", directory).code == 0
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 6, (COUNT, 1))
    path = tmp_path_factory.mktemp("data") / "texts.npz"
    mask = (np.arange(5) < lengths).astype(np.int64)
    np.savez(
        path, input_ids=rng.integers(0, 13, (COUNT, 5)), attention_mask=mask, labels=rng.integers(0, 13, (COUNT, 5))
    )
    return path


def test_it_is_verified_and_fine_tuned(embrace: Embrace, bundle: Path, data: Path, tmp_path: Path) -> None:
    assert embrace("verify", bundle, "--json").code == 0
    shown = embrace("inspect", bundle, "--json").json
    assert [item["name"] for item in shown["inputs"]] == ["input_ids", "attention_mask"]
    options = ("--rounds", 2, "--epochs", 3, "--rate", "0.02", "--batch", COUNT, "--json")
    answer = embrace("train", bundle, "--data", data, "--work", tmp_path / "w", "--out", tmp_path / "o", *options)
    assert answer.code == 0, answer.err
    assert answer.json["after"]["mean_loss"] < answer.json["before"]["mean_loss"]


@pytest.mark.parametrize("place", [-1, 0], ids=["last layer", "everything"])
def test_agents_train_it_as_pytorch_does(
    embrace: Embrace, bundle: Path, data: Path, tmp_path: Path, place: int
) -> None:
    manifest = read_manifest(bundle)
    boundary = manifest.boundaries[place].name
    local = {"steps": STEPS, "batch": COUNT, "rate": str(RATE), "rules": []}
    with live_server(tmp_path / "server") as server:
        job = server.create_job(bundle, num_rounds=ROUNDS, local=local)
        told = ("--server", server.url, "--token", server.enrolment, "--data", data, "--work", tmp_path / "work")
        answer = embrace("agent", *told, "--boundary", boundary, "--tasks", ROUNDS, "--json")
        assert answer.code == 0, answer.err
        client = Client(server.url, server.admin)
        wait_until(lambda: client.job(job)["state"] == "done")
        client.save_weights(job, ROUNDS, tmp_path / "weights.safetensors")
        client.close()
    found = manifest.space.views(np.array(map_weights(tmp_path / "weights.safetensors", manifest.space)))
    first = manifest.space.views(np.array(map_weights(bundle / manifest.weights.name, manifest.space)))
    expected = trained_by_pytorch(first, data, whole=place == 0)
    assert not np.array_equal(found["words.weight"], first["words.weight"])
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name].detach().numpy(), atol=2e-5, err_msg=name)


def trained_by_pytorch(start: dict[str, np.ndarray], data: Path, whole: bool) -> dict[str, torch.Tensor]:
    """Gradient descent on all samples; in front of the last layer the weights of the round's beginning."""
    module = several_inputs.MaskedTagger()
    module.load_state_dict({name: torch.tensor(value) for name, value in start.items()}, strict=False)
    stored = {name: torch.from_numpy(value) for name, value in np.load(data).items()}
    labels = stored.pop("labels")
    parameters = list(module.parameters()) if whole else [module.words.weight]
    for _ in range(ROUNDS):
        hidden = module(**stored)["hidden"].detach()
        for _ in range(STEPS):
            logits = module(**stored)["logits"] if whole else module.head(hidden).transpose(1, 2)
            gradients = torch.autograd.grad(F.cross_entropy(logits, labels), parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= RATE * gradient
    return dict(module.named_parameters())
