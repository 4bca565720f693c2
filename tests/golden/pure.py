"""What both implementations compute to the last bit: orders, seeds, pictures, local rules, sync plans, bodies."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edge_runtime.activations import ActivationStore
from edge_runtime.bundle_files import read_manifest
from edge_runtime.data import shuffled
from edge_runtime.data.augment import Augmentation
from edge_runtime.data.input_adapter import fit_inputs
from edge_runtime.data.prng import below, sample_bits
from edge_runtime.data.samples import hold_out
from edge_runtime.engine.ordered_dropout import draw_width
from edge_runtime.participant import Begun, Contribution, begin, finish
from edge_runtime.trainer import Outcome, batches, step_seed
from federation.axes.local import (
    Adam,
    AdamW,
    ControlVariate,
    LocalRule,
    LocalStep,
    Momentum,
    Proximal,
    ServerMomentum,
    Start,
    WeightDecay,
    clip,
    runs,
)
from federation.axes.sync import FedLama, OnePart, Rotating, Sync, When, WholeModel, after_round, first_facts
from federation.coverage import coverage
from federation.device_task import Kept, Part
from federation.exchange import Exchange, Inherit, trained_region
from federation.layout import MODEL, layers_layout
from federation.manifest import Loss, Manifest, TensorSpec, dumps
from federation.messages import Report, Task, encode_task
from federation.metrics import Score, score
from federation.preprocessing import PLAIN, Preprocessing
from federation.region import Region
from federation.space import Vector
from federation.weights import header
from federation.wire import encode
from tests.edge_runtime.test_graph_check import REFUSED, batch_as_statistic
from tests.golden.values import base64_of, pattern, sha256
from tests.hostile_bundles import DEMO
from tests.merged_graphs import MERGED
from tests.tiny_bundle import boundary, layer, manifest, statistic, weight


def of_one_output(value: Loss | Score) -> dict[str, Any]:
    """Leave out what a page refuses: several heads, losses of a user's own."""
    return {key: item for key, item in asdict(value).items() if key not in ("heads", "own")}


def chance() -> dict[str, Any]:
    """Orders of samples, bits of samples, seeds of steps."""
    seeds = [(0, 0), (1, 0), (2**53 - 1, 3 << 24), (977, 5)]
    tasks = [Task("strong", 7, 4, 0.1, seed=seed, round=number) for seed, number in ((0, 0), (2**52 + 1, 3))]
    return {
        "orders": [
            {"n": n, "seed": seed, "epoch": epoch, "order": shuffled(n, seed, epoch).tolist()}
            for n in (1, 2, 5, 33)
            for seed, epoch in seeds
        ],
        "bits": [
            {
                "seed": seed,
                "epoch": epoch,
                "index": index,
                "draw": draw,
                "bits": str(int(sample_bits(seed, epoch, np.array([index]), draw)[0])),
                "below": int(below(sample_bits(seed, epoch, np.array([index]), draw), 9)[0]),
            }
            for seed, epoch in seeds
            for index, draw in ((0, 0), (17, 2), (59_999, 1 << 32))
        ],
        "steps": [
            {
                "seed": task.seed,
                "round": task.round,
                "seeds": [step_seed(task, number) for number in range(task.steps)],
                "batches": [[epoch, indices.tolist()] for epoch, indices in batches(11, 4, task)],
            }
            for task in tasks
        ],
        "widths": [draw_width(seed, 3) for seed in range(20)],
    }


