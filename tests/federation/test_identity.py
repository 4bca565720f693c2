"""Ids and seeds follow from names, and from nothing else."""

from __future__ import annotations

import doctest
import hashlib
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation import identity
from federation.identity import device_id, free_name, task_seed


def ids(*names: str) -> list[str]:
    """Of devices that enrol one after the other."""
    known: list[str] = []
    for name in names:
        known.append(device_id(name, known.__contains__))
    return known


def test_the_id_is_the_hash_of_the_name() -> None:
    assert ids("kitchen-pi") == [hashlib.sha256(b"kitchen-pi").hexdigest()[:12]]
    assert doctest.testmod(identity).failed == 0


def test_the_order_of_enrolment_does_not_matter() -> None:
    names = [f"device-{number}" for number in range(50)]
    assert dict(zip(names, ids(*names))) == dict(zip(names[::-1], ids(*names[::-1])))


def test_devices_of_the_same_name_are_told_apart_the_same_way_each_time() -> None:
    found = ids("pi", "pi", "pi", "phone")
    assert len(set(found)) == 4 and found == ids("pi", "pi", "pi", "phone")
    assert found[1] == hashlib.sha256(b"pi\x001").hexdigest()[:12]


@given(st.lists(st.text(max_size=8), max_size=20))
def test_no_two_devices_share_an_id(names: list[str]) -> None:
    found = ids(*names)
    assert len(set(found)) == len(names) and all(len(one) == 12 and int(one, 16) >= 0 for one in found)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 100, 1025])
def test_of_many_devices_with_one_name_each_asks_for_few_names(count: int) -> None:
    """The numbers are those that counting up would find, and the work does not grow with the fleet."""
    known: set[str] = set()
    asked = 0

    def taken(name: str) -> bool:
        nonlocal asked
        asked += 1
        return name in known

    for number in range(1, count + 1):
        found = free_name("pi", taken)
        assert found == ("pi" if number == 1 else f"pi-{number}")
        known.add(found)
    assert asked <= count * (2 + 2 * math.log2(count))
    known.discard("pi")
    assert free_name("pi", taken) == "pi"


def test_whoever_has_the_id_already_keeps_it() -> None:
    (first,) = ids("pi")
    assert device_id("pi", {first}.__contains__) != first


@given(st.integers(0, 2**32 - 1), st.text(max_size=20))
def test_a_seed_is_exact_in_json(seed: int, device: str) -> None:
    found = task_seed(seed, device)
    assert 0 <= found < 2**53 and int(float(found)) == found and found == task_seed(seed, device)


def test_seeds_depend_on_the_job_and_on_the_device() -> None:
    found = {task_seed(seed, device) for seed in range(100) for device in ids(*"abcdefghij")}
    assert len(found) == 1000


@pytest.mark.parametrize("bit", [0, 26, 52])
def test_every_bit_of_a_seed_is_a_fair_coin(bit: int) -> None:
    heads = Counter(task_seed(7, f"{number:012x}") >> bit & 1 for number in range(10_000))[1]
    assert abs(heads - 5000) < 5 * math.sqrt(2500)
