"""The agent: wait for a task, do it, answer, again. It rides out outages and never dies of a task."""

from __future__ import annotations

import errno
import math
import random
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edge_runtime.client import FIRST_PAUSE, LONGEST_PAUSE, Declined, DeviceClient, NotUnderstood
from edge_runtime.connection import Unreachable, WrongConnection
from edge_runtime.data import Samples, check_trainable, load_samples
from edge_runtime.data.load import Data
from edge_runtime.data.text import is_text
from edge_runtime.data.token_file import TokenSpace
from edge_runtime.data_reference import file_of
from edge_runtime.device import Device, DeviceMemory
from edge_runtime.device_state import KeptFiles, forget_finished
from edge_runtime.engine.choose import choose_engine
from edge_runtime.engine.session import FrozenType, RuntimeSettings, give_back_memory
from edge_runtime.enrolment import check_work_folder, credential
from edge_runtime.evaluate import score_received
from edge_runtime.files import sole_user
from edge_runtime.forward import Report as Progress
from edge_runtime.heartbeat import Heartbeat, TaskLost
from edge_runtime.logs import get_logger
from edge_runtime.memory import PeakMeter
from edge_runtime.own_limits import DiskRoom, OwnLimits
from edge_runtime.participant import begin, finish
from edge_runtime.places import default_work
from edge_runtime.remote import RemoteBundle, RemoteServer, RemoteSource
from edge_runtime.signing import read_public
from edge_runtime.timing import Stopwatch
from edge_runtime.trainer import Trainer
from edge_runtime.trust import Trust
from federation.coverage import coverage
from federation.errors import DataError, EmbraceError, InputError, TaskFailed
from federation.messages import Report, Task, TaskOffer, decode_task
from federation.wire import encode

log = get_logger("embrace.agent")
_SECONDS = re.compile(r"\b\d+ s\b")


