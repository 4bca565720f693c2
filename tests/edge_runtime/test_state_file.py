"""Kept state: what comes back, what a kill or a full disk leaves, and files that are no state."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from edge_runtime.state_file import MOST_HEADER_BYTES, load_state, save_state
from federation.errors import InputError
from tests.edge_runtime.conftest import answer, child


def test_what_is_saved_comes_back(tmp_path):
    path = tmp_path / "new folder" / "state.safetensors"
    x = np.random.default_rng(0).standard_normal(1001).astype(np.float32)
    save_state(path, {"x": x, "momentum": x[::2], "none": x[:0]}, {"round": "7", "wörter": "ja — „nein“"})
    vectors, about = load_state(path)
    assert about == {"round": "7", "wörter": "ja — „nein“"}
    assert list(vectors) == ["x", "momentum", "none"]
    assert np.array_equal(vectors["x"], x) and np.array_equal(vectors["momentum"], x[::2])
    assert vectors["none"].shape == (0,) and all(v.dtype == np.float32 for v in vectors.values())
    assert [file.name for file in path.parent.iterdir()] == ["state.safetensors"]


def test_golden_bytes(tmp_path):
    save_state(tmp_path / "state", {"x": np.array([1, 2], np.float32), "y": np.zeros(0, np.float32)}, {"k": "v"})
    text = (
        b'{"__metadata__":{"k":"v"},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"y":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}}'
    )
    padded = text + b" " * (-len(text) % 8)
    data = bytes.fromhex("0000803f00000040")
    assert (tmp_path / "state").read_bytes() == len(padded).to_bytes(8, "little") + padded + data


def test_any_safetensors_reader_can_open_it(tmp_path):
    path = tmp_path / "state"
    vectors = {"a": np.arange(5, dtype=np.float32), "b": np.zeros(0, np.float32), "c": np.ones(3, np.float32)}
    save_state(path, vectors, {"k": "v"})
    found = load_file(path)
    assert set(found) == set(vectors)
    assert all(np.array_equal(found[name], vectors[name]) for name in vectors)


REPLACE = """
import sys
from pathlib import Path
import numpy as np
from edge_runtime.state_file import load_state, save_state

path = Path(sys.argv[1])
save_state(path, {"x": np.full(100_000, 1, np.float32)}, {})
old = load_state(path)[0]["x"]
assert not old.flags.writeable
save_state(path, {"x": old[:50_000] + 1}, {})
print(old.size, float(old.min()), float(old.max()), *np.unique(load_state(path)[0]["x"]))
"""


def test_what_was_loaded_stays_when_the_file_is_replaced(tmp_path):
    """Vectors are mapped, not read. In a process of its own: a mapped file that is cut off ends the process."""
    assert answer(REPLACE, tmp_path / "state") == "100000 1.0 1.0 2.0"


SAVE = """
import sys
from pathlib import Path
import numpy as np
from edge_runtime.state_file import save_state

path, version = Path(sys.argv[1]), 0
while True:
    version += 1
    vector = np.full(200_000, version, np.float32)
    save_state(path, {"x": vector, "y": vector[: 1000 + version % 7]}, {"version": str(version)})
    print(version, flush=True)
