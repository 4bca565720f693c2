"""Measure what training a bundle costs on this device: seconds by part and peak memory, boundary by boundary.

Each boundary is measured in a fresh process (measure.py), the weakest first. A bundle lies here, or with a coordinator
whose job trains it; nothing but what a device has is needed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import numpy as np

from edge_runtime.bundle_files import check_bundle, file_ref, read_manifest
from edge_runtime.client import Declined, DeviceClient, OpenJob
from edge_runtime.engine.choose import EngineName, choose_engine, engines_of
from edge_runtime.engine.session import RUNTIME, Profile
from edge_runtime.enrolment import check_work_folder, credential
from edge_runtime.files import sole_user
from edge_runtime.machine import core_count, describe_device
from edge_runtime.measure import Case, Measurement, measure
from edge_runtime.memory import available_memory
from edge_runtime.own_limits import DiskRoom, OwnLimits
from edge_runtime.remote import RemoteBundle
from edge_runtime.trust import Trust
from federation.benchmark import MOST_LETTERS, Benchmark, BoundaryCost, PartSeconds, tiers_of
from federation.capacity import megabytes, predicted_peak
from federation.errors import InputError, OutOfMemory
from federation.manifest import MANIFEST_NAME, Boundary, Manifest
from federation.messages import TaskOffer
from federation.printable import printable

Progress = Callable[[str, int, int], None]
Notify = Callable[[str], None]
ALL, TIERS = "all", "tiers"
ATTEMPTS = 3  # to fetch weights: a job goes on meanwhile, and its older versions are removed
PATIENCE = 20.0  # seconds with a coordinator that does not answer: a person waits


@dataclass(frozen=True)
class BenchSettings:
    """What to measure, and how."""

    boundaries: str = TIERS  # NAME,… or 'tiers' or 'all'
    batch: int | None = None  # None: the job's, or the bundle's
    threads: int = 1
    iterations: int = 10
    engine: str = "auto"
    profile: Profile = "fast"


def check_runtime_profile(text: str) -> Profile:
    """Read the name of a runtime profile."""
    for known in get_args(Profile):
        if text == known:
            return cast(Profile, known)
    raise InputError(f"--profile {text}: expected {' or '.join(get_args(Profile))}")


def places(manifest: Manifest, boundaries: str) -> list[Boundary]:
    """Choose boundaries, input side first: NAME,… or 'tiers' or 'all'. A bundle without tiers has its first one."""
    wanted = set(manifest.tiers.values()) or {manifest.boundaries[0].name}
    if boundaries == ALL:
        wanted = {boundary.name for boundary in manifest.boundaries if boundary.narrow is None}
    elif boundaries != TIERS:
        named = [name.strip() for name in boundaries.split(",") if name.strip()]
        if not named:
            raise InputError("--boundaries: expected names separated by commas, 'tiers' or 'all'")
        wanted = {manifest.boundary(name).name for name in named}
    return [boundary for boundary in manifest.boundaries if boundary.name in wanted]


class LocalBundle:
    """A bundle that lies on this device."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        check_bundle(directory, self.manifest)
        self.digest = file_ref(directory, MANIFEST_NAME).sha256
        self.batch = self.manifest.batch

    def fetch(self, boundaries: Sequence[Boundary], engine: EngineName) -> None:
        """Do nothing: everything is here."""


class JobBundle:
    """The bundle of a job that runs: its graphs and newest weights are fetched, checked and kept as an agent does."""

    def __init__(self, client: DeviceClient, job: OpenJob, work: Path, trust: Trust, progress: Progress) -> None:
        trust.check(job.bundle, client.signature(job.bundle))
        self._client = client
        self._job = job
        self._progress = progress
        self.digest = job.bundle
        self.batch = job.batch
        self.directory = work / "jobs" / job.bundle[:16]
        room = DiskRoom(work, OwnLimits().disk)
        room.in_use = {self.directory}
        self._remote = RemoteBundle(client, job.bundle, work, self.directory, room.take)
        self.manifest = self._remote.manifest
        room.in_use |= {self._remote.cache / ref.sha256 for ref in self.manifest.files()}

    def fetch(self, boundaries: Sequence[Boundary], engine: EngineName) -> None:
        """Fetch all that training from some boundaries needs."""
        self._progress("fetch graphs", 0, 1)
        for boundary in boundaries:
            self._remote.training_files(boundary, engine)
        frozen = {layer for boundary in boundaries for layer in self.manifest.frozen(boundary)}
        for layer in {*frozen, self.manifest.layers[-1]}:  # the last one warms the runtime up
            self._remote.layer_file(layer)
        self._progress("fetch weights", 0, 1)
        for attempt in range(ATTEMPTS):
            try:
                self._remote.fetch_all(_offer(self._job))
                return
            except Declined as refusal:
                if refusal.answer != 404 or attempt + 1 == ATTEMPTS:
                    raise
                self._job = find_job(self._client.open_jobs(), self._job.id)


