"""The headline claims of the five papers: what was published, what came out here, and what is still to be run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.papers.editions import missed
from bench.papers.embracing import AVERAGED, EMBRACING, STATIC, WIDTH
from bench.papers.report import VERDICTS, runs_of, was_run
from bench.papers.similarity import ALONE, CHANNELS, FIRST, PLACES, SECOND

Stored = Callable[[str, str], Mapping[str, Any] | None]  # table, scale -> its report, with today's verdicts
Figure = tuple[str, str]  # row and column; of rows with | between them the first that is there counts
Floats = Sequence[float]
NOT_RUN, NOT_BY_ALL = "not run", "not by every seed"
NEAR = 4.0  # points of accuracy
TARGETS = ("95", "90")  # % of accuracy, {} in the names of columns
DATA = {
    "cifar10": "CIFAR-10",
    "fashion_mnist": "Fashion-MNIST",
    "femnist": "FEMNIST",
    "imdb": "IMDB",
    "mnist": "MNIST",
}


@dataclass(frozen=True)
class Headline:
    """One claim of a paper and the table that tests it."""

    paper: str
    claim: str
    published: str
    table: str
    figures: tuple[Figure, ...]  # in the order of the published ones
    holds: Callable[[Floats], bool]  # whether the figures shown say what the claim says
    related: tuple[str, ...]  # how the claims of the table begin that are about the same
    hours: str  # that `full` takes on two cores: client steps times the processor time of one, a seed
    shown: Callable[[Floats], Floats] = list  # made of the figures, where the paper tells differences
    targets: tuple[str, ...] = ()  # the first that all rows reached with all their seeds counts, or else the last

    def line(self, stored: Stored) -> list[str]:
        """Fill a line: of the largest scale that was run, or that there is none.

        Where only some rows of a scale were run, a smaller one is judged, and their figures stand beside it.
        """
        scales = ("full", "medium", "short")
        there = ((scale, data) for scale in scales if (data := stored(self.table, scale)) is not None)
        found = [(scale, data, ours) for scale, data in there if (ours := self._ours(data))]
        if not found:
            return [*self._told, "–", "–", NOT_RUN, "–", self._full("", {})]
        scale, data, ours = found[0]
        smaller = next((other for _, _, other in found[1:] if other[2] != NOT_RUN), found[-1][2])
        if ours[2] == NOT_RUN != smaller[2]:
            ours = [f"{smaller[0]}; so far at {scale} {ours[0]}", *smaller[1:]]
        return [*self._told, *ours, self._full(scale, data)]

    @property
    def _told(self) -> list[str]:
        return [self.paper, self.claim, self.published]

    def _full(self, scale: str, data: Mapping[str, Any]) -> str:
        """Say what is still to be run: all of the table, or those of its rows that were not."""
        if scale != "full":
            return f"`{self.table}`, about {self.hours} h"
        there = [was_run(row) for row in data["rows"]]
        if all(there):
            return "run"
        return f"run: {sum(there)} of the {len(there)} rows of `{self.table}`; all take about {self.hours} h"

    def _ours(self, data: Mapping[str, Any]) -> list[str]:
        """Fill in figures, scale, whether they hold, and the related claims; empty if no figure is there."""
        rows = {row["label"]: row for row in data["rows"]}
        target, found = self._found(rows)
        known = [value for value in found if value is not None]
        whole = len(known) == len(found)
        if not known or not (whole or self.shown is list):
            return []
        shown = self.shown(known) if whole else []
        ours = " / ".join("–" if value is None else f"{value:.4g}" for value in shown or found)
        mine = [row for labels, _ in self.figures if (row := _row(rows, labels))]
        if missed(self.table, data.get("edition", 0)):
            verdict = "run before a change"
        elif whole:
            verdict = VERDICTS[self.holds(shown)]
        else:
            verdict = NOT_BY_ALL if all(map(was_run, mine)) else NOT_RUN
        return [ours + (f" to {target} %" if target else ""), _scale(mine, data), verdict, self._others(data)]

    def _found(self, rows: Mapping[str, Any]) -> tuple[str, list[float | None]]:
        """Return the target, and every figure."""
        for target in self.targets or ("",):
            found = [_mean(_row(rows, labels), column.format(target)) for labels, column in self.figures]
            if None not in found:
                break
        return target, found

    def _others(self, data: Mapping[str, Any]) -> str:
        """Count the claims of the table about the same that held."""
        asked = [claim["verdict"] for claim in data["claims"] if claim["text"].startswith(self.related)]
        tested = [verdict == VERDICTS[True] for verdict in asked if verdict != VERDICTS[None]]
        return f"{sum(tested)} of {len(tested)}" if tested else "–"


def _scale(rows: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> str:
    fleet, seeds = rows[0]["job"]["simulate"], min(map(runs_of, filter(was_run, rows)))
    words = [
        f"{data['scale']}: {DATA[fleet['dataset']]}",
        f"{fleet['devices']} devices",
        _length([row["job"] for row in rows]),
        f"{seeds} seed{'s' if seeds > 1 else ''}",
    ]
    return ", ".join(words)


def _length(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Say how many rounds; or local steps, where only these are as many in all rows."""
    rounds = {job["num_rounds"] for job in jobs}
    steps = {job["num_rounds"] * job.get("local", {}).get("steps", 1) for job in jobs}
    if len(rounds) > 1 and len(steps) == 1:
        return f"{steps.pop():,} local steps"
    return " to ".join(f"{count:,}" for count in sorted({min(rounds), max(rounds)})) + " rounds"