"""


def check_complete(path) -> int:
    vectors, about = load_state(path)
    version = int(about["version"])
    assert vectors["x"].size == 200_000 and (vectors["x"] == version).all()
    assert vectors["y"].size == 1000 + version % 7 and (vectors["y"] == version).all()
    return version


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_kill_at_any_moment_leaves_one_complete_version(tmp_path):
    path, chance, last = tmp_path / "state", random.Random(0), 0
    for _ in range(6):
        process = child(SAVE, path)
        assert process.stdout.readline() == "1\n"
        time.sleep(chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate(timeout=30)
        last = max([1, *map(int, out.split())])
        assert check_complete(path) in (last, last + 1)  # what was announced is there; the next may be, too
        assert {file.name for file in tmp_path.iterdir()} <= {"state", "state.new"}
    save_state(path, {}, {})  # what a kill left beside does no harm
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_a_reader_never_sees_two_versions_in_one(tmp_path):
    path = tmp_path / "state"
    process = child(SAVE, path)
    try:
        assert process.stdout.readline() == "1\n"
        seen = {check_complete(path) for _ in range(300)}
        while len(seen) < 3:  # on a busy machine the writer may not have had its turn
            seen.add(check_complete(path))
            assert process.poll() is None
    finally:
        process.kill()
        process.communicate(timeout=30)


def content(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\x01\x02",
        b"\xff" * 8,
        bytes(100),
        b"garbage " * 200,
        content({"x": GOOD}, bytes(7)),  # truncated by a byte
        content({"x": GOOD}, bytes(8), length=MOST_HEADER_BYTES + 1),
        content({"x": GOOD}, bytes(8), length=2**63),
        content(b"[" * 100_000, bytes(8)),
        content(b"\xff\xfe\xfd", bytes(8)),
        content([1, 2], bytes(8)),
        content(7),
        content({"x": 7}, bytes(8)),
        content({"x": {}}, bytes(8)),
        content({"x": {**GOOD, "dtype": "F64"}}, bytes(8)),
        content({"x": {**GOOD, "data_offsets": [4, 0]}}, bytes(8)),
        content({"x": {**GOOD, "data_offsets": [-8, 0]}}, bytes(8)),
        content({"x": {**GOOD, "data_offsets": [0, 7]}}, bytes(8)),
        content({"x": {**GOOD, "data_offsets": [0, 2**70]}}, bytes(8)),
        content({"x": {**GOOD, "data_offsets": [0]}}, bytes(8)),
        content({"x": {**GOOD, "data_offsets": None}}, bytes(8)),
        content({"x": {**GOOD, "data_offsets": [0, float("inf")]}}, bytes(8)),
        content({"x": {**GOOD, "data_offsets": [0, float("nan")]}}, bytes(8)),
        content({"__metadata__": 3, "x": GOOD}, bytes(8)),
    ],
)
def test_what_is_no_state_is_refused_by_name(tmp_path, bad):
    path = tmp_path / "state"
    path.write_bytes(bad)
    with pytest.raises(InputError, match=r"state is no saved state: .*; remove it to begin anew") as caught:
        load_state(path)
    assert "\n" not in str(caught.value)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_state_is_refused_or_read_but_never_a_crash(tmp_path, data):
    path = tmp_path / "state"
    save_state(path, {"x": np.arange(4, dtype=np.float32), "y": np.ones(2, np.float32)}, {"k": "v"})
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        vectors, _ = load_state(path)
    except InputError:
        return
    assert sum(float(np.nan_to_num(v).sum()) for v in vectors.values()) is not None  # every byte can be read


def test_where_nothing_can_be_read_or_written_it_says_so(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*absent: No such file"):
        load_state(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*state: "):
        save_state(tmp_path / "file" / "state", {}, {})
    with pytest.raises(InputError, match="cannot write "):
        save_state(tmp_path, {}, {})
    assert sorted(os.listdir(tmp_path)) == ["file"] and not tmp_path.with_name(tmp_path.name + ".new").exists()


FILL = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from edge_runtime.state_file import save_state
from federation.errors import DiskFull

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
path = Path(sys.argv[1])
save_state(path, {"x": np.full(1000, 1, np.float32)}, {"version": "1"})
try:
    save_state(path, {"x": np.full(1 << 19, 2, np.float32)}, {"version": "2"})
except DiskFull as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
def test_a_full_disk_leaves_the_old_state(tmp_path):
    path = tmp_path / "state"
    assert answer(FILL, path) == f"no room to keep {path}; what was there before is unchanged"
    vectors, about = load_state(path)
    assert about == {"version": "1"} and (vectors["x"] == 1).all() and vectors["x"].size == 1000
    assert os.listdir(tmp_path) == ["state"]


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    path = tmp_path / "state"
    save_state(path, {}, {"version": "1"})
    with pytest.raises(InputError, match="more than 16 MiB"):
        save_state(path, {}, {"version": "2" * MOST_HEADER_BYTES})
    assert load_state(path)[1] == {"version": "1"} and os.listdir(tmp_path) == ["state"]
