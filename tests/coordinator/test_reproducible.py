"""Two fresh fleets with the same names, data and job file arrive at the same bits, in whatever order they start."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embrace.client import Client
from embrace.demo.digits_demo import SHIPPED, load_digits
from embrace.demo.processes import Processes
from federation.axes.cover import DeviceProfile
from federation.identity import device_id, task_seed
from tests.coordinator.harness import Site, World, task_parts
from tests.live_server import live_server
from tests.waiting import wait_until

TIERS = {"strong-pi": "strong", "old-phone": "moderate", "camera": "weak"}
JOB = """
bundle = "digits"
num_rounds = 4
seed = 11
[participate]
count = 2
min_available = 3
quorum = 2
[local]
steps = 5
"""


@dataclass(frozen=True)
class Run:
    weights: bytes
    cohorts: list[list[str]]  # of every round, in the order of the slots
    ids: dict[str, str]


def fleet(directory: Path, names: Sequence[str]) -> Run:
    """A fresh coordinator and fresh agents, which enrol in this order."""
    with live_server(directory) as server, Processes(directory) as processes:
        admin = Client(server.url, server.admin)
        shares = dict(zip(TIERS, load_digits()[0]))
        for name in names:
            x, y = shares[name]
            np.savez(directory / f"{name}.npz", x=x, y=y)
            processes.start(
                name,
                "agent",
                "--server",
                server.url,
                "--token",
                server.enrolment,
                "--name",
                name,
                "--tier",
                TIERS[name],
                "--data",
                str(directory / f"{name}.npz"),
                "--work",
                str(directory / name),
                "--memory",
                "128MB",
                "--engine",
                "portable",
                "--json",
            )
            wait_until(lambda: name in {row["name"] for row in admin.call("GET", "/devices")})  # noqa: B023
        shutil.copytree(SHIPPED / "model", directory / "digits")
        (directory / "job.toml").write_text(JOB)
        job = admin.create(directory / "job.toml")
        wait_until(lambda: admin.call("GET", f"/jobs/{job}")["state"] == "done")
        admin.save_weights(job, 4, directory / "trained.safetensors")
        ids = {row["name"]: row["id"] for row in admin.call("GET", "/devices")}
        timings = admin.call("GET", f"/jobs/{job}/timings")
        admin.close()
    cohorts = [[row["device"] for row in timings if row["round"] == number] for number in range(4)]
    return Run((directory / "trained.safetensors").read_bytes(), cohorts, ids)


def test_two_fresh_fleets_arrive_at_the_same_bits(tmp_path: Path) -> None:
    one = fleet(tmp_path / "one", list(TIERS))
    two = fleet(tmp_path / "two", list(TIERS)[::-1])
    assert one.ids == two.ids == {name: device_id(name, lambda known: False) for name in TIERS}
    assert one.cohorts == two.cohorts and len({tuple(cohort) for cohort in one.cohorts}) > 1
    assert one.weights == two.weights
    assert one.weights != (SHIPPED / "model" / "weights.safetensors").read_bytes()


def test_a_devices_seed_does_not_depend_on_its_seat(world: World) -> None:
    job = world.job(seed=5, num_rounds=3, participate={"count": 2, "over_select": 1.0, "min_available": 4})
    devices = world.fleet("strong", "strong", "weak", "weak")
    taken: dict[str, set[int]] = {device: set() for device in devices}
    for _ in range(3):
        offers = world.offers(devices)
        for number, (device, offer) in enumerate(offers.items()):
            assert offer.work["seed"] == task_seed(5, device)
            taken[device].add(task_parts(offer.id)[1])
            if number < 2:  # as many as are wanted
                world.send(device, offer)
        world.settle()
    assert world.state(job)["state"] == "done"
    assert max(len(seats) for seats in taken.values()) > 1


def test_devices_of_one_name_that_enrol_at_once(site: Site) -> None:
    known = site.server.registry
    token = known.invite(16, 60)
    with ThreadPoolExecutor(8) as pool:
        found = [device for device, _ in pool.map(lambda _: known.enrol(token, "pi", DeviceProfile()), range(16))]
    expected: list[str] = []
    for _ in range(16):
        expected.append(device_id("pi", expected.__contains__))
    assert sorted(found) == sorted(expected)