def _row(rows: Mapping[str, Any], labels: str) -> Mapping[str, Any]:
    return next((rows[label] for label in labels.split("|") if label in rows), {})


def _mean(row: Mapping[str, Any], column: str) -> float | None:
    """Return a mean over all seeds of a row; None where some of them have no such figure."""
    figure = row.get("figures", {}).get(column, {})
    mean: float | None = figure.get("mean")
    return mean if mean is not None and figure["runs"] == runs_of(row) else None


def _best(*labels: str) -> tuple[Figure, ...]:
    return tuple((label, "best accuracy %") for label in labels)


def _similar(label: str) -> tuple[Figure, ...]:
    return tuple((label, f"SVCCA, {place}") for place in PLACES)


def _final(*labels: str) -> tuple[Figure, ...]:
    return tuple((label, "accuracy at the end %") for label in labels)


def _cost(*labels: str) -> tuple[Figure, ...]:
    return tuple((label, "communication cost %") for label in labels)


def _beside_scaffold(place: str, claim: str, published: str, related: str) -> Headline:
    columns = ("MiB per worker to {} %", "seconds to {} %, 20 MB/s")
    return Headline(
        "FedAvg, two-sided rates",
        f"MNIST, {claim}: fewer MiB and seconds over 20 MB/s to a target than SCAFFOLD",
        published,
        "fedavg-table2",
        tuple((f"{place}, {name}", column) for column in columns for name in ("SCAFFOLD", "FedAvg")),
        lambda found: _falls(found[:2]) and _falls(found[2:]),
        (f"{related}: FedAvg takes fewer",),
        "18",
        targets=TARGETS,
    )


def _falls(figures: Floats) -> bool:
    return all(first > second for first, second in pairwise(figures))


def _rises(figures: Floats) -> bool:
    return all(first < second for first, second in pairwise(figures))


def _stays_near(figures: Floats) -> bool:
    """Whether the second is near the first, or above it."""
    return figures[0] - figures[1] < NEAR


def _input_side_above(figures: Floats) -> bool:
    """Of five places, whether both on the input side are above both on the output side."""
    return min(figures[:2]) > max(figures[3:])


def _keeps(figures: Floats) -> bool:
    """Whether the third loses less than half of what the second loses to the first."""
    return figures[0] - figures[2] < (figures[0] - figures[1]) / 2


def _costs_little_more(figures: Floats) -> bool:
    return figures[1] < figures[0] + 10


def _leads(size: int) -> Callable[[Floats], Floats]:
    """In groups of this size, what the first has more than the best of the others."""
    return lambda figures: [
        figures[start] - max(figures[start + 1 : start + size]) for start in range(0, len(figures), size)
    ]


