"""Trackers and `on_round`: what a run tells while it goes, in Python, on the command line, and in each real library."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embrace
from embrace import trackers
from embrace.trackers import metrics_of
from tests.embrace.cli.conftest import run as command
from tests.live_server import live_server, next_task, send_update
from tests.waiting import wait_until

torch = pytest.importorskip("torch")


class Notes:
    """The smallest tracker of a user's own."""

    def __init__(self, name: str = "", folder: Path | None = None) -> None:
        self.told: list[Any] = []

    def start(self, config: Mapping[str, Any]) -> None:
        self.told.append(("start", dict(config)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.told.append((step, dict(metrics)))

    def end(self) -> None:
        self.told.append("end")

    @property
    def steps(self) -> list[tuple[int, dict[str, float]]]:
        """What was logged; it began and ended once."""
        assert self.told[0][0] == "start" and self.told[-1] == "end"
        return self.told[1:-1]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> embrace.Bundle:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return embrace.export(model, tmp_path_factory.mktemp("bundles") / "dense", input_shape=(4,))


def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random((60, 4), np.float32), np.arange(60) % 3


def simulate(bundle: embrace.Bundle, **options: Any) -> embrace.Run:
    job = embrace.Job(bundle, name="tiny", num_rounds=3, local={"steps": 2, "batch": 4})
    return embrace.simulate(job, arrays(), devices=3, workers=1, layers_every=3, **options)


def test_a_simulation_tells_each_round(bundle: embrace.Bundle):
    notes, seen = Notes(), []
    run = simulate(bundle, track=notes, on_round=seen.append)
    assert seen == list(run.rounds)
    assert notes.told[0][1]["num_rounds"] == 3 and notes.told[0][1]["local"]["batch"] == 4
    assert [step for step, _ in notes.steps] == [1, 2, 3], "rounds that are done"
    for record, (_, metrics) in zip(run.rounds, notes.steps):
        assert metrics["loss"] == record["loss"] and metrics["accuracy"] == record["accuracy"]
        assert metrics["devices"] == 3 and "round" not in metrics
    measured = run.rounds[-1]["per_layer"]["discrepancy"]
    assert notes.steps[-1][1]["per_layer/discrepancy/0"] == measured["0"]


def test_a_run_that_goes_on_tells_the_rounds_that_are_new(bundle: embrace.Bundle, tmp_path: Path):
    seen: list[Any] = []
    simulate(bundle, folder=tmp_path, on_round=seen.append)
    simulate(bundle, folder=tmp_path, on_round=seen.append)
    assert [record["round"] for record in seen] == [0, 1, 2]


def test_training_on_a_device_tells_each_round(bundle: embrace.Bundle):
    notes, seen = Notes(), []
    training = embrace.train(bundle, arrays(), rounds=2, boundary="strong", track=notes, on_round=seen.append)
    assert seen == training.rounds and [step for step, _ in notes.steps] == [1, 2]
    assert training.after is not None
    last = notes.steps[-1][1]
    assert last["accuracy"] == training.after.accuracy and last["test_loss"] == training.after.mean_loss
    assert last["loss"] == training.rounds[-1]["loss"] and last["seconds/wall"] > 0


def test_a_tracker_ends_also_when_the_run_fails(bundle: embrace.Bundle):
    notes = Notes()

    def stop(record: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(bundle, track=notes, on_round=stop)
    assert [step for step, _ in notes.steps] == [1]


def test_a_run_does_not_end_with_its_tracker(bundle: embrace.Bundle):
    class Broken(Notes):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            super().log(step, metrics)
            raise ConnectionError("the server \x1b[2Jis gone")

    broken = Broken()
    with pytest.warns(
        UserWarning, match=r"Broken stopped: ConnectionError: the server \\x1b\[2Jis gone; the run goes on"
    ) as told:
        run = simulate(bundle, track=broken)
    assert len(told) == 1 and len(run.rounds) == 3 and len(broken.steps) == 1


def test_numbers_of_a_record():
    record = {"round": 4, "loss": 0.5, "none": None, "nan": float("nan"), "yes": True, "text": "x", "a": {"b:c": 1}}
    assert metrics_of(record) == {"loss": 0.5, "a/b_c": 1.0}


# --- on the command line ----------------------------------------------------------------------------------------------

JOB = (
    "bundle = '{bundle}'\nname = 'tiny'\nnum_rounds = 2\n[local]\nsteps = 1\n[simulate]\ndevices = 3\ndata = '{data}'\n"
)


@pytest.fixture
def job(bundle: embrace.Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file beside its data, in the folder where a test works."""
    x, y = arrays()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    (tmp_path / "job.toml").write_text(JOB.format(bundle=bundle.path, data="data.npz"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "job.toml"


@pytest.mark.parametrize("library", ["tensorboard", "mlflow", "wandb"])
def test_a_library_that_is_missing_is_named_before_anything_runs(library: str, job: Path, monkeypatch, bundle):
    monkeypatch.setitem(sys.modules, library, None)
    if library == "tensorboard":  # it may be loaded in parts
        for name in [name for name in sys.modules if name.startswith("tensorboard.")]:
            monkeypatch.setitem(sys.modules, name, None)
    answer = command("simulate", job, "--track", library)
    assert answer.code == 3 and f"pip install 'embrace-fl[{library}]'" in answer.error
    assert not Path("runs").exists()
    answer = command("train", bundle.path, "--data", "data.npz", "--out", "out", "--track", library)
    assert answer.code == 3 and not Path("out").exists()


def test_a_tracker_that_does_not_exist(job: Path):
    answer = command("simulate", job, "--track", "paper")
    assert answer.code == 2 and answer.error == "track: expected tensorboard, mlflow, wandb, got 'paper'"


def test_a_job_that_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lines, JSON and Python tell a tracker the same rounds, also those that were over before."""
    made: list[Notes] = []

    def open_notes(name: str, folder: Path) -> Notes:
        assert name == "small/one" and folder == Path("runs") / "small-one", "a name from outside is no path"
        made.append(Notes())
        return made[-1]

    monkeypatch.setattr(trackers, "TRACKERS", {"tensorboard": open_notes})
    with live_server(tmp_path / "server") as server:
        job = server.create_job(tmp_path / "small", name="small/one", num_rounds=2)
        device = server.enrol()
        for _ in range(2):
            assert send_update(device, next_task(device)["id"]).status_code == 201
        options = ("--server", server.url, "--token", server.admin, "--track", "tensorboard")
        for more in ((), ("--json",)):
            answer = command("job", "watch", job, *options, *more)
            assert answer.code == 0, answer.err
        notes, seen = Notes(), []
        with embrace.Client(server.url, server.admin) as client:
            assert client.follow(job, seen.append, track=notes) == "done"
    assert [record["round"] for record in seen] == [0, 1]
    assert [step for step, _ in notes.steps] == [1, 2]
    assert all(metrics["loss"] == 1.5 and metrics["updates"] == 1 for _, metrics in notes.steps)
    assert [each.steps for each in made] == [notes.steps] * 2


# --- with the real libraries, read back with their own readers --------------------------------------------------------


def records(run: embrace.Run) -> list[float]:
    return [record["loss"] for record in run.rounds]


def test_tensorboard_of_a_job_that_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From rounds that devices answered, through `job watch`, to the file that TensorBoard reads."""
    pytest.importorskip("tensorboard", reason="needs pip install 'embrace-fl[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    monkeypatch.chdir(tmp_path)
    with live_server(tmp_path / "server") as server:
        job = server.create_job(tmp_path / "small", name="small/one", num_rounds=2)
        device = server.enrol()
        for loss in (1.5, 0.25):
            assert send_update(device, next_task(device)["id"], {"loss": loss}).status_code == 201
        options = ("--server", server.url, "--token", server.admin, "--track", "tensorboard")
        answer = command("job", "watch", job, *options)
        assert answer.code == 0, answer.err
    events = EventAccumulator("runs/small-one")
    events.Reload()
    for name, values in (("loss", (1.5, 0.25)), ("updates", (1.0, 1.0))):
        read = [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(name)]
        assert read == list(enumerate(values, 1))


def test_tensorboard(job: Path):
    pytest.importorskip("tensorboard", reason="needs pip install 'embrace-fl[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    answer = command("simulate", job, "--workers", 1, "--track", "tensorboard", "--json")
    assert answer.code == 0, answer.err
    events = EventAccumulator("runs/tiny")
    events.Reload()
    read = [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors("loss")]
    told = [(record["round"] + 1, np.float32(record["loss"])) for record in answer.json["rounds"]]
    assert read == told
    assert b'"num_rounds": 2' in make_ndarray(events.Tensors("config")[0].tensor_proto).item()


@pytest.mark.filterwarnings("ignore")
def test_mlflow(job: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow", reason="needs pip install 'embrace-fl[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{Path.cwd()}/mlruns")
    run = embrace.simulate(embrace.Job.from_file(job), workers=1, track="mlflow")
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("embrace").experiment_id])
    assert found.info.run_name == "tiny" and found.info.status == "FINISHED"
    assert found.data.params["num_rounds"] == "2" and found.data.params["local/steps"] == "1"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == list(enumerate(records(run), 1))


@pytest.mark.filterwarnings("ignore")
def test_wandb(job: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="needs pip install 'embrace-fl[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = embrace.simulate(embrace.Job.from_file(job), workers=1, track="wandb")
    (file,) = Path("wandb").glob("offline-run-*/*.wandb")

    def kept() -> list[Any]:
        return [Record.FromString(data) for data in pieces(file.read_bytes())]

    # Its service ends the file with a record of its own, a moment after `finish` returned.
    wait_until(lambda: bool(kept()) and kept()[-1].WhichOneof("record_type") == "exit", lambda: "the file has no end")
    read = []
    for record in kept():
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            read.append((int(items["_step"]), float(items["loss"])))
    assert read == list(enumerate(records(run), 1))


def pieces(stored: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format behind a header of seven bytes, which is how W&B keeps an offline run."""
    block, header, place, whole = 32768, struct.Struct("<IHB"), 7, b""
    while place + header.size <= len(stored):
        room = block - place % block
        if room < header.size:
            place += room
            continue
        _, length, kind = header.unpack_from(stored, place)
        place += header.size
        if place + length > len(stored):
            return  # still being written
        whole += stored[place : place + length]
        place += length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""
