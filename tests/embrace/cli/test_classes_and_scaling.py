"""Class names and scaling on the way of a model: export, inspect, train, a fleet, simulate, and the ONNX at its end."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import embrace as public
from edge_runtime.bundle_files import read_manifest
from tests.embrace.cli.test_simulate_own_data import MODEL, write_pictures
from tests.live_server import live_server

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a model and pictures in two sub-folders."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "model.py").write_text(MODEL)
    write_pictures(folder / "photos")
    return folder


@pytest.fixture
def bundle(embrace, project: Path, tmp_path: Path) -> Path:
    answer = embrace(
        *("export", f"{project}/model.py:pictures", "--input", "3,8,8", "--out", tmp_path / "bundle"),
        *("--classes", project / "photos", "--mean", "0.5,0.25,0.5", "--std", "1/4"),
    )
    assert answer.code == 0, answer.err
    return tmp_path / "bundle"


def classify(model: Path, picture: Path) -> str:
    """What a program does that knows the ONNX file alone: read its metadata, scale the picture, name the class."""
    session = onnxruntime.InferenceSession(model)
    told = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
    assert told["input"] == {"dtype": "float32", "shape": [3, 8, 8], "layout": "NCHW", "channels": "RGB"}
    _, height, width = told["input"]["shape"]
    pixels = np.asarray(Image.open(picture).convert("RGB").resize((width, height), Image.Resampling.BILINEAR))
    how = told["preprocessing"]
    mean, std = (np.array(how[name], np.float32).reshape(-1, 1, 1) for name in ("mean", "std"))
    x = (pixels.transpose(2, 0, 1) * np.float32(how["scale"]["uint8"]) - mean) / std
    (scores,) = session.run(None, {"input": x[None].astype(np.float32)})
    return str(told["classes"][int(scores[0].argmax())])


def names_pictures_rightly(model: Path, photos: Path) -> bool:
    onnx.checker.check_model(onnx.load(model))
    return all(
        classify(model, photos / name / f"{number}.png") == name for name in ("sea", "sunset") for number in (0, 7)
    )


def test_inspect_shows_them(embrace, bundle: Path):
    told = embrace("inspect", bundle, "--json").json
    assert told["classes"] == ["sea", "sunset"]
    assert told["preprocessing"] == {"scale": None, "mean": [0.5, 0.25, 0.5], "std": [0.25]}
    shown = embrace("inspect", bundle).out
    assert "classes: sea, sunset" in shown and "stored values become inputs by: − 0.5 0.25 0.5, ÷ 0.25" in shown


def test_a_model_trained_here_names_what_it_sees(embrace, bundle: Path, project: Path, tmp_path: Path):
    answer = embrace(
        "train", bundle, "--data", project / "photos", "--rounds", 6, "--out", tmp_path / "trained", "--json"
    )
    assert answer.code == 0, answer.err
    assert answer.json["after"]["accuracy"] == 1.0
    model = public.load(tmp_path / "trained").to_onnx(tmp_path / "model.onnx")
    assert names_pictures_rightly(model, project / "photos")


def test_a_model_trained_by_a_fleet_names_what_it_sees(embrace, bundle: Path, project: Path, tmp_path: Path):
    """Two devices, one with pictures of a single class: it needs no folder for the other."""
    job = tmp_path / "job.toml"
    job.write_text(
        f'bundle = "{bundle}"\nnum_rounds = 3\n'
        '[participate]\nmin_available = 2\nquorum = 2\n[local]\nsteps = 20\nrate = "0.02"\n'
    )
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "sunset").symlink_to(project / "photos" / "sunset")
    with live_server(tmp_path / "server") as server:
        created = embrace("job", "create", job, "--server", server.url, "--token", server.admin, "--json")
        assert created.code == 0, created.err

        def take_part(name: str, data: Path) -> None:
            options = {"token": server.enrolment, "name": name, "tier": "strong", "work": tmp_path / name}
            with public.Agent.join(server.url, str(data), **options) as agent:
                agent.run(most_tasks=3)

        devices = [
            threading.Thread(target=take_part, args=each)
            for each in (("one", project / "photos"), ("two", tmp_path / "alone"))
        ]
        for device in devices:
            device.start()
        for device in devices:
            device.join(120)
            assert not device.is_alive()
        options = ("--server", server.url, "--token", server.admin)
        answer = embrace("job", "export", created.json["id"], "--out", tmp_path / "trained", *options)
        assert answer.code == 0, answer.err
    assert read_manifest(tmp_path / "trained").classes == ("sea", "sunset")
    assert names_pictures_rightly(tmp_path / "trained" / "model.onnx", project / "photos")


def test_a_simulation_applies_and_checks_them(embrace, bundle: Path, project: Path, tmp_path: Path):
    job = tmp_path / "job.toml"
    job.write_text(f'bundle = "{bundle}"\nnum_rounds = 2\n[local]\nsteps = 5\n[simulate]\ndevices = 4\n')
    options = ("--workers", 1, "--out", tmp_path / "run", "--json")
    answer = embrace("simulate", job, "--data", project / "photos", *options)
    assert answer.code == 0, answer.err
    plain = public.export(f"{project}/model.py:pictures", tmp_path / "plain", input_shape=(3, 8, 8))
    assert plain.manifest.preprocessing is None
    job.write_text(job.read_text().replace(str(bundle), str(plain.path)))
    other = embrace("simulate", job, "--data", project / "photos", "--workers", 1, "--out", tmp_path / "2", "--json")
    assert other.json["rounds"][0]["loss"] != answer.json["rounds"][0]["loss"], "inputs are scaled otherwise"
    (tmp_path / "forest" / "tree").mkdir(parents=True)
    job.write_text(job.read_text().replace(str(plain.path), str(bundle)))
    refused = embrace("simulate", job, "--data", tmp_path / "forest", *options)
    assert refused.code == 2 and "found tree; expected sea, sunset" in refused.error


def test_names_that_training_data_has_stay_with_the_model(embrace, project: Path, tmp_path: Path):
    """A bundle without names gets those of the folder that it was trained on."""
    public.export(f"{project}/model.py:pictures", tmp_path / "plain", input_shape=(3, 8, 8))
    assert embrace("train", tmp_path / "plain", "--data", project / "photos", "--rounds", 1).code == 0
    assert read_manifest(tmp_path / "plain-trained").classes == ("sea", "sunset")
    assert read_manifest(tmp_path / "plain").classes is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--classes", "one,two,three"), "classes: 3 names, the model 'model.pictures' has 2 classes"),
        (("--classes", "none.csv"), "cannot read none.csv"),
        (("--mean", "1,2"), "preprocessing.mean: expected one number or 3"),
        (("--std", "0"), "std: expected numbers above 0"),
        (("--scale", "much"), "--scale much: expected a number, as 0.5 or 1/255"),
    ],
)
def test_what_cannot_travel(embrace, project: Path, tmp_path: Path, options: tuple[str, ...], message: str):
    answer = embrace(
        "export", f"{project}/model.py:pictures", "--input", "3,8,8", "--out", tmp_path / "bundle", *options
    )
    assert answer.code == 2 and message in answer.error
