"""What EmbracingFL leaves open: frozen layers that run seldom, whose statistics count, cohorts, batches in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.papers.embracing import (
    AVERAGED,
    BEST,
    BY_STATISTICS,
    CIFAR_FULL,
    COLUMNS,
    EMBRACING,
    FASHION_SHORT,
    FINAL,
    FULL_NOTE,
    SEES,
    SHORT_NOTE,
    SMOKE,
    SMOKE_NOTE,
    STATIC,
    Experiment,
)
from bench.papers.measures import best_accuracy, swing
from bench.papers.table import Claim, Column, Measured, Setting, Table, above
from simulation.runs import Run

NONE = "none: EmbracingFL names it as an open question"
REFRESHED = (1, 2, 5, 10)  # rounds for which activations of the frozen layers are used
DOWN = "MB down"


def megabytes_down(run: Run) -> float | None:
    return float(sum(row["bytes_down"] for row in run.rounds) / 1e6)


def _tables(experiment: Experiment, note: str, named: Mapping[str, Mapping[str, Any]], fraction: float) -> Setting:
    """Make rows of one mix, 16/0/112 of the paper, that differ in a part of the job."""
    tiers = {"strong": experiment.scaled(16), "weak": experiment.scaled(112)}
    base = experiment.job(EMBRACING, tiers, fraction)
    rows = [
        experiment.row(
            label, EMBRACING, {**base, **{key: {**base.get(key, {}), **own} for key, own in more.items()}}, None
        )
        for label, more in named.items()
    ]
    return experiment.setting(note, rows)


# --- activations that are kept ---------------------------------------------------------------------------------------


def _label(every: int) -> str:
    return "every round" if every == 1 else f"every {every} rounds"


def _refreshed(experiment: Experiment, note: str, fraction: float) -> Setting:
    named = {_label(every): {"local": {"refresh_every": every}} for every in REFRESHED}
    return _tables(experiment, note, named, fraction)


KEEPS = (
    "A weak device runs the frozen layers again when its activations are so many rounds old, and fetches them only "
    "then. All devices in every round: one that is seldom drawn keeps nothing that is young enough."
)


def _as_good(every: int, margin: float = 1.0) -> Claim:
    def test(measured: Measured) -> bool | None:
        often, seldom = (measured.get(_label(number), {}).get(FINAL) for number in (1, every))
        return None if often is None or seldom is None else seldom > often - margin

    return Claim(f"{_label(every)} loses less than a point to every round", test)


REFRESH = Table(
    "embracing-refresh",
    NONE,
    "May weak devices run the frozen layers less often than every round?",
    {
        "smoke": lambda: _refreshed(SMOKE, SMOKE_NOTE, 1.0),
        "short": lambda: _refreshed(FASHION_SHORT, f"{SHORT_NOTE}; 4 strong and 28 weak devices. {KEEPS} {SEES}", 1.0),
        "full": lambda: _refreshed(
            CIFAR_FULL, f"CIFAR-10, ResNet20, 16 strong and 112 weak devices, 1,000 rounds as the paper's. {KEEPS}", 1.0
        ),
    },
    (*COLUMNS, Column(DOWN, megabytes_down, 1)),
    tuple(map(_as_good, REFRESHED[1:])),
)


# --- statistics of batch norm ----------------------------------------------------------------------------------------

STRONG_ONLY, FROM_ALL = "from strong devices", "from all devices"
SWING = "mean change between scores %"


def _statistics(experiment: Experiment, note: str, fraction: float) -> Setting:
    named: dict[str, Any] = {
        STRONG_ONLY: {},
        FROM_ALL: {"cover": {"rule": "output_side", "frozen_statistics": True}},
    }
    setting = _tables(experiment, note, named, fraction)
    return replace(setting, every={**setting.every, "both_statistics_every": experiment.every})


STATISTICS_NOTE = (
    "A quarter of the devices in each round, as they are drawn. Whose statistics of batch norm count in layers that "
    "weak devices do not train: those of strong devices, which train them, or also those that weak devices measure "
    "while their data passes (`frozen_statistics`). Each run is scored with the averaged statistics, and with static "
    "ones, computed from 1,024 training samples."
)


def _steadier(measured: Measured) -> bool | None:
    strong, every = (measured.get(label, {}).get(SWING) for label in (STRONG_ONLY, FROM_ALL))
    return None if strong is None or every is None else every < strong


def _near_static(measured: Measured) -> bool | None:
    averaged, static = (measured.get(FROM_ALL, {}).get(column) for column in (AVERAGED, STATIC))
    return None if averaged is None or static is None else averaged > static - 1.0


FROZEN_STATISTICS = Table(
    "embracing-statistics",
    "none: in the paper they come from the devices that train a layer",
    "Do statistics that weak devices measure mend the batch norms of the input side?",
    {
        "smoke": lambda: _statistics(SMOKE, SMOKE_NOTE, 1.0),
        "short": lambda: _statistics(
            FASHION_SHORT, f"{SHORT_NOTE}; 4 strong and 28 weak devices. {STATISTICS_NOTE}", 0.25
        ),
        "full": lambda: _statistics(
            CIFAR_FULL, f"CIFAR-10, ResNet20, 16 strong and 112 weak devices, 1,000 rounds. {STATISTICS_NOTE}", 0.25
        ),
    },
    (*BY_STATISTICS, Column(BEST, best_accuracy), Column(SWING, swing)),
    (
        Claim("statistics from all devices gain accuracy", above(AVERAGED, [FROM_ALL], [STRONG_ONLY])),
        Claim("they make accuracy steadier from score to score", _steadier),
        Claim("averaged over all devices they lose less than a point to static ones", _near_static),
    ),
)


# --- cohorts ---------------------------------------------------------------------------------------------------------

DRAWN, MENDED = "all waited for", "all waited for, a strong device swapped in"
INVITED, FIRST_HALF = (
    "a third more invited, the first count",
    "half is a quorum, the others late at 1.5 times the usual",
)
QUICK = ", strong ones four times as quick"
MINUTES, UPDATES = "simulated minutes", "updates per round"


def _minutes(run: Run) -> float | None:
    return float(sum(row["round_seconds"] for row in run.rounds) / 60)


def _updates(run: Run) -> float | None:
    return float(sum(row["devices"] for row in run.rounds) / len(run.rounds))


def _cohorts(experiment: Experiment, note: str) -> Setting:
    rules: dict[str, dict[str, Any]] = {
        DRAWN: {"quorum": 1.0},
        MENDED: {"quorum": 1.0, "balance": True},
        INVITED: {"quorum": 1.0, "over_select": 1 / 3},
        FIRST_HALF: {"quorum": 0.5, "lateness": 1.5},
    }
    named: dict[str, Any] = {
        label: {"participate": {"balance": False, **rule}, "simulate": {"pace": {}}} for label, rule in rules.items()
    }
    for label in (INVITED, FIRST_HALF):
        named[label + QUICK] = {**named[label], "simulate": {"pace": {"tiers": {"strong": 4.0}}}}
    return _tables(experiment, note, named, 0.25)


COHORTS_NOTE = (
    "A quarter of the devices in each round. `balance` swaps a strong device into a cohort that has none. Devices make "
    "10⁹ multiply-accumulates in a second, send 5 and fetch 20 megabits, times a drawn factor (`simulate.pace`): "
    "a strong one trains more and takes longer, unless it is quicker. The code of a coordinator's round decides which "
    "updates count."
)


def _gains(measured: Measured) -> bool | None:
    plain, mended = (measured.get(label, {}).get(FINAL) for label in (DRAWN, MENDED))
    return None if plain is None or mended is None else mended > plain


def _costs_little(label: str, margin: float = 1.0) -> Claim:
    def test(measured: Measured) -> bool | None:
        plain, other = (measured.get(row, {}).get(FINAL) for row in (DRAWN, label))
        return None if plain is None or other is None else other > plain - margin

    return Claim(f"{label}: loses less than a point to waiting for all", test)


COHORTS = Table(
    "embracing-cohorts",
    "none: papers take cohorts as they are drawn",
    "What do a strong device in every cohort, over-selection and a quorum cost or gain?",
    {
        "smoke": lambda: _cohorts(SMOKE, SMOKE_NOTE),
        "short": lambda: _cohorts(FASHION_SHORT, f"{SHORT_NOTE}; 4 strong and 28 weak devices. {COHORTS_NOTE} {SEES}"),
        "full": lambda: _cohorts(
            CIFAR_FULL, f"CIFAR-10, ResNet20, 16 strong and 112 weak devices, 1,000 rounds. {COHORTS_NOTE}"
        ),
    },
    (*COLUMNS, Column(MINUTES, _minutes, 1), Column(UPDATES, _updates, 1)),
    (
        Claim("swapping a strong device in gains accuracy", _gains),
        _costs_little(INVITED),
        _costs_little(FIRST_HALF),
    ),
)


# --- batches in parts ------------------------------------------------------------------------------------------------

WHOLE, WEAK_ONES = "all train everything, whole batches", "an eighth strong, the others weak, whole batches"


def _in_parts(size: int) -> str:
    return f"all train everything, {size} samples at once"


def _parts(experiment: Experiment, note: str, sizes: tuple[int, ...]) -> Setting:
    everyone = {"strong": experiment.devices}
    mixed = {"strong": experiment.scaled(16), "weak": experiment.scaled(112)}
    whole = experiment.job(EMBRACING, everyone, 0.25)
    jobs = {WHOLE: whole, WEAK_ONES: experiment.job(EMBRACING, mixed, 0.25)}
    jobs |= {_in_parts(size): {**whole, "local": {**whole["local"], "micro_batch": size}} for size in sizes}
    return experiment.setting(note, [experiment.row(label, EMBRACING, job, None) for label, job in jobs.items()])


PARTS_NOTE = (
    "A quarter of the devices in each round, as they are drawn. A device that is short of memory may train only "
    "output-side layers, or the whole model with a few samples of a batch at once (`micro_batch`), over which batch "
    "norm then normalises."
)


def _keeps_accuracy(size: int, margin: float = 1.0) -> Claim:
    def test(measured: Measured) -> bool | None:
        whole, parts = (measured.get(row, {}).get(FINAL) for row in (WHOLE, _in_parts(size)))
        return None if whole is None or parts is None else parts > whole - margin

    return Claim(f"{_in_parts(size)}: loses less than a point to whole batches", test)


SHORT_PARTS, FULL_PARTS = (8, 4, 2), (8, 4)
PARTS = Table(
    "embracing-parts",
    "none: in the paper a batch goes through at once",
    "What does batch norm over parts of a batch cost devices that train everything in little memory?",
    {
        "smoke": lambda: _parts(SMOKE, SMOKE_NOTE, (4,)),
        "short": lambda: _parts(FASHION_SHORT, f"{SHORT_NOTE}. {PARTS_NOTE}", SHORT_PARTS),
        "full": lambda: _parts(CIFAR_FULL, f"{FULL_NOTE}; ResNet20 on CIFAR-10. {PARTS_NOTE}", FULL_PARTS),
    },
    COLUMNS,
    (
        *map(_keeps_accuracy, SHORT_PARTS),
        Claim("4 at once is above an eighth strong, the others weak", above(FINAL, [_in_parts(4)], [WEAK_ONES])),
    ),
)
