"""Devices score the version that they received on data that they hold out, against PyTorch on the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

# ruff: noqa: E402
torch = pytest.importorskip("torch")

from edge_runtime.data import Samples
from embrace.bundles import Bundle
from federation.identity import task_seed
from federation.space import Vector
from model_export.zoo.digits import digits_cnn
from tests.end_to_end.conftest import WriteJob
from tests.end_to_end.fleet import SEED, Fleet, RealDevice, job_text, read_weights, simulate

EVALUATE = "[evaluate]\non_devices = true\nholdout = 0.25\n"


def scored(bundle: Path, weights: Vector, x: Any, y: Any) -> tuple[float, int]:
    """Sum of the losses and number of right predictions, by the module that the bundle came from."""
    module, space = digits_cnn(), Bundle(bundle).manifest.space
    state = {p.name: torch.from_numpy(np.array(weights[space.slice_of(p.name)]).reshape(p.shape)) for p in space}
    module.load_state_dict(state, strict=False)
    module.eval()
    with torch.no_grad():
        outputs = module(torch.from_numpy(np.array(x, np.float32)))
    labels = torch.from_numpy(np.array(y, np.int64))
    loss = torch.nn.functional.cross_entropy(outputs.double(), labels, reduction="sum")
    return float(loss), int((outputs.argmax(1) == labels).sum())


def parts(device: RealDevice) -> tuple[Samples, Samples]:
    """What a device trains on, and what it holds out."""
    (loaded,) = device.agent._loaded.values()
    assert loaded.held_out is not None and isinstance(loaded.trainer.samples, Samples)
    return loaded.trainer.samples, loaded.held_out


def rows(samples: Samples) -> set[bytes]:
    return {x.tobytes() for x in samples.batch(np.arange(len(samples)))[0]}


def test_scores_of_devices_are_those_of_their_own_data(fleet: Fleet, write_job: WriteJob, tmp_path: Path) -> None:
    job = fleet.admin.create(write_job(job_text("embracing", 2, EVALUATE, steps=3)))
    fleet.wait(lambda: fleet.job(job)["state"] == "done")
    events = [event["body"] for event in fleet.admin.watch(job) if event["kind"] == "RoundCommitted"]
    told = [body["evaluation"] for body in events]
    assert [row["version"] for row in told] == [0, 1] and [row["devices"] for row in told] == [5, 5]
    fleet.admin.save_weights(job, 1, tmp_path / "1.safetensors")
    versions = [fleet.bundle / "weights.safetensors", tmp_path / "1.safetensors"]
    for version, (file, found) in enumerate(zip(versions, told)):
        weights = read_weights(fleet.bundle, file)
        each: dict[str, list[tuple[float, int, int]]] = {}
        for device in fleet.devices.values():
            held = parts(device)[1]
            x, y = held.batch(np.arange(len(held)))
            tier = str(device.agent.device.tier)
            each.setdefault(tier, []).append((*scored(fleet.bundle, weights, x, y), len(held)))
        everything = np.array([row for own in each.values() for row in own])
        losses, rights, counts = everything.T
        assert found["counted"] == counts.sum()
        assert found["mean_loss"] == pytest.approx(losses.sum() / counts.sum(), rel=1e-4)
        assert found["accuracy"] == pytest.approx(rights.sum() / counts.sum())
        assert found["spread"]["accuracy"]["min"] == pytest.approx((rights / counts).min())
        assert found["spread"]["mean_loss"]["max"] == pytest.approx((losses / counts).max(), rel=1e-4)
        for tier, own in each.items():
            by_tier = np.array(own).sum(0)
            assert found["tiers"][tier]["mean_loss"] == pytest.approx(by_tier[0] / by_tier[2], rel=1e-4)
        metrics = {row["name"]: row["value"] for row in fleet.admin.metrics(job) if row["version"] == version}
        assert metrics == {f"device_{name}": found[name] for name in ("accuracy", "mean_loss")}
    best = max(told, key=lambda row: row["accuracy"])
    assert (
        fleet.job(job)["best"]["version"] == best["version"] and fleet.job(job)["best"]["metric"] == "device_accuracy"
    )
    exported = fleet.admin.export(job, tmp_path / "best", bundle=fleet.bundle, best=True)
    expected = read_weights(fleet.bundle, versions[best["version"]])
    assert read_weights(exported.path, exported.path / "weights.safetensors").tobytes() == expected.tobytes()


def test_what_is_held_out_is_never_trained_on(fleet: Fleet, write_job: WriteJob) -> None:
    """A quarter of each device's samples, the same after a restart of the agent, and others for another seed."""
    fleet.run(write_job(job_text("fedavg", 1, EVALUATE, steps=2)))
    for device in fleet.devices.values():
        train, held = parts(device)
        both = train._chosen, held._chosen
        assert both[0] is not None and both[1] is not None
        assert not set(both[0]) & set(both[1]) and len(held) == max(1, round(0.25 * (len(train) + len(held))))
        assert sorted([*both[0], *both[1]]) == list(range(len(train) + len(held)))
        assert device.reports[-1].samples == len(train) and device.reports[-1].evaluation["counted"] == len(held)
        whole = Samples(held.name, held._rows, held._fit, held._targets)
        assert np.array_equal(whole.split(0.25, task_seed(SEED, device.id))[1]._chosen, both[1])
    fleet.run(write_job(job_text("fedavg", 1, steps=2)))
    for device in fleet.devices.values():
        (loaded,) = device.agent._loaded.values()
        assert loaded.held_out is None and device.reports[-1].evaluation == {}


