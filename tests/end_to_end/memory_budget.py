"""The proof of the memory budget: real agents over a real coordinator, watched from outside.

    python -m tests.end_to_end.memory_budget            # all twelve models, three budgets each; writes the page's table

Every agent is a process of its own under a hard limit (RLIMIT_DATA, which counts what is reserved, too: as much again
is allowed for that), trains several rounds, and its anonymous memory is read from outside all the time, with that of
the copies in which it makes its trials. The oracle for the largest boundary that fits are fresh processes that train
from one boundary each and know nothing of budgets.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.bundle_files import read_manifest
from edge_runtime.measure import Case, random_inputs, random_labels_of
from federation.capacity import FLOAT_BYTES, predicted_peak
from federation.manifest import Boundary, Manifest
from tests.live_server import LiveServer, live_server
from tests.memory_models import export_named
from tests.stock_python import ROOT, STOCK_PYTHON

MODELS = ("grouped", "depthwise", "attention", "mlp", "lstm", "gru")
MODELS += ("digits", "mnist_cnn", "resnet8", "resnet20", "mobilenetv2", "text_transformer")
BATCH, SAMPLES, ROUNDS = 16, 96, 4
IDLE = 60_000_000  # more than an agent that waits has
AT_WORK = 2_000_000  # an agent that trains next to nothing peaks more than so much above the idle one
SENT = 2  # vectors that an agent has beside a training step: its update, and what it sends of it
PYTHON = STOCK_PYTHON if STOCK_PYTHON.exists() else Path(sys.executable)
PAGE = ROOT / "docs" / "results" / "memory-budget.md"

# The agent's own command line, with a hard limit on what it can take.
CHILD = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
import embrace.cli.main, edge_runtime.agent
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
data, anonymous = (int(status[key].split()[0]) * 1024 for key in ("VmData", "RssAnon"))
budget = int(sys.argv[1])
limit = data - anonymous + 2 * budget + (64 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
embrace.cli.main.main(sys.argv[2:])
"""


@dataclass(frozen=True)
class Proof:
    """What one agent did with one budget. Bytes."""

    model: str
    budget: int
    idle: int
    boundary: str  # of its last round
    first: str  # of its first round
    peak: int  # of the process, over its whole life, seen from outside
    told: int  # ... as it says itself
    with_trials: int  # of the process and its copies together
    failed: tuple[str, ...]  # reasons of tasks that it gave back
    largest: str  # boundary that fits, by the oracle
    scored: int = 0  # rounds in which it scored the version that it received


def prove(name: str, folder: Path, tight: int = 2, **plan: Any) -> list[Proof]:
    """Let an agent train a model within a wide budget, and within so many of a tight and a middling one."""
    directory = folder / name
    if not directory.exists():
        export_named(name, folder)
    manifest = read_manifest(directory)
    write_data(manifest, folder / f"{name}.npz")
    rooms = default_rooms(manifest)
    wide = prove_one(name, manifest, folder, IDLE + rooms[-1], **plan)
    return [*(prove_one(name, manifest, folder, wide.idle + room, **plan) for room in rooms[:tight]), wide]


def prove_one(name: str, manifest: Manifest, folder: Path, budget: int, **plan: Any) -> Proof:
    with tempfile.TemporaryDirectory(dir=folder) as work, live_server(Path(work) / "server") as server:
        local = {"steps": 3, "batch": BATCH, "rate": "0.01", "rules": [{"rule": "momentum", "factor": 0.9}]}
        job = server.create_job(folder / name, num_rounds=ROUNDS, local=local, bounds={"offer": 0.5}, **plan)
        seen = watch(agent_command(server, folder / f"{name}.npz", Path(work) / "device", budget), ROOT)
        failed = tuple(failures(server, job))
    assert seen.code == 0, seen.err
    reports = [json.loads(line) for line in seen.out.splitlines()]
    own = reports[0]["memory"]["process"] - reports[0]["memory"]["anonymous"]
    return Proof(
        model=name,
        budget=budget,
        idle=own,
        boundary=reports[-1]["boundary"],
        first=reports[0]["boundary"],
        peak=seen.peak,
        told=max(report["memory"]["process"] for report in reports),
        with_trials=seen.together,
        failed=failed,
        largest=largest(folder / name, manifest, budget - own, reports[-1]["boundary"]),
        scored=sum(bool(report.get("evaluation")) for report in reports),
    )


def agent_command(server: LiveServer, data: Path, work: Path, budget: int) -> list[str]:
    told = ["--server", server.url, "--token", server.enrolment, "--data", data, "--work", work, "--json"]
    own = [PYTHON, "-c", CHILD, budget, "agent", *told, "--memory", f"{budget}B", "--tasks", ROUNDS]
    return list(map(str, own))