def pictures() -> dict[str, Any]:
    """Crop and flip; float16; bytes to numbers; pictures resized."""
    shape = (3, 2, 5, 4)
    batch = pattern(120, 1).reshape(shape)
    numbers = np.array([0, 7, 1000])
    halves = np.concatenate(
        [pattern(50, 2, 1e-6), pattern(50, 3, 300_000), np.array([0, -0.0, 65504, 65520, 6e-8, 2.98e-8], np.float32)]
    )
    store = ActivationStore(1, TensorSpec("float32", (halves.size,)), stored_as="float16")
    store.write(0, halves[None])
    return {
        "batch": base64_of(batch),
        "shape": shape,
        "numbers": numbers.tolist(),
        "augmented": [
            {
                "crop": crop,
                "flip": flip,
                "seed": seed,
                "epoch": epoch,
                "sha256": sha256(Augmentation(crop, flip).apply(batch, numbers, seed, epoch)),
            }
            for crop, flip in ((1, False), (0, True), (2, True))
            for seed, epoch in ((0, 0), (2**53 - 1, 3 << 24), (12, 13))
        ],
        "halves": {"values": base64_of(halves), "stored": base64_of(store.rows(0, 1))},
        "inputs": [
            {
                "dtype": str(stored.dtype),
                "shape": stored.shape,
                "stored": base64_of(stored),
                "takes": asdict(spec),
                "preprocessing": asdict(how),
                "sha256": sha256(fit_inputs("data", stored, _takes(spec, how)).convert(stored)),
            }
            for stored, spec, how in _stored_inputs()
        ],
        "resized": list(_resized()),
    }


def _stored_inputs() -> Iterator[tuple[np.ndarray, TensorSpec, Preprocessing]]:
    bytes_ = (np.arange(2 * 4 * 4 * 3) * 37 % 256).astype(np.uint8)
    colours = TensorSpec("float32", (3, 4, 4))
    yield bytes_.reshape(2, 4, 4, 3), colours, PLAIN
    yield bytes_.reshape(2, 4, 4, 3), colours, Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    yield bytes_.reshape(2, 48), colours, Preprocessing(scale=0.01, mean=(0.5,))
    yield bytes_[:32].reshape(2, 4, 4), TensorSpec("float32", (1, 4, 4)), PLAIN
    yield pattern(10, 4).astype(np.float64).reshape(2, 5), TensorSpec("float32", (5,)), Preprocessing(scale=3.7)
    yield pattern(10, 4).astype(np.float16).reshape(2, 5), TensorSpec("float32", (5,)), Preprocessing(std=(0.3,))
    yield np.arange(6, dtype=np.int32).reshape(2, 3), TensorSpec("int64", (3,)), PLAIN


def _takes(spec: TensorSpec, how: Preprocessing) -> Manifest:
    own = None if how == PLAIN else how
    return manifest([layer("only", weight("w", 1), input=spec)], preprocessing=own)


def _resized() -> Iterator[dict[str, Any]]:
    from PIL import Image

    # Along one axis: which axis comes first, and so a last bit, differs between versions of Pillow.
    for height, width, channels, wanted in ((7, 9, 3, (7, 5)), (3, 4, 1, (8, 4)), (40, 31, 3, (12, 31))):
        pixels = ((np.arange(height * width * channels) * 73) % 256).astype(np.uint8)
        image = Image.fromarray(pixels.reshape(height, width, channels)[..., 0 if channels == 1 else slice(None)])
        resized = np.asarray(image.resize((wanted[1], wanted[0]), Image.Resampling.BILINEAR))
        yield {
            "from": [height, width, channels],
            "to": wanted,
            "pixels": base64_of(pixels),
            "resized": base64_of(resized),
        }


