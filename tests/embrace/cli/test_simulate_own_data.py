"""`embrace simulate` with a user's own model and own data: a table, images, a function, on an unequal fleet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import embrace as public
from simulation.runs import read_run

pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")

MODEL = """
from torch import nn


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(nn.functional.gelu(self.hidden(x)))


def pictures():
    body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(body, nn.Flatten(), nn.Linear(6 * 4 * 4, 8), nn.ReLU(), nn.Linear(8, 2))
"""
JOB = """
bundle = "{bundle}"
num_rounds = 6
[local]
steps = 10
batch = 8
rate = "0.1"
[simulate]
devices = 6
tiers = {{ strong = 2, weak = 4 }}
{more}
"""


def write_table(file: Path, count: int = 240, seed: int = 0) -> None:
    """Three kinds of flowers around three centres, called by their names."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 3, count)
    centres = np.array([[2, 0, 0, 1], [0, 2, 0, -1], [0, 0, 2, 0]])
    rows = centres[kinds] + 0.3 * rng.standard_normal((count, 4))
    names = np.array(["iris", "rose", "tulip"])[kinds]
    lines = ["a,species,b,c,d", *(f"{r[0]:.4f},{n},{r[1]:.4f},{r[2]:.4f},{r[3]:.4f}" for r, n in zip(rows, names))]
    file.write_text("\n".join(lines) + "\n")


def write_pictures(folder: Path, count: int = 40) -> None:
    """Reddish and bluish pictures of a size that is not the model's."""
    rng = np.random.default_rng(0)
    for name, channel in (("sea", 2), ("sunset", 0)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 100, (12, 10, 3), dtype=np.uint8)
            pixels[:, :, channel] += 120
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its bundles, a table and pictures."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "model.py").write_text(MODEL)
    tiers = {"weak": 0.6}
    public.export(f"{folder}/model.py:Tabular", folder / "tabular", input_shape=(4,), tiers=tiers)
    public.export(f"{folder}/model.py:pictures", folder / "pictures", input_shape=(3, 8, 8), tiers=tiers)
    write_table(folder / "flowers.csv")
    write_table(folder / "others.csv", 60, seed=1)
    write_pictures(folder / "photos")
    return folder


def job(project: Path, bundle: str, more: str) -> Path:
    file = project / "job.toml"
    file.write_text(JOB.format(bundle=bundle, more=more))
    return file


def test_a_table_of_your_own_on_an_unequal_fleet(embrace, project: Path, tmp_path: Path):
    more = 'data = "flowers.csv"\nlabel = "species"\npartitioner = "dirichlet"\npartition = { alpha = 0.5 }\n'
    options = ("--out", tmp_path / "run", "--workers", 1)
    answer = embrace("simulate", job(project, "tabular", more), *options)
    assert answer.code == 0, answer.err
    run = read_run(tmp_path / "run")
    assert run.rounds[-1]["devices"] == 6 and run.rounds[-1]["failures"] == 0
    assert run.rounds[-1]["samples"] == 192, "a fifth of 240 is held out, every other sample is on one device"
    assert run.accuracy is not None and run.accuracy > 0.9, "it learned three kinds of flowers"
    assert run.about["job"]["simulate"]["dataset"].startswith("flowers.csv-")
    # The same samples in another folder are the same run; other samples are another.
    moved = tmp_path / "flowers.csv"
    moved.write_bytes((project / "flowers.csv").read_bytes())
    assert embrace("simulate", project / "job.toml", *options, "--data", moved).code == 0
    write_table(moved, seed=7)
    changed = embrace("simulate", project / "job.toml", *options, "--data", moved)
    assert changed.code == 2 and "another run" in changed.error


def test_pictures_of_your_own_with_the_graphs_that_devices_run(embrace, project: Path, tmp_path: Path):
    file = job(project, "pictures", 'data = "photos"\npartitioner = "shard"\ntest_share = 0.25')
    answer = embrace("simulate", file, "--out", tmp_path / "run", "--workers", 1, "--engine", "portable")
    assert answer.code == 0, answer.err
    run = read_run(tmp_path / "run")
    assert run.rounds[-1]["samples"] == 60 and run.accuracy is not None and run.accuracy > 0.9


def test_data_tests_tiers_and_partition_on_the_command_line(embrace, project: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(project)
    (project / "mine.py").write_text(
        "import numpy as np\n\n\ndef load():\n    return np.eye(4)[[0, 1, 2] * 20], [0, 1, 2] * 20\n"
    )
    answer = embrace(
        *("simulate", job(project, "tabular", 'dataset = "digits"'), "--data", "mine.py:load", "--json"),
        *("--test-data", "others.csv", "--label", "species"),
    )
    assert answer.code == 2 and "only .csv files" in answer.error
    answer = embrace(
        *("simulate", project / "job.toml", "--data", "flowers.csv", "--label", "species", "--test-data", "others.csv"),
        *("--tiers", "strong=1,weak=3", "--partition", "shard,shards_per_partition=1", "--rounds", 2, "--workers", 1),
        *("--out", tmp_path / "run", "--json"),
    )
    assert answer.code == 0, answer.err
    assert [record["samples"] for record in answer.json["rounds"]] == [240, 240], "nothing is held out"
    table = read_run(tmp_path / "run").about["job"]["simulate"]
    assert table["tiers"] == {"strong": 1, "weak": 3} and table["partition"] == {"shards_per_partition": 1}
    answer = embrace(
        *("simulate", project / "job.toml", "--data", "mine.py:load", "--rounds", 1, "--workers", 1, "--json"),
        *("--out", tmp_path / "function"),
    )
    assert answer.code == 0, answer.err
    assert answer.json["rounds"][0]["samples"] == 48


def test_the_job_file_may_lie_elsewhere(embrace, project: Path, tmp_path: Path, monkeypatch):
    """Data is looked for beside the job file, as the bundle is; also later on, from another folder."""
    job(project, "tabular", 'data = "flowers.csv"\nlabel = "species"\ntest_data = "others.csv"\nsamples = 100')
    monkeypatch.chdir(project)
    opened = public.Job.from_file("job.toml")
    monkeypatch.chdir(tmp_path)
    run = public.simulate(opened, workers=1, evaluate_every=6)
    assert run.rounds[-1]["samples"] == 100 and run.accuracy is not None and run.accuracy > 0.9


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        ('date = "flowers.csv"', (), "simulate.date: no such key; expected data, dataset, devices, label, pace"),
        ('data = "flowers.csv"\ndataset = "digits"', (), "simulate.data: expected own data or a data set"),
        ("test_share = 0.1", (), "simulate.test_share: belongs to own data"),
        (
            'data = "flowers.csv"\ntest_share = 1.5',
            (),
            "simulate.test_share: expected a share between 0 and 1, got 1.5",
        ),
        ('data = "none.csv"', (), "no such file"),
        ('data = "flowers.csv"', (), "line 2, column 2 (species): expected a finite number"),
        ("", ("--data", "photos", "--dataset", "digits"), "--data and --dataset: expected one of them"),
        ("", ("--partition", "dirichlet,alpha"), "--partition: expected KEY=NUMBER, got 'alpha'"),
    ],
)
def test_what_is_refused(embrace, project: Path, tmp_path: Path, more: str, options: tuple[str, ...], message: str):
    answer = embrace("simulate", job(project, "tabular", more), "--out", tmp_path / "run", *options)
    assert answer.code == 2 and message in answer.error, answer.err
    if "simulate." in message:
        assert answer.error.startswith("line ")