def test_layers_travel_once_for_training_and_scoring(fleet: Fleet, write_job: WriteJob) -> None:
    """Devices that train everything, and such that run frozen layers, download as much as without scores."""
    downloaded = []
    for more in ("", EVALUATE):
        fleet.run(write_job(job_text("embracing", 2, more, steps=2)))
        downloaded.append({name: device.reports[-1].bytes["downloaded"] for name, device in fleet.devices.items()})
    assert downloaded[0] == downloaded[1] and min(downloaded[0].values()) > 0


def test_devices_end_a_job_where_there_is_no_central_data(fleet: Fleet, write_job: WriteJob) -> None:
    job = fleet.admin.create(
        write_job(job_text("fedavg", 9, f"{EVALUATE}metric = 'device_mean_loss'\ntarget = 100.0\n"))
    )
    fleet.wait(lambda: fleet.job(job)["state"] == "done")
    found = fleet.job(job)
    assert found["version"] == 1 and found["best"]["version"] == 0
    assert "device_mean_loss" in found["message"] and found["message"].endswith("of version 0 reached the target 100")


@pytest.mark.parametrize("algorithm", ["heterofl", "partial_averaging", "scaffold"])
def test_a_score_is_that_of_the_servers_version(
    fleet: Fleet, write_job: WriteJob, algorithm: str, tmp_path: Path
) -> None:
    """Devices with narrow models, with parts of their own, and with state score the version that they were sent."""
    local = {} if algorithm == "partial_averaging" else {"steps": 2}
    job = fleet.admin.create(write_job(job_text(algorithm, 2, EVALUATE, **local)))
    fleet.wait(lambda: fleet.job(job)["state"] == "done")
    told = [row["summary"]["evaluation"] for row in fleet.admin.rounds(job)]
    fleet.admin.save_weights(job, 1, tmp_path / "1.safetensors")
    weights = read_weights(fleet.bundle, tmp_path / "1.safetensors")
    held = [parts(device)[1] for device in fleet.devices.values()]
    sums = np.array([scored(fleet.bundle, weights, *own.batch(np.arange(len(own)))) for own in held]).sum(0)
    assert told[1]["mean_loss"] == pytest.approx(sums[0] / told[1]["counted"], rel=1e-4)


@pytest.mark.parametrize("algorithm", ["embracing", "domo"])
def test_a_simulation_holds_out_and_scores_the_same(
    fleet: Fleet, write_job: WriteJob, tmp_path: Path, algorithm: str
) -> None:
    file = write_job(job_text(algorithm, 2, EVALUATE, steps=3))
    simulated = simulate(file, tmp_path / "run")
    job = fleet.admin.create(file)
    fleet.wait(lambda: fleet.job(job)["state"] == "done")
    assert fleet.weights(job).tobytes() == simulated.weights.tobytes()
    for row, line in zip(fleet.admin.rounds(job), simulated.lines, strict=True):
        real, told = row["summary"]["evaluation"], line["evaluation"]
        assert real.keys() == told.keys() and real["tiers"].keys() == told["tiers"].keys()
        assert (real["version"], real["counted"], real["accuracy"]) == (
            told["version"],
            told["counted"],
            told["accuracy"],
        )
        assert real["mean_loss"] == pytest.approx(told["mean_loss"], rel=1e-6)


def test_a_simulation_can_end_by_the_scores_of_devices(write_job: WriteJob, tmp_path: Path) -> None:
    target = f"{EVALUATE}metric = 'device_mean_loss'\ntarget = 100.0\n"
    lines = simulate(write_job(job_text("fedavg", 5, target, steps=1)), tmp_path / "run").lines
    assert len(lines) == 1 and "of version 0 reached the target 100" in lines[0]["stopped"]
