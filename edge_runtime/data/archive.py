""".npz files: arrays in a zip file. What is stored without compression is mapped where it lies, and nothing is read."""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from edge_runtime.data.input_adapter import Array
from federation.errors import DataError

PAIRS = (("x", "y"), ("x_train", "y_train"), ("data", "target"), ("images", "labels"))  # the first that is there
GROUPS = "groups"  # the writer of each sample, or the house that it comes from
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip member: signature, lengths of its name and its extra field
_ENCRYPTED = 1

Header = tuple[tuple[int, ...], bool, "np.dtype[Any]"]  # shape, whether the first axis varies fastest, type


def accepted_names() -> str:
    first, *others = (f"{inputs} and {labels}" for inputs, labels in PAIRS)
    return f"{first} (or {', '.join(others)})"


def read_archive(path: Path, name: str) -> tuple[Array, Array, str]:
    """Read inputs, labels, and how the inputs are stored."""
    inputs, labels, stored = read_named(path, name)
    assert not isinstance(inputs, dict) and not isinstance(labels, dict)
    return inputs, labels, stored


Named = Array | dict[str, Array]


def read_named(
    path: Path, name: str, inputs: Sequence[str] = (), labels: Sequence[str] = ()
) -> tuple[Named, Named, str]:
    """Read an array for each input and each label that has a name; `x` and `y` have all of a sample in one."""
    chosen: list[Sequence[str]] = []

    def choose(found: set[str]) -> list[str]:
        chosen[:] = choose_names(name, found, inputs, labels)
        return [*chosen[0], *chosen[1]]

    arrays = _read_chosen(path, name, choose)
    count = len(chosen[0])
    stored = "npz, mapped" if all(isinstance(array, np.memmap) for array in arrays[:count]) else "npz, read into memory"
    given = [dict(zip(names, own)) for names, own in zip(chosen, (arrays[:count], arrays[count:]))]
    return (
        given[0] if list(chosen[0]) == list(inputs) else arrays[0],
        given[1] if list(chosen[1]) == list(labels) else arrays[count],
        stored,
    )


def choose_names(
    name: str, found: Collection[str], inputs: Sequence[str] = (), labels: Sequence[str] = ()
) -> list[Sequence[str]]:
    """Choose the arrays of inputs and of labels among those that are there: by their own names, else the usual ones."""
    named = [bool(own) and set(own) <= set(found) for own in (inputs, labels)]
    for pair in PAIRS:
        taken = [own if has else [usual] for own, has, usual in zip((inputs, labels), named, pair)]
        clash = named[0] and not named[1] and pair[1] in inputs  # what is an input is no label
        if all(set(each) <= set(found) for each in taken) and not clash:
            return taken
    if not inputs and not labels:
        raise DataError(f"{name}: expected arrays named {accepted_names()}, found {_listed(found)}")
    wanted = [*(inputs or ["x"]), *(labels or ["y"])]
    missing = [key for key in wanted if key not in found]
    raise DataError(
        f"{name} has no {', '.join(missing)}: expected arrays named {', '.join(wanted)}, found {_listed(found)}"
    )


def read_arrays(path: Path, name: str, wanted: Sequence[str]) -> list[Array]:
    """Read the arrays of these names; a DataError lists those that are not there."""

    def choose(found: set[str]) -> Sequence[str]:
        if missing := [key for key in wanted if key not in found]:
            raise DataError(f"{name}: expected arrays named {', '.join(missing)}, found {_listed(found)}")
        return wanted

    return _read_chosen(path, name, choose)


def read_groups(path: Path) -> NDArray[np.int64] | None:
    """Read the number of each sample's group, if the archive has an array `groups`."""
    found = _read_chosen(path, str(path), lambda names: [GROUPS] if GROUPS in names else [])
    if not found:
        return None
    if found[0].ndim != 1 or found[0].dtype.kind not in "iu":
        raise DataError(f"{path}: {GROUPS}: expected an integer for each sample, got {found[0].dtype}")
    return np.asarray(found[0], np.int64)


def _read_chosen(path: Path, name: str, choose: Callable[[set[str]], Sequence[str]]) -> list[Array]:
    try:
        with path.open("rb") as file, _open_zip(file, name) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            return [_read_member(path, file, archive, members[key], f"{name}: {key}") for key in choose(set(members))]
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or error}") from None


def _listed(found: Collection[str]) -> str:
    return (" ".join(", ".join(sorted(found)).split()) or "none")[:200]


def _open_zip(file: IO[bytes], name: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except Exception as error:  # damage shows in many unrelated types
        raise DataError(f"{name} is no .npz file that can be read: {_first_line(error)}") from None


def _read_member(path: Path, file: IO[bytes], archive: zipfile.ZipFile, member: zipfile.ZipInfo, what: str) -> Array:
    if member.flag_bits & _ENCRYPTED:
        raise DataError(f"{what} is encrypted")
    if member.compress_type != zipfile.ZIP_STORED:
        return _decompress(archive, member, what)
    file.seek(member.header_offset)
    local = file.read(_LOCAL_HEADER.size)
    if len(local) < _LOCAL_HEADER.size or local[:4] != b"PK\x03\x04":
        raise DataError(f"{what} is damaged: it is not where the file says")
    _, name_length, extra_length = _LOCAL_HEADER.unpack(local)
    file.seek(name_length + extra_length, 1)
    header, length = _read_header(file, what)
    _check_size(header, member.file_size - length, what)
    shape, fortran, dtype = header
    if math.prod(shape) == 0:
        return np.zeros(shape, dtype)
    try:
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
    except (ValueError, OverflowError, OSError) as error:  # the file ends too early, or addresses run out
        raise DataError(f"{what} cannot be mapped: {error}") from None


def _decompress(archive: zipfile.ZipFile, member: zipfile.ZipInfo, what: str) -> Array:
    try:
        with archive.open(member) as stream:
            header, length = _read_header(stream, what)
            _check_size(header, member.file_size - length, what)
        with archive.open(member) as stream:
            return np.asarray(npy.read_array(stream, allow_pickle=False))
    except DataError:
        raise
    except MemoryError:
        raise DataError(
            f"{what} does not fit memory: store it without compression (numpy.savez), then it is read in place"
        ) from None
    except Exception as error:  # every way of compression has its own type
        raise DataError(f"{what} is damaged: {_first_line(error)}") from None


def _read_header(stream: IO[bytes], what: str) -> tuple[Header, int]:
    """Read the header of an array, and how many bytes it takes."""
    start = stream.tell()
    try:
        version = npy.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the format holds no plain numbers")
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        header: Header = read(stream)
    except Exception as error:  # the header is parsed as Python source, which can fail in many ways
        raise DataError(f"{what} is no array: {_first_line(error)}") from None
    if header[2].hasobject:
        raise DataError(f"{what} holds Python objects, which could run code when they are read; expected numbers")
    return header, stream.tell() - start


def _check_size(header: Header, size: int, what: str) -> None:
    shape, _, dtype = header
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
        raise DataError(f"{what} says it is {dtype} {shape}, but it has {size} bytes")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
