"""The time of one training step in a browser, beside the same step of this machine's own onnxruntime.

A Chromium with a new profile opens a page of ours on loopback. The page asks for orders, one after the other: load a
runtime, open a training graph, run a step. So the columns take turns with the native steps (A B C, B C A, …), and
whatever else the machine does meets all of them alike. A step is forward, backward and the local rule (weight decay,
momentum); its parameters move, as in training.
"""

from __future__ import annotations

import os
import platform
import queue
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from bench.device.entering import Entering
from bench.device.subject import Subject, open_subject
from bench.processes import family_cpu, family_memory
from edge_runtime.bundle_files import map_weights
from edge_runtime.engine.choose import open_step
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.machine import load_average
from edge_runtime.measure import RATE, RULES, random_labels_of
from federation.axes.local import LocalStep, Start, runs
from federation.errors import InputError
from federation.manifest import Boundary

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
PLACES = tuple(f"/Applications/{name}.app/Contents/MacOS/{name}" for name in ("Google Chrome", "Chromium"))
FLAGS = (
    "--headless",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-unsafe-webgpu",  # headless Chromium has no adapter otherwise
)
TIMEOUT = 900  # seconds for one order: exporting is not among them
WARM_UP = 2
IN_A_ROW = 5  # steps of a turn: giving an order costs the browser some milliseconds of processor time, too
SEED = 1
TOLERANCE = 1e-4  # of the first loss, against the native one

Progress = Callable[[str, int, int], None]
Answer = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What some steps in a row took, in milliseconds."""

    loss: float  # of the first
    steps: list[float]
    rules: list[float]
    processor: float  # of all threads, together


class NoBrowser(InputError):
    """There is none, or it did not do what it was asked to."""


@dataclass(frozen=True)
class Column:
    """One way to run a step."""

    name: str
    threads: int
    provider: str  # native, wasm or webgpu


@dataclass
class Timing:
    """Milliseconds of a boundary's steps by column, round by round: the graph, and the local rule behind it."""

    model: str
    boundary: str
    tiers: list[str]
    batch: int
    parameters: int
    steps: dict[str, list[float]] = field(default_factory=dict)
    rules: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, float] = field(default_factory=dict)  # milliseconds of all processors in a step, on average
    heaps: dict[str, int] = field(default_factory=dict)  # bytes of the runtime, which never shrinks

    def whole(self, column: str) -> list[float]:
        """Milliseconds of graph and rule together."""
        return [a + b for a, b in zip(self.steps.get(column, []), self.rules.get(column, []), strict=True)]

    def ratio(self, column: str, other: str) -> float | None:
        """How many times longer a column takes: the median over rounds, each compared with itself."""
        pairs = list(zip(self.whole(column), self.whole(other), strict=False))
        return statistics.median(a / b for a, b in pairs) if pairs else None


@dataclass
class FirstBatch:
    """From opening the page with nothing cached to the end of the first step."""

    model: str
    boundary: str
    seconds: float
    bytes: int
    memory: int | None  # of all of the browser's processes


@dataclass
class BrowserReport:
    columns: list[str]
    device: dict[str, str]
    timings: list[Timing]
    first: list[FirstBatch]
    notes: list[str]
    load: list[float]  # of the machine, before and after

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> BrowserReport:
        """Read what `--json` printed."""
        lists = {"timings": [Timing(**t) for t in facts["timings"]], "first": [FirstBatch(**f) for f in facts["first"]]}
        return cls(**{**facts, **lists})


def find_browser(wanted: str | None) -> str:
    """Find a Chromium, or the one that is asked for."""
    found = shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, (*NAMES, *PLACES))), None)
    if found is None:
        raise NoBrowser(f"no Chromium found{f' at {wanted}' if wanted else ''}: install one, or say --chromium PATH")
    return found


