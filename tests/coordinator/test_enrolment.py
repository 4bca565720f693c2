"""Who may take part: invitations, tokens that are nowhere in the files, devices that are shut out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.errors import NotAllowed, NotFound, Refused
from federation.axes.cover import DeviceProfile
from federation.errors import InputError
from tests.coordinator.databases import about_sqlite
from tests.coordinator.harness import World, task_parts


def test_an_invitation_ends_after_its_uses_and_after_its_time(world: World) -> None:
    token = world.registry.invite(2, 100)
    first, second = (world.registry.enrol(token, "d", DeviceProfile())[0] for _ in range(2))
    assert first != second
    with pytest.raises(NotAllowed, match="used up"):
        world.registry.enrol(token, "d", DeviceProfile())
    late = world.registry.invite(2, 100)
    world.now += 100
    with pytest.raises(NotAllowed, match="expired"):
        world.registry.enrol(late, "d", DeviceProfile())
    assert len(world.coordinator.devices()) == 2


def test_of_many_who_come_at_once_with_the_last_use_one_gets_it(world: World) -> None:
    token, gate = world.registry.invite(1, 100), threading.Barrier(8)

    def come(_: int) -> bool:
        gate.wait()
        try:
            world.registry.enrol(token, "d", DeviceProfile())
        except NotAllowed:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(come, range(8))) == 1


@pytest.mark.parametrize(("uses", "seconds"), [(0, 60), (1, 0), (1, 1e9), (10**7, 60), (1, float("nan"))])
def test_an_invitation_has_bounds(world: World, uses: int, seconds: float) -> None:
    with pytest.raises(InputError, match="uses"):
        world.registry.invite(uses, seconds)


@about_sqlite
def test_no_token_is_in_the_files(world: World) -> None:
    admin, invitation = world.registry.set_admin_token(), world.registry.invite(2, 60)
    device, token = world.registry.enrol(invitation, "kitchen", DeviceProfile())
    assert admin and world.registry.device_of(token) == device
    files = [path for path in world.root.iterdir() if path.is_file()]
    everything = b"".join(path.read_bytes() for path in files)
    assert b"kitchen" in everything  # it is the right place to look, and not compressed
    for secret in (admin, invitation, token):
        assert secret.encode() not in everything
        assert secret.split("_", 2)[2].encode() not in everything


def test_the_administrators_token_is_made_once(world: World) -> None:
    token = world.registry.set_admin_token()
    assert token and world.registry.set_admin_token() is None
    world.registry.check_admin(token)
    with pytest.raises(NotAllowed):
        world.registry.check_admin(token + "x")


def test_a_revoked_device_is_shut_out_and_its_seat_goes_to_another(world: World) -> None:
    job = world.job()
    invitation = world.registry.invite(1, 60)
    gone, token = world.registry.enrol(invitation, "d", DeviceProfile(tier="strong"))
    offer = world.poll(gone)
    assert offer is not None
    world.coordinator.revoke(gone)
    with pytest.raises(NotAllowed):
        world.registry.device_of(token)
    with pytest.raises(NotAllowed):
        world.poll(gone)
    heir = world.device()
    second = world.poll(heir)
    assert second is not None and task_parts(second.id) == (0, 0, 2)
    with pytest.raises(Refused) as refusal:
        world.send(gone, offer)
    assert refusal.value.reason == "late"
    world.send(heir, second)
    world.settle()
    assert world.state(job)["version"] == 1
    with pytest.raises(NotFound):
        world.coordinator.revoke("nobody")
