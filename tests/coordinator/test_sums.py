"""The sums that a version was made of are kept with it, and lead from the version before to it, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from coordinator.store.blobs import DirectoryBlobs
from coordinator.store.sums import read_sums
from coordinator.store.versions import Versions
from federation.engine import RoundEngine
from federation.errors import InputError
from federation.job import plan_from
from tests.coordinator.harness import ALL_THREE, TIERS, World


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedadam", "fednova", "fedavg_lm"])
def test_a_version_follows_from_the_one_before_and_its_sums(world: World, tmp_path: Path, algorithm: str) -> None:
    """The files of the job are read by an engine that has never seen an update."""
    plan = {"algorithm": algorithm, "num_rounds": 3, **ALL_THREE}
    job, devices = world.job(**plan), world.fleet(*TIERS)
    for _ in range(2):
        for samples, (device, offer) in enumerate(world.offers(devices).items(), 1):
            world.send_all(device, offer, samples=samples, steps=3 * samples)
        world.settle()
    assert world.state(job)["version"] == 2
    engine = RoundEngine(plan_from({"bundle": "tiny", **plan}), world.manifest)
    versions, names = Versions(DirectoryBlobs(world.root)), engine.vector_names
    stored = read_sums(versions.sums(job, 2), engine.space)
    assert (stored.round, stored.devices, stored.draws) == (1, 3, 3)
    before = versions.read(job, 1, engine.space, names)
    found = {name: before[name][slice(0, engine.space.size)] for name in before}
    for name, at, values in engine.changes(stored.as_round(engine, engine.first_facts), before, stored.devices):
        found[name][at] = values
    expected = versions.open(job, 2, engine.space, names)
    assert {name: own.tobytes() for name, own in found.items()} == {n: own.tobytes() for n, own in expected.items()}
    assert (found["model"] != before["model"][slice(0, engine.space.size)]).any()


def test_sums_go_with_the_version_that_they_lead_from(world: World) -> None:
    job, devices = world.job(num_rounds=4, **ALL_THREE), world.fleet(*TIERS)
    for _ in range(3):
        world.round(devices)
    kept = sorted(path.name for path in world.files.version(job, 0).parent.iterdir())
    assert kept == ["2.safetensors", "3.safetensors", "3.sums"]


def test_a_robust_rule_has_no_sums(world: World) -> None:
    job, devices = world.job(serve={"combine": "median"}, **ALL_THREE), world.fleet(*TIERS)
    world.round(devices)
    assert not list(world.root.rglob("*.sums")) and world.state(job)["version"] == 1


@pytest.mark.parametrize("harm", ["cut", "longer", "empty", "other notes", "other model"])
def test_a_file_that_holds_no_sums_is_refused(world: World, harm: str) -> None:
    job, devices = world.job(**ALL_THREE), world.fleet(*TIERS)
    world.round(devices)
    path = world.files.version(job, 1).with_suffix(".sums")
    whole, space = path.read_bytes(), world.manifest.space
    assert np.any(read_sums(path, space).totals["model"].mean())
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    if harm == "other notes":
        header["__metadata__"] = {"sums": json.dumps({"round": 1})}
    if harm == "other model":
        header["model"] |= {"shape": [space.size - 1], "data_offsets": [0, 8 * space.size - 8]}
    text = json.dumps(header).encode()
    end = -8 if harm == "other model" else None
    harmed = {"cut": whole[:-8], "longer": whole + b"\0", "empty": b""}
    path.write_bytes(harmed.get(harm, len(text).to_bytes(8, "little") + text + whole[8 + length : end]))
    with pytest.raises(InputError):
        read_sums(path, space)
