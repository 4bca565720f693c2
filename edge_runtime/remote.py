"""A bundle that lies with the coordinator: graphs are fetched once and kept, weights layer by layer when they are due.

In the work directory of a job there is one sparse weights file; it has the bytes of the layers in use, at the offsets
at which the graphs look for them. A layer that is discarded becomes a hole again.
"""

from __future__ import annotations

import ctypes
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edge_runtime.bundle_files import file_ref
from edge_runtime.client import DeviceClient
from federation.coverage import coverage
from federation.device_task import Part
from federation.errors import BundleError
from federation.exchange import Exchange, trained_region
from federation.layout import MODEL, Layout
from federation.manifest import MANIFEST_NAME, Boundary, FileRef, Manifest, loads
from federation.messages import TaskOffer
from federation.region import Region
from federation.space import Vector
from federation.weights import header
from federation.wire import Limits, UpdateDecoder, read_blocks

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


class RemoteBundle:
    """Graphs by hash in a cache, and a work directory that looks like a bundle."""

    def __init__(self, client: DeviceClient, digest: str, cache: Path, work: Path) -> None:
        self.client = client
        self.cache = cache / "graphs"
        self.directory = work
        self.cache.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        text = client.manifest(digest)
        (work / MANIFEST_NAME).write_bytes(text)
        self.manifest: Manifest = loads(text.decode())
        self.space = self.manifest.space
        self.data_start = len(header(self.space))
        self.received = 0  # bytes of weights
        self._sound: set[str] = set()  # graphs that were compared with their hashes

    def file(self, ref: FileRef) -> Path:
        """Put a graph into the work directory, from the cache or from the coordinator."""
        path = self.directory / ref.name
        if ref.sha256 not in self._sound:
            path.parent.mkdir(parents=True, exist_ok=True)
            known = self.cache / ref.sha256
            if not known.exists() or file_ref(self.cache, ref.sha256).sha256 != ref.sha256:
                self.client.save_graph(ref.sha256, known)
            path.unlink(missing_ok=True)
            try:
                os.link(known, path)
            except OSError:
                shutil.copyfile(known, path)
            self._sound.add(ref.sha256)
        return path

    def training_files(self, boundary: Boundary, engine: str) -> None:
        """Fetch everything that an engine needs for a boundary."""
        for ref in boundary.ort_training if engine == "ort-training" else filter(None, (boundary.train,)):
            self.file(ref)

    def weights(self, offer: TaskOffer, where: slice) -> Vector:
        """Map a range of the weights of a task's version."""
        self.fetch_weights(offer, where)
        path = self.directory / self.manifest.weights.name
        if where.stop == where.start:
            return np.zeros(0, np.float32)
        return np.memmap(
            path, np.dtype("<f4"), "r", offset=self.data_start + 4 * where.start, shape=(where.stop - where.start,)
        )

    def fetch_weights(self, offer: TaskOffer, where: slice) -> None:
        """Fetch a range of a version to its place in the file."""
        start, stop = self.data_start + 4 * where.start, self.data_start + 4 * where.stop
        path = self.directory / self.manifest.weights.name
        path.touch()
        with path.open("r+b") as file:
            file.seek(start)
            for chunk in self.client.weights(offer.job, offer.version, start, stop):
                file.write(chunk)
                self.received += len(chunk)
            if file.tell() != stop:
                raise BundleError(f"expected {stop - start} bytes of weights, got {file.tell() - start}")


class RemoteServer:
    """What a device's part in a round asks for (participant.py), over HTTP."""

    def __init__(self, bundle: RemoteBundle, offer: TaskOffer, exchange: Exchange) -> None:
        self.bundle = bundle
        self.offer = offer
        self.exchange = exchange

    def model(self, part: Part) -> Vector:
        where = part.region.plain
        return self.bundle.weights(self.offer, where) if where is not None else self._part(MODEL, part, 0)

    def before(self, part: Part) -> Vector:
        return self._part(MODEL, part, -1)

    def state(self, name: str, part: Part) -> Vector:
        return self._part(name, part, 0)

    def inherited(self) -> tuple[Region, Vector]:
        assert self.exchange.inherit is not None
        covered = coverage(self.bundle.manifest, self.exchange.inherit.boundary)
        region = trained_region(self.bundle.manifest, covered)
        tracks = dict.fromkeys((MODEL, *self.exchange.tracks), region)
        return region, self._read(tracks, self.bundle.client.inherited(self.offer.id))

    def _part(self, name: str, part: Part, later: int) -> Vector:
        offer = self.offer
        stream = self.bundle.client.part(offer.job, offer.version + later, name, part.boundary, part.unit)
        return self._read({name: part.region}, stream)

    def _read(self, tracks: dict[str, Region], stream: Iterator[bytes]) -> Vector:
        """Read the first vector of a body, after every check."""
        decoder, body = UpdateDecoder(Layout(tracks), Limits()), bytearray()
        for chunk in stream:
            decoder.feed(chunk)
            body += chunk
        self.bundle.received += len(body)
        checked = decoder.finish().tracks[next(iter(tracks))]
        values: Vector = np.empty(checked.region.size, np.float32)
        done = 0
        for run, block in read_blocks(io.BytesIO(body), checked):
            values[done : done + run.size] = block
            done += run.size
        return values


class RemoteSource:
    """Frozen layers of one version of the weights."""

    def __init__(self, bundle: RemoteBundle, offer: TaskOffer) -> None:
        self.bundle = bundle
        self.offer = offer
        self.manifest = bundle.manifest
        self.lineage = offer.job
        self.version = f"{offer.job}/{offer.version}"

    def fetch(self, layer: int) -> Path:
        self.bundle.fetch_weights(self.offer, self.bundle.space.layer(layer))
        return self.bundle.file(self.manifest.layers[layer].forward)

    def release(self, layer: int) -> None:
        """Give the layer's blocks back to the disk, where the system can."""
        where = self.bundle.space.layer(layer)
        path = self.bundle.directory / self.manifest.weights.name
        with path.open("r+b") as file:
            _punch(file.fileno(), self.bundle.data_start + 4 * where.start, 4 * (where.stop - where.start))


def _punch(descriptor: int, offset: int, length: int) -> None:
    """Give a file's bytes back (FALLOC_FL_PUNCH_HOLE); where that cannot be, they stay until the next version comes."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is not None and length:
        call(descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(length))
