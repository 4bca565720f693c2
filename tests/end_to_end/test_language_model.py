"""A small language model whose logits are never whole, trained and scored by an agent over HTTP, against PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# ruff: noqa: E402
torch = pytest.importorskip("torch")

import embrace
from embrace.client import Client
from embrace.jobs import Job
from model_export.autodiff import chunked_loss
from model_export.zoo.llama import Llama, LlamaShape
from tests.live_server import live_server
from tests.stock_python import ROOT
from tests.waiting import PATIENCE

SHAPE = LlamaShape(vocabulary=150, width=32, inner=64, blocks=2, heads=4, key_heads=2)
LENGTH, STEPS, RATE = 8, 4, 0.01


def test_an_agent_trains_and_scores_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chunked_loss, "LARGE", 1)
    monkeypatch.setattr(chunked_loss, "PIECE", 64 * LENGTH)
    torch.manual_seed(0)
    model = Llama(SHAPE, LENGTH)
    row = np.random.default_rng(0).integers(0, SHAPE.vocabulary, LENGTH)
    x = np.tile(row, (8, 1))  # the same text throughout: whatever is held out, and in whatever order, is known
    bundle = embrace.export(
        model,
        tmp_path / "bundle",
        sample=x,
        vocabulary=SHAPE.vocabulary,
        classes_last=True,
        next_token=True,
        split=["layers.1"],
    )
    assert bundle.manifest.loss_chunk == 64
    np.savez(tmp_path / "text.npz", x=x, y=x)
    with live_server(tmp_path) as server, Client(server.url, server.admin) as client:
        local = {"steps": STEPS, "batch": 1, "rate": f"{RATE}", "rules": []}
        job = client.create(Job(bundle.path, num_rounds=2, local=local, evaluate={"on_devices": True, "holdout": 0.25}))
        command = [sys.executable, "-m", "embrace", "agent", "--server", server.url, "--data", tmp_path / "text.npz"]
        command += ["--work", tmp_path / "agent", "--tasks", "2", "--json"]
        environment = {**os.environ, "EMBRACE_TOKEN": server.enrolment}
        done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        told = [json.loads(line) for line in done.stdout.decode().splitlines()]
        events = [event["body"] for event in client.watch(job) if event["kind"] == "RoundCommitted"]
    losses = _by_hand(model, row, 2 * STEPS)
    assert [report["loss"] for report in told] == pytest.approx(
        [np.mean(losses[:STEPS]), np.mean(losses[STEPS : 2 * STEPS])], rel=1e-4
    )
    scores = [event["evaluation"] for event in events]
    assert [score["mean_loss"] for score in scores] == pytest.approx([losses[0], losses[STEPS]], rel=1e-4)
    assert all(score["counted"] == 2 * (LENGTH - 1) for score in scores)


def _by_hand(model: Llama, row: np.ndarray, steps: int) -> list[float]:
    tokens, losses = torch.from_numpy(row)[None], []
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses
