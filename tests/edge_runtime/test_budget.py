"""From a memory budget to a boundary: sizes, prediction, correction by trials, what is remembered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edge_runtime import budget, trial
from edge_runtime.budget import allow, largest_fitting, parse_memory, parse_size
from edge_runtime.bundle_files import read_manifest
from edge_runtime.engine.session import RuntimeSettings
from edge_runtime.trial import Conditions, Trial, Trials, known_needs
from federation.capacity import predicted_memory, predicted_peak
from federation.errors import InputError, OutOfMemory
from federation.manifest import Boundary, Manifest
from tests.embrace.cli.conftest import run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "resnet8"
    assert run("export", "resnet8", "--out", folder).code == 0
    return folder


@pytest.fixture(scope="module")
def manifest(directory: Path) -> Manifest:
    return read_manifest(directory)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MB", 64_000_000),
        ("1.5GB", 1_500_000_000),
        ("256MiB", 256 << 20),
        ("500000", 500_000),
        ("2 k", 2000),
        ("1g", 10**9),
        ("10 mib", 10 << 20),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-3MB", "64 TB", "lots", "0", "1e9", "64MBs", "9" * 40])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="expected something like 64MB"):
        parse_size(text)


def test_the_prediction_is_never_below_the_papers_formula(manifest: Manifest) -> None:
    for boundary in manifest.boundaries:
        assert predicted_peak(manifest, boundary, 32) > predicted_memory(manifest, boundary, 32).total


def test_more_room_never_means_fewer_layers(manifest: Manifest) -> None:
    chosen = []
    for room in range(2_000_000, 60_000_000, 1_000_000):
        try:
            chosen.append(largest_fitting(manifest, 32, room, None)[0].layer)
        except OutOfMemory:
            assert not chosen
    assert chosen[0] > 0 and chosen[-1] == 0
    assert chosen == sorted(chosen, reverse=True)


def test_trials_correct_the_prediction(manifest: Manifest) -> None:
    """Where everything takes twice the prediction, the choice is that of half the room; each boundary is tried once."""
    tried: list[str] = []

    def twice(boundary: Boundary) -> Trial:
        tried.append(boundary.name)
        return Trial(2 * predicted_peak(manifest, boundary, 32), 0.4, 0.1)

    room = int(2.1 * predicted_peak(manifest, manifest.boundary("weak"), 32))
    chosen, need, trial = largest_fitting(manifest, 32, room, twice)
    assert chosen == largest_fitting(manifest, 32, room // 2, None)[0]
    assert trial is not None and need == trial.anonymous <= room
    assert len(tried) == len(set(tried))


def test_a_prediction_just_above_the_room_is_doubted(manifest: Manifest) -> None:
    """Where everything takes less than predicted, the next boundary fits although its prediction does not."""
    weak, places = manifest.boundary("weak"), sorted(manifest.boundaries, key=lambda boundary: boundary.layer)
    nearer = next(place for place in reversed(places) if place.layer < weak.layer)
    need = predicted_peak(manifest, nearer, 32)
    room = int(0.9 * need)
    assert predicted_peak(manifest, weak, 32) <= room < need
    chosen, _, trial = largest_fitting(
        manifest, 32, room, lambda b: Trial(predicted_peak(manifest, b, 32) // 2, 0.4, 0.1)
    )
    assert largest_fitting(manifest, 32, room, None)[0] == weak
    assert chosen.layer <= nearer.layer and trial is not None and trial.anonymous <= room


def test_a_trial_that_does_not_survive_means_less(manifest: Manifest) -> None:
    weak = manifest.boundary("weak")

    def killed(boundary: Boundary) -> Trial:
        if boundary.layer < weak.layer:
            raise OutOfMemory("ended")
        return Trial(1_000_000, None, 0.1)

    chosen, _, _ = largest_fitting(manifest, 32, 10**9, killed)
    assert chosen == weak


def test_where_nothing_fits_the_smallest_is_named(manifest: Manifest) -> None:
    with pytest.raises(OutOfMemory, match=r"the smallest, 'fc', needs about .* use a smaller batch"):
        largest_fitting(manifest, 32, 10_000, None)


def trials(directory: Path, manifest: Manifest, batch: int, work: Path, **more: object) -> Trials:
    return Trials(Conditions(directory, manifest, batch, **more), work)  # type: ignore[arg-type]


def test_a_real_trial_is_made_once_and_remembered(
    directory: Path, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weak = manifest.boundary("weak")
    first = trials(directory, manifest, 8, tmp_path)(weak)
    assert first.anonymous > predicted_memory(manifest, weak, 8).activations
    assert first.forward_share is not None and 0 < first.forward_share < 1
    assert weak.train is not None and (first.graph, first.batch) == (weak.train.sha256, 8)
    assert known_needs(tmp_path, RuntimeSettings(), 10) == (first.need,)
    assert known_needs(tmp_path, RuntimeSettings(threads=2), 10) == (), "other threads take other memory"
    monkeypatch.setattr(trial, "attempt", lambda *told: pytest.fail("tried again"))
    assert trials(directory, manifest, 8, tmp_path)(weak) == first
    (written,) = (tmp_path / "trials").iterdir()
    written.write_text("{broken")
    with pytest.raises(pytest.fail.Exception):  # a file that cannot be read is as good as none
        trials(directory, manifest, 8, tmp_path)(weak)


def test_a_named_boundary_that_does_not_fit_is_answered_with_one_that_does(
    directory: Path, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = 30_000_000
    monkeypatch.setattr(budget, "current_memory", lambda: budget_memory(idle))
    room = predicted_peak(manifest, manifest.boundary("weak"), 32) + 1000
    with pytest.raises(OutOfMemory) as error:
        allow(
            directory,
            manifest,
            batch=32,
            samples=10,
            memory=str(idle + room + budget.AT_WORK),
            boundary="strong",
            work=tmp_path,
            try_out=False,
        )
    assert "training from 'stem' needs about" in str(error.value)
    assert str(error.value).endswith("--boundary layer3")


def budget_memory(anonymous: int) -> object:
    from edge_runtime.memory import Memory

    return Memory(2 * anonymous, anonymous, anonymous, 2 * anonymous)


def test_little_room_means_low_memory_small_batches_and_a_file(
    directory: Path, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "current_memory", lambda: budget_memory(0))

    def plan(memory: str, samples: int, **more: str) -> budget.Allowance:
        return allow(
            directory,
            manifest,
            batch=4,
            samples=samples,
            memory=memory,
            boundary="weak",
            work=tmp_path,
            try_out=False,
            **more,
        )

    wide = plan("1GB", 100)
    assert (wide.settings.profile, wide.plan.folder, wide.plan.batch) == ("fast", None, 64)
    little = str(predicted_peak(manifest, manifest.boundary("weak"), 4) + budget.AT_WORK + 100_000)
    tight = plan(little, 1000)
    assert tight.plan.folder == tmp_path / "activations" and tight.plan.batch < 64
    assert plan(little, 10, profile="low_memory").settings.profile == "low_memory"
    # float16 halves what decides between memory and disk
    row = 2 * 4 * 32 * 32 * 16  # of the largest layer, twice: one store is read while the next is written
    needed = plan("1GB", 100).needed
    between = str(needed + 4 * 100 * row * 3 // 4)
    assert plan(between, 100).plan.folder is not None
    assert plan(between, 100, activations="float16").plan.folder is None


def test_without_a_budget_the_frozen_layers_take_little_beside_training(
    directory: Path, manifest: Manifest, tmp_path: Path
) -> None:
    told = {"batch": 4, "samples": 1000, "boundary": "weak", "work": tmp_path, "try_out": False}
    found = allow(directory, manifest, **told)
    assert found.budget_from != "asked for" and found.settings.profile == "fast"
    largest = max(layer.activations for layer in manifest.layers)
    assert found.plan.memory is not None and found.plan.memory <= found.needed // 8
    assert found.plan.batch == 1 or 8 * largest * found.plan.batch <= found.needed // 8
    assert found.plan.folder == tmp_path / "activations"
    assert allow(directory, manifest, **told, profile="low_memory").settings.profile == "low_memory"


@pytest.mark.parametrize(("option", "value"), [("profile", "quick"), ("engine", "torch"), ("memory", "much")])
def test_unknown_words_are_refused(
    directory: Path, manifest: Manifest, tmp_path: Path, option: str, value: str
) -> None:
    options = {"memory": "1GB", option: value}
    with pytest.raises(InputError, match="expected"):
        allow(directory, manifest, batch=4, samples=4, boundary="weak", work=tmp_path, try_out=False, **options)


def test_trials_know_the_engine_and_the_batch(directory: Path, manifest: Manifest, tmp_path: Path) -> None:
    weak = replace(manifest.boundary("fc"))
    for batch in (2, 4):
        trials(directory, manifest, batch, tmp_path, engine="portable")(weak)
    (written,) = (tmp_path / "trials").iterdir()
    assert len(json.loads(written.read_text())) == 2


@pytest.mark.parametrize("text", ["64", " 512 ", "70", 64])
def test_a_bare_small_number_is_asked_about(text: str | int) -> None:
    with pytest.raises(InputError, match=rf"{str(text).strip()} bytes\? write {str(text).strip()}MB"):
        parse_memory(text)
    assert parse_memory("64B") == 64 and parse_memory("64000000") == 64_000_000


def test_a_budget_below_the_idle_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "current_memory", lambda: budget_memory(40_000_000))
    with pytest.raises(OutOfMemory, match=r"^30 MB allowed, the idle process takes 40 MB; give it more memory$"):
        budget.open_budget("30MB")
    assert budget.open_budget("70MB").room == 30_000_000 - budget.AT_WORK