def scores() -> dict[str, Any]:
    """Which samples are held out, and scores of outputs; logarithms of two libraries may differ in their last bits."""
    held = []
    for count, classes, fraction, seed in (
        (10, 3, 0.25, 0),
        (23, 5, 0.5, 2**53 - 1),
        (7, 7, 0.3, 5),
        (2, 1, 0.9, 1),
        (9, None, 0.1, 3),
    ):
        labels = np.arange(count) * 7 % (classes or count) if classes else pattern(count, 1)
        mask = hold_out(labels, classes is not None, fraction, seed)
        held.append(
            {"labels": labels.tolist(), "classes": classes is not None, "fraction": fraction, "seed": seed}
            | {"held": np.flatnonzero(mask).tolist()}
        )
    found = []
    for loss, shape, labels in (
        (Loss("cross_entropy"), (6, 4), np.arange(6) % 4),
        (Loss("cross_entropy", 0.1, 2), (6, 4, 3), np.arange(18).reshape(6, 3) % 4),
        (Loss("bce_with_logits", 0.2), (5, 1), (np.arange(5) % 2).reshape(5, 1)),
        (Loss("mse"), (5, 2), pattern(10, 3).reshape(5, 2)),
        (Loss("mse", ignore_index=0, next_token=True), (3, 4, 2), np.arange(24).reshape(3, 4, 2) % 5),
        (Loss("huber", delta=0.7), (5, 2), pattern(10, 3).reshape(5, 2)),
        (Loss("focal", gamma=1.5), (6, 4, 3), np.arange(18).reshape(6, 3) % 4),
        (Loss("focal", classes_last=True, ignore_index=1), (6, 3, 4), np.arange(18).reshape(6, 3) % 4),
        (Loss("cross_entropy", next_token=True), (6, 4, 3), np.arange(18).reshape(6, 3) % 4),
        (Loss("cross_entropy", classes_last=True, next_token=True), (6, 3, 4), np.arange(18).reshape(6, 3) % 4),
        (Loss("cosine"), (5, 4, 2), pattern(40, 3).reshape(5, 4, 2)),
    ):
        outputs = pattern(math.prod(shape), 4, 6.0).reshape(shape)
        found.append(
            {"loss": of_one_output(loss), "shape": shape, "positions": labels.shape[1:2]}
            | {"labels": labels.reshape(-1).tolist()}
            | {"score": of_one_output(score(loss, outputs, labels))}
        )
    return {"held": held, "scores": found}


def graphs() -> dict[str, str]:
    """Hostile training graphs of the demo's boundary `dense`: both implementations refuse them."""
    import onnx

    found = {}
    demo = read_manifest(DEMO)
    known = demo.boundary("dense")
    assert known.train is not None
    for change in REFUSED:
        if change is batch_as_statistic:  # there is none behind this boundary
            continue
        model = onnx.load(DEMO / known.train.name)
        change(model)
        found[change.__name__] = base64.b64encode(model.SerializeToString(deterministic=True)).decode()
    for write in MERGED:
        found[write.__name__] = base64.b64encode(write(onnx.load(DEMO / known.train.name))).decode()
    return found


CHAINS: dict[str, tuple[tuple[LocalRule, ...], tuple[str, ...]]] = {
    "sgd": ((), ()),
    "weight_decay": ((WeightDecay(0.01),), ()),
    "heavy_ball": ((WeightDecay(1e-4), Momentum(0.9)), ()),
    "nesterov": ((Momentum(0.9, nesterov=True),), ("momentum",)),
    "proximal": ((Proximal(0.1), Momentum(0.5)), ()),
    "control": ((ControlVariate(), Momentum(0.9)), ("control",)),
    "domo": ((Momentum(0.9), ServerMomentum(0.7, "before")), ("server_momentum",)),
    "domo_s": ((WeightDecay(0.01), Momentum(0.9), ServerMomentum(0.7, "every_step")), ("server_momentum",)),
    "adam": ((Adam(),), ()),
    "adam_l2": ((WeightDecay(0.1), Adam(0.8, 0.95, 1e-5)), ("first_moment", "second_moment")),
    "adamw": ((AdamW(decay=0.1), ServerMomentum(0.7, "every_step")), ("server_momentum",)),
    "everything": (
        (WeightDecay(0.01), Proximal(0.3), ControlVariate(), Momentum(0.9), ServerMomentum(0.2, "before")),
        ("control", "server_momentum", "momentum"),
    ),
}
SIZE, STEPS, RATE = 41, 5, 0.05
WEIGHTS, STATISTICS = [slice(2, 19), slice(23, 41)], [slice(19, 23)]


