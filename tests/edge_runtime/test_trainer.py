"""The local training loop: reproducible, the same with both engines, fresh when it has to be, whole when it fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.activations import ActivationStore
from edge_runtime.data import Augmentation, from_arrays
from edge_runtime.engine.engine import OnnxEngine
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.forward import ForwardPlan
from edge_runtime.layers import BundleSource, TrainedSource
from edge_runtime.trainer import Outcome, Received, Trainer, batches, step_seed
from federation.axes.local import Momentum, ServerMomentum, WeightDecay
from federation.errors import DiskFull, InputError, NonFiniteLoss, OutOfMemory
from federation.messages import Task
from tests.edge_runtime.conftest import ENGINES, Bundle, RecordingSource, both_engines, relative

RULES = (WeightDecay(1e-4), Momentum(0.9))
WEAK = Task("weak", steps=8, batch=32, rate=0.05, rules=RULES, seed=11)


def trainer_of(bundle: Bundle, samples, source=None, **more) -> Trainer:
    return Trainer(bundle.directory, source or BundleSource(bundle.directory, bundle.manifest), samples, **more)


def train(bundle: Bundle, samples, task: Task, **more) -> Outcome:
    """A fresh trainer's outcome."""
    return trainer_of(bundle, samples, **more).run(task, Received(bundle.suffix(task.boundary)))


@pytest.fixture(scope="module")
def rows(dropouts):
    """Random samples for the model with dropout."""
    rng = np.random.default_rng(0)
    return from_arrays(rng.standard_normal((100, 20)).astype(np.float32), rng.integers(0, 4, 100), dropouts.manifest)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("boundary", ["strong", "moderate", "weak"])
def test_a_task_is_reproducible_bit_for_bit(digits, samples, engine, boundary):
    task = replace(WEAK, boundary=boundary, crop=1, flip=True)
    first, again = (train(digits, samples, task, engine=engine) for _ in range(2))
    assert np.array_equal(first.parameters, again.parameters)
    assert (first.report.loss, first.report.last_loss) == (again.report.loss, again.report.last_loss)
    other = train(digits, samples, replace(task, seed=12), engine=engine)
    later = train(digits, samples, replace(task, round=1), engine=engine)
    assert not np.array_equal(first.parameters, other.parameters)
    assert not np.array_equal(first.parameters, later.parameters)


@both_engines
def test_both_engines_train_alike(digits, samples, dropouts, rows):
    """Order, augmentation and dropout come from the seed, not from the engine."""
    augmented = replace(WEAK, boundary="strong", crop=1, flip=True, rate=0.01)
    for bundle, data, task in [
        (digits, samples, WEAK),
        (digits, samples, augmented),
        (dropouts, rows, replace(WEAK, boundary="3")),
        (dropouts, rows, replace(WEAK, boundary="0")),
    ]:
        portable, other = (train(bundle, data, task, engine=engine) for engine in ENGINES)
        assert (portable.report.engine, other.report.engine) == ENGINES
        assert portable.report.loss == pytest.approx(other.report.loss, rel=1e-4)
        assert relative(portable.local.update(), other.local.update()) < 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_every_step_draws_its_own_dropout(dropouts, rows, engine):
    task = replace(WEAK, boundary="0")
    seeds = [step_seed(task, number) for number in range(1000)]
    seeds += [step_seed(replace(task, round=1), number) for number in range(1000)]
    seeds += [step_seed(replace(task, seed=12), number) for number in range(1000)]
    assert len(set(seeds)) == 3000 and min(seeds) >= 0 and max(seeds) < 2**31
    loss = train(dropouts, rows, replace(task, steps=1), engine=engine).report.loss
    step = dropouts.step("0", engine)
    ((_, indices),) = batches(100, 32, replace(task, steps=1))
    x, labels = rows.batch(indices)
    assert step.run(x, labels, seeds[0]) == loss
    assert step.run(x, labels, seeds[1]) != loss