OTHERS = ("FedAvg", "FedAvgSM", "FedAvgLM", "FedAvgLM-Z", "FedAvgSLM", "FedAvgSLM-Z")
HEADLINES = (
    Headline(
        "EmbracingFL",
        "CIFAR-10: 16/0/112 is near 128/0/0, width reduction is not (%)",
        "80.45 / 76.98 / 54.53",
        "embracing-cases",
        _best(
            "EmbracingFL, 32/0/0|EmbracingFL, 128/0/0",
            "EmbracingFL, 4/0/28|EmbracingFL, 16/0/112",
            "width reduction, 4/0/28|width reduction, 16/0/112",
        ),
        lambda found: _stays_near(found) and not _stays_near(found[::2]),
        ("EmbracingFL is above width", "EmbracingFL loses less"),
        "83",
    ),
    Headline(
        "EmbracingFL",
        "FEMNIST: 16/0/112 is near 128/0/0 (%)",
        "81.27 / 79.63",
        "embracing-cases",
        _best(
            "FEMNIST, EmbracingFL, 32/0/0|FEMNIST, EmbracingFL, 128/0/0",
            "FEMNIST, EmbracingFL, 4/0/28|FEMNIST, EmbracingFL, 16/0/112",
        ),
        _stays_near,
        ("FEMNIST",),
        "83",
    ),
    Headline(
        "EmbracingFL",
        "FEMNIST: moderate devices cost less than 0.8 points (%, 128/0/0, 64/64/0, 32/96/0, 16/112/0; by the paper's "
        "own table the last costs 0.83)",
        "81.27 / 81.80 / 81.55 / 80.44",
        "embracing-cases",
        _best(*(f"FEMNIST, EmbracingFL, {mix}" for mix in ("128/0/0", "64/64/0", "32/96/0", "16/112/0"))),
        lambda found: found[0] - min(found[1:]) < 0.8,
        ("FEMNIST",),
        "83",
    ),
    Headline(
        "EmbracingFL",
        "CIFAR-10: above width reduction in every mix (points at 32/32/64 and 16/0/112)",
        "12.40 / 22.45",
        "embracing-cases",
        _best(
            *(
                f"{method}, {short}|{method}, {full}"
                for short, full in (("8/8/16", "32/32/64"), ("4/0/28", "16/0/112"))
                for method in (EMBRACING, WIDTH)
            )
        ),
        lambda leads: min(leads) > 0,
        ("EmbracingFL is above width",),
        "83",
        _leads(2),
    ),
    Headline(
        "EmbracingFL",
        "IMDB: 16/0/112 loses less than 7.3 points, as published (%)",
        "82.15 / 74.89",
        "embracing-imdb",
        _best("EmbracingFL, 32/0/0|EmbracingFL, 128/0/0", "EmbracingFL, 4/0/28|EmbracingFL, 16/0/112"),
        lambda found: found[0] - found[1] < 7.3,
        ("EmbracingFL",),
        "83",
    ),
    Headline(
        "EmbracingFL",
        "16 strong devices gain when 112 weak ones join (%)",
        "60.15 / 77.34",
        "embracing-scaling",
        _best(
            "EmbracingFL, 4 strong + 0 weak|EmbracingFL, 16 strong + 0 weak",
            "EmbracingFL, 4 strong + 28 weak|EmbracingFL, 16 strong + 112 weak",
        ),
        _rises,
        ("EmbracingFL",),
        "103",
    ),
    Headline(
        "EmbracingFL",
        "averaged statistics of batch norm are above static ones (%)",
        "77.34 / 74.49",
        "embracing-bn",
        tuple((EMBRACING, column) for column in (AVERAGED, STATIC)),
        _falls,
        (EMBRACING,),
        "53",
    ),
    Headline(
        "EmbracingFL",
        "averaged statistics ruin width reduction (%, static and averaged)",
        "64.01 / 19.21",
        "embracing-bn",
        tuple((WIDTH, column) for column in (STATIC, AVERAGED)),
        _falls,
        (WIDTH,),
        "53",
    ),
    Headline(
        "EmbracingFL",
        "input-side layers of devices that train alone stay more alike than output-side ones (SVCCA at five places)",
        "figure 1",
        "svcca",
        _similar(ALONE),
        _input_side_above,
        ("alone",),
        "3",
    ),
    Headline(
        "EmbracingFL",
        "synchronising the second half keeps more alike than half of the channels at all five places, and than the "
        "first half on the output side (least lead in SVCCA)",
        "figure 3",
        "svcca",
        _similar(SECOND) + _similar(CHANNELS) + _similar(FIRST),
        lambda leads: min(leads) > 0,
        ("the second half",),
        "3",
        lambda found: [
            min(second - channels for second, channels in zip(found[:5], found[5:10])),
            min(second - first for second, first in zip(found[3:5], found[13:])),
        ],
    ),
    _beside_scaffold("IID, n = 10, 2NN", "IID, n = 10, 2NN", "9.12 / 4.56 / 0.88 / 0.56", "IID"),
    _beside_scaffold("2 digits, n = 10, 2NN", "two digits, n = 10, 2NN", "42.55 / 21.28 / 4.23 / 2.46", "2 digits"),
    _beside_scaffold("2 digits, n = 10, CNN", "two digits, n = 10, CNN", "124.34 / 44.41 / 11.12 / 4.92", "2 digits"),
    Headline(
        "FedAvg, two-sided rates",
        "n workers get as far in T/n rounds as one in T, with the rates of each T (% at the end: n = 1 / 2 / 5 / 10)",
        "theory",
        "fedavg-speedup",
        _final("n = 1 for T rounds", *(f"n = {n} for T/n rounds" for n in (2, 5, 10))),
        lambda found: min(found[1:]) > found[0] - 2,
        ("2 workers get as far", "5 workers get as far", "10 workers get as far"),
        "0.5",
    ),
    Headline(
        "Partial averaging",
        "IID, τ = 4: higher accuracy than periodic averaging (%)",
        "91.80 / 93.03",
        "partial-averaging",
        _final("τ = 4, periodic", "τ = 4, partial, by channel"),
        _rises,
        ("by layer: higher", "by channel: higher"),
        "169",
    ),
    Headline(
        "Partial averaging",
        "IID, τ = 4: local models stay closer (highest squared distance)",
        "figure 2",
        "partial-averaging",
        tuple(
            (f"τ = 4, {kind}", "squared distance, highest of τ steps") for kind in ("periodic", "partial, by channel")
        ),
        _falls,
        ("by layer: the highest", "by channel: the highest"),
        "169",
    ),
    Headline(
        "Partial averaging",
        "25 %, Dirichlet 0.5: higher accuracy than periodic averaging (%)",
        "88.73 / 90.16",
        "partial-averaging-unequal",
        _final("25 %, Dirichlet 0.5, periodic", "25 %, Dirichlet 0.5, handed on"),
        _rises,
        ("handed on",),
        "444",
    ),
    Headline(
        "FedLAMA",
        "φ = 2 keeps the accuracy of FedAvg(10), FedAvg(20) does not (%), and costs little more than FedAvg(20) "
        "(% of the bytes)",
        "86.04 / 85.38 / 86.01 / 50 / 52.83",
        "fedlama-femnist",
        (*_final("FedAvg(10)", "FedAvg(20)", "FedLAMA(10, 2)"), *_cost("FedAvg(20)", "FedLAMA(10, 2)")),
        lambda found: _keeps(found[:3]) and _costs_little_more(found[3:]),
        ("FedLAMA(10, 2)",),
        "3",
    ),
    Headline(
        "FedLAMA",
        "φ = 4 keeps the accuracy of FedAvg(10), FedAvg(40) does not (%)",
        "86.04 / 83.97 / 85.61",
        "fedlama-femnist",
        _final("FedAvg(10)", "FedAvg(40)", "FedLAMA(10, 4)"),
        _keeps,
        ("FedLAMA(10, 4) above", "FedLAMA(10, 4) loses"),
        "3",
    ),
    Headline(
        "FedLAMA",
        "and costs little more than FedAvg(40) (% of the bytes)",
        "25 / 29.97",
        "fedlama-femnist",
        _cost("FedAvg(40)", "FedLAMA(10, 4)"),
        _costs_little_more,
        ("FedLAMA(10, 4) costs",),
        "3",
    ),
    Headline(
        "DOMO",
        "s = 5 %: DOMO is above FedAvgSLM-Z, FedAvgSM and FedAvg (points)",
        "5.00 / 5.68 / 23.14",
        "domo",
        _final("s = 5 %, DOMO", "s = 5 %, FedAvgSLM-Z", "s = 5 %, FedAvgSM", "s = 5 %, FedAvg"),
        lambda leads: min(leads) > 0,
        ("s = 5 %",),
        "834",
        lambda found: [found[0] - other for other in found[1:]],
    ),
    Headline(
        "DOMO",
        "its lead over the best other grows as data becomes less alike (points at s = 20 / 10 / 5 %)",
        "1.02 / 2.13 / 5.00",
        "domo",
        _final(*(f"s = {s} %, {name}" for s in (20, 10, 5) for name in ("DOMO", *OTHERS))),
        _rises,
        ("DOMO's lead",),
        "834",
        _leads(1 + len(OTHERS)),
    ),
)
HEADS = (
    "paper",
    "claim",
    "published",
    "ours",
    "scale",
    "held?",
    "related claims that held",
    "to run at full scale, a seed",
)


def headline_table(stored: Stored) -> str:
    """Write the table that the page opens with."""
    lines = [HEADS, ["---"] * len(HEADS), *(headline.line(stored) for headline in HEADLINES)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
