""".npz files: arrays in a zip file. What is stored without compression is mapped where it lies, and nothing is read."""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Callable, Sequence
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

    def choose(found: set[str]) -> tuple[str, ...]:
        pair = next((pair for pair in PAIRS if found >= set(pair)), None)
        if pair is None:
            raise DataError(f"{name}: expected arrays named {accepted_names()}, found {_listed(found)}")
        return pair

    inputs, labels = _read_chosen(path, name, choose)
    return inputs, labels, "npz, mapped" if isinstance(inputs, np.memmap) else "npz, read into memory"


def read_named(path: Path, name: str, inputs: Sequence[str]) -> tuple[Array | dict[str, Array], Array, str]:
    """Read an array for each input, and labels; or, if these are not there, inputs and labels as of any model."""
    known = [labels for _, labels in PAIRS if labels not in inputs]

    def choose(found: set[str]) -> Sequence[str]:
        labels = next((label for label in known if label in found), None)
        return [*inputs, labels] if labels is not None and found >= set(inputs) else []

    *arrays, labels = _read_chosen(path, name, choose) or (None,)
    if labels is None:
        return read_archive(path, name)
    stored = "npz, mapped" if all(isinstance(array, np.memmap) for array in arrays) else "npz, read into memory"
    return dict(zip(inputs, arrays)), labels, stored


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


def _listed(found: set[str]) -> str:
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
