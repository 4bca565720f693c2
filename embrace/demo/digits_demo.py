"""The demo of digits: a small network that comes along, so that nothing but a coordinator and agents is needed."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.bundle_files import read_manifest
from edge_runtime.data import from_arrays
from edge_runtime.trainer import Received, Trainer
from embrace.demo.fleet import DemoAgent, DemoJob, Lookout, Show, check_packages, device_result, job_file, run_fleet
from embrace.demo.results import DemoOutcome
from federation.axes.local import Momentum
from federation.errors import NonFiniteLoss
from federation.messages import Task
from simulation.datasets.digits import DIGITS

SHIPPED = Path(__file__).parent / "digits"
STEPS, BATCH, RATE, MOMENTUM = 40, 32, 0.02, 0.9
OTHER_RATES = (0.1, 0.3)  # for a device alone: the frozen layers of an untrained network call for larger steps
ALPHA, SEED = 0.5, 2  # of the split
HELD_OUT = 5  # every fifth image of each digit


LOCAL = f"""\
steps = {STEPS}
batch = {BATCH}
rate = "{RATE}"
rules = [{{ rule = "momentum", factor = {MOMENTUM} }}]
"""
FLEET = (
    DemoAgent("strong", "128MB", "strong"),
    DemoAgent("moderate", "96MB", "moderate"),
    DemoAgent("weak-1", "80MB", "weak"),
    DemoAgent("weak-2", "80MB", "weak"),
)
Digits = tuple[NDArray[np.float32], NDArray[np.int64]]


def load_digits() -> tuple[list[Digits], Digits]:
    """Load the devices' images and those that are held out; the same everywhere.

    Which share of a digit a device gets is drawn from a Dirichlet distribution, so that each has many images of some
    digits and hardly any of others.
    """
    with np.load(DIGITS) as file:
        x, y = file["x"].astype(np.float32) / 16, file["y"].astype(np.int64)
    chance = np.random.RandomState(SEED)  # unlike default_rng it promises the same numbers in every version of numpy
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(len(FLEET) + 1)]
    for digit in range(10):
        mine = np.flatnonzero(y == digit)
        held = np.arange(len(mine)) % HELD_OUT == HELD_OUT - 1
        parts[-1].append(mine[held])
        shares = np.cumsum(chance.dirichlet([ALPHA] * len(FLEET)))[:-1]
        for part, piece in zip(parts, np.split(mine[~held], np.rint(shares * np.sum(~held)).astype(int))):
            part.append(piece)
    chosen = [np.sort(np.concatenate(part)) for part in parts]
    *devices, rest = [(x[rows], y[rows]) for rows in chosen]
    return devices, rest


def run_digits(directory: Path, rounds: int, show: Show = lambda view: None) -> DemoOutcome:
    """Run the demo in an empty directory. When it returns or raises, no process is left."""
    started = time.perf_counter()
    check_packages()
    shares, held_out = load_digits()
    bundle = Path(shutil.copytree(SHIPPED / "model", directory / "digits"))
    samples = from_arrays(*held_out, read_manifest(bundle))
    files = [directory / f"{member.name}.npz" for member in FLEET]
    for file, (x, y) in zip(files, shares):
        np.savez(file, x=x, y=y)
    job = DemoJob(bundle, FLEET, files, samples, job_file("digits", rounds, LOCAL))
    look, fleet = run_fleet(directory, job, rounds, show)
    look.tell("train each device alone, for comparison")
    devices = [
        device_result(member, fleet, np.bincount(share[1], minlength=10).tolist(), _alone(look, member, share, rounds))
        for member, share in zip(FLEET, shares)
    ]
    layers, seconds = len(look.manifest.layers), time.perf_counter() - started
    return DemoOutcome(len(samples), layers, look.rounds, devices, look.notes, seconds)


def _alone(look: Lookout, member: DemoAgent, share: Digits, rounds: int) -> float:
    """Train one device's data alone with as many steps, at the rate that suits it best."""
    boundary = look.manifest.boundary(member.tier or "strong")
    mine = look.manifest.space.suffix(boundary.layer)
    trainer = Trainer(look.bundle, look.source, from_arrays(*share, look.manifest))
    scores = []
    for rate in (RATE, *OTHER_RATES):
        task = Task(boundary.name, rounds * STEPS, BATCH, rate, (Momentum(MOMENTUM),))
        weights = look.first.copy()
        with suppress(NonFiniteLoss):
            weights[mine] = trainer.run(task, Received(weights[mine].copy())).parameters
        scores.append(look.score(weights))
    trainer.close()
    return max(scores)