def rule_chains() -> dict[str, Any]:
    """Run every chain over the same gradients: what x, the update and the buffers are afterwards."""
    found = {}
    for name, (rules, brought) in CHAINS.items():
        x = pattern(SIZE, 5)
        given = {each: np.abs(pattern(SIZE, 6 + salt)) for salt, each in enumerate(brought)}
        step = LocalStep(rules, Start(x, STEPS, RATE, brought=given, steps_before=7), WEIGHTS, STATISTICS)
        for number in range(STEPS):
            step.step(pattern(SIZE, 20 + number), RATE)
        found[name] = {
            "rules": encode_task(Task("x", STEPS, 1, RATE, rules=rules))["rules"],
            "brought": brought,
            "x": base64_of(step.x),
            "update": base64_of(step.update()),
            "state": {key: base64_of(value) for key, value in step.state().items()},
        }
    return found


def clipped() -> dict[str, Any]:
    """Gradients of weights, shortened to some norms."""
    found = {}
    for most in (0.5, 2.0, 1e6):
        gradients = pattern(SIZE, 8)
        clip(gradients, WEIGHTS, most)
        found[str(most)] = base64_of(gradients)
    return found


LAYERS = (
    layer("stem", weight("stem.weight", 8, 3, 2), weight("stem.bias", 8), statistic("stem.mean", 8)),
    layer("pool"),
    layer(
        "body",
        weight("body.0.scale", 8),
        weight("body.1.weight", 6, 8),
        weight("body.2.bias", 6),
        weight("body.3.weight", 6, 6),
        statistic("body.2.mean", 6),
        statistic("body.count"),
    ),
    layer("näher", weight("7", 5, 6), weight("head.bias", 5)),
)
NARROW = (((4, 3, 2), (4,), (4,)), (), ((4,), (3, 4), (3,), (3, 3), (3,), ()), ((5, 3), (5,)))
BOUNDARIES = (
    boundary("stem", 0),
    boundary("body", 2),
    boundary("näher", 3),
    boundary("stem@0.5", 0, width=0.5, narrow=NARROW),
)
MODEL_MANIFEST = manifest(
    LAYERS, BOUNDARIES, {"strong": "stem", "weak": "näher"}, loss=Loss("mse"), labels=TensorSpec("float32", (1,))
)
ALL_SYNCS: tuple[Sync, ...] = (
    WholeModel(),
    Rotating(3),
    Rotating(2, by="channel"),
    FedLama(2),
    OnePart("first_half"),
    OnePart("second_half"),
    OnePart("half_of_channels"),
    OnePart("none"),
)


def bodies() -> dict[str, Any]:
    """Headers and bodies by their sha256: of the weights file, of ranges of layers, of every unit of every plan."""
    space = MODEL_MANIFEST.space
    found = []
    for sync in ALL_SYNCS:
        for name in ("stem", "body", "näher", "stem@0.5", "..body"):
            trained = trained_region(MODEL_MANIFEST, coverage(MODEL_MANIFEST, name))
            for unit, region in enumerate(sync.units(space)):
                sent = region & trained
                vectors = {MODEL: (sent, pattern(sent.size, unit)), "control": (sent, pattern(sent.size, 9))}
                found.append(
                    {
                        "sync": encode_task(Task("x", 1, 1, 1.0, exchange=_plain(sync)))["exchange"]["sync"],
                        "boundary": name,
                        "unit": unit,
                        "size": sent.size,
                        "sha256": hashlib.sha256(b"".join(bytes(part) for part in encode(vectors))).hexdigest(),
                    }
                )
    return {
        "manifest": dumps(MODEL_MANIFEST),
        "weights_header": hashlib.sha256(header(space)).hexdigest(),
        "layers_header": hashlib.sha256(layers_layout(space, 2).header).hexdigest(),
        "units": found,
    }