class CountingEngine(OnnxEngine):
    """A device's engine behind a name of its own that counts what it is asked for."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(
            bundle.directory, BundleSource(bundle.directory, bundle.manifest), "portable", RuntimeSettings()
        )
        self.asked: list[str] = []

    def open_step(self, boundary):
        self.asked.append(f"step {boundary.name}")
        return super().open_step(boundary)

    def store(self, boundary, *arguments):
        self.asked.append(f"store {boundary.name}")
        return super().store(boundary, *arguments)


def test_another_engine_can_stand_behind_the_loop(digits, samples):
    engine = CountingEngine(digits)
    given = train(digits, samples, WEAK, engine=engine, measures_memory=False)
    own = train(digits, samples, WEAK)
    boundary = digits.manifest.boundary("weak")
    assert engine.asked == [f"store {boundary.name}", f"step {boundary.name}"]
    assert np.array_equal(given.parameters, own.parameters)
    assert own.report.memory and not given.report.memory


@given(count=st.integers(1, 100), batch=st.integers(1, 100), steps=st.integers(1, 60), seed=st.integers(0, 5))
def test_every_sample_is_used_once_per_epoch(count, batch, steps, seed):
    batch = min(batch, count)
    each = count // batch
    found = list(batches(count, batch, Task("weak", steps, batch, 0.1, seed=seed)))
    assert len(found) == steps and all(len(indices) == batch for _, indices in found)
    assert [epoch for epoch, _ in found] == [number // each for number in range(steps)]
    for start in range(0, steps, each):
        used = np.concatenate([indices for _, indices in found[start : start + each]])
        assert len(set(used.tolist())) == len(used) and set(used.tolist()) <= set(range(count))
        if count % batch == 0 and start + each <= steps:
            assert sorted(used.tolist()) == list(range(count))


def test_orders_differ_between_epochs_and_rounds():
    def orders(**more) -> list[tuple[int, ...]]:
        return [tuple(indices) for _, indices in batches(50, 50, Task("weak", 3, 50, 0.1, **more))]

    assert len({*orders(), *orders(seed=1), *orders(round=1)}) == 9


def test_every_sample_passes_the_frozen_layers_once_however_many_epochs_there_are(digits, samples):
    engine = CountingEngine(digits)
    trainer = trainer_of(digits, samples, engine=engine)
    outcome = trainer.run(replace(WEAK, epochs=3), Received(digits.suffix("weak")))
    assert outcome.report.steps == 3 * (len(samples) // WEAK.batch)
    assert [what for what in engine.asked if what.startswith("store")] == ["store dense"]


def test_activations_are_computed_again_only_when_they_are_due(digits, samples):
    source = RecordingSource(digits)
    trainer = trainer_of(digits, samples, source)

    def computed(round_: int, version: str, **more) -> bool:
        source.version = version
        source.events.clear()
        trainer.run(replace(WEAK, round=round_, steps=1, **more), Received(digits.suffix("weak")))
        assert source.fetched in ([], [0, 1, 2])
        return bool(source.fetched)

    assert computed(0, "a")
    assert not computed(1, "a") and not computed(900, "a"), "the same layers on the same data give the same"
    assert computed(901, "b") and computed(902, "c"), "always fresh is the default"
    assert computed(902, "d"), "... even within a round"
    assert not computed(903, "e", refresh_every=3) and not computed(904, "f", refresh_every=3)
    assert computed(905, "g", refresh_every=3)
    assert not computed(906, "x", refresh_every=3, good_since=905) and computed(
        906, "y", refresh_every=3, good_since=906
    )
    assert computed(905, "g", refresh_every=3)
    assert not computed(906, "h", refresh_every=3) and computed(906, "h")
    assert computed(10, "i", refresh_every=3), "a round that lies before is another training"
    assert computed(10, "i", activations="float16") and computed(10, "i")
    trainer.close()
    assert computed(10, "i")


def test_activations_of_another_training_are_not_taken_over(digits, samples, tmp_path):
    """Two jobs on one bundle, the second a round later than what the first one left behind."""
    other = TrainedSource(digits.directory, digits.manifest, 0, digits.weights * np.float32(1.5), tmp_path)
    other.lineage = "another job"
    first = replace(WEAK, round=4, refresh_every=3)
    later = replace(first, round=5)
    received = Received(digits.suffix("weak"))
    trainer = trainer_of(digits, samples)
    trainer.run(first, received)
    trainer.source = other
    found = trainer.run(later, received).parameters.copy()
    fresh = trainer_of(digits, samples, other).run(later, received).parameters
    stale = train(digits, samples, later).parameters
    assert np.array_equal(found, fresh) and not np.array_equal(found, stale)


def test_a_layer_further_back_needs_its_own_activations(digits, samples):
    source = RecordingSource(digits)
    trainer = trainer_of(digits, samples, source)
    for boundary, expected in [("dense", [0, 1, 2]), ("conv3", [0, 1]), ("conv3", []), ("conv1", []), ("conv2", [0])]:
        source.events.clear()
        found = trainer.run(replace(WEAK, boundary=boundary, steps=2), Received(digits.suffix(boundary)))
        assert source.fetched == expected
        fresh = train(digits, samples, replace(WEAK, boundary=boundary, steps=2))
        assert np.array_equal(found.parameters, fresh.parameters)
        layer = digits.manifest.boundary(boundary).layer
        size = int(np.prod(digits.manifest.layers[layer].input.shape)) * 4 * 200 if layer else 0
        assert found.report.bytes == {"stored_activations": size}


def test_augmented_activations_are_new_in_every_round_and_reproducible(digits, samples):
    source = RecordingSource(digits)
    trainer = trainer_of(digits, samples, source)

    def losses(task: Task) -> tuple[float, bool]:
        source.events.clear()
        loss = trainer.run(task, Received(digits.suffix("weak"))).report.loss
        return loss, bool(source.fetched)

    task = replace(WEAK, steps=1, batch=200, crop=2)  # one step with all samples: their order does not matter
    first, fetched = losses(task)
    assert fetched
    assert losses(task) == (first, False), "the same round of the same seed"
    second, fetched = losses(replace(task, round=1))
    assert fetched and abs(second - first) > 1e-5
    third, fetched = losses(replace(task, round=1, seed=12))
    assert fetched and abs(third - second) > 1e-5
    plain, fetched = losses(replace(task, crop=0))
    assert fetched and abs(plain - first) > 1e-5
    assert losses(task) == (first, True), "reproducible from seed and round"
    assert losses(replace(task, round=1, refresh_every=2))[1] is False


@pytest.mark.parametrize("crop", [0, 2])
def test_only_what_a_round_takes_goes_through_the_frozen_layers(digits, samples, crop):
    """Two steps of eight take 16 of 200 samples; the result is that of storing all of them."""
    task = replace(WEAK, steps=2, batch=8, crop=crop)
    source = RecordingSource(digits)
    trainer = trainer_of(digits, samples, source, stores_all=False)
    received = Received(digits.suffix("weak"))
    row = 4 * int(np.prod(digits.manifest.layers[digits.manifest.boundary("weak").layer].input.shape))
    for number in (0, 1):
        source.events.clear()
        found = trainer.run(replace(task, round=number), received)
        everything = train(digits, samples, replace(task, round=number))
        assert found.report.bytes["stored_activations"] == 16 * row
        assert everything.report.bytes["stored_activations"] == 200 * row
        assert relative(found.parameters, everything.parameters) < 1e-6
        assert source.fetched, "other samples than in the round before"
    source.events.clear()
    again = trainer.run(replace(task, round=1), received)
    assert np.array_equal(again.parameters, found.parameters) and not source.fetched
    kept = trainer.run(replace(task, round=2, refresh_every=3), received)
    assert kept.report.bytes["stored_activations"] == 200 * row, "later rounds will take others"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_strong_boundary_trains_on_augmented_inputs_of_each_epoch(digits, samples, engine):
    """One step per epoch: the loss of each is that of the inputs shifted for it, from the weights reached so far."""
    task = Task("strong", steps=2, batch=200, rate=0.0, seed=3, round=2, crop=2, flip=True)
    found = train(digits, samples, task, engine=engine)
    step = digits.step("strong", engine)
    losses = []
    for epoch, indices in batches(200, 200, task):
        x, labels = samples.batch(indices)
        losses.append(step.run(Augmentation(2, True).apply(x, indices, 3, epoch), labels))
        for name, kind in step.kinds.items():
            if kind == "statistic":
                step.values[name][...] = step.results[name]
    assert found.report.loss == pytest.approx(sum(losses) / 2, rel=1e-6) and losses[0] != losses[1]
    assert found.report.last_loss == pytest.approx(losses[1], rel=1e-6)
    assert found.report.bytes == {"stored_activations": 0}


@pytest.mark.parametrize("boundary", ["moderate", "weak"])
def test_float16_activations_change_the_gradient_by_little(digits, images, boundary):
    """Real images; the error of the gradient relative to its length, before training and after some of it.

    It is exactly the error that PyTorch makes with activations rounded to float16.
    """
    torch = pytest.importorskip("torch")
    samples = from_arrays(images[0][:512], images[1][:512], digits.manifest)
    layer, space = digits.manifest.boundary(boundary).layer, digits.manifest.space
    weights = [p for part in digits.manifest.layers[layer:] for p in part.parameters if p.kind == "weight"]
    trainer = trainer_of(digits, samples)
    trained = trainer.run(Task(boundary, 100, 32, 0.05, RULES), Received(digits.suffix(boundary))).parameters.copy()
    for when, received in (("fresh", digits.suffix(boundary)), ("trained", trained)):
        found, expected = {}, {}
        module = digits.module()
        for name, value in space.views(received, start=space.suffix(layer).start).items():
            module.state_dict()[name].copy_(torch.from_numpy(value))
        with torch.no_grad():
            rows = module[:layer].eval()(torch.from_numpy(images[0][:512]))
        for stored_as in ("float32", "float16"):
            outcome = trainer.run(Task(boundary, 1, 512, 1.0, activations=stored_as), Received(received))
            moved = space.views(-outcome.local.update(), start=space.suffix(layer).start)  # one plain step of rate 1
            found[stored_as] = np.concatenate([moved[p.name].ravel() for p in weights])
            assert outcome.report.bytes["stored_activations"] == rows.numel() * (4 if stored_as == "float32" else 2)
            module.train().zero_grad()
            rounded = rows.to(getattr(torch, stored_as)).float()
            torch.nn.functional.cross_entropy(module[layer:](rounded), torch.from_numpy(images[1][:512])).backward()
            gradients = dict(module.named_parameters())
            expected[stored_as] = np.concatenate([gradients[p.name].grad.numpy().ravel() for p in weights])
            assert relative(found[stored_as], expected[stored_as]) < 1e-3
        error = float(np.linalg.norm(found["float16"] - found["float32"]) / np.linalg.norm(found["float32"]))
        print(f"{boundary}, {when}: float16 activations change the gradient by {error:.1e}")
        assert 0 < error < 2e-2


@pytest.mark.parametrize("engine", ENGINES)
def test_divergence_is_named_and_the_trainer_can_go_on(digits, samples, engine):
    trainer = trainer_of(digits, samples, engine=engine)
    momentum = np.ones_like(digits.suffix("weak"))
    received = Received(digits.suffix("weak"), {"momentum": momentum})
    kept = received.parameters.copy(), momentum.copy()
    for vector in (received.parameters, momentum):
        vector.flags.writeable = False
    with pytest.raises(NonFiniteLoss, match=r"the loss is (nan|inf) at step \d+ of round 5 with the rate 1e\+30; use"):
        trainer.run(replace(WEAK, rate=1e30, round=5), received)
    assert np.array_equal(received.parameters, kept[0]) and np.array_equal(momentum, kept[1])
    with pytest.raises(NonFiniteLoss, match="parameters are not finite after round 5"):
        trainer.run(replace(WEAK, rate=1e38, round=5, steps=1), received)
    good = trainer.run(WEAK, Received(digits.suffix("weak")))
    assert np.array_equal(good.parameters, train(digits, samples, WEAK, engine=engine).parameters)


def test_lack_of_memory_is_named_and_gives_everything_back(digits, samples):
    class Starving(RecordingSource):
        error: Exception | None = MemoryError()

        def fetch(self, layer: int, *, measuring: bool = False):
            if self.error and layer == 1:
                raise self.error
            return super().fetch(layer, measuring=measuring)

    source = Starving(digits)
    trainer = trainer_of(digits, samples, source)
    with pytest.raises(OutOfMemory, match=r"^training from 'dense': not enough memory"):
        trainer.run(WEAK, Received(digits.suffix("weak")))
    source.error = OutOfMemory("no room for it")
    with pytest.raises(OutOfMemory, match=r"^training from 'dense': no room for it"):
        trainer.run(WEAK, Received(digits.suffix("weak")))
    source.error = None
    expected = train(digits, samples, WEAK).parameters
    assert np.array_equal(trainer.run(WEAK, Received(digits.suffix("weak"))).parameters, expected)


def test_a_full_disk_is_named_and_the_trainer_can_go_on(digits, samples, tmp_path):
    trainer = trainer_of(digits, samples, plan=ForwardPlan(folder=tmp_path, store_limit=200 * 128 * 4))
    with pytest.raises(DiskFull, match="the limit is"):
        trainer.run(replace(WEAK, boundary="conv2"), Received(digits.suffix("conv2")))
    weak = trainer.run(WEAK, Received(digits.suffix("weak")))
    assert np.array_equal(weak.parameters, train(digits, samples, WEAK).parameters)
    assert list(tmp_path.iterdir()) == []


def test_received_vectors_that_do_not_fit_are_refused(digits, samples):
    trainer, good = trainer_of(digits, samples), digits.suffix("weak")
    for wrong in (good[:-1], good[:1], good.astype(np.float64), good.reshape(1, -1)):
        with pytest.raises(InputError, match="parameters: expected float32"):
            trainer.run(WEAK, Received(wrong))
    for name in ("momentum", "control", "server_momentum"):
        with pytest.raises(InputError, match=f"{name}: expected float32"):
            trainer.run(WEAK, Received(good, {name: good[:-1]}))


def test_a_batch_is_no_larger_than_the_data(digits, images):
    few = from_arrays(images[0][:10], images[1][:10], digits.manifest)
    found = train(digits, few, replace(WEAK, batch=4096, steps=3))
    assert (found.report.batch, found.report.samples, found.report.steps) == (10, 10, 3)
    assert np.array_equal(found.parameters, train(digits, few, replace(WEAK, batch=10, steps=3)).parameters)


def test_batch_sizes_may_change_from_task_to_task(digits, samples):
    trainer = trainer_of(digits, samples)
    for batch in (32, 8, 64):
        task = replace(WEAK, batch=batch)
        found = trainer.run(task, Received(digits.suffix("weak")))
        assert np.array_equal(found.parameters, train(digits, samples, task).parameters)


@pytest.mark.parametrize("boundary", ["strong", "weak"])
def test_the_update_is_how_far_parameters_moved(digits, samples, boundary):
    received = digits.suffix(boundary)
    found = train(digits, samples, replace(WEAK, boundary=boundary))
    assert np.array_equal(found.local.update(), found.parameters - received)
    assert np.abs(found.local.update()).max() > 0
    assert found.local.state()["momentum"].shape == received.shape


def test_the_servers_part_of_the_movement_is_not_reported(digits, samples):
    received = digits.suffix("weak")
    server = np.random.default_rng(0).standard_normal(received.size).astype(np.float32) * np.float32(1e-3)
    task = replace(WEAK, rules=(ServerMomentum(0.5, "every_step"),))
    found = trainer_of(digits, samples).run(task, Received(received, {"server_momentum": server}))
    expected = found.parameters - received + server * np.float32(0.5 * 8 * 0.05)
    assert relative(found.local.update(), expected) < 1e-4


def test_local_momentum_goes_on_where_it_was(digits, samples):
    """Two tasks of 4 steps with the buffer handed over are not two that begin at zero."""
    trainer, received = trainer_of(digits, samples), digits.suffix("weak")
    first = trainer.run(replace(WEAK, steps=4), Received(received))
    x, momentum = first.parameters.copy(), first.local.state()["momentum"].copy()
    carried = trainer.run(replace(WEAK, steps=4, round=1), Received(x, {"momentum": momentum})).parameters.copy()
    begun = trainer.run(replace(WEAK, steps=4, round=1), Received(x)).parameters
    assert not np.array_equal(carried, begun)


def test_the_report_says_what_was_done(digits, samples):
    found = train(
        digits, samples, WEAK, settings=RuntimeSettings(profile="low_memory"), plan=ForwardPlan(memory=1)
    ).report
    assert (found.status, found.boundary, found.engine, found.profile) == ("done", "dense", "portable", "low_memory")
    assert (found.steps, found.batch, found.samples, found.round) == (8, 32, 200, 0)
    assert found.seconds["wall"] > 0 and set(found.seconds["forward"]) == {"conv1", "conv2", "conv3"}
    assert found.memory == {} or set(found.memory) == {"anonymous", "file_backed", "total", "process"}


def test_a_store_serves_the_trainer_from_disk_as_from_memory(digits, samples, tmp_path):
    inside = train(digits, samples, WEAK)
    outside = train(digits, samples, WEAK, plan=ForwardPlan(folder=tmp_path))
    assert np.array_equal(inside.parameters, outside.parameters)
    assert ActivationStore(1, digits.manifest.layers[3].input, folder=tmp_path).on_disk
