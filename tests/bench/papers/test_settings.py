"""Scale `full` beside the papers' own settings, as their texts have them. Nothing is trained."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

from bench.papers import TABLES
from bench.papers.runner import spec_of
from federation.job import plan_from, plan_to
from model_export.zoo import zoo_model

DECAYED = [("weight_decay", 1e-4), ("momentum", 0.9)]
# table -> rows that begin so -> what the paper says about them. Steps, batch, rules and rates are those of a device.
FULL = {
    "fedavg-table2": {
        "": {"devices": 100, "epochs": 5, "rate": "0.1", "server": 1.0, "dataset": "mnist", "rounds": 100},
        "2 digits, n = 10,": {"joining": 10, "partition": {"labels_per_partition": 2}},
        "IID, n = 100,": {"joining": 100, "partition": {"labels_per_partition": 10}},
    },
    "fedavg-effects": {"": {"devices": 100, "rate": "0.1", "server": 1.0, "model": "mnist_2nn", "rounds": 100}},
    "fedavg-speedup": {
        "n = 1 for T": {"rate": f"{1 / (math.sqrt(1000) * 10):.6g}", "steps": 10, "rounds": 1000},
        "n = 5 for T/n": {"rate": f"{1 / (math.sqrt(200) * 10):.6g}", "server": pytest.approx(50**0.5), "rounds": 200},
        "n = 50": {"server": pytest.approx(math.sqrt(10 * 50)), "joining": 50},
    },
    "embracing-scaling": {
        "": {"model": "resnet20", "dataset": "cifar10", "devices": 128, "rounds": 1000, "rate": "0.4/10@800,900"},
        "EmbracingFL": {"steps": 10, "batch": 32, "rules": DECAYED, "share": 1.0, "partition": {"alpha": 0.1}},
        "EmbracingFL, 16 strong + 32 weak": {"tiers": {"strong": 16, "weak": 32, "absent": 80}},
    },
    "embracing-cases": {
        "EmbracingFL": {"model": "resnet20", "rounds": 1000, "rate": "0.4/10@800,900", "share": 0.25, "rules": DECAYED},
        "EmbracingFL, 16/0/112": {"tiers": {"strong": 16, "weak": 112}, "devices": 128, "partition": {"alpha": 0.1}},
        "as in Keras": {"model": "resnet20_keras", "rounds": 1000, "crop": 4, "flip": True, "rate": "0.4/10@800,900"},
        "width reduction": {"widths": (0.45, 0.2), "share": 0.25},
        "FEMNIST": {"model": "femnist_cnn", "rounds": 200, "rate": "0.04", "partition": {"groups_per_partition": 2}},
    },
    "embracing-bn": {"": {"model": "resnet20", "rounds": 1000, "share": 1.0, "tiers": {"strong": 16, "weak": 112}}},
    "embracing-imdb": {
        "": {"model": "imdb_bilstm", "dataset": "imdb", "devices": 128, "rounds": 400, "rate": "0.1/10@200,300"},
        "EmbracingFL": {"steps": 10, "batch": 32, "rules": DECAYED, "share": 0.25},
    },
    "svcca": {
        "": {"model": "resnet20", "devices": 32, "rounds": 100, "steps": 10, "rate": "0.4", "partition": {"alpha": 0.1}}
    },
    "partial-averaging": {
        "": {"devices": 128, "batch": 32, "rules": DECAYED, "partitioner": "iid"},
        "τ = 2, periodic": {"model": "vgg11", "steps": 2, "rounds": 660, "rate": "0.2/10@366,549 warmup 36"},
        "τ = 4, partial": {"model": "vgg11", "steps": 1, "rounds": 1320, "rate": "0.1/10@732,1099 warmup 73"},
        "τ = 8, partial": {"rate": "0.08/10@732,1099 warmup 73"},
        "CIFAR-10, τ = 8, periodic": {"model": "resnet20", "steps": 8, "rounds": 458, "crop": 4, "flip": True},
        "CIFAR-10, τ = 2, partial": {"rounds": 3664, "rate": "1.2/10@1831,2747 warmup 61"},
    },
    "partial-averaging-unequal": {
        "": {"model": "resnet20", "devices": 128, "batch": 32, "rules": DECAYED, "crop": 4, "flip": True},
        "100 %, Dirichlet 1, periodic": {"steps": 10, "rounds": 1000, "rate": "0.4/10@500,750 warmup 6", "share": 1.0},
        "25 %, Dirichlet 0.1, handed on": {"steps": 1, "rounds": 10_000, "rate": "0.2/10@5000,7500 warmup 61"},
        "50 %, Dirichlet 0.5": {"share": 0.5, "partition": {"alpha": 0.5}},
    },
    "fedlama-femnist": {
        "": {"model": "femnist_cnn", "devices": 128, "batch": 32, "share": 0.25, "rules": [("momentum", 0.9)]},
        "FedAvg(40)": {"steps": 40, "rounds": 50, "rate": "0.04 warmup 2"},
        "FedLAMA(10, 4)": {"steps": 10, "rounds": 200, "rate": "0.04 warmup 10"},
    },
    "domo": {
        "": {"dataset": "cifar10", "devices": 16, "steps": 98, "batch": 32, "rounds": 200, "crop": 4, "flip": True},
        "s = 5 %": {"model": "vgg16", "partition": {"similarity": 0.05}},
        "s = 5 %, DOMO-S": {"rules": [("weight_decay", 5e-4), ("momentum", 0.6), ("server_momentum", None)]},
        "ResNet56, s = 10 %": {"model": "resnet56_gn", "partition": {"similarity": 0.1}},
    },
}
OURS = {
    "combinations",
    "embracing-refresh",
    "embracing-statistics",
    "embracing-cohorts",
    "embracing-parts",
}  # no paper has a setting for these


def told(row, setting) -> dict[str, object]:
    """What the plan of a row says, defaults included; a rate that is tried stands in the setting."""
    plan = plan_to(plan_from({**row.job, "bundle": row.model}))
    local, fleet, participate = plan["local"], plan["simulate"], plan["participate"]
    return {
        "model": row.model,
        "widths": row.widths,
        "rounds": plan["num_rounds"],
        "share": participate["fraction_train"],
        "joining": participate["count"],
        "server": plan["serve"].get("rate"),
        "rules": [(rule["rule"], rule.get("factor")) for rule in local["rules"]],
        **{name: local[name] for name in ("steps", "epochs", "batch", "rate", "crop", "flip")},
        **{name: fleet.get(name) for name in ("devices", "dataset", "partitioner", "partition", "tiers")},
    }


@pytest.mark.parametrize("name", [name for name in TABLES if name not in OURS])
def test_full_is_what_the_paper_says(name):
    setting = TABLES[name].setting("full")
    for beginning, expected in FULL[name].items():
        rows = [row for row in setting.rows if row.label.startswith(beginning)]
        assert rows, beginning
        for row in rows:
            found = told(row, setting)
            assert {key: found[key] for key in expected} == expected, row.label


@pytest.mark.parametrize("scale", ["smoke", "short", "full"])
@pytest.mark.parametrize("name", [name for name in TABLES if name not in OURS])
def test_cohorts_of_papers_are_taken_as_they_are_drawn(name, scale):
    for row in TABLES[name].setting(scale).rows:
        plan = plan_from({**row.job, "bundle": row.model})
        assert not plan.participation.balance and not plan.participation.over_select, row.label
        assert plan.participation.count is None or plan.participation.count <= plan.simulate["devices"]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_cell_of_full_is_a_run_of_a_model_that_exists(table):
    setting = table.setting("full")
    specs = {spec_of(row, setting, 0, None).folder for row in setting.rows}
    assert len(specs) >= len(setting.rows) - 2  # of those that differ: rows of one table may share a run
    for row in setting.rows:
        model, fleet = zoo_model(row.model), row.job["simulate"]
        assert sum(fleet.get("tiers", {}).values()) in (0, fleet["devices"])
        assert set(fleet.get("tiers", {})) <= {"strong", "absent", *model.tiers}
        assert not row.widths or model.narrows


@pytest.mark.parametrize("scale", ["short", "full"])
def test_devices_with_film_reviews_keep_their_momentum(scale):
    setting = TABLES["embracing-imdb"].setting(scale)
    assert all(row.job["local"]["rules"][-1]["between"] == "keep" for row in setting.rows)
    assert "keeps its momentum for its next round" in setting.note


def test_the_bound_of_cifar_10_is_said():
    setting = TABLES["embracing-cases"].setting("full")
    bounds = {row.job["simulate"]["dataset"]: row.job["bounds"]["max_value"] for row in setting.rows}
    assert bounds == {"cifar10": 2**20, "femnist": 4096} and "up to 2^20" in setting.note


def test_the_svcca_of_the_paper_sees_512_images():
    assert TABLES["svcca"].setting("full").every["svcca_samples"] == 512


def test_domo_tries_the_rates_of_the_paper_and_divides_them_twice():
    rates = TABLES["domo"].setting("full").rates
    assert {rate.partition("/")[0] for rate in rates} == {"0.4", "0.2", "0.1", "0.05", "0.01", "0.005"}
    assert all(rate.endswith("/10@120,160") for rate in rates)