def bench_browser(
    references: Sequence[str],
    *,
    batch: int = 32,
    threads: int = 2,
    boundaries: str = "tiers",
    rounds: int = 6,
    chromium: str | None = None,
    software_gpu: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> BrowserReport:
    """Time the boundaries of bundles or models in a browser and natively."""
    executable = find_browser(chromium)
    report = BrowserReport([], {}, [], [], [], [load_average()])
    for reference in references:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            subject = open_subject(reference, "portable", folder, progress=progress)
            case = _Case(subject, batch, {boundary.name for boundary, _ in subject.places(boundaries)})
            browser = stack.enter_context(Browser.open(executable, case, folder / "profile"))
            _measure(report, case, browser, threads, software_gpu, subject.places(boundaries), rounds, progress)
    report.load.append(load_average())
    return report


def _measure(
    report: BrowserReport,
    case: _Case,
    browser: Browser,
    threads: int,
    software_gpu: bool,
    places: list[tuple[Boundary, list[str]]],
    rounds: int,
    progress: Progress,
) -> None:
    columns = _columns(report, browser.ask(do="look"), threads, software_gpu)
    report.columns = [column.name for column in columns]
    for number, (boundary, tiers) in enumerate(places):
        timing = Timing(case.manifest.name, boundary.name, tiers, case.batch, case.parameters[boundary.name].size)
        turns = dict(_opened(case, browser, columns, boundary, report))
        for turn in range(-WARM_UP, rounds):
            progress(f"{case.manifest.name} {boundary.name}", number * rounds + max(turn, 0), len(places) * rounds)
            names = list(turns)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                taken = turns[name]()
                if turn >= 0:
                    timing.steps.setdefault(name, []).extend(taken.steps)
                    timing.rules.setdefault(name, []).extend(taken.rules)
                    share = taken.processor / rounds / IN_A_ROW
                    timing.processor[name] = timing.processor.get(name, 0.0) + share
        timing.heaps = {name: browser.heaps[name] for name in turns if name in browser.heaps}
        report.timings.append(timing)


def _columns(report: BrowserReport, found: Answer, threads: int, software_gpu: bool) -> list[Column]:
    """The columns that this machine and its browser have; what is missing is noted."""
    columns = [Column("native, 1 thread", 1, "native"), Column("wasm, 1 thread", 1, "wasm")]
    notes: list[str] = []
    if threads > 1 and found["isolated"]:
        columns.insert(1, Column(f"native, {threads} threads", threads, "native"))
        columns.append(Column(f"wasm, {threads} threads", threads, "wasm"))
    adapter = found.get("adapter")
    if not adapter:
        notes.append("WebGPU: the browser offers no adapter, so there is no such column")
    elif "swiftshader" in adapter and not software_gpu:
        notes.append(f"WebGPU: the only adapter is software ({adapter}), which tells nothing; --software-gpu times it")
    else:
        columns.append(Column("WebGPU", 1, "webgpu"))
        notes.append(f"WebGPU's adapter: {adapter}")
    report.notes += [note for note in notes if note not in report.notes]
    version = found["userAgent"].partition("Chrome/")[2].partition(" ")[0]
    report.device = {
        "processor": f"{platform.machine()}, {os.cpu_count()} processors",
        "onnxruntime": onnxruntime.__version__,
        "browser": f"Chromium {version}",
    }
    return columns


TakeTurn = Callable[[], Turn]


def _opened(
    case: _Case, browser: Browser, columns: Sequence[Column], boundary: Boundary, report: BrowserReport
) -> Iterator[tuple[str, TakeTurn]]:
    """Open a boundary in each column that can run it, and check that all do the same work: the same loss.

    A runtime's memory never shrinks, so every boundary gets a fresh one.
    """
    expected: float | None = None
    for column in columns:
        if column.provider == "native":
            native = case.native(boundary, column.threads)
            loss = native().loss
            expected = loss if expected is None else expected
            yield column.name, native
            continue
        where = f"{case.manifest.name} {boundary.name}, {column.name}"
        try:
            browser.ask(do="load", column=column.name, threads=column.threads, provider=column.provider)
            browser.ask(do="open", column=column.name, bundle="/bundle", boundary=boundary.name, batch=case.batch)
            answer = browser.ask(do="step", column=column.name, rate=RATE, count=1)
        except NoBrowser as error:
            report.notes.append(f"{where}: {error}")
            continue
        if case.manifest.name not in (known.model for known in report.first):
            moved = int(answer["bytes"] + answer["pageBytes"])
            since = answer["sinceOpened"] / 1e3
            report.first.append(FirstBatch(case.manifest.name, boundary.name, since, moved, browser.memory()))
        loss = answer["loss"]
        if expected is None or not abs(loss - expected) <= TOLERANCE * max(1.0, abs(expected)):
            report.notes.append(f"{where}: loss {loss}, native {expected}; not timed")
            continue
        yield column.name, partial(browser.turn, column.name)


class _Case:
    """One bundle, and one random batch as it arrives at each boundary."""

    def __init__(self, subject: Subject, batch: int, boundaries: set[str]) -> None:
        self.manifest = subject.manifest
        self.directory = subject.directory
        self.batch = batch
        self.labels = random_labels_of(self.manifest, batch)
        vector = np.array(map_weights(self.directory / self.manifest.weights.name, self.manifest.space))
        entering = Entering(self.directory, self.manifest, batch, RuntimeSettings())
        chosen = [boundary for boundary in self.manifest.boundaries if boundary.name in boundaries]
        self.inputs = {boundary.name: entering(boundary) for boundary in chosen}
        self.parameters = {b.name: vector[self.manifest.space.suffix(b.layer)] for b in chosen if b.narrow is None}

    def native(self, boundary: Boundary, threads: int) -> TakeTurn:
        """Open the native step."""
        step = open_step(self.directory, self.manifest, boundary, "portable", RuntimeSettings(threads))
        step.parameters[:] = self.parameters[boundary.name]
        local = LocalStep(RULES, Start(step.parameters, 1, RATE), *runs(boundary.space(self.manifest), boundary.layer))

        def run() -> Turn:
            times = [(0.0, 0.0)] * IN_A_ROW
            losses = [0.0] * IN_A_ROW
            before = time.process_time()
            for number in range(IN_A_ROW):
                began = time.perf_counter()
                losses[number] = step.run(self.inputs[boundary.name], self.labels, SEED)
                ran = time.perf_counter()
                local.step(step.gradients, RATE)
                times[number] = (1e3 * (ran - began), 1e3 * (time.perf_counter() - ran))
            spent = 1e3 * (time.process_time() - before)
            return Turn(losses[0], [graph for graph, _ in times], [rule for _, rule in times], spent)

        return run

    def file(self, what: str, boundary: str) -> bytes | None:
        """What the page fetches for a boundary."""
        if boundary not in self.parameters:
            return None
        arrays = {"parameters": self.parameters[boundary], "inputs": self.inputs[boundary], "labels": self.labels}
        return np.ascontiguousarray(arrays[what]).tobytes() if what in arrays else None


class Browser:
    """A Chromium that does what it is asked to, one order after the other."""

    def __init__(
        self, process: subprocess.Popen[bytes], orders: queue.Queue[Answer], answers: queue.Queue[Answer]
    ) -> None:
        self.process = process
        self.orders = orders
        self.answers = answers
        self.heaps: dict[str, int] = {}

    @classmethod
    @contextmanager
    def open(cls, executable: str, case: _Case, profile: Path) -> Iterator[Browser]:
        orders: queue.Queue[Answer] = queue.Queue()
        answers: queue.Queue[Answer] = queue.Queue()
        with _served(case, orders, answers) as address:
            root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # it refuses root otherwise
            command = [executable, *FLAGS, *root, f"--user-data-dir={profile}", f"{address}/bench"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                yield cls(process, orders, answers)
            finally:
                orders.put({"do": "end"})
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def ask(self, **order: Any) -> Answer:
        """Have one thing done, and return what the page says."""
        self.orders.put(order)
        for _ in range(TIMEOUT):
            try:
                answer = self.answers.get(timeout=1)
                break
            except queue.Empty:
                if self.process.poll() is not None:
                    raise NoBrowser(f"the browser ended with {self.process.returncode}") from None
        else:
            raise NoBrowser(f"the browser did not answer within {TIMEOUT} s: {order}")
        if "error" in answer:
            raise NoBrowser(str(answer["error"])[:300])
        if "heap" in answer:
            self.heaps[order["column"]] = int(answer["heap"])
        return answer

    def turn(self, column: str) -> Turn:
        before = family_cpu(self.process.pid)
        answer = self.ask(do="step", column=column, rate=RATE, count=IN_A_ROW)
        spent = 1e3 * (family_cpu(self.process.pid) - before)
        return Turn(answer["loss"], answer["steps"], answer["rules"], spent)

    def memory(self) -> int | None:
        return family_memory(self.process.pid)


@contextmanager
def _served(case: _Case, orders: queue.Queue[Answer], answers: queue.Queue[Answer]) -> Iterator[str]:
    """Serve the page and what it needs on a free port of loopback."""
    import uvicorn
    from fastapi import FastAPI, Response
    from fastapi.responses import FileResponse

    from coordinator.api import pages

    if not (pages.FOLDER / "bench.html").is_file():
        raise NoBrowser(f"the page is not there. {pages.NOT_BUILT.strip()}")
    app = FastAPI()
    pages.install(app)
    names = {entry.name for entry in case.directory.iterdir() if entry.is_file()}

    @app.get("/bench")
    def page() -> Response:
        return FileResponse(pages.FOLDER / "bench.html", headers=pages.HEADERS)

    @app.post("/bench/next")
    def following(answer: Answer) -> Answer:
        if answer:
            answers.put(answer)
        return orders.get()

    @app.get("/bundle/{name}")
    def bundle_file(name: str) -> Response:
        if name not in names:
            return Response(status_code=404)
        return FileResponse(case.directory / name, headers=pages.HEADERS)

    @app.get("/bundle/bench/{boundary}/{what}")
    def array(boundary: str, what: str) -> Response:
        found = case.file(what, boundary)
        return Response(status_code=404) if found is None else Response(found, headers=pages.HEADERS)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            orders.put({"do": "end"})
            server.should_exit = True
            thread.join(10)
