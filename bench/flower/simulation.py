"""Flower's Ray simulation of the same case, in an environment of its own; nothing of it is imported here.

Its clients run the same module, the same SGD and as many steps over the same samples; each takes its batches in an
order of its own. Measured are all processes, Ray's included.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bench.flower_python import FlowerMissing
from edge_runtime.system import HERE

LIMIT = 1800.0  # seconds for everything
PROGRAM = """
import json
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from bench.simulation.meter import Meter
from model_export.zoo import zoo_model

FOLDER = Path(__file__).parent
CASE = json.loads((FOLDER / "case.json").read_text())
KEPT = {}
client, server = ClientApp(), ServerApp()


def ready():
    if not KEPT:
        torch.set_num_threads(1)
        KEPT["module"] = zoo_model(CASE["model"]).build().train()
        KEPT["inputs"] = np.load(FOLDER / "inputs.npy", mmap_mode="r")
        KEPT["labels"] = np.load(FOLDER / "labels.npy", mmap_mode="r")
    return KEPT


@client.train()
def train(message, context):
    kept = ready()
    module = kept["module"]
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(module.parameters(), CASE["rate"], 0.9, weight_decay=1e-4)
    count, first = CASE["samples"], CASE["samples"] * int(context.node_config["partition-id"])
    order, total = [], 0.0
    while len(order) < CASE["steps"]:
        order += list(torch.randperm(count).split(CASE["batch"]))[: max(1, count // CASE["batch"])]
    for chosen in order[: CASE["steps"]]:
        x = torch.from_numpy(kept["inputs"][first + chosen.numpy()])
        y = torch.from_numpy(kept["labels"][first + chosen.numpy()])
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x), y)
        loss.backward()
        optimiser.step()
        total += loss.item()
    metrics = MetricRecord({"num-examples": count, "loss": total / CASE["steps"]})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server.main()
def main(grid, context):
    torch.manual_seed(0)
    arrays = ArrayRecord(zoo_model(CASE["model"]).build().state_dict())
    meter, losses = Meter(), []
    for number in range(CASE["rounds"] + 1):
        strategy = FedAvg(
            fraction_train=CASE["cohort"] / CASE["devices"], fraction_evaluate=0.0, min_train_nodes=CASE["cohort"],
            min_available_nodes=CASE["devices"],
        )
        meter.round()
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1)
        arrays = result.arrays
        losses.append(float(dict(result.train_metrics_clientapp[1])["loss"]))
    meter.end()
    found = {"seconds": meter.seconds, "cpu": meter.cpu, "memory": meter.memory or None, "losses": losses}
    (FOLDER / "flower.json").write_text(json.dumps(found))


def go():
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    start = {"num_cpus": CASE["workers"], "include_dashboard": False}
    config = {"init_args": start, "client_resources": resources}
    run_simulation(server, client, CASE["devices"], backend_config=config)
"""


def run_flower_simulation(python: Path, root: Path, folder: Path) -> None:
    """Write `flower.json` into the folder of a case; `root` is where the models are."""
    (folder / "flower_case.py").write_text(PROGRAM)  # a module, so that its workers import it once
    path = os.pathsep.join((str(folder), str(root)))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "flower.log").open("wb") as log:
        process = subprocess.Popen(
            [python, "-c", "import flower_case; flower_case.go()"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            **HERE.own_group,
        )
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        raise FlowerMissing(f"no result after {LIMIT:g} seconds") from None
    finally:
        HERE.end_group(process.pid)
        process.wait()
    if not (folder / "flower.json").exists():
        words = (folder / "flower.log").read_text(errors="replace").strip().splitlines()
        raise FlowerMissing(f"its simulation failed: {words[-1][:200] if words else 'it said nothing'}")
