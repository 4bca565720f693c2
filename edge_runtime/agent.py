"""The agent: wait for a task, do it, answer, again. It rides out outages and never dies of a task."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from edge_runtime.budget import allow, check_profile, parse_size
from edge_runtime.client import Declined, DeviceClient
from edge_runtime.data import Samples, check_trainable, load_samples
from edge_runtime.data.load import Data
from edge_runtime.data_reference import file_of
from edge_runtime.device_state import KeptFiles, forget_finished
from edge_runtime.engine.choose import check_engine, choose_engine
from edge_runtime.engine.ort_training import is_available
from edge_runtime.engine.session import RUNTIME, RuntimeSettings
from edge_runtime.enrolment import check_work_folder, credential
from edge_runtime.forward import ForwardPlan
from edge_runtime.forward import Report as Progress
from edge_runtime.memory import current_memory
from edge_runtime.participant import begin, finish
from edge_runtime.places import default_work
from edge_runtime.remote import RemoteBundle, RemoteServer, RemoteSource
from edge_runtime.timing import Stopwatch
from edge_runtime.trainer import Trainer
from federation.coverage import coverage
from federation.errors import DataError, EmbraceError, InputError, OutOfMemory, TaskFailed
from federation.messages import Report, Task, TaskOffer, decode_task
from federation.wire import encode

log = logging.getLogger("embrace.agent")


@dataclass(frozen=True)
class Device:
    """What the person who starts an agent decides."""

    data: Data  # as `embrace train --data`
    work: Path
    memory: str | None = None
    tier: str | None = None
    engine: str = "auto"
    profile: str = "auto"
    settings: RuntimeSettings = field(default_factory=RuntimeSettings)
    allow_single_class: bool = True  # a fleet has the other classes

    def __post_init__(self) -> None:
        check_engine(self.engine)
        check_profile(self.profile)


@dataclass
class _Loaded:
    """A bundle at work: its files, the data that fits it, and the trainer."""

    bundle: RemoteBundle
    samples: Samples
    trainer: Trainer


class Agent:
    """A device at work: it waits for tasks, trains, and sends updates. Its data stays where it is.

    >>> with embrace.Agent.join(server, (x, y), token=enrolment, tier="weak", work=folder / "device") as agent:
    ...     agent.run(most_tasks=0)
    0
    """

    def __init__(
        self,
        client: DeviceClient,
        device: Device,
        *,
        progress: Progress = lambda what, done, total: None,
        on_report: Callable[[Report], None] = lambda report: None,
    ) -> None:
        self.client = client
        self.device = device
        self.progress = progress
        self.on_report = on_report
        self._loaded: dict[str, _Loaded] = {}
        self._begun: set[str] = set()  # jobs
        self._unfit = ""  # as it was told
        self._goes_on = False
        self._following: TaskOffer | None = None  # the task that came with the answer to an update

    @classmethod
    def join(
        cls,
        server: str,
        data: Data,
        *,
        token: str | None = None,
        name: str | None = None,
        memory: str | None = None,
        tier: str | None = None,
        engine: str = "auto",
        profile: str = "auto",
        threads: int = 1,
        spinning: bool = False,
        work: str | Path | None = None,
        certificate: str | Path | None = None,
        progress: Progress = lambda what, done, total: None,
        on_report: Callable[[Report], None] = lambda report: None,
    ) -> Agent:
        """Connect this machine to a coordinator.

        `token` is an enrolment token, needed the first time. `data` is a pair of arrays, FILE.npz, a folder of images
        by class, FILE.csv or FILE.py:NAME. `memory` is a budget such as "64MB"; `tier` fixes what is trained instead.
        """
        folder = Path(work) if work is not None else default_work()
        device = Device(data, folder, memory, tier, engine, profile, RuntimeSettings(threads, spinning))
        if not isinstance(data, tuple) and not file_of(str(data)).exists():
            raise InputError(f"no such file: {file_of(str(data))}")
        check_work_folder(folder)
        verify: str | bool = True if certificate is None else str(certificate)
        known = describe(device)
        own = credential(server, token, name or socket.gethostname(), known, folder, verify)
        client = DeviceClient(server, own, verify=verify)
        try:
            client.set_profile(known)
        except BaseException:
            client.close()
            raise
        return cls(client, device, progress=progress, on_report=on_report)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def run(
        self, *, most_tasks: int | None = None, wait: float = 30.0, until: Callable[[], bool] = lambda: False
    ) -> int:
        """Work until told to stop; returns the number of tasks that were answered."""
        done, patience = 0, 0.0  # the first answer comes at once: it may be that no job can use this device
        while (most_tasks is None or done < most_tasks) and not until():
            self._goes_on = most_tasks is None or done + 1 < most_tasks
            offer, self._following = self._following, None
            if offer is None:
                offer = self.client.next_task(patience)
                patience = wait
                self._tell_unfit(self.client.unfit)
            if offer is not None and self.answer(offer):
                done += 1
        if self._following is not None:
            self._give_up(self._following, "stopped", "the agent was told to stop")
        return done

    def _tell_unfit(self, why: str) -> None:
        if why and why != self._unfit:
            log.warning("no job can use this device: %s; waiting for one that can", why)
        self._unfit = why

    def answer(self, offer: TaskOffer) -> bool:
        """Do a task and send the result; whatever goes wrong with it is reported, and the agent lives on."""
        try:
            report = self._work(offer)
        except (TaskFailed, DataError) as error:
            self._give_up(offer, error.reason, str(error))
        except Declined as error:  # late, or the round is over: not worth a repetition
            log.warning("task %s: %s", offer.id, error)
        except (EmbraceError, OSError) as error:
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            self._give_up(offer, "disk_full" if full else "failed", str(error))
        except MemoryError as error:
            self._give_up(offer, "out_of_memory", str(error) or "not enough memory")
        else:
            self.on_report(report)
            return True
        return False

    def _give_up(self, offer: TaskOffer, reason: str, message: str) -> None:
        log.warning("task %s failed: %s", offer.id, message)
        try:
            self.client.fail(offer.id, reason, message)
        except Declined as error:
            log.warning("task %s: %s", offer.id, error)

    def _work(self, offer: TaskOffer) -> Report:
        watch = Stopwatch()
        offer.check()
        task = decode_task(offer.work)
        with watch.part("download"):
            loaded = self._load(offer, task)
            manifest, covered = loaded.bundle.manifest, coverage(loaded.bundle.manifest, task.boundary)
            engine = choose_engine(covered.boundary, self.device.engine)
            for graph in covered.graphs:
                loaded.bundle.training_files(graph, engine)
            before = loaded.bundle.received
            kept = self._kept(offer.job)
            begun = begin(task, manifest, RemoteServer(loaded.bundle, offer, task.exchange), kept)
        loaded.trainer.engine = engine
        loaded.trainer.source = RemoteSource(loaded.bundle, offer)
        outcome = loaded.trainer.run(task, begun.received, watch)
        with watch.part("optimiser"):
            contribution = finish(begun, outcome)
        with watch.part("state"):
            kept.save(offer.id, task.boundary, contribution)
        downloaded = loaded.bundle.received - before
        report = replace(
            outcome.report,
            lost_state=begun.device.lost,
            seconds=asdict(watch.timings(loaded.trainer.forward_share)),
            bytes={**outcome.report.bytes, "downloaded": downloaded, "uploaded": contribution.bytes},
        )
        with watch.part("upload"):
            body = partial(encode, contribution.tracks)
            self._following = self.client.send_update(offer.id, body, report, following=self._goes_on)
        kept.acknowledged(offer.id)
        return replace(report, seconds=asdict(watch.timings(loaded.trainer.forward_share)))

    def _kept(self, job: str) -> KeptFiles:
        """Open the folder of a job's state. When a job begins, the folders of those that are over are removed."""
        folder = self.device.work / "kept"
        if job not in self._begun:
            forget_finished(folder, self.client, besides=job)
            self._begun.add(job)
        return KeptFiles(folder / job)

    def _load(self, offer: TaskOffer, task: Task) -> _Loaded:
        known = self._loaded.get(offer.bundle)
        if known is None:
            for other in self._loaded.values():  # one bundle at a time: memory is short
                other.trainer.close()
            self._loaded.clear()
            work = self.device.work / "jobs" / offer.bundle[:16]
            bundle = RemoteBundle(self.client, offer.bundle, self.device.work, work)
            samples = load_samples(self.device.data, bundle.manifest)
            check_trainable(samples, self.device.allow_single_class)
            settings, plan = self._allowance(bundle, samples, task)
            trainer = Trainer(
                work, RemoteSource(bundle, offer), samples, settings=settings, plan=plan, progress=self.progress
            )
            known = self._loaded[offer.bundle] = _Loaded(bundle, samples, trainer)
        return known

    def _allowance(self, bundle: RemoteBundle, samples: Samples, task: Task) -> tuple[RuntimeSettings, ForwardPlan]:
        """Decide whether the task fits; if not, tell the coordinator what would, and give the task back."""
        device, manifest = self.device, bundle.manifest

        def allowed(boundary: str | None) -> tuple[RuntimeSettings, ForwardPlan, str]:
            found = allow(
                bundle.directory,
                manifest,
                batch=task.batch,
                samples=len(samples),
                memory=device.memory,
                boundary=boundary,
                engine=device.engine,
                profile=device.profile,
                settings=device.settings,
                activations=task.activations,
                work=device.work,
                try_out=False,
            )
            return found.settings, found.plan, found.boundary.name

        try:
            settings, plan, _ = allowed(coverage(manifest, task.boundary).boundary.name)
            return settings, plan
        except OutOfMemory:
            _, _, fitting = allowed(None)
            self.client.set_profile({**describe(device), "boundary": fitting})
            raise


def describe(device: Device) -> dict[str, object]:
    """Describe this device: the profile that it reports."""
    room = None
    if device.memory is not None:
        now = current_memory()
        room = max(1, parse_size(device.memory) - (now.anonymous if now else 0))
    engines = ["portable", *(["ort-training"] if is_available() else [])]
    if device.engine != "auto":
        engines = [device.engine]
    return {
        "memory": room,
        "tier": device.tier,
        "threads": device.settings.threads,
        "runtime": RUNTIME,
        "engines": engines,
    }
