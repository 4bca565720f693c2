"""EmbracingFL beside width reduction and input-side training, as weak devices join: tables 2, 3 to 6 and 9."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.papers.measures import accuracies_by, best_accuracy, final_accuracy, final_accuracy_by, rounds_to
from bench.papers.table import Claim, Column, Drawn, Measured, PaperRow, Setting, Table

PAPER = "Lee et al., Embracing Federated Learning: Enabling Weak Client Participation via Partial Model Training, 2024"
EMBRACING, WIDTH, INPUT = "EmbracingFL", "width reduction", "input side first"
ALGORITHMS = {EMBRACING: "embracing", WIDTH: "heterofl", INPUT: "inclusivefl"}
STATISTICS = {EMBRACING: "global", WIDTH: "static", INPUT: "global"}  # of batch norm, what suits each
WIDTHS = (0.45, 0.2)  # moderate and weak devices, the paper's table 10
FINAL, BEST = "accuracy at the end %", "best accuracy %"
COLUMNS = (Column(FINAL, final_accuracy), Column(BEST, best_accuracy))
ABSENT = "absent"  # a tier that no model has: such a device has data and cannot take part
Mix = tuple[int, int, int]  # strong, moderate and weak devices of the paper's 128

# strong, moderate, weak -> EmbracingFL, width reduction, FEMNIST, IMDB
CASES: Mapping[Mix, tuple[float, float, float, float]] = {
    (128, 0, 0): (80.45, 80.45, 81.27, 82.15),
    (64, 64, 0): (80.20, 76.77, 81.80, 82.21),
    (32, 96, 0): (79.78, 67.92, 81.55, 82.09),
    (16, 112, 0): (79.72, 59.03, 80.44, 82.55),
    (64, 0, 64): (80.08, 72.97, 80.80, 80.38),
    (32, 0, 96): (78.91, 69.70, 80.78, 77.09),
    (16, 0, 112): (76.98, 54.53, 79.63, 74.89),
    (32, 32, 64): (80.33, 67.93, 81.29, 79.09),
    (16, 32, 80): (79.63, 59.59, 81.18, 79.41),
    (16, 16, 96): (77.63, 58.17, 81.17, 77.32),
}
# weak devices beside 16 strong ones -> EmbracingFL, width reduction
JOINED = {0: (60.15, 60.15), 16: (66.62, 61.34), 32: (72.60, 62.09), 64: (74.79, 63.68), 112: (77.34, 65.01)}
AVERAGED, STATIC = "averaged statistics, accuracy at the end %", "static statistics, accuracy at the end %"
BY_STATISTICS = (Column(AVERAGED, final_accuracy_by("global")), Column(STATIC, final_accuracy_by("static")))
# (method, statistics of batch norm) -> accuracy with 16 strong and 112 weak devices
NORMS = {
    (EMBRACING, AVERAGED): 77.34,
    (EMBRACING, STATIC): 74.49,
    (WIDTH, STATIC): 64.01,
    (WIDTH, AVERAGED): 19.21,
}


@dataclass(frozen=True)
class Experiment:
    """What the rows of a table share: model, data and what a device does in a round."""

    model: str
    dataset: str
    devices: int  # the mixes of the paper are divided so that they add up to this
    rounds: int
    rate: str
    steps: int = 10
    batch: int = 32
    samples: int | None = None
    test_samples: int | None = None
    every: int = 1  # rounds between scores
    partitioner: str = "dirichlet"
    alpha: float = 0.1  # of the Dirichlet distribution
    input_tier: str = "weak"  # whose memory devices have that train the input side
    augments: bool = False  # shifts images by up to four pixels and mirrors them
    keeps_momentum: bool = False  # from one round of a device to its next; the paper does not say
    max_value: float = 4096.0  # of any element of an update: variances of batch norm jump in the first rounds

    def scaled(self, count: int) -> int:
        return count * self.devices // 128

    def job(self, method: str, tiers: Mapping[str, int], fraction: float, statistics: str | None = None) -> Any:
        known = {"samples": self.samples, "test_samples": self.test_samples}
        deals = {"dirichlet": {"alpha": self.alpha}, "natural": {"groups_per_partition": 2}}
        augmented = {"crop": 4, "flip": True} if self.augments else {}
        local = {"steps": self.steps, "batch": self.batch, "rate": self.rate, **augmented, **self._kept_momentum()}
        return {
            "algorithm": ALGORITHMS[method],
            "num_rounds": self.rounds,
            "participate": {"fraction_train": fraction},
            "local": local,
            "evaluate": {"statistics": statistics or STATISTICS[method]},
            "bounds": {"max_value": self.max_value},
            "simulate": {
                "devices": self.devices,
                "dataset": self.dataset,
                "partitioner": self.partitioner,
                "partition": deals[self.partitioner],
                "tiers": {name: n for name, n in tiers.items() if n},
                **{name: count for name, count in known.items() if count is not None},
            },
        }

    def _kept_momentum(self) -> Mapping[str, Any]:
        if not self.keeps_momentum:
            return {}
        momentum = {"rule": "momentum", "factor": 0.9, "between": "keep"}
        return {"rules": [{"rule": "weight_decay", "factor": 1e-4}, momentum]}

    def row(
        self, label: str, method: str, job: Any, published: float | None, panel: str = "", curve: str = ""
    ) -> PaperRow:
        told = {} if published is None else {BEST: published}
        return PaperRow(label, self.model, job, told, panel, curve, widths=WIDTHS if method == WIDTH else ())

    def setting(self, note: str, rows: list[PaperRow]) -> Setting:
        return Setting(note, rows, every={"evaluate_every": self.every})


CIFAR_FULL = Experiment("resnet20", "cifar10", 128, 1000, "0.4/10@800,900", every=10, max_value=2.0**20)
CIFAR_KERAS = replace(CIFAR_FULL, model="resnet20_keras", augments=True)
FEMNIST_FULL = Experiment("femnist_cnn", "femnist", 128, 200, "0.04", every=10, partitioner="natural")
IMDB_FULL = Experiment("imdb_bilstm", "imdb", 128, 400, "0.1/10@200,300", every=10, keeps_momentum=True)
FASHION_SHORT = Experiment(
    "fashion_resnet8@0.625",
    "fashion_mnist",
    32,
    30,
    "0.1/10@24,27",
    batch=16,
    samples=4000,
    test_samples=1000,
    every=2,
    alpha=0.5,
    input_tier="layer1",
)
FEMNIST_SHORT = Experiment(
    "femnist_cnn@0.125", "femnist", 32, 120, "0.04", test_samples=1500, every=2, partitioner="natural"
)
IMDB_SHORT = Experiment(
    "imdb_bilstm@0.25",
    "imdb",
    32,
    400,
    "0.1/10@200,300",
    test_samples=5000,
    every=10,
    alpha=0.5,
    keeps_momentum=True,
)
SMOKE = Experiment("digits", "digits", 16, 2, "0.05", steps=2, batch=8, samples=480, test_samples=64)

FULL_NOTE = "The paper's own setting: 128 devices, 10 steps of batch 32, momentum 0.9, weight decay 1e-4"
SHORT_NOTE = (
    "Fashion-MNIST instead of CIFAR-10, 4,000 training and 1,000 test samples, ResNet8 with 10, 20 and 40 channels, 32 "
    "devices instead of 128, Dirichlet 0.5 instead of 0.1, 10 steps of batch 16, momentum 0.9, weight decay 1e-4, rate "
    "0.1 for every row, a tenth of it after 80 % and again after 90 % of the rounds, as in the paper"
)
SMOKE_NOTE = "scikit-learn's digits on 16 devices, two rounds: whether it runs, nothing else."
FRONT = (
    "Not even the stem fits into a weak device's memory: those that train the input side, stem and first block, have "
    "six times as much."
)
CIFAR_BOUND = "On CIFAR-10 a value of an update may be up to 2^20."
KERAS_NOTE = (
    "The paper does not say how it builds ResNet20 and whether it augments images. The code that its authors published "
    "for FedLAMA has the batch norm and the first weights of Keras, and it standardises, crops and mirrors images. "
    "Three rows do so, too, but for the standardising."
)
KEPT_NOTE = (
    "A device keeps its momentum for its next round; the paper does not say whether its devices do. Where they did "
    "not, `short` stayed at chance."
)
SEES = "Width reduction is scored with static batch norm, the others with global statistics."


# --- scaling ---------------------------------------------------------------------------------------------------------


def _joined(experiment: Experiment, method: str, weak: int) -> Any:
    """16 strong devices of 128, so many weak ones, and all of them in every round."""
    tier = experiment.input_tier if method == INPUT else "weak"
    tiers = {"strong": experiment.scaled(16), tier: experiment.scaled(weak), ABSENT: experiment.scaled(112 - weak)}
    return experiment.job(method, tiers, 1.0)


def _scaling(experiment: Experiment, note: str, weak: tuple[int, ...], input_side: tuple[int, ...]) -> Setting:
    rows = []
    for method, counts in ((EMBRACING, weak), (WIDTH, weak[1:]), (INPUT, input_side)):  # without weak ones all are one
        for count in counts:
            published = dict(zip((EMBRACING, WIDTH), JOINED[count])).get(method)
            label = f"{experiment.scaled(16)} strong + {experiment.scaled(count)} weak"
            job = _joined(experiment, method, count)
            rows.append(
                experiment.row(f"{method}, {label}", method, job, published, method, f"+ {experiment.scaled(count)}")
            )
    return experiment.setting(note, rows)


def _scaling_full() -> Setting:
    weak = tuple(JOINED)
    return _scaling(CIFAR_FULL, f"{FULL_NOTE}, ResNet20 on CIFAR-10; all join. {SEES} {CIFAR_BOUND}", weak, weak[1:])


def _scaling_short() -> Setting:
    note = (
        f"{SHORT_NOTE}; 30 rounds; 4 strong and so many weak devices join every round, the others never. {SEES} {FRONT}"
    )
    return _scaling(FASHION_SHORT, note, (0, 32, 112), (112,))


def _rows_of(measured: Measured, method: str) -> list[float | None]:
    """Return the best accuracy of each row of a method, as the paper's tables do; the first has strong devices alone.

    None where a row was not run.
    """
    return [row.get(BEST) for label, row in measured.items() if label.startswith(f"{method}, ")]


def _grows(method: str) -> Claim:
    def test(measured: Measured) -> bool | None:
        alone, joined = _rows_of(measured, EMBRACING)[:1], _rows_of(measured, method)[method == EMBRACING :]
        values = [value for value in alone + joined if value is not None]
        return values == sorted(values) if len(values) > 1 and alone[0] is not None else None

    return Claim(f"{method}: each time weak devices join, the accuracy is higher", test)


def _ahead(first: str, second: str) -> Claim:
    """Compare rows of the same mix, other than that of strong devices alone."""

    def test(measured: Measured) -> bool | None:
        wins = []
        for label, row in measured.items():
            mix = label.removeprefix(f"{first}, ")
            ours, theirs = row.get(BEST), measured.get(f"{second}, {mix}", {}).get(BEST)
            if mix != label and not mix.endswith(("+ 0 weak", "/0/0")) and ours is not None and theirs is not None:
                wins.append(ours > theirs)
        return all(wins) if wins else None

    return Claim(f"{first} is above {second} in every mix", test)


SCALING = Table(
    "embracing-scaling",
    PAPER + ", table 2",
    "Weak devices that train the output side improve the model, more than those that train a narrow one.",
    {
        "smoke": lambda: _scaling(SMOKE, SMOKE_NOTE, (0, 112), (112,)),
        "short": _scaling_short,
        "full": _scaling_full,
    },
    COLUMNS,
    (_grows(EMBRACING), _grows(WIDTH), _ahead(EMBRACING, WIDTH), _ahead(EMBRACING, INPUT)),
)


# --- cases -----------------------------------------------------------------------------------------------------------


def _case_rows(
    experiment: Experiment, mixes: tuple[Mix, ...], methods: Mapping[str, int], prefix: str = ""
) -> list[PaperRow]:
    """A quarter of the devices in each round; `methods` has the place of each in the published figures."""
    rows = []
    for method, place in methods.items():
        for mix in mixes[method == WIDTH :]:  # strong devices alone are the same for both
            counts = [experiment.scaled(count) for count in mix]
            job = experiment.job(method, dict(zip(("strong", "moderate", "weak"), counts)), 0.25)
            name = "/".join(map(str, counts))
            panel = f"{prefix}{method}"
            rows.append(experiment.row(f"{panel}, {name}", method, job, CASES[mix][place], panel, name))
    return rows


FEMNIST, KERAS = "FEMNIST, ", "as in Keras, augmented: "
CIFAR_METHODS = {EMBRACING: 0, WIDTH: 1}
SHORT_MIXES: tuple[Mix, ...] = ((128, 0, 0), (32, 32, 64), (16, 0, 112))


def _cases_full() -> Setting:
    mixes = tuple(CASES)
    rows = _case_rows(CIFAR_FULL, mixes, CIFAR_METHODS)
    rows += _case_rows(CIFAR_KERAS, ((128, 0, 0), (16, 0, 112)), CIFAR_METHODS, KERAS)
    rows = [replace(row, every={"both_statistics_every": 100}) for row in rows]
    rows += _case_rows(FEMNIST_FULL, mixes, {EMBRACING: 2}, FEMNIST)
    note = (
        f"{FULL_NOTE}, a quarter of them in each round; ResNet20 on CIFAR-10, the CNN on FEMNIST. {SEES} {CIFAR_BOUND} "
        f"{KERAS_NOTE}"
    )
    return CIFAR_FULL.setting(note, rows)


def _cases_short() -> Setting:
    note = (
        f"{SHORT_NOTE}; strong/moderate/weak devices, 8 of the 32 in each of 30 rounds. {SEES} FEMNIST: two writers on "
        "each of 32 devices, the CNN with an eighth of its channels, 120 rounds, batch 32, the paper's rate 0.04."
    )
    rows = _case_rows(FASHION_SHORT, SHORT_MIXES, CIFAR_METHODS)
    return FASHION_SHORT.setting(note, rows + _case_rows(FEMNIST_SHORT, SHORT_MIXES, {EMBRACING: 2}, FEMNIST))


def _close_to_all_strong(data: str = "", margin: float = 4) -> Claim:
    def test(measured: Measured) -> bool | None:
        strong, *mixes = _rows_of(measured, f"{data}{EMBRACING}") or [None]
        known = [value for value in mixes if value is not None]
        return strong - min(known) < margin if known and strong is not None else None

    return Claim(f"{data}EmbracingFL loses less than {margin:g} points to strong devices alone in every mix", test)


CASES_TABLE = Table(
    "embracing-cases",
    PAPER + ", tables 3, 4 and 6",
    "With mixes of strong, moderate and weak devices, EmbracingFL stays near a fleet of strong ones.",
    {
        "smoke": lambda: SMOKE.setting(SMOKE_NOTE, _case_rows(SMOKE, ((128, 0, 0), (32, 32, 64)), CIFAR_METHODS)),
        "short": _cases_short,
        "full": _cases_full,
    },
    (*COLUMNS, Column("rounds to 59 %", rounds_to(0.59), 1), *BY_STATISTICS),
    (_ahead(EMBRACING, WIDTH), _close_to_all_strong(), _close_to_all_strong(FEMNIST)),
)


# --- batch norm ------------------------------------------------------------------------------------------------------


def _norms(experiment: Experiment, note: str, fraction: float, every: int) -> Setting:
    """One run of each method, scored with both kinds: scoring twice costs no training."""
    tiers = {"strong": experiment.scaled(16), "weak": experiment.scaled(112)}
    rows = [
        PaperRow(
            method,
            experiment.model,
            experiment.job(method, tiers, fraction),
            {column: published for (name, column), published in NORMS.items() if name == method},
            widths=WIDTHS if method == WIDTH else (),
            every={"both_statistics_every": every},
        )
        for method in (EMBRACING, WIDTH)
    ]
    return experiment.setting(note, rows)


def _norms_short() -> Setting:
    note = f"{SHORT_NOTE}; 4 strong and 28 weak devices, 8 of the 32 in each of 30 rounds (in the paper all)."
    return _norms(FASHION_SHORT, note, 0.25, FASHION_SHORT.every)


def _higher(method: str, better: str, worse: str, text: str) -> Claim:
    def test(measured: Measured) -> bool | None:
        high, low = (measured.get(method, {}).get(column) for column in (better, worse))
        return None if high is None or low is None else high > low

    return Claim(f"{method}: {text}", test)


NORM = Table(
    "embracing-bn",
    PAPER + ", table 9",
    "Averaged statistics of batch norm suit EmbracingFL and ruin width reduction.",
    {
        "smoke": lambda: _norms(SMOKE, SMOKE_NOTE, 1.0, 1),
        "short": _norms_short,
        "full": lambda: _norms(
            CIFAR_FULL, f"{FULL_NOTE}, 16 strong and 112 weak, all in every round. {CIFAR_BOUND}", 1.0, 100
        ),
    },
    (*BY_STATISTICS, Column(BEST, best_accuracy)),
    (
        _higher(EMBRACING, AVERAGED, STATIC, "averaged statistics are above static ones"),
        _higher(WIDTH, STATIC, AVERAGED, "static statistics are above averaged ones"),
    ),
    drawn=(
        Drawn("averaged statistics", "test accuracy, %", accuracies_by("global")),
        Drawn("static statistics", "test accuracy, %", accuracies_by("static")),
    ),
)


# --- film reviews ----------------------------------------------------------------------------------------------------


IMDB_MIXES: tuple[Mix, ...] = ((128, 0, 0), (16, 112, 0), (16, 0, 112))


def _imdb_full() -> Setting:
    note = f"{FULL_NOTE}, a quarter of them in each round; bidirectional LSTM on IMDB. {KEPT_NOTE}"
    return IMDB_FULL.setting(note, _case_rows(IMDB_FULL, tuple(CASES), {EMBRACING: 3}))


def _imdb_short() -> Setting:
    note = (
        "IMDB, all 25,000 training and 5,000 test reviews, the bidirectional LSTM with a quarter of its units, 32 "
        "devices instead of 128, 8 of them in each of 400 rounds, Dirichlet 0.5 instead of 0.1; as in the paper 10 "
        "steps of batch 32, momentum 0.9, weight decay 1e-4, rate 0.1, a tenth of it after 200 and after 300 rounds. "
        f"{KEPT_NOTE}"
    )
    return IMDB_SHORT.setting(note, _case_rows(IMDB_SHORT, IMDB_MIXES, {EMBRACING: 3}))


IMDB = Table(
    "embracing-imdb",
    PAPER + ", table 5",
    "A recurrent network: weak devices leave out the embedding and the first half of the words.",
    {
        "smoke": lambda: SMOKE.setting(SMOKE_NOTE, _case_rows(SMOKE, ((128, 0, 0), (16, 0, 112)), {EMBRACING: 3})),
        "short": _imdb_short,
        "full": _imdb_full,
    },
    COLUMNS,
    (_close_to_all_strong(margin=7.3),),  # in the paper 16/0/112 loses 7.26
)
