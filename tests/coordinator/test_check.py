"""`embrace admin check`: what is sound is found sound, also at work; a flipped byte and a lost file are named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text, update

from coordinator.store.schema import ROUNDS
from tests.coordinator.databases import database_url
from tests.coordinator.harness import ALL_THREE, TIERS, World
from tests.embrace.cli.conftest import Answer, run


def check(world: World) -> Answer:
    return run("admin", "check", "--data", world.root, "--database", database_url(world.root), "--json")


def flip(path: Path, place: int = -2) -> None:
    """Change one byte: of the last number its exponent, or so."""
    found = bytearray(path.read_bytes())
    found[place] ^= 0x40
    path.write_bytes(found)


def trained(world: World, rounds: int = 3, **plan: Any) -> str:
    job, devices = world.job(num_rounds=9, **ALL_THREE, **plan), world.fleet(*TIERS)
    for _ in range(rounds):
        for samples, (device, offer) in enumerate(world.offers(devices).items(), 1):
            world.send_all(device, offer, samples=samples, steps=2 * samples)
        world.settle()
    assert world.state(job)["version"] == rounds
    return job


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedadam", "fednova", "fedlama"])
def test_a_sound_coordinator_is_found_sound(world: World, algorithm: str) -> None:
    """It is at work, and one update of the next round has arrived."""
    job = trained(world, algorithm=algorithm)
    devices = [row["id"] for row in world.coordinator.devices()]
    offers = world.offers(devices)
    world.send_all(devices[0], offers[devices[0]], samples=1)
    answer = check(world)
    assert answer.json["wrong"] == [] and answer.code == 0
    (found,) = answer.json["jobs"]
    assert (found["job"], found["version"], found["versions"], found["computed"]) == (job, 3, 2, 1)


def test_a_median_has_nothing_to_add_up(world: World) -> None:
    trained(world, serve={"combine": "median"})
    assert (check(world).code, check(world).json["jobs"][0]["computed"]) == (0, 0)


def test_a_version_of_an_earlier_program_has_no_sums(world: World) -> None:
    """Nor says its round that they were kept: nothing is wrong, and nothing is computed again."""
    job = trained(world)
    world.files.version(job, 3).with_suffix(".sums").unlink()
    with world.sessions.begin() as session:
        for number, summary in session.execute(select(ROUNDS.c.number, ROUNDS.c.summary)).all():
            earlier = {name: value for name, value in summary.items() if name != "sums_kept"}
            session.execute(update(ROUNDS).where(ROUNDS.c.number == number).values(summary=earlier))
    answer = check(world)
    assert answer.json["wrong"] == [] and answer.code == 0
    assert (answer.json["jobs"][0]["versions"], answer.json["jobs"][0]["computed"]) == (2, 0)


HARM: dict[str, Callable[[World, str], str]] = {}


def harm(function: Callable[[World, str], str]) -> Callable[[World, str], str]:
    """Something that goes wrong; returns words of the line that names it."""
    HARM[function.__name__] = function
    return function


@harm
def newest_weights_flipped(world: World, job: str) -> str:
    flip(world.files.version(job, 3))
    return f"job {job}: version 3: its weights are not what version 2 and the sums of its round make"


@harm
def older_weights_flipped(world: World, job: str) -> str:
    flip(world.files.version(job, 2))
    return f"job {job}: version 3: its weights are not what version 2"


@harm
def state_flipped(world: World, job: str) -> str:
    flip(world.files.state(job, 3))
    return f"job {job}: version 3: its state is not what version 2"


@harm
def sums_flipped(world: World, job: str) -> str:
    path = world.files.version(job, 3).with_suffix(".sums")
    flip(path, -2)
    return f"job {job}: version 3: "


@harm
def sums_lost(world: World, job: str) -> str:
    world.files.version(job, 3).with_suffix(".sums").unlink()
    return f"job {job}: version 3: the sums that it was made of are not there"


@harm
def weights_lost(world: World, job: str) -> str:
    world.files.version(job, 3).unlink()
    return f"job {job}: version 3: its weights are not there"


@harm
def weights_cut(world: World, job: str) -> str:
    path = world.files.version(job, 3)
    path.write_bytes(path.read_bytes()[:-4])
    return f"job {job}: version 3: "


@harm
def body_flipped(world: World, job: str) -> str:
    (path,) = (world.root / "spool").iterdir()
    flip(path)
    return "bodies: the update of task"


@harm
def body_lost(world: World, job: str) -> str:
    (path,) = (world.root / "spool").iterdir()
    path.unlink()
    return "it is not there"


@harm
def graph_flipped(world: World, job: str) -> str:
    flip(next(world.files.bundle(world.bundle).glob("*.onnx")))
    return f"job {job}: bundle {world.bundle}: "


@harm
def bundle_lost(world: World, job: str) -> str:
    world.files.bundle(world.bundle).rename(world.root / "elsewhere")
    return f"job {job}: bundle {world.bundle}: it is not there"


@harm
def round_forgotten(world: World, job: str) -> str:
    with world.sessions.begin() as session:
        session.execute(text("UPDATE rounds SET state = 'abandoned' WHERE number = 1"))
    return f"job {job}: its newest version is 3, and 2 rounds are committed"


@harm
def seats_without_a_round(world: World, job: str) -> str:
    with world.sessions.begin() as session:
        session.execute(text("UPDATE seats SET round = 77 WHERE round = 0"))
    return "database: 3 rows of seats name rounds, which are not there"


@pytest.mark.parametrize("name", sorted(HARM))
def test_what_is_wrong_is_named(world: World, name: str) -> None:
    job = trained(world, algorithm="fedadam")
    devices = [row["id"] for row in world.coordinator.devices()]
    world.send_all(devices[0], world.offers(devices)[devices[0]], samples=1)
    world.settle()
    assert check(world).code == 0
    words = HARM[name](world, job)
    answer = check(world)
    assert answer.code == 1
    assert [line for line in answer.json["wrong"] if words in line], answer.json["wrong"]
    shown = run("admin", "check", "--data", world.root, "--database", database_url(world.root))
    assert shown.code == 1 and "wrong: " in shown.out


def test_evaluation_data_that_is_lost(world: World) -> None:
    digest = hashlib.sha256(b"samples").hexdigest()
    reference, path = f"sha256:{digest}", world.root / "data" / f"{digest}.safetensors"
    path.write_bytes(b"samples")
    job = world.job(evaluate={"data": "coordinator:test.npz"})
    with world.sessions.begin() as session:
        repository = world.coordinator.repository
        record = repository.job(session, job)
        assert record is not None
        repository.change_job(session, job, plan={**record.plan, "evaluate": {"data": reference}})
    assert check(world).code == 0
    path.write_bytes(b"something else")
    assert "evaluation data: it has the sha256" in "".join(check(world).json["wrong"])


def test_a_database_of_another_program_is_left_alone(world: World) -> None:
    with world.sessions.begin() as session:
        session.execute(text("UPDATE meta SET value = '3' WHERE key = 'schema'"))
    answer = run("admin", "check", "--data", world.root, "--database", database_url(world.root))
    assert answer.code == 2 and "schema 3" in answer.error
    with world.sessions.begin() as session:
        session.execute(text("UPDATE meta SET value = '99' WHERE key = 'schema'"))
