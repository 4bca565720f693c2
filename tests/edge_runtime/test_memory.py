"""Measured memory against other files of the kernel, and against memory that is really taken."""

from __future__ import annotations

import mmap
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.memory import PeakMeter, _rest, available_memory, current_memory

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
MB = 1_000_000


def rollup() -> dict[str, int]:
    """The sums over all mappings: the kernel walks its page tables for them instead of keeping counters."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return {name: int(kilobytes) * 1024 for name, kilobytes in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}


def test_memory_is_what_the_mappings_add_up_to():
    block = np.ones(5 * MB)  # so that there is something to count
    found, expected = current_memory(), rollup()
    assert abs(found.resident - expected["Rss"]) < 2 * MB
    assert abs(found.anonymous - expected["Anonymous"]) < 2 * MB
    assert abs(found.file_backed - (expected["Rss"] - expected["Anonymous"])) < 2 * MB
    assert found.anonymous > block.nbytes and found.peak >= found.resident - 2 * MB


def test_a_block_that_came_and_went_is_seen():
    with PeakMeter() as meter:
        block = mmap.mmap(-1, 50 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for _ in range(3):  # a look every millisecond needs a few of them
            np.frombuffer(block, np.uint8)[:] = 1
        threading.Event().wait(0.02)
        block.close()
    after = current_memory().anonymous - meter.before.anonymous
    assert after < 25 * MB, "the block is gone before the meter ends"
    assert 49 * MB <= meter.peak.anonymous < 75 * MB
    assert 49 * MB <= meter.peak.total < 75 * MB  # the kernel's counters lag a few pages behind
    assert meter.peak.file_backed < 10 * MB


def test_files_are_counted_apart(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1000) * 40_000)
    with PeakMeter() as meter, path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert np.frombuffer(mapped, np.uint8)[::512].any()
        threading.Event().wait(0.02)
    assert 39 * MB <= meter.peak.file_backed < 60 * MB
    assert meter.peak.total >= 39 * MB and meter.peak.anonymous < 15 * MB


def test_the_baseline_may_be_older_than_the_meter():
    idle = current_memory()
    block = mmap.mmap(-1, 24 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never out of the heap's free pages
    np.frombuffer(block, np.uint8)[:] = 1
    with PeakMeter(idle) as meter:
        pass
    assert meter.peak.anonymous >= 22 * MB
    with PeakMeter() as meter:
        pass
    assert meter.peak.anonymous < 5 * MB


def test_a_meter_ends_with_what_it_measures():
    with pytest.raises(KeyError), PeakMeter() as meter:
        raise KeyError
    assert meter.peak is not None
    assert "memory" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("limit", "usage", "expected"),
    [
        ("1000\n", "300\n", (700, "limit of the control group")),
        ("1000", "1500", (0, "limit of the control group")),
        ("max\n", "300\n", None),
        ("many", "300", None),
        ("1000", "", None),
        (None, "300", None),
        ("1000", None, None),
    ],
)
def test_what_a_control_group_leaves(tmp_path, limit, usage, expected):
    for name, text in (("max", limit), ("current", usage)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert _rest(tmp_path / "max", tmp_path / "current") == expected


def test_available_memory_is_no_more_than_the_machine_has():
    found, where = available_memory()
    machine = int(re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text()).group(1)) * 1024
    assert 0 <= found <= machine
    assert where in ("free memory of the machine", "limit of the control group")
