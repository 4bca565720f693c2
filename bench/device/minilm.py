"""MiniLM on film reviews within budgets of memory, beside PyTorch's fine-tuning of the same layers.

    embrace export minilm --classes negative,positive --out build/minilm
    python -m bench.device.minilm --data-dir data --bundle build/minilm --work build/imdb --budgets 64MB,128MB,256MB

`embrace train` runs in a process of its own (`--python`: with the interpreter of a device, which has no PyTorch). The
reviews come as numbers of words: they are joined to texts again, lower case, without punctuation and unknown words.
PyTorch sees the same samples in the same order, with the same rule, and trains the layers that the budget allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_runtime.bundle_files import map_weights, own_tokenizer, read_manifest
from edge_runtime.data import Samples, load_samples
from edge_runtime.trainer import batches
from federation.messages import Task
from model_export.source import reload_source

CLASSES = ("negative", "positive")
BATCH, AT_ONCE = 8, 1
DECAY = 0.01  # of adamw
OPTIMISERS: dict[str, Callable[[list[nn.Parameter], float], torch.optim.Optimizer]] = {
    f"adamw={DECAY}": lambda weights, rate: torch.optim.AdamW(weights, rate, weight_decay=DECAY),
    "sgd": torch.optim.SGD,
}


def write_reviews(folder: Path, out: Path, count: int) -> None:
    """Write the first reviews of both parts as JSON lines."""
    words = (folder / "vocab.txt").read_text().splitlines()
    with np.load(folder / "imdb_10k_256.npz") as stored:
        for part in ("train", "test"):
            rows, labels = stored[f"x_{part}"][:count], stored[f"y_{part}"][:count]
            lines = [
                json.dumps({"text": " ".join(words[token] for token in row if token > 2), "label": CLASSES[label]})
                for row, label in zip(rows, labels)
            ]
            (out / f"{part}.jsonl").write_text("\n".join(lines) + "\n")


def train(python: str, bundle: Path, work: Path, budget: str, rule: str, rate: float) -> dict[str, Any]:
    """Run `embrace train` within a budget, and look at the memory of its process."""
    out = work / f"trained-{budget}"
    told = ("train", bundle, "--data", work / "train.jsonl", "--test", work / "test.jsonl", "--memory", budget)
    rules = ("--rule", rule, "--rate", rate, "--batch", BATCH, "--micro-batch", AT_ONCE)
    places = ("--rounds", 1, "--epochs", 1, "--out", out, "--work", work / f"work-{budget}", "--json", "--fresh")
    begun, before = time.perf_counter(), os.times()
    with (work / f"{budget}.json").open("w+") as answer:
        command = [python, "-m", "embrace", *map(str, (*told, *rules, *places))]
        process = subprocess.Popen(command, stdout=answer)
        peak = {"VmHWM": 0, "RssAnon": 0}
        while process.poll() is None:
            peak = _higher(peak, process.pid)
            time.sleep(0.02)
        answer.seek(0)
        found = json.load(answer)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return {**found, "peak": peak, "wall": time.perf_counter() - begun, "processor": seconds}


def _higher(peak: dict[str, int], process: int) -> dict[str, int]:
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
        return {name: max(value, int(lines[name].split()[0]) * 1024) for name, value in peak.items()}
    except (OSError, KeyError, ValueError):
        return peak


def train_by_pytorch(bundle: Path, work: Path, boundary: str, rule: str, rate: float) -> dict[str, Any]:
    """Fine-tune the same layers with PyTorch; return accuracy on the test reviews and seconds."""
    manifest = read_manifest(bundle)
    tokenizer = own_tokenizer(bundle, manifest)
    parts = [load_samples(work / f"{part}.jsonl", manifest, tokenizer=tokenizer) for part in ("train", "test")]
    source = reload_source(manifest.source, loss=manifest.loss, batch=manifest.batch, inputs=manifest.inputs)
    network = source.module()
    stored = manifest.space.views(np.array(map_weights(bundle / manifest.weights.name, manifest.space)))
    network.load_state_dict({name: torch.tensor(value) for name, value in stored.items()})
    first = manifest.boundary(boundary).layer
    trained = {parameter.name for layer in manifest.layers[first:] for parameter in layer.parameters}
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trained)
    begun = time.process_time()
    chosen = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimiser = OPTIMISERS[rule](chosen, rate)
    task = Task(boundary=boundary, steps=len(parts[0]) // BATCH, batch=BATCH, rate=rate, rules=(), seed=0)
    for _, indices in batches(len(parts[0]), BATCH, task):
        rows, labels = parts[0].batch(indices)
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(torch.from_numpy(rows)), torch.from_numpy(labels)).backward()
        optimiser.step()
    return {"accuracy": _accuracy(network, parts[1]), "processor": time.process_time() - begun}


def _accuracy(network: nn.Module, samples: Samples) -> float:
    right = 0
    with torch.inference_mode():
        for start in range(0, len(samples), 32):
            rows, labels = samples.batch(np.arange(start, min(start + 32, len(samples))))
            right += int((network(torch.from_numpy(rows)).argmax(1).numpy() == labels).sum())
    return right / len(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="has the folder imdb")
    parser.add_argument("--bundle", type=Path, required=True, help="embrace export minilm --classes negative,positive")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--budgets", default="64MB,128MB,256MB")
    parser.add_argument("--count", type=int, default=1000, help="reviews to train on, and to test on")
    parser.add_argument("--rule", choices=OPTIMISERS, default=f"adamw={DECAY}")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the device")
    told = parser.parse_args()
    torch.set_num_threads(1)
    told.work.mkdir(parents=True, exist_ok=True)
    write_reviews(told.data_dir / "imdb", told.work, told.count)
    manifest = read_manifest(told.bundle)
    for budget in told.budgets.split(","):
        ours = train(told.python, told.bundle, told.work, budget, told.rule, told.rate)
        boundary = manifest.boundary(ours["boundary"])
        theirs = train_by_pytorch(told.bundle, told.work, boundary.name, told.rule, told.rate)
        row = {
            "budget": budget,
            "boundary": boundary.name,
            "layers": len(manifest.layers) - boundary.layer,
            "weights": manifest.weights_of(boundary),
            "before": ours["before"]["accuracy"],
            "accuracy": ours["after"]["accuracy"],
            "pytorch": theirs["accuracy"],
            "peak": ours["peak"],
            "process": ours["rounds"][0]["memory"].get("process"),
            "wall": round(ours["wall"], 1),
            "processor": round(ours["processor"], 1),
            "pytorch_processor": round(theirs["processor"], 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