def _plain(sync: Sync) -> Exchange:
    units = len(sync.units(MODEL_MANIFEST.space))
    return Exchange(sync, sent=(0,), changed=(0,) * units)


@dataclass(frozen=True)
class Scenario:
    """Some rounds of one device, which takes part in all but those it misses."""

    rules: tuple[LocalRule, ...] = ()
    sync: Sync = WholeModel()  # noqa: RUF009
    boundary: str = "stem"
    rounds: int = 3
    misses: tuple[int, ...] = ()
    loses: tuple[int, ...] = ()  # rounds before which what it kept is gone
    windows: int | None = None  # rounds of a window
    fuse: float | None = None
    inherits: bool = False


SCENARIOS = {
    "fedavg": Scenario(),
    "weak": Scenario(boundary="näher"),
    "narrow": Scenario(boundary="stem@0.5", rules=(Momentum(0.9, between="keep"),)),
    "input_side": Scenario(boundary="..body", rules=(WeightDecay(0.1),)),
    "momentum_kept": Scenario((Momentum(0.9, between="keep"),)),
    "momentum_averaged": Scenario((Momentum(0.9, between="average"),), boundary="body"),
    "adam": Scenario((Adam(),), boundary="body"),
    "adamw_kept": Scenario((AdamW(between="keep"),), misses=(1,), loses=(3,), rounds=5),
    "scaffold": Scenario((ControlVariate(),), boundary="body", misses=(1,), rounds=4),
    "scaffold_lost": Scenario((ControlVariate(),), loses=(2,), rounds=4),
    "vrl_sgd": Scenario((ControlVariate("own"),), rounds=4),
    "vrl_rotating": Scenario((ControlVariate("own"),), Rotating(2), rounds=5),
    "domo": Scenario((Momentum(0.9), ServerMomentum(0.7, "before")), fuse=3.5, rounds=4, misses=(2,)),
    "domo_s_fedlama": Scenario((ServerMomentum(0.7, "every_step"),), FedLama(2), fuse=0.3, rounds=5),
    "rotating_layers": Scenario((), Rotating(3), rounds=7, misses=(4,)),
    "rotating_channels": Scenario((Momentum(0.5, between="average"),), Rotating(2, by="channel"), "body", rounds=5),
    "handed_on": Scenario((), Rotating(2), windows=2, rounds=5, inherits=True),
    "fedlama_scaffold": Scenario((ControlVariate(), Momentum(0.9)), FedLama(2), "body", rounds=5, misses=(3,)),
    "half": Scenario((Proximal(0.1),), OnePart("half_of_channels"), rounds=3),
}


class Server:
    """The server's vectors, made of patterns; it counts what it is asked for."""

    def __init__(self, version: int) -> None:
        self.version = version

    def model(self, part: Part) -> Vector:
        return _version(self.version, part.region)

    def before(self, part: Part) -> Vector:
        return _version(self.version - 1, part.region)

    def state(self, name: str, part: Part) -> Vector:
        return np.array(part.region.gather(pattern(MODEL_MANIFEST.space.size, 300 + len(name) + self.version)))

    def inherited(self) -> tuple[Region, Vector]:
        region = trained_region(MODEL_MANIFEST, coverage(MODEL_MANIFEST, "body"))
        return region, pattern(region.size, 500 + self.version, 0.1)


def _version(version: int, region: Region) -> Vector:
    return np.array(region.gather(pattern(MODEL_MANIFEST.space.size, 100 + version)))


class Memory:
    """What a device kept."""

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}

    def load(self, task: str) -> Kept | None:
        return self.kept.get(task)


def participants() -> dict[str, Any]:
    """Rounds of a device whose gradients are patterns: what it starts from, sends and keeps, by sha256."""
    return {name: list(_participate(scenario)) for name, scenario in SCENARIOS.items()}


