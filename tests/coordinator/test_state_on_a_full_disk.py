"""No room for the server's state, or for the weights beside it: the round is closed again, and nothing counts twice."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.store import blobs
from tests.coordinator.harness import World


def final(world: World, rounds: int = 3) -> dict[str, bytes]:
    """The files of the last version of a job with momentum on the server."""
    job = world.job(num_rounds=rounds, serve={"rule": "momentum", "factor": 0.9})
    devices = world.fleet("strong", "weak")
    while world.state(job)["state"] == "running":
        world.round(devices)
        world.later(60)  # when what could not be closed is tried again
    assert world.spool() == []
    places = world.files.version(job, rounds), world.files.state(job, rounds)
    assert sorted(path.name for path in places[0].parent.iterdir()) == [
        "2.safetensors",
        "2.state",
        "3.safetensors",
        "3.state",
        "3.sums",
    ]
    return {path.name: path.read_bytes() for path in places}


@pytest.mark.parametrize("suffix", [".sums", ".state", ".safetensors"])
def test_the_round_is_closed_again(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    expected = final(make_world())
    publish, refused = blobs.publish, []

    def full_once(draft: Path, path: Path) -> None:
        if path.name == f"2{suffix}" and not refused:
            refused.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(draft, path)

    monkeypatch.setattr(blobs, "publish", full_once)
    assert final(make_world()) == expected and refused