def _offer(job: OpenJob) -> TaskOffer:
    return TaskOffer("none", job.id, job.bundle, job.round, 0.0, {})


def find_job(jobs: Sequence[OpenJob], wanted: str | None) -> OpenJob:
    """Find the job that a name or the beginning of an id means; without one, the only job."""
    found = [job for job in jobs if wanted is None or job.name == wanted or job.id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(printable(f"{job.id} ({job.name})", 100) for job in (found or jobs)[:8])
    if not jobs:
        raise InputError("the coordinator has no job that runs: create one, or name a bundle on this device")
    if wanted is None or found:
        raise InputError(f"several jobs run there; choose one with --job: {listed}")
    raise InputError(f"no job that runs is called {wanted!r}; there are: {listed}")


@contextmanager
def connected(
    server: str,
    token: str | None,
    *,
    name: str | None,
    work: Path,
    certificate: Path | None = None,
    engine: str = "auto",
    notify: Notify = lambda text: None,
) -> Iterator[DeviceClient]:
    """Connect as the device whose credential the work folder has, or as a new one; no agent may be at work there."""
    check_work_folder(work)
    busy = f"an agent is at work in {work}, and measurements beside it mean nothing: stop it first"
    with sole_user(work / "agent.lock", busy):
        profile = {"runtime": RUNTIME, "engines": engines_of(engine)}
        own = credential(server, token, name or socket.gethostname(), profile, work, certificate, notify)
        with DeviceClient(server, own, certificate=certificate, patience=PATIENCE) as client:
            yield client


def bench_device(
    bundle: LocalBundle | JobBundle,
    settings: BenchSettings | None = None,
    *,
    progress: Progress = lambda what, done, total: None,
    measure: Callable[[Case], Measurement] = measure,
) -> Benchmark:
    """Measure a bundle; a boundary that does not fit the memory becomes a line with the reason."""
    settings = settings or BenchSettings()
    manifest, batch = bundle.manifest, settings.batch or bundle.batch
    chosen = places(manifest, settings.boundaries)
    engine = choose_engine(chosen[0], settings.engine)
    for boundary in chosen:
        choose_engine(boundary, engine)
    bundle.fetch(chosen, engine)
    costs: list[BoundaryCost] = []
    idle: int | None = None
    for done, boundary in enumerate(reversed(chosen)):
        progress(f"{manifest.name} from {boundary.name}", done, len(chosen))
        tiers = tiers_of(manifest, boundary.name)
        case = Case(
            str(bundle.directory),
            boundary.name,
            engine,
            batch,
            settings.threads,
            settings.profile,
            iterations=settings.iterations,
            whole_round=True,
        )
        try:
            _check_room(manifest, boundary, batch)
            found = measure(case)
        except OutOfMemory as error:
            costs.append(BoundaryCost(boundary.name, tiers, problem=printable(error, MOST_LETTERS)))
            continue
        costs.append(BoundaryCost(boundary.name, tiers, _seconds(found), found.memory.get("anonymous")))
        idle = found.idle.get("anonymous", idle)
    progress("done", len(chosen), len(chosen))
    machine = describe_device()
    return Benchmark(
        bundle=bundle.digest,
        model=printable(manifest.name, MOST_LETTERS),
        batch=batch,
        iterations=settings.iterations,
        runtime=f"{RUNTIME}, {engine}" + ("" if settings.profile == "fast" else f", {settings.profile}"),
        threads=settings.threads,
        costs=tuple(reversed(costs)),
        processor=printable(machine.get("processor", ""), MOST_LETTERS),
        system=printable(machine.get("system", ""), MOST_LETTERS),
        cores=core_count(),
        idle=idle,
    )


def _check_room(manifest: Manifest, boundary: Boundary, batch: int) -> None:
    """Refuse a trial that would only make the system end it, or slow everything down."""
    needed, free = predicted_peak(manifest, boundary, batch), available_memory()
    if free is not None and needed > free[0]:
        raise OutOfMemory(f"needs {megabytes(needed)} by prediction, {megabytes(free[0])} are free ({free[1]})")


def _seconds(found: Measurement) -> PartSeconds:
    nothing = [0.0] * len(found.training)
    frozen, io = found.forward_compute or nothing, found.activation_io or nothing
    batches = [sum(parts) for parts in zip(frozen, io, found.training, found.optimiser, strict=True)]
    low, batch, high = map(float, np.percentile(batches, [25, 50, 75]))
    training = float(np.median(found.training))
    share = found.forward_share
    return PartSeconds(
        load=found.load,
        frozen_forward=float(np.median(frozen)),
        activation_io=float(np.median(io)),
        training=training,
        optimiser=float(np.median(found.optimiser)),
        batch=batch,
        low=low,
        high=high,
        backward=None if share is None else training * (1.0 - share),
    )
