"""A bundle that lies with the coordinator: graphs are fetched once and kept, weights layer by layer when they are due.

In the work directory of a job there is one sparse weights file; it has the bytes of the layers in use, at the offsets
at which the graphs look for them. A layer that is discarded becomes a hole again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from edge_runtime.bundle_files import file_ref
from edge_runtime.client import DeviceClient
from edge_runtime.engine.choose import choose_engine
from edge_runtime.engine.ort_training import TRAINING_MODEL
from edge_runtime.files import link_file
from edge_runtime.graph_check import (
    check_forward_graph,
    check_loss_graph,
    check_ort_training_graph,
    check_training_graph,
)
from edge_runtime.layers import head_of
from edge_runtime.system import HERE
from federation.coverage import coverage
from federation.device_task import Part
from federation.errors import BundleError
from federation.exchange import Exchange, update_regions
from federation.layout import MODEL, Layout
from federation.manifest import MANIFEST_NAME, Boundary, FileRef, Layer, Manifest, loads
from federation.messages import TaskOffer
from federation.region import Region
from federation.space import Vector
from federation.weights import header
from federation.wire import Limits, UpdateDecoder, read_blocks


class RemoteBundle:
    """Graphs by hash in a cache, and a work directory that looks like a bundle."""

    def __init__(
        self,
        client: DeviceClient,
        digest: str,
        cache: Path,
        work: Path,
        room: Callable[[int], None] = lambda size: None,
    ) -> None:
        """`room` is told how many bytes are about to be written, and raises if that is too much."""
        self.client = client
        self._room = room
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
        self._harmless: set[str] = set()  # ... whose structure was checked
        self._version = ""  # of the weights in the file
        self._there: set[str] = set()  # parameters whose bytes of that version are in the file

    def file(self, ref: FileRef) -> Path:
        """Put a graph into the work directory, from the cache or from the coordinator."""
        path = self.directory / ref.name
        if ref.sha256 not in self._sound:
            path.parent.mkdir(parents=True, exist_ok=True)
            known = self.cache / ref.sha256
            if not known.exists() or file_ref(self.cache, ref.sha256).sha256 != ref.sha256:
                self._room(ref.bytes)
                self.client.save_graph(ref.sha256, known, ref.bytes)
            path.unlink(missing_ok=True)
            link_file(known, path)
            self._sound.add(ref.sha256)
        return path

    def tokenizer(self) -> Path | None:
        """Fetch the tokenizer, if the bundle has one; the manifest bounds its size."""
        return self.file(self.manifest.tokenizer) if self.manifest.tokenizer is not None else None

    def training_files(self, boundary: Boundary, engine: str) -> None:
        """Fetch everything that an engine needs for a boundary; refuse a graph that does other things than training."""
        self._frozen_file()
        self.loss_file()
        check = check_ort_training_graph if engine == "ort-training" else check_training_graph
        for ref in boundary.ort_training if engine == "ort-training" else filter(None, (boundary.train,)):
            path = self.file(ref)
            if ref.sha256 not in self._harmless and (engine != "ort-training" or path.name == TRAINING_MODEL):
                check(path, self.manifest, boundary)
                self._harmless.add(ref.sha256)

    def layer_file(self, layer: Layer, *, measuring: bool = False) -> Path:
        """Fetch the graph of a frozen layer, or the one that also measures, checked in the same way."""
        self._frozen_file()
        graph = layer.graph(measuring)
        path = self.file(graph)
        if graph.sha256 not in self._harmless:
            check_forward_graph(path, self.manifest, layer, measuring=measuring)
            self._harmless.add(graph.sha256)
        return path

    def loss_file(self) -> None:
        """Fetch the graph of a loss that was traced, checked likewise."""
        own = self.manifest.loss.own
        if own is not None and own.graph.sha256 not in self._harmless:
            check_loss_graph(self.file(own.graph), self.manifest)
            self._harmless.add(own.graph.sha256)

    def _frozen_file(self) -> None:
        """Fetch the weights that no device trains, which lie beside the graphs."""
        if self.manifest.stored is not None:
            self.file(self.manifest.stored)

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
        """Fetch a range of a version to its place in the file, unless all of it is there."""
        if self._version != f"{offer.job}/{offer.version}":
            self._version = f"{offer.job}/{offer.version}"
            self._there.clear()
        (self.directory / self.manifest.weights.name).touch()
        for missing in self._missing(where):
            self._fetch(offer, self.data_start + 4 * missing.start, self.data_start + 4 * missing.stop)
        self._there |= {
            name for name, own in self._inside(where) if where.start <= own.start and own.stop <= where.stop
        }

    def _fetch(self, offer: TaskOffer, start: int, stop: int) -> None:
        self._room(stop - start)
        with (self.directory / self.manifest.weights.name).open("r+b") as file:
            file.seek(start)
            for chunk in self.client.weights(offer.job, offer.version, start, stop, offer.storage):
                file.write(chunk)
                self.received += len(chunk)
            if file.tell() != stop:
                raise BundleError(f"expected {stop - start} bytes of weights, got {file.tell() - start}")

    def fetch_all(self, offer: TaskOffer) -> None:
        """Fetch a whole version, and write what stands in front of it: then the directory is a bundle."""
        self.fetch_weights(offer, slice(0, self.space.size))
        with (self.directory / self.manifest.weights.name).open("r+b") as file:
            file.write(header(self.space))

    def _inside(self, where: slice) -> Iterator[tuple[str, slice]]:
        """Yield the parameters that a range touches, with their places, in order."""
        for parameter in self.space:
            own = self.space.slice_of(parameter.name)
            if own.start < where.stop and where.start < own.stop:
                yield parameter.name, own

    def _missing(self, where: slice) -> list[slice]:
        """Find the parts of a range that are not in the file; neighbours are one part."""
        found: list[slice] = []
        for name, own in self._inside(where):
            start, stop = max(own.start, where.start), min(own.stop, where.stop)
            if name in self._there:
                continue
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(slice(start, stop))
        return found

    def discard(self, layer: int) -> None:
        """Give the blocks of a layer's weights back to the disk, where the system can."""
        where = self.space.layer(layer)
        self._there -= {parameter.name for parameter in self.manifest.layers[layer].parameters}
        if where.start == where.stop:
            return
        with (self.directory / self.manifest.weights.name).open("r+b") as file:
            HERE.punch_hole(file.fileno(), self.data_start + 4 * where.start, 4 * (where.stop - where.start))


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
        tracks = update_regions(self.bundle.manifest, covered, self.exchange.tracks)
        return tracks[MODEL], self._read(tracks, self.bundle.client.inherited(self.offer.id))

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
    """Layers of one version of the weights. `keeps`: they stay on the disk, because the same task needs them again."""

    def __init__(self, bundle: RemoteBundle, offer: TaskOffer, *, keeps: bool = False) -> None:
        self.bundle = bundle
        self.offer = offer
        self.keeps = keeps
        self.manifest = bundle.manifest
        self.lineage = offer.job
        self.version = f"{offer.job}/{offer.version}"

    def fetch_weights(self, layers: range) -> None:
        space = self.bundle.space
        self.bundle.fetch_weights(self.offer, slice(space.layer(layers[0]).start, space.layer(layers[-1]).stop))

    def fetch(self, layer: int, *, measuring: bool = False) -> Path:
        space, used = self.bundle.space, self.manifest.layers[layer]
        for where in (space.layer(layer), *(space.slice_of(name) for name in used.borrowed or ())):
            self.bundle.fetch_weights(self.offer, where)
        return self.bundle.layer_file(used, measuring=measuring)

    def fetch_head(self, boundary: Boundary) -> Path:
        head, space = head_of(boundary), self.bundle.space
        for number, parameters in enumerate(space.layers):
            if not set(head.parameters).isdisjoint(parameters):  # as a rule they came with the task
                self.bundle.fetch_weights(self.offer, space.layer(number))
        return self.bundle.layer_file(head)

    def fetch_step(self, boundary: Boundary) -> tuple[Path, Vector]:
        self.bundle.training_files(boundary, choose_engine(boundary))
        return self.bundle.directory, self.bundle.weights(self.offer, self.bundle.space.suffix(boundary.layer))

    def release(self, layer: int) -> None:
        if not self.keeps:
            self.bundle.discard(layer)
