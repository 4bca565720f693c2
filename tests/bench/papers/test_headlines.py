"""The table that the page opens with: which figures a headline takes, and what it says of them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bench.papers import TABLES
from bench.papers.editions import EDITION
from bench.papers.headlines import HEADLINES

FLEET = {"num_rounds": 1000, "simulate": {"devices": 8, "dataset": "mnist"}}


def headline_of(text):
    return next(found for found in HEADLINES if text in found.claim)


def row_of_a_report(label, job=FLEET, runs=1, **means):
    figures = {column: {"mean": mean, "runs": 0 if mean is None else runs} for column, mean in means.items()}
    return {"label": label, "job": job, "figures": figures, "failures": []}


def report_of(rows, scale="full", **other):
    return {"rows": rows, "scale": scale, "seeds": [0], "edition": EDITION, "claims": [], **other}


def rows_with(headline, *figures, **other):
    """Rows of a report with these figures of a headline, at its first target."""
    found = {}
    for (labels, column), figure in zip(headline.figures, figures, strict=True):
        found.setdefault(labels.split("|")[-1], {})[column.format(*headline.targets)] = figure
    return [row_of_a_report(label, **other, **means) for label, means in found.items()]


def told(headline, rows):
    """Figures and verdict of a headline's line."""
    return headline.line(lambda *asked: report_of(rows))[3:6:2]


@pytest.mark.parametrize("headline", HEADLINES, ids=lambda headline: headline.claim)
def test_a_headline_names_rows_columns_and_claims_of_its_table(headline):
    table = TABLES[headline.table]
    for scale in ("short", "full"):
        labels = {row.label for row in table.setting(scale).rows}
        there = [bool(labels & set(row.split("|"))) for row, _ in headline.figures]
        assert all(there) or ("moderate devices" in headline.claim and scale == "short"), scale
        for _, column in headline.figures:
            for target in headline.targets or ("",):
                assert column.format(target) in {known.name for known in table.columns}
    for beginning in headline.related:
        assert any(claim.text.startswith(beginning) for claim in table.claims), beginning


def test_a_headline_takes_the_first_target_that_all_rows_reached_with_all_their_seeds():
    headline = headline_of("IID, n = 10, 2NN")
    mib, seconds = "MiB per worker to {} %", "seconds to {} %, 20 MB/s"
    rows = [
        row_of_a_report(label, runs=2, **{"best accuracy %": 95, mib.format(90): cost, seconds.format(90): cost})
        for label, cost in (("IID, n = 10, 2NN, SCAFFOLD", 3.0), ("IID, n = 10, 2NN, FedAvg", 2.0))
    ]
    assert told(headline, rows) == ["3 / 2 / 3 / 2 to 90 %", "held"]
    for row, runs in zip(rows, (2, 1)):
        row["figures"] |= {column.format(95): {"mean": 4.0, "runs": runs} for column in (mib, seconds)}
    assert told(headline, rows) == ["3 / 2 / 3 / 2 to 90 %", "held"]  # one seed of two is no mean of both
    rows[1]["figures"] |= {column.format(95): {"mean": 4.0, "runs": 2} for column in (mib, seconds)}
    assert told(headline, rows) == ["4 / 4 / 4 / 4 to 95 %", "did not hold"]
    for column in (mib, seconds):
        rows[1]["figures"] |= {column.format(target): {"mean": 4.0, "runs": 1} for target in (90, 95)}
    assert told(headline, rows) == ["3 / – / 3 / – to 90 %", "not by every seed"]


def test_fewer_bytes_and_more_seconds_do_not_hold():
    headline = headline_of("two digits, n = 10, 2NN")
    assert told(headline, rows_with(headline, 42.55, 21.28, 2.0, 3.0))[1] == "did not hold"
    assert told(headline, rows_with(headline, 42.55, 21.28, 4.23, 2.46))[1] == "held"


@pytest.mark.parametrize(
    ("places", "verdict"),
    [
        ((0.82, 0.62, 0.57, 0.71, 0.65), "did not hold"),  # the first is above the last, which is not the claim
        ((0.82, 0.72, 0.57, 0.71, 0.65), "held"),
    ],
)
def test_both_places_on_the_input_side_have_to_be_above_both_on_the_output_side(places, verdict):
    headline = headline_of("devices that train alone")
    figures = " / ".join(f"{place:g}" for place in places)
    assert told(headline, rows_with(headline, *places)) == [figures, verdict]


@pytest.mark.parametrize(
    ("second", "line"),
    [
        ((0.5, 0.5, 0.5, 0.6, 0.6), ["0.1 / 0.3", "held"]),
        ((0.3, 0.5, 0.5, 0.6, 0.6), ["-0.1 / 0.3", "did not hold"]),
        ((0.5, 0.5, 0.5, 0.6, 0.2), ["-0.2 / -0.1", "did not hold"]),
    ],
)
def test_the_second_half_has_to_be_above_half_of_the_channels_and_above_the_first_half(second, line):
    headline = headline_of("synchronising the second half")
    channels, first = (0.4,) * 5, (1.0, 1.0, 0.9, 0.3, 0.3)
    assert told(headline, rows_with(headline, *second, *channels, *first)) == line


