"""Calls that are made together: those that wait for one, and those that others on their way are waited for with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coordinator.batching import Batched


def test_those_that_come_meanwhile_are_taken_together() -> None:
    calls: list[list[int]] = []

    def call(items: Sequence[int]) -> list[int]:
        calls.append(list(items))
        return [10 * item for item in items]

    async def run() -> list[int]:
        batched = Batched(call, most=3)
        return await asyncio.gather(*(batched(number) for number in range(5)))

    assert asyncio.run(run()) == [0, 10, 20, 30, 40]
    assert calls == [[0, 1, 2], [3, 4]]


def test_one_that_is_on_its_way_is_waited_for_and_no_other() -> None:
    """However long the pause is: it ends when the last has come, or when there are as many as are taken at a time."""
    calls: list[list[int]] = []

    def call(items: Sequence[int]) -> list[int]:
        calls.append(list(items))
        return list(items)

    async def run() -> None:
        batched = Batched(call, most=3, pause=3600.0)
        with batched.expecting():
            assert await batched(0) == 0  # none was called before
            waits = [asyncio.create_task(batched(number)) for number in (1, 2)]
            await asyncio.sleep(0.05)
            assert calls == [[0]]
        await asyncio.gather(*waits)
        with batched.expecting():
            await asyncio.gather(*(batched(number) for number in (3, 4, 5)))
        assert await batched(6) == 6

    asyncio.run(run())
    assert calls == [[0], [1, 2], [3, 4, 5], [6]]