def _participate(scenario: Scenario) -> Iterator[dict[str, Any]]:
    memory, last = Memory(), None
    for task in scenario_tasks(scenario):
        if task.round in scenario.loses:
            memory.kept.clear()
        if task.round in scenario.misses:
            continue
        begun = begin(task, MODEL_MANIFEST, Server(task.round), memory)
        contribution = finish(begun, train_on_patterns(begun))
        last = f"task-{task.round}"
        memory.kept = {
            last: Kept(last, task.boundary, _copied(contribution.kept), contribution.walked, contribution.steps)
        }
        yield {
            "task": encode_task(task),
            "loses": task.round in scenario.loses,
            "lost": begun.device.lost,
            "parameters": sha256(begun.received.parameters),
            "reference": sha256(begun.received.origin),
            "brought": {name: sha256(vector) for name, vector in sorted(begun.received.brought.items())},
            "body": _body(contribution),
            "kept": {name: sha256(vector) for name, vector in sorted(contribution.kept.items())},
            "walked": contribution.walked,
            "steps": contribution.steps,
        }


def scenario_tasks(scenario: Scenario) -> Iterator[Task]:
    """The tasks that a coordinator would give."""
    sync, space = scenario.sync, MODEL_MANIFEST.space
    facts, last = first_facts(sync, space), None
    tracks = tuple(track.name for rule in scenario.rules for track in rule.tracks)
    for number in range(scenario.rounds):
        window = number - number % scenario.windows if scenario.windows else 0
        ends = bool(scenario.windows) and (number + 1) % (scenario.windows or 1) == 0
        when = When(number, ends_window=ends, is_last=number == scenario.rounds - 1)
        known = last if last is not None and last >= window else None
        exchange = Exchange(
            sync,
            sync.sent(when, facts),
            facts.changed,
            window_from=window,
            last_round=last,
            last_task=None if last is None else f"task-{last}",
            inherit=Inherit("other", "body") if scenario.inherits and window and known is None else None,
            tracks=tracks,
            fuse=scenario.fuse if number else None,
        )
        yield Task(scenario.boundary, 3, 2, 0.05, scenario.rules, seed=number, round=number, exchange=exchange)
        apart = {unit: 5.0 if unit == 2 else 1.0 for unit in range(len(facts.changed))}  # of FedLAMA: a part of "body"
        facts = after_round(sync, when, facts, tuple(1 for _ in facts.changed), apart)
        if number not in scenario.misses:
            last = number


def train_on_patterns(begun: Begun) -> Outcome:
    """Three steps whose gradients are patterns."""
    task, covered = begun.task, begun.device.covered
    x = np.array(begun.received.parameters)
    received = begun.received
    start = Start(x, task.steps, task.rate, received.origin, received.brought, received.steps_before)
    space = covered.boundary.space(MODEL_MANIFEST)
    local = LocalStep(task.rules, start, *runs(space, covered.boundary.layer, covered.layers))
    for number in range(task.steps):
        local.step(pattern(x.size, 1000 + 10 * task.round + number), task.rate)
    report = Report("done", task.boundary, "portable", "fast", task.round, task.steps, 2, 2, 1.0, 1.0)
    return Outcome(local.x, local, report)


def _copied(vectors: Mapping[str, Vector]) -> dict[str, Vector]:
    return {name: np.array(vector) for name, vector in vectors.items()}


def _body(contribution: Contribution) -> str:
    return hashlib.sha256(b"".join(bytes(part) for part in encode(contribution.tracks))).hexdigest()


def everything() -> dict[str, Any]:
    """All vectors, as JSON has them."""
    found = {
        "chance": chance(),
        "pictures": pictures(),
        "scores": scores(),
        "graphs": graphs(),
        "rules": rule_chains(),
        "clipped": clipped(),
        "bodies": bodies(),
        "participants": participants(),
    }
    read: dict[str, Any] = json.loads(json.dumps(found))
    return read