@pytest.mark.parametrize(
    ("text", "holds", "fails"),
    [
        ("moderate devices cost", (81.0, 81.8, 80.5, 80.3), (81.27, 81.80, 81.55, 80.44)),  # as published: 0.83
        ("above width reduction in every mix", (80.33, 67.93, 76.98, 54.53), (80.33, 67.93, 54.0, 54.53)),
        ("ruin width reduction", (64.01, 19.21), (19.21, 64.01)),
        ("φ = 2 keeps", (86.04, 85.38, 86.01, 50, 52.83), (86.04, 85.38, 86.01, 50, 60.5)),
        ("φ = 2 keeps", (86.04, 85.38, 86.01, 50, 52.83), (86.04, 85.38, 85.5, 50, 52.83)),
    ],
)
def test_what_the_papers_published_holds(text, holds, fails):
    headline = headline_of(text)
    assert told(headline, rows_with(headline, *holds))[1] == "held"
    assert told(headline, rows_with(headline, *fails))[1] == "did not hold"


def test_rows_of_as_many_steps_in_other_rounds_read_the_same_on_every_line():
    jobs = {n: {**FLEET, "num_rounds": 1000 // n, "local": {"steps": n}} for n in (10, 40)}
    labels = {"FedAvg(10)": 10, "FedAvg(40)": 40, "FedLAMA(10, 4)": 10}
    means = {"accuracy at the end %": 80.0, "communication cost %": 25.0}
    rows = [row_of_a_report(label, jobs[n], **means) for label, n in labels.items()]
    for text in ("φ = 4 keeps", "and costs little more than FedAvg(40)"):
        scale = headline_of(text).line(lambda *asked: report_of(rows))[4]
        assert scale == "full: MNIST, 8 devices, 1,000 local steps, 1 seed"
    jobs[10]["num_rounds"] = 200
    scale = headline_of("φ = 4 keeps").line(lambda *asked: report_of(rows))[4]
    assert scale == "full: MNIST, 8 devices, 25 to 200 rounds, 1 seed"


def test_a_headline_says_what_was_run_and_at_which_scale():
    headline = headline_of("averaged statistics of batch norm")
    rows = rows_with(headline, 0.75, 0.5, runs=3)
    claim = {"text": "EmbracingFL: averaged", "verdict": "did not hold"}
    report = report_of(rows, "short", seeds=[0, 1, 2], claims=[claim])
    reports = {("embracing-bn", "short"): report}
    told = headline.line(lambda *asked: reports.get(asked))
    assert told[3:7] == ["0.75 / 0.5", "short: MNIST, 8 devices, 1,000 rounds, 3 seeds", "held", "0 of 1"]
    assert told[7].startswith("`embracing-bn`, about")
    reports["embracing-bn", "full"] = {**report, "scale": "full", "claims": [{**claim, "verdict": "held"}]}
    assert headline.line(lambda *asked: reports.get(asked))[5:] == ["held", "1 of 1", "run"]
    rows.append(row_of_a_report("other", accuracy=None))
    assert headline.line(lambda *asked: reports.get(asked))[7].startswith("run: 1 of the 2 rows of `embracing-bn`; all")


def test_figures_of_rows_that_were_run_are_shown_without_a_verdict():
    headline = headline_of("FEMNIST: 16/0/112")
    assert told(headline, rows_with(headline, None, 0.5)) == ["– / 0.5", "not run"]
    some, all_of_them = rows_with(headline, None, 0.5), rows_with(headline, 0.75, 0.25)
    reports = {"full": report_of(some), "short": report_of(all_of_them, "short")}
    line = headline.line(lambda table, scale: reports.get(scale))
    assert line[3] == "0.75 / 0.25; so far at full – / 0.5" and line[4].startswith("short") and line[5] == "held"
    reports["medium"] = report_of(rows_with(headline, 0.5, 0.125), "medium")  # the largest scale that has all rows
    line = headline.line(lambda table, scale: reports.get(scale))
    assert line[3] == "0.5 / 0.125; so far at full – / 0.5" and line[4].startswith("medium")


def test_a_headline_of_differences_shows_them_or_the_scale_that_has_all():
    headline = headline_of("its lead")
    accuracy = {"DOMO": (80.0, 81.0, 84.0), "FedAvgSM": (79.0, 79.0, 80.0)}
    rows = [
        row_of_a_report(label, **{column: dict(zip((20, 10, 5), accuracy.get(name, (70.0, 70.0, 70.0))))[int(s)]})
        for label, column in headline.figures
        for s, name in [label.removeprefix("s = ").split(" %, ")]
    ]
    assert told(headline, rows) == ["1 / 2 / 4", "held"]
    reports = {"full": report_of(rows[:1]), "short": report_of(rows, "short")}
    line = headline.line(lambda table, scale: reports.get(scale))
    assert line[3:6] == ["1 / 2 / 4", "short: MNIST, 8 devices, 1,000 rounds, 1 seed", "held"]


def test_a_headline_that_was_not_run_says_so():
    assert headline_of("IMDB").line(lambda *asked: None)[3:6] == ["–", "–", "not run"]
