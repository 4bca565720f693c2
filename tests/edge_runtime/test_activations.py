"""Stored activations: values, the disk that they take and give back, and what happens when there is too little."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edge_runtime.activations import ActivationStore
from federation.errors import DiskFull, InputError, OutOfMemory
from federation.manifest import TensorSpec
from tests.edge_runtime.conftest import ROOT, answer, child

ROW = TensorSpec("float32", (3, 4))
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def mapped(folder: Path) -> int:
    """How many files of a folder, named or not, this process has mapped."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("stored_as", ["float32", "float16"])
@pytest.mark.parametrize("disk", [False, True])
def test_rows_come_back_in_any_order(tmp_path, stored_as, disk):
    values = np.random.default_rng(0).integers(-1000, 1000, (20, 3, 4)).astype(np.float32)  # float16 holds these
    store = ActivationStore(20, ROW, stored_as=stored_as, folder=tmp_path if disk else None)
    assert len(store) == 20 and store.on_disk is disk
    assert store.nbytes == values.size * (4 if stored_as == "float32" else 2)
    for start in (0, 7, 14):
        store.write(start, values[start : start + 7])
    order = np.random.default_rng(1).permutation(20)[:9]
    out = np.full((9, 3, 4), np.nan, np.float32)
    store.read(order, out)
    assert np.array_equal(out, values[order])
    rows = store.rows(5, 18)
    assert rows.dtype == np.float32 and np.array_equal(rows, values[5:18])


def test_token_ids_keep_their_type():
    """float16 is for floats: the ids of words would not survive it."""
    store = ActivationStore(2, TensorSpec("int64", (2,)), stored_as="float16")
    ids = np.array([[9999, 2**40 + 1], [0, 3]])
    store.write(0, ids)
    assert store.nbytes == 32 and np.array_equal(store.rows(0, 2), ids)


@given(values=arrays(np.float32, (4, 6), elements=st.floats(-1e6, 1e6, width=32)))
def test_float16_is_off_by_half_a_unit_in_the_last_place_and_never_infinite(values):
    store = ActivationStore(4, TensorSpec("float32", (6,)), stored_as="float16")
    store.write(0, values)
    out = np.empty_like(values)
    store.read(np.arange(4), out)
    assert np.array_equal(out, store.rows(0, 4))
    inside = np.abs(values) <= 65504
    error = np.abs(out.astype(np.float64) - values)
    assert (error <= np.maximum(np.abs(values) * 2.0**-11, 2.0**-25))[inside].all()  # 11 bits; subnormals lose more
    assert np.array_equal(out[~inside], np.copysign(65504, values[~inside]))


@LINUX
@pytest.mark.parametrize("stored_as", ["float32", "float16"])
def test_a_store_on_disk_has_no_name_and_goes_when_closed(tmp_path, stored_as):
    folder = tmp_path / "made" / "when needed"
    store = ActivationStore(1000, ROW, stored_as=stored_as, folder=folder)
    store.write(0, np.ones((1000, 3, 4), np.float32))
    assert list(folder.iterdir()) == []
    assert mapped(folder) == 1
    descriptors = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert sum(str(folder) in target for target in descriptors) <= 1
    store.close()
    assert list(folder.iterdir()) == [] and mapped(folder) == 0 and len(store) == 0
    store.close()


HOLD = """
import os, signal, sys
from pathlib import Path
import numpy as np
from edge_runtime.activations import ActivationStore
from federation.manifest import TensorSpec

store = ActivationStore(64, TensorSpec("float32", (1 << 16,)), folder=Path(sys.argv[1]))
store.write(0, np.ones((64, 1 << 16), np.float32))
print("written", flush=True)
sys.stdin.read()
"""


@LINUX
def test_a_killed_process_leaves_neither_file_nor_blocks(tmp_path):
    """16 MiB, reserved and written: gone with the process, and while it lives there is no name to find them by."""
    shared = Path("/dev/shm")  # a file system that nobody else fills meanwhile
    folder = shared / f"embrace-{os.getpid()}" if os.access(shared, os.W_OK) else tmp_path
    folder.mkdir(exist_ok=True)
    try:
        before = os.statvfs(folder).f_bfree
        process = child(HOLD, folder)
        assert process.stdout.readline() == "written\n"
        assert list(folder.iterdir()) == []
        if folder is not tmp_path:
            block = os.statvfs(folder).f_frsize
            assert (before - os.statvfs(folder).f_bfree) * block > 12 << 20
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL
        assert list(folder.iterdir()) == []
        if folder is not tmp_path:
            assert (before - os.statvfs(folder).f_bfree) * block < 4 << 20
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("disk", "error", "stored_as", "hint"),
    [
        (True, DiskFull, "float32", "use less data or --activations float16"),
        (False, OutOfMemory, "float32", "use less data or --activations float16"),
        (True, DiskFull, "float16", "use less data"),
    ],
)
def test_a_limit_is_kept_before_anything_is_taken(tmp_path, disk, error, stored_as, hint):
    folder = tmp_path / "store" if disk else None
    size = 12 * 100 * (4 if stored_as == "float32" else 2)
    assert ActivationStore(100, ROW, stored_as=stored_as, folder=folder, limit=size).nbytes == size
    with pytest.raises(error) as caught:
        ActivationStore(100, ROW, stored_as=stored_as, folder=folder, limit=size - 1)
    assert str(caught.value) == f"100 activations of 3×4 take {size:,} bytes, the limit is {size - 1:,}; {hint}"


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot store activations in"):
        ActivationStore(1, ROW, folder=tmp_path / "file" / "folder")


FILL = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from edge_runtime.activations import ActivationStore
from federation.errors import DiskFull
from federation.manifest import TensorSpec

folder, most = Path(sys.argv[1]), int(sys.argv[2])
if most:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then the system answers EFBIG
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
store = ActivationStore(8, TensorSpec("float32", (1 << 14,)), folder=folder)  # 512 KiB
store.write(0, np.ones((8, 1 << 14), np.float32))
try:
    ActivationStore(32, TensorSpec("float32", (1 << 14,)), folder=folder)  # 2 MiB
except DiskFull as error:
    print(error)
assert store.rows(0, 8).sum() == 8 << 14 and not list(folder.iterdir())
"""
MESSAGE = "no room for 2,097,152 bytes of activations in {}; free some or use less data"


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
def test_a_file_may_not_be_larger_than_the_system_allows(tmp_path):
    assert answer(FILL, tmp_path, 1 << 20) == MESSAGE.format(tmp_path)


@LINUX
def test_a_full_disk_is_an_error_and_not_a_bus_error(tmp_path):
    """A file system of 1 MiB, made for this test in a name space of its own."""
    script = f"mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} - {tmp_path} 0"
    possible = shutil.which("unshare") and subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True, check=False
    )
    if not possible or possible.returncode:
        pytest.skip("this system does not let a test mount a file system")
    found = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        input=FILL,
        text=True,
        capture_output=True,
        cwd=ROOT,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == MESSAGE.format(tmp_path)


def test_a_file_system_that_cannot_reserve_gets_zeros(tmp_path, monkeypatch):
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    store = ActivationStore(3, TensorSpec("float32", (1 << 18,)), folder=tmp_path)
    store.write(1, np.ones((1, 1 << 18), np.float32))
    assert [float(store.rows(n, n + 1).sum()) for n in range(3)] == [0, 1 << 18, 0]
