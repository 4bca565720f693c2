"""The headline claims of the five papers: what was published, what came out here, and what is still to be run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.papers.editions import missed
from bench.papers.embracing import AVERAGED, STATIC
from bench.papers.report import VERDICTS, was_run

Stored = Callable[[str, str], Mapping[str, Any] | None]  # table, scale -> its report, with today's verdicts
Figure = tuple[str, str]  # row and column; either may name others with | between, and the first that is there counts
Floats = Sequence[float]
NOT_RUN = "not run"
NEAR = 4.0  # points of accuracy
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

    def line(self, stored: Stored) -> list[str]:
        """Fill a line: of the largest scale that was run, or that there is none."""
        for scale in ("full", "short"):
            data = stored(self.table, scale)
            if data is not None and (ours := self._ours(data)):
                return [*self._told, *ours, self._full(scale, data)]
        return [*self._told, "–", "–", NOT_RUN, "–", self._full("", {})]

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
        found = [_mean(rows, labels, column) for labels, column in self.figures]
        known = [value for value in found if value is not None]
        if not known:
            return []
        whole = len(known) == len(found)
        told = self.shown(known) if whole else found
        ours = " / ".join("–" if value is None else f"{value:.4g}" for value in told)
        if missed(self.table, data.get("edition", 0)):
            verdict = "run before a change"
        else:
            verdict = VERDICTS[self.holds(self.shown(known))] if whole else NOT_RUN
        row = next(row for labels, _ in self.figures if (row := _row(rows, labels)))
        return [ours, _scale(row, data), verdict, self._others(data)]

    def _others(self, data: Mapping[str, Any]) -> str:
        """Count the claims of the table about the same that held."""
        asked = [claim["verdict"] for claim in data["claims"] if claim["text"].startswith(self.related)]
        tested = [verdict == VERDICTS[True] for verdict in asked if verdict != VERDICTS[None]]
        return f"{sum(tested)} of {len(tested)}" if tested else "–"


def _scale(row: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    job, seeds = row["job"], len(data["seeds"])
    fleet = job["simulate"]
    words = [
        f"{data['scale']}: {DATA[fleet['dataset']]}",
        f"{fleet['devices']} devices",
        f"{job['num_rounds']:,} rounds",
        f"{seeds} seed{'s' if seeds > 1 else ''}",
    ]
    return ", ".join(words)


def _row(rows: Mapping[str, Any], labels: str) -> Mapping[str, Any]:
    return next((rows[label] for label in labels.split("|") if label in rows), {})


def _mean(rows: Mapping[str, Any], labels: str, column: str) -> float | None:
    figures = _row(rows, labels).get("figures", {})
    means = (figures.get(name, {}).get("mean") for name in column.split("|"))
    return next((mean for mean in means if mean is not None), None)


def _best(*labels: str) -> tuple[Figure, ...]:
    return tuple((label, "best accuracy %") for label in labels)


def _final(*labels: str) -> tuple[Figure, ...]:
    return tuple((label, "accuracy at the end %") for label in labels)


def _to_target(column: str, place: str) -> tuple[Figure, ...]:
    return tuple((f"{place}, {name}", f"{column} to 95 %|{column} to 90 %") for name in ("SCAFFOLD", "FedAvg"))


def _falls(figures: Floats) -> bool:
    return all(first > second for first, second in pairwise(figures))


def _rises(figures: Floats) -> bool:
    return all(first < second for first, second in pairwise(figures))


def _stays_near(figures: Floats) -> bool:
    """Whether the second is near the first, or above it."""
    return figures[0] - figures[1] < NEAR


def _leads(size: int) -> Callable[[Floats], Floats]:
    """In groups of this size, what the first has more than the best of the others."""
    return lambda figures: [
        figures[start] - max(figures[start + 1 : start + size]) for start in range(0, len(figures), size)
    ]


EMBRACING = ("EmbracingFL is above width", "EmbracingFL loses less")
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
        EMBRACING,
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
        "IMDB: 16/0/112 loses no more than the published 7.26 points (%)",
        "82.15 / 74.89",
        "embracing-imdb",
        _best("EmbracingFL, 32/0/0|EmbracingFL, 128/0/0", "EmbracingFL, 4/0/28|EmbracingFL, 16/0/112"),
        lambda found: found[0] - found[1] <= 7.26,
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
        tuple(("EmbracingFL", column) for column in (AVERAGED, STATIC)),
        _falls,
        ("EmbracingFL",),
        "53",
    ),
    Headline(
        "EmbracingFL",
        "input-side layers of devices that train alone stay alike (SVCCA, input / output)",
        "figure 1",
        "svcca",
        (("alone", "SVCCA, input side"), ("alone", "SVCCA, output")),
        _falls,
        ("alone",),
        "3",
    ),
    Headline(
        "FedAvg, two-sided rates",
        "MNIST, IID, n = 10, 2NN: fewer MiB to the target than SCAFFOLD",
        "9.12 / 4.56",
        "fedavg-table2",
        _to_target("MiB per worker", "IID, n = 10, 2NN"),
        _falls,
        ("IID: FedAvg takes fewer",),
        "18",
    ),
    Headline(
        "FedAvg, two-sided rates",
        "MNIST, two digits, n = 10, CNN: fewer MiB to the target than SCAFFOLD",
        "124.34 / 44.41",
        "fedavg-table2",
        _to_target("MiB per worker", "2 digits, n = 10, CNN"),
        _falls,
        ("2 digits: FedAvg takes fewer",),
        "18",
    ),
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
        _best("τ = 4, periodic", "τ = 4, partial, by channel"),
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
        _best("25 %, Dirichlet 0.5, periodic", "25 %, Dirichlet 0.5, handed on"),
        _rises,
        ("handed on",),
        "444",
    ),
    Headline(
        "FedLAMA",
        "φ = 4 keeps the accuracy of FedAvg(10), FedAvg(40) does not (%)",
        "86.04 / 83.97 / 85.61",
        "fedlama-femnist",
        _final("FedAvg(10)", "FedAvg(40)", "FedLAMA(10, 4)"),
        lambda found: found[0] - found[2] < (found[0] - found[1]) / 2,
        ("FedLAMA(10, 4) above", "FedLAMA(10, 4) loses"),
        "3",
    ),
    Headline(
        "FedLAMA",
        "and costs little more than FedAvg(40) (% of the bytes)",
        "25 / 29.97",
        "fedlama-femnist",
        tuple((label, "communication cost %") for label in ("FedAvg(40)", "FedLAMA(10, 4)")),
        lambda found: found[1] < found[0] + 10,
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