def failures(server: LiveServer, job: str) -> list[str]:
    with server.client(server.admin).stream("GET", f"/v1/jobs/{job}/events") as stream:
        lines = [line.removeprefix("data:") for line in stream.iter_lines() if line.startswith("data:")]
    events = [json.loads(line) for line in lines]
    return [event["reason"] for event in events if "reason" in event and "task" in event]


@dataclass(frozen=True)
class Seen:
    """A process that has ended."""

    code: int
    out: str
    err: str
    peak: int
    together: int  # with its copies; pages that both have are counted once


def watch(command: Sequence[str], cwd: Path) -> Seen:
    """Run a command and read its anonymous memory from outside until it ends."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, text=True, cwd=cwd)
        peak = together = 0
        while child.poll() is None:
            peak = max(peak, _field(child.pid, "status", "RssAnon:"))
            copies = _children(child.pid)
            if copies:
                together = max(together, sum(_field(pid, "smaps_rollup", "Pss_Anon:") for pid in (child.pid, *copies)))
            time.sleep(0.001)
        for file in (out, err):
            file.seek(0)
        return Seen(child.returncode, out.read(), err.read(), peak, max(peak, together))


def _field(pid: int, file: str, key: str) -> int:
    with contextlib.suppress(OSError):  # it has just ended
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def ordinary(manifest: Manifest) -> list[Boundary]:
    """Boundaries from the input to the output, one for each layer."""
    found = {b.layer: b for b in manifest.boundaries if b.train and b.narrow is None and b.last_steps is None}
    return [found[layer] for layer in sorted(found)]


def default_rooms(manifest: Manifest) -> list[int]:
    """Room for a bit more than the last quarter, the second half, and everything."""
    places = ordinary(manifest)
    wanted = [places[3 * len(places) // 4], places[len(places) // 2], places[0]]
    needs = [predicted_peak(manifest, p, BATCH) + SENT * FLOAT_BYTES * manifest.weights_of(p) for p in wanted]
    return [max(int(factor * need), 8_000_000) for factor, need in zip((1.1, 1.2, 1.3), needs, strict=True)]


def largest(directory: Path, manifest: Manifest, room: int, chosen: str) -> str:
    """Find the boundary nearest to the input that fits, by measuring those around the one that was chosen."""
    for place in ordinary(manifest):
        if place.name == chosen:
            return chosen
        predicted = predicted_peak(manifest, place, BATCH)
        if predicted < 1.4 * room and need(directory, manifest, place) <= room:
            return place.name
    return chosen


def need(directory: Path, manifest: Manifest, boundary: Boundary) -> int:
    """Bytes that training from a boundary takes in a fresh process, and the vectors that an agent has beside it."""
    case = Case(str(directory), boundary.name, batch=BATCH, warm_up=0, iterations=2, divide=False)
    program = [PYTHON, "-m", "edge_runtime.measure"]
    told = json.dumps(asdict(case))
    answer = subprocess.run(program, input=told, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(answer.stdout)
    return int(found["memory"]["anonymous"]) + SENT * FLOAT_BYTES * manifest.weights_of(boundary) + AT_WORK


def write_data(manifest: Manifest, path: Path) -> None:
    x = random_inputs(manifest.input, SAMPLES, manifest.vocabulary)
    np.savez(path, x=x, y=random_labels_of(manifest, SAMPLES))


def steps_away(manifest: Manifest, proof: Proof) -> int:
    """Count how many boundaries the chosen one lies behind the largest that fits."""
    names = [place.name for place in ordinary(manifest)]
    return names.index(proof.boundary) - names.index(proof.largest)


def table(proofs: Sequence[Proof]) -> str:
    """Write the rows of the results page."""
    lines = ["| model | allowed MB | idle | trained from | largest that fits | peak | with trials | tasks given back |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for one in proofs:
        sizes = (f"{size / 1e6:.1f}" for size in (one.peak, one.with_trials))
        lines.append(
            f"| {one.model} | {one.budget / 1e6:.1f} | {one.idle / 1e6:.1f} | `{one.boundary}` | `{one.largest}` | "
            f"{' | '.join(sizes)} | {', '.join(one.failed) or '–'} |"
        )
    return "\n".join(lines)


def main(names: Sequence[str]) -> None:
    proofs: list[Proof] = []
    with tempfile.TemporaryDirectory(prefix="embrace-proof-") as folder:
        for name in names or MODELS:
            for one in prove(name, Path(folder)):
                proofs.append(one)
                print(table([one]).splitlines()[-1], flush=True)
    if not names:
        text = PAGE.read_text()
        start, end = "<!-- proof -->\n", "<!-- end of proof -->"
        before, after = text.partition(start)[0], text.partition(end)[2]
        PAGE.write_text(f"{before}{start}{table(proofs)}\n{end}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
