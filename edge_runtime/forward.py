"""The multi-step forward pass: load some frozen layers, run the local data through them, store what comes out, discard
them, go on with the next. The whole model is never in memory.

While one group of layers computes, the next one is fetched. The layers of a group run as one graph where they can
(join_layers.py): values pass from one to the next in the runtime's own layout. ResNet20's at the weak tier take 11 %
less time so, and give the same to within the rounding of float32. In 8 bits (int8_layers.py) they take half of it; as
that is less exact, a device's owner has to ask for it, and evaluation and measured statistics stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edge_runtime.activations import ActivationStore, StoredType
from edge_runtime.bundle_files import read_range
from edge_runtime.engine.portable import LayerForward, open_beside
from edge_runtime.engine.session import FrozenType, RuntimeSettings, is_out_of_memory
from edge_runtime.frozen_statistics import FrozenStatistics
from edge_runtime.int8_layers import open_int8, tell_float
from edge_runtime.join_layers import join_layers
from edge_runtime.layers import LayerSource
from edge_runtime.timing import FORWARD, Stopwatch
from federation.capacity import FLOAT_BYTES
from federation.errors import EmbraceError, OutOfMemory
from federation.manifest import Boundary, Manifest

# Numbers of the first and last sample -> the inputs of the first layer.
Inputs = Callable[[int, int], NDArray[Any]]
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ForwardPlan:
    """How to run the frozen layers on this device."""

    batch: int = 64  # samples that go through a layer at once
    memory: int | None = None  # bytes for the layers that are loaded at the same time; None: all at once
    stored_as: StoredType = "float32"
    computed_in: FrozenType = "float32"
    folder: Path | None = None  # where activations are kept; None: in memory
    store_limit: int | None = None  # the most bytes of one store


PACKED = 5  # times its weights: what a session takes at most that packs and folds them


def groups(manifest: Manifest, start: int, stop: int, memory: int | None, profile: str) -> list[range]:
    """Group consecutive layers that are loaded together: as many as the memory allows, at least one.

    A layer counts with its weights, trained or stored; `fast` holds them twice (as they came, and packed for the
    processor).
    """
    factor = 2 if profile == "fast" else 1
    found: list[range] = []
    used = 0
    for layer in range(start, stop):
        size = factor * _bytes_of(manifest, layer)
        if found and (memory is None or used + size <= memory):
            found[-1] = range(found[-1].start, layer + 1)
            used += size
        else:
            found.append(range(layer, layer + 1))
            used = size
    return found


def _bytes_of(manifest: Manifest, layer: int) -> int:
    return FLOAT_BYTES * manifest.elements_of(manifest.layers[layer])


def _settings_of(manifest: Manifest, part: range, memory: int | None, settings: RuntimeSettings) -> RuntimeSettings:
    """Pack few weights for the processor also where memory is short: convolutions are twice as quick so."""
    few = memory is not None and PACKED * sum(_bytes_of(manifest, layer) for layer in part) <= memory
    return replace(settings, profile="fast") if few else settings


def store_activations(
    source: LayerSource,
    layers: range,
    inputs: Inputs,
    count: int,
    plan: ForwardPlan,
    settings: RuntimeSettings,
    watch: Stopwatch,
    report: Report = lambda what, done, total: None,
    boundary: Boundary | None = None,
    statistics: FrozenStatistics | None = None,
) -> ActivationStore:
    """Run `count` samples through some layers, and through the head of a boundary behind them if it has one.

    What the last one gives is stored. A head has the number of the layer whose first steps it runs. `statistics` get
    what enters the batch norms; half as many samples pass at once then, because that takes up to half as much again.
    """
    manifest, store = source.manifest, None
    batch = plan.batch if statistics is None else max(1, plan.batch // 2)
    parts = groups(manifest, layers.start, layers.stop, plan.memory, settings.profile)
    pieces = dict(enumerate(manifest.layers))
    if boundary is not None and boundary.head is not None:
        pieces[boundary.layer] = boundary.head
        parts.append(range(boundary.layer, boundary.layer + 1))
    end = parts[-1].stop if parts else 0

    def fetch(number: int) -> Path:
        if boundary is not None and number not in layers:
            return source.fetch_head(boundary)
        return source.fetch(number, measuring=statistics is not None)

    def fetch_part(part: range) -> list[Path]:
        if part[-1] in layers:
            source.fetch_weights(part)
        return [fetch(number) for number in part]

    with ThreadPoolExecutor(1, "fetch") as pool, ExitStack() as unfinished:
        for part, graphs in _fetched(fetch_part, parts, pool, watch):
            with watch.part("load"):
                names = {layer: pieces[layer].name for layer in part}
                own = _settings_of(manifest, part, plan.memory, settings)
                rows = store.rows if store else inputs
                loaded = []
                if plan.computed_in == "int8":
                    why = _why_float(manifest, part, plan.memory, own.profile, statistics)
                    loaded = _open_int8(graphs, names, own, rows, count, batch, why)
                loaded = loaded or _open(graphs, names, own, join=statistics is None)
                for layer, graph in zip(part, graphs, strict=True):
                    if statistics is not None:
                        statistics.begin(
                            layer, partial(read_range, graph.parent / manifest.weights.name, manifest.space)
                        )
            with watch.part("activation_io"):
                following = ActivationStore(
                    count,
                    pieces[part[-1]].output,
                    stored_as=plan.stored_as,
                    folder=plan.folder,
                    limit=plan.store_limit,
                )
            unfinished.callback(following.close)
            for start in range(0, count, batch):
                stop = min(start + batch, count)
                report(pieces[part[-1]].name, part.start * count + len(part) * stop, end * count)
                with watch.part("activation_io"):
                    value = rows(start, stop)
                value = _run_all(loaded, value, watch, statistics)
                with watch.part("activation_io"):
                    following.write(start, value)
            if store:
                store.close()
            store = following
            del loaded  # before the next group is loaded
            for layer in set(part).intersection(layers):
                source.release(layer)
        unfinished.pop_all()  # nothing failed: the last store is the caller's
    if store is None:
        raise ValueError("no layers to run")
    return store


@dataclass(frozen=True)
class _Loaded:
    """A session: of one layer, or of several that are joined."""

    session: LayerForward
    layer: int  # the first
    name: str


def _open_int8(
    graphs: Sequence[Path],
    names: Mapping[int, str],
    settings: RuntimeSettings,
    rows: Inputs,
    count: int,
    batch: int,
    why_float: str | None,
) -> list[_Loaded]:
    """Open a group as one graph in 8 bits; where it has to stay float32 there is none."""
    title = _title(names)
    if why_float is not None:
        tell_float(title, why_float)
        return []
    session = open_int8(graphs, title, settings, rows, count, batch)
    return [] if session is None else [_Loaded(session, next(iter(names)), title)]


def _why_float(
    manifest: Manifest, part: range, memory: int | None, profile: str, statistics: FrozenStatistics | None
) -> str | None:
    """Say what of a round keeps a group from running in 8 bits.

    To write it takes as much memory as its weights. `fast` packs them, which takes as much; `low_memory` takes none.
    """
    if statistics is not None:
        return "what enters their batch norms is measured"
    weights = sum(_bytes_of(manifest, layer) for layer in part)
    if profile == "low_memory" and memory is not None and weights > memory:
        return "there is too little memory to write them in 8 bits"
    return None


def _title(names: Mapping[int, str]) -> str:
    first, *rest = names.values()
    return f"{first} to {rest[-1]}" if rest else first


def _open(graphs: Sequence[Path], names: Mapping[int, str], settings: RuntimeSettings, *, join: bool) -> list[_Loaded]:
    """Open a group, as one graph if that can be written."""
    layers = list(names)
    sessions = open_layers(graphs, settings) if join else [LayerForward(graph, settings) for graph in graphs]
    if len(sessions) < len(layers):
        return [_Loaded(sessions[0], layers[0], _title(names))]
    return [_Loaded(session, layer, names[layer]) for session, layer in zip(sessions, layers, strict=True)]


def open_layers(graphs: Sequence[Path], settings: RuntimeSettings) -> list[LayerForward]:
    """Open consecutive layers: one session for all, or one for each where that graph cannot be written.

    Nor can it where layers lie in several folders: each of them has weights of its own, of which a graph reads one.
    """
    together = len(graphs) > 1 and len({graph.parent for graph in graphs}) == 1
    joined = _open_joined(graphs, settings) if together else None
    return [LayerForward(graph, settings) for graph in graphs] if joined is None else [joined]


def _open_joined(graphs: Sequence[Path], settings: RuntimeSettings) -> LayerForward | None:
    joined = join_layers([graph.read_bytes() for graph in graphs])
    try:
        return open_beside(LayerForward, [joined], graphs[0].parent, settings)
    except OSError:  # the folder cannot be written to
        return None


def _run_all(
    loaded: Sequence[_Loaded], value: NDArray[Any], watch: Stopwatch, statistics: FrozenStatistics | None
) -> NDArray[Any]:
    for piece in loaded:
        value = _run(piece, value, watch, statistics)
    return value


def _run(piece: _Loaded, value: NDArray[Any], watch: Stopwatch, statistics: FrozenStatistics | None) -> NDArray[Any]:
    with watch.part(FORWARD + piece.name):
        try:
            if statistics is None or piece.layer not in statistics.norms:
                return piece.session(value)
            output, rows = piece.session.measure(value, statistics.norms[piece.layer])
            for norm, (means, variances) in rows.items():
                statistics.add(norm, means, variances)
            return output
        except Exception as error:  # onnxruntime raises several unrelated types
            if is_out_of_memory(error):
                raise OutOfMemory(f"not enough memory to run layer {piece.name!r} on {len(value)} samples") from None
            raise EmbraceError(f"layer {piece.name!r} failed: {str(error).splitlines()[0]}") from None


def _fetched(
    fetch_part: Callable[[range], list[Path]], parts: Sequence[range], pool: ThreadPoolExecutor, watch: Stopwatch
) -> Iterator[tuple[range, list[Path]]]:
    """Yield each group with its graphs; the next one is being fetched while this one is in use."""

    def fetch(part: range) -> tuple[list[Path], float]:
        began = watch.now()
        return fetch_part(part), watch.now() - began

    fetching = pool.submit(fetch, parts[0])
    for part, following in zip_longest(parts, parts[1:]):
        with watch.part("download"):
            waiting = watch.now()
            graphs, took = fetching.result()
            watch.hidden_download += max(0.0, took - (watch.now() - waiting))
        if following is not None:
            fetching = pool.submit(fetch, following)
        yield part, graphs
