"""A coordinator that wants its devices' samples, over real sockets: what an agent lets it have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import embrace
from edge_runtime.bundle_files import map_weights, read_manifest
from tests.hostile_bundles import STOLEN, batch_as_gradient, batch_beside_labels, changed_bundle
from tests.live_server import LiveServer, live_server

pytest.importorskip("onnx")
IMAGES = 64
PLAN = {"num_rounds": 1, "local": {"steps": 1, "batch": IMAGES, "rate": "1.0"}, "participate": {"min_available": 1}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("hostile")) as running:
        yield running


@pytest.fixture
def private() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(8)
    return rng.random((IMAGES, 1, 8, 8), np.float32), rng.integers(0, 10, IMAGES)


@pytest.fixture
def agent(server: LiveServer, private: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> Iterator[embrace.Agent]:
    work = tmp_path / "work"
    with embrace.Agent.join(server.url, private, token=server.enrolment, tier="strong", work=work) as found:
        yield found
    server.retire_devices()


def stolen(server: LiveServer, job: str, bundle: Path, folder: Path) -> np.ndarray:
    """What the coordinator can compute from the device's update: with a rate of one, the "gradient"."""
    space, versions = read_manifest(bundle).space, []
    with embrace.Client(server.url, server.admin) as client:
        for version in (0, 1):
            client.save_weights(job, version, folder / str(version))
            versions.append(space.views(np.array(map_weights(folder / str(version), space)))[STOLEN])
    return (versions[0] - versions[1]).reshape(IMAGES, 1, 8, 8)


def test_without_the_check_every_sample_is_given_away(
    server: LiveServer,
    agent: embrace.Agent,
    private: tuple[np.ndarray, np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack works against an agent that runs what it is given: else the tests below would prove nothing."""
    monkeypatch.setattr("edge_runtime.remote.check_training_graph", lambda *_: None)
    changed_bundle(tmp_path / "bundle", batch_as_gradient)
    job = server.create_job(tmp_path / "bundle", **PLAN)
    assert agent.run(most_tasks=1) == 1
    with embrace.Client(server.url, server.admin) as client:
        assert list(client.watch(job))  # until the round is committed
    found = stolen(server, job, tmp_path / "bundle", tmp_path)
    matches = [np.abs(found - image).max(axis=(1, 2, 3)).min() < 1e-5 for image in private[0]]
    assert sum(matches) == IMAGES


@pytest.mark.parametrize("attack", [batch_as_gradient, batch_beside_labels])
def test_an_agent_refuses_and_says_why(
    server: LiveServer, agent: embrace.Agent, tmp_path: Path, attack: object
) -> None:
    changed_bundle(tmp_path / "bundle", attack)  # type: ignore[arg-type]
    job = server.create_job(tmp_path / "bundle", **PLAN)
    offer = agent.client.next_task(30.0)
    assert offer is not None and not agent.answer(offer)
    with embrace.Client(server.url, server.admin) as client:
        assert client.job(job)["version"] == 0
        client.stop(job)
        told = [json.dumps(event) for event in client.watch(job)]
    assert any("unsafe_graph" in event and "the graph is refused: " in event for event in told)