@dataclass
class _Loaded:
    """A bundle at work: its files, the data that fits it, and the trainer."""

    bundle: RemoteBundle
    samples: Samples  # to train on
    held_out: Samples | None  # to score versions with
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
        memory: DeviceMemory | None = None,
        progress: Progress = lambda what, done, total: None,
        on_report: Callable[[Report], None] = lambda report: None,
        on_notice: Callable[[str], None] = log.info,
        sleep: Callable[[float], None] = time.sleep,
        held: AbstractContextManager[object] | None = None,
    ) -> None:
        """`held` is closed with the agent."""
        self.client = client
        self.device = device
        self.progress = progress
        self.on_report = on_report
        self.on_notice = on_notice
        self._held = held
        self.memory = memory or DeviceMemory(device)
        self._loaded: dict[tuple[str, float, int], _Loaded] = {}  # by bundle, held-out share and its seed
        self._trust = Trust(client.server, device.work, device.trust)
        self._room = DiskRoom(device.work, device.limits.disk)
        self._begun: set[str] = set()  # jobs
        self._tidy = False  # whether what was kept of other jobs was looked at since the last task
        self._unfit = ""  # as it was told
        self._waiting = ""  # ... why there is no task
        self._parts = 0  # samples at once, if more than the owner wished
        self._goes_on = False
        self._heartbeat = Heartbeat(client, "", None)  # of the task at work
        self._sleep = sleep
        self._until: Callable[[], bool] = lambda: False
        self._failed = 0  # tasks since the last that was answered
        self._refused = 0  # requests for a task since the last that was answered with sense
        self._following: TaskOffer | None = None  # the task that came with the answer to an update

    @classmethod
    def join(
        cls,
        server: str,
        data: Data,
        *,
        tokenizer: str | Path | None = None,
        token: str | None = None,
        name: str | None = None,
        memory: str | None = None,
        tier: str | None = None,
        boundary: str | None = None,
        micro_batch: int | None = None,
        engine: str = "auto",
        profile: str = "auto",
        threads: int = 1,
        spinning: bool = True,
        frozen: FrozenType = "float32",
        work: str | Path | None = None,
        certificate: str | Path | None = None,
        trust: Sequence[str] = (),
        limits: OwnLimits | None = None,
        progress: Progress = lambda what, done, total: None,
        on_report: Callable[[Report], None] = lambda report: None,
        on_notice: Callable[[str], None] = log.info,
    ) -> Agent:
        """Connect this machine to a coordinator.

        `token` is an enrolment token, needed the first time. `data` is a pair of arrays, FILE.npz, a folder of images
        by class, FILE.csv, FILE.jsonl, FILE.txt or FILE.py:NAME; `tokenizer` makes tokens of texts, without it the
        bundle's. `memory` is a budget such as "64MB" for the whole process; `tier` or
        `boundary` fix what is trained. With `micro_batch` at most so many samples go through at once: less memory, and
        batch norm sees that many. With `frozen` "int8" the other layers run in 8 bits: less exact, in less time.
        `trust` are public keys, or files with them: bundles of other signers are refused. Without, the signer of the
        first bundle is remembered. `limits` bound what any task may take here.
        `on_notice` gets what a person at the device should know: its name, what it waits for.
        """
        folder = Path(work) if work is not None else default_work()
        settings = RuntimeSettings(threads, spinning, frozen=frozen)
        device = Device(data, folder, memory, tier, engine, profile, settings, boundary=boundary)
        device = replace(device, limits=limits or OwnLimits(), trust=tuple(map(read_public, trust)))
        device = replace(device, micro_batch=micro_batch)
        if tokenizer is not None:
            device = replace(device, tokenizer=Path(tokenizer).resolve())
        if not isinstance(data, tuple) and not file_of(str(data)).exists():
            raise InputError(f"no such file: {file_of(str(data))}")
        check_work_folder(folder)
        with ExitStack() as stack:
            in_use = f"give each agent its own --work: {folder} is in use by another"
            stack.enter_context(sole_user(folder / "agent.lock", in_use))
            own_memory = DeviceMemory(device)
            known = own_memory.describe()
            enrolled = {key: value for key, value in known.items() if key not in ("needs", "measures", "micro_batch")}
            own = credential(server, token, name or socket.gethostname(), enrolled, folder, certificate, on_notice)
            client = stack.enter_context(DeviceClient(server, own, certificate=certificate))
            try:
                client.set_profile(known)
            except EmbraceError as error:
                if is_final(error) or isinstance(error, WrongConnection):
                    raise
                log.warning("the coordinator did not take this device's profile: %s", error)
            held = stack.pop_all()
        return cls(
            client,
            device,
            memory=own_memory,
            progress=progress,
            on_report=on_report,
            on_notice=on_notice,
            held=held,
        )

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self._held is not None:
            self._held.__exit__(None, None, None)

    def run(
        self, *, most_tasks: int | None = None, wait: float = 30.0, until: Callable[[], bool] = lambda: False
    ) -> int:
        """Work until told to stop; returns the number of tasks that were answered."""
        done, patience = 0, 0.0  # the first answer comes at once: it may be that no job can use this device
        self._until = until
        while (most_tasks is None or done < most_tasks) and not until():
            self._goes_on = most_tasks is None or done + 1 < most_tasks
            offer, self._following = self._following, None
            if offer is None:
                offer = self._ask(patience)
                patience = wait
            if offer is None:
                continue
            failed = self._failed
            if self.answer(offer):
                done += 1
                self._failed = 0
            elif self._failed > failed:
                self._rest(failed)
        if self._following is not None:
            self._give_up(self._following, "stopped", "the agent was told to stop")
        return done

    def _ask(self, wait: float) -> TaskOffer | None:
        """Ask for a task. Whatever the coordinator answers, the agent asks again later; but not if it is shut out."""
        if self.client.come_back is not None:
            self._stay_away(self.client.come_back)
            if self._until():
                return None
        asked = time.monotonic()
        try:
            offer = self.client.next_task(wait)
            if offer is None and not self._tidy:
                self._tidy = True
                forget_finished(self.device.work / "kept", self.client)
        except EmbraceError as error:
            if is_final(error):
                raise
            self._refused += 1
            log.warning("no task: %s; asking again", error)
            self._rest(self._refused)
            return None
        self._refused = 0
        self._tell_unfit(self.client.unfit)
        if offer is None and self.client.come_back is None:
            self._tell_waiting(self.client.waiting)
            if time.monotonic() - asked < min(wait, 1.0) / 2:  # it should have let us wait
                self._rest(1)
        return offer

    def _stay_away(self, seconds: float) -> None:
        """Wait for as long as the coordinator said that this device is not needed."""
        self.client.come_back = None
        self._tell_waiting(f"{self.client.waiting or 'not needed now'}; asks again in {seconds:.0f} s")
        self._pause(seconds)

    def _rest(self, times: int) -> None:
        """Wait before the next request: longer each time, a little at random, and no longer than there is to do."""
        if times > 0:
            self._pause(min(FIRST_PAUSE * 2 ** min(times, 30), LONGEST_PAUSE) * random.uniform(0.5, 1.5))

    def _pause(self, seconds: float) -> None:
        for _ in range(math.ceil(seconds)):
            if self._until():
                return
            self._sleep(min(seconds, 1.0))

    def _tell_waiting(self, why: str) -> None:
        if why and not _same(why, self._waiting):
            self._waiting = why
            self.on_notice(f"enrolled as {self.client.name or 'a device'}, waiting: {why}")

    def _tell_unfit(self, why: str) -> None:
        if why and not _same(why, self._unfit):
            log.warning("no job can use this device: %s; waiting for one that can", why)
        self._unfit = why

    def answer(self, offer: TaskOffer) -> bool:
        """Do a task and send the result; whatever goes wrong with it is reported, and the agent lives on."""
        self._tidy = False
        try:
            self.client.deadline.begin(self.device.limits.task_seconds)
            try:
                with Heartbeat(self.client, offer.id, self.client.lease) as self._heartbeat:
                    report = self._work(offer)
            finally:
                self.client.deadline.end()
        except (TaskFailed, DataError) as error:
            self._give_up(offer, error.reason, str(error))
        except TaskLost as error:
            log.warning("task %s is given up: %s", offer.id, error)
        except Declined as error:
            if error.answer == 409:  # late, or the round is over
                log.warning("task %s: %s", offer.id, error)
            else:
                self._give_up(offer, "refused" if error.answer in (400, 413, 422) else "coordinator", str(error))
        except (Unreachable, NotUnderstood) as error:
            self._give_up(offer, "coordinator", str(error))
        except (EmbraceError, OSError) as error:
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            self._give_up(offer, "disk_full" if full else "failed", str(error))
        except MemoryError as error:
            self._give_up(offer, "out_of_memory", str(error) or "not enough memory")
        except Exception as error:  # a graph or a manifest may hold anything
            log.exception("task %s", offer.id)
            self._give_up(offer, "failed", f"{type(error).__name__}: {error}")
        else:
            self.on_report(report)
            return True
        return False

    def _give_up(self, offer: TaskOffer, reason: str, message: str) -> None:
        log.warning("task %s failed: %s", offer.id, message)
        self._failed += 1
        try:
            self.client.fail(offer.id, reason, message)
        except EmbraceError as error:
            log.warning("task %s: %s", offer.id, error)

    def _work(self, offer: TaskOffer) -> Report:
        watch = Stopwatch()
        offer.check()
        task = decode_task(offer.work)
        with watch.part("download"):
            loaded = self._load(offer, task)
            task = self._fit(loaded, offer, task)
            self.device.limits.check_steps(task.for_samples(len(loaded.samples)).steps)
            manifest, covered = loaded.bundle.manifest, coverage(loaded.bundle.manifest, task.boundary)
            engine = choose_engine(covered.boundary, self.device.engine)
            for graph in covered.graphs:
                loaded.bundle.training_files(graph, engine)
            before = loaded.bundle.received
            kept = self._kept(offer.job)
        loaded.trainer.engine = engine
        loaded.trainer.source = RemoteSource(loaded.bundle, offer)
        with PeakMeter(self.memory.idle) as meter:
            evaluation = self._evaluate(loaded, offer, watch) if task.evaluate else {}
            with watch.part("download"):
                begun = begin(task, manifest, RemoteServer(loaded.bundle, offer, task.exchange), kept)
            outcome = loaded.trainer.run(task, begun.received, watch)
            with watch.part("optimiser"):
                contribution = finish(begun, outcome, loaded.trainer.spare)
            with watch.part("state"):
                kept.save(offer.id, task.boundary, contribution)
        downloaded = loaded.bundle.received - before
        report = replace(
            outcome.report,
            lost_state=begun.device.lost,
            evaluation=evaluation,
            memory=meter.report(self.memory.allowed),
            seconds=asdict(watch.timings(loaded.trainer.forward_share)),
            bytes={**outcome.report.bytes, "downloaded": downloaded, "uploaded": contribution.bytes},
        )
        self._heartbeat.check()
        with watch.part("upload"):
            body = partial(encode, contribution.tracks)
            self._following = self.client.send_update(
                offer.id, body, report, following=self._goes_on, storage=offer.storage is not None
            )
        kept.acknowledged(offer.id)
        return replace(report, seconds=asdict(watch.timings(loaded.trainer.forward_share)))

    def _still_going(self, what: str, done: int, total: int) -> None:
        """Tell how far the work is; end it between two steps if it is of no use any more, or takes too long."""
        self.client.deadline.check()
        self._heartbeat.check()
        self.progress(what, done, total)

    def _evaluate(self, loaded: _Loaded, offer: TaskOffer, watch: Stopwatch) -> dict[str, Any]:
        """Score the received version on the held-out share; its layers stay on the disk for the training."""
        trainer = loaded.trainer
        if not loaded.held_out:
            return {}
        if self.device.memory is not None:
            trainer.release_session()  # the next step opens it again: within a budget it is one or the other
        source = RemoteSource(loaded.bundle, offer, keeps=True)
        loaded.bundle.loss_file()
        found = score_received(
            loaded.bundle.directory, source, loaded.held_out, trainer.plan, trainer.settings, watch, self._still_going
        )
        if trainer.settings.profile == "low_memory":
            give_back_memory()
        return asdict(found) if math.isfinite(found.loss) else {}

    def _tell_profile(self, profile: dict[str, Any]) -> None:
        """Send a profile; without it the coordinator decides by what it knew, and the task that follows may not fit."""
        try:
            self.client.set_profile(profile)
        except EmbraceError as error:
            if is_final(error):
                raise
            log.warning("the coordinator did not take this device's profile: %s", error)

    def _kept(self, job: str) -> KeptFiles:
        """Open the folder of a job's state. When a job begins, the folders of those that are over are removed."""
        folder = self.device.work / "kept"
        if job not in self._begun:
            forget_finished(folder, self.client, besides=job)
            self._begun.add(job)
        return KeptFiles(folder / job, server=self.client.server)

    def _load(self, offer: TaskOffer, task: Task) -> _Loaded:
        key = (offer.bundle, task.holdout, task.seed if task.holdout else 0)
        known = self._loaded.get(key)
        if known is None:
            for other in self._loaded.values():  # one bundle at a time: memory is short
                other.trainer.close()
            self._loaded.clear()
            work = self.device.work / "jobs" / offer.bundle[:16]
            self._trust.check(offer.bundle, self.client.signature(offer.bundle))
            self._room.in_use = {work}
            bundle = RemoteBundle(self.client, offer.bundle, self.device.work, work, self._room.take)
            self._room.in_use |= {bundle.cache / ref.sha256 for ref in bundle.manifest.files()}
            data, tokenizer = self.device.data, self.device.tokenizer
            if tokenizer is None and not isinstance(data, tuple) and is_text(str(data)):
                tokenizer = bundle.tokenizer()
            space = TokenSpace(self.device.work, self._room.left)
            samples, held_out = load_samples(data, bundle.manifest, tokenizer=tokenizer, space=space), None
            if task.holdout:  # by the device's own seed: the same samples in every round, also after a restart
                samples, held_out = samples.split(task.holdout, task.seed)
            check_trainable(samples, self.device.allow_single_class)
            self.memory.settle()
            # Memory is measured here, for the whole task.
            trainer = Trainer(
                work,
                RemoteSource(bundle, offer),
                samples,
                measures_memory=False,
                stores_all=False,
                progress=self._still_going,
            )
            known = self._loaded[key] = _Loaded(bundle, samples, held_out, trainer)
        return known

    def _fit(self, loaded: _Loaded, offer: TaskOffer, task: Task) -> Task:
        """Set the trainer up within this device's memory; return the task in the parts that the device takes.

        Memory is counted as the coordinator counts it; a device with few samples takes parts that are no larger.
        """
        manifest, offered = loaded.bundle.manifest, task
        task = offered.in_parts(self.device.micro_batch, manifest)
        self._tell_parts(task.at_once)
        most = max(len(loaded.samples), len(loaded.held_out) if loaded.held_out else 0)
        fitting = self.memory.fit(loaded.bundle, offer.bundle, most, task, self._tell_profile, self._still_going)
        loaded.trainer.settings = fitting.settings
        loaded.trainer.plan = fitting.plan
        if fitting.plan.folder is not None:
            loaded.trainer.plan = replace(fitting.plan, store_limit=self._room.left)
        loaded.trainer.forward_share = fitting.forward_share
        return offered.in_parts(task.at_once, manifest, len(loaded.samples))

    def _tell_parts(self, at_once: int) -> None:
        """Say, once for each size, that batches cannot go through in parts as small as the owner wished."""
        wished = self.device.micro_batch
        if wished is not None and wished < at_once != self._parts:
            self._parts = at_once
            why = "for the sake of the model's loss or batch norm"
            self.on_notice(f"--micro-batch {wished}: {at_once} samples go through at once, {why}")


def _same(words: str, before: str) -> bool:
    """Whether the same is said again, but for seconds that go down."""
    return _SECONDS.sub("", words) == _SECONDS.sub("", before)


def is_final(error: EmbraceError) -> bool:
    """Whether the coordinator refuses this device's credential: nothing that it asks later is answered."""
    return isinstance(error, Declined) and error.answer in (401, 403)
