"""A training job as a value: which bundle, which algorithm, for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.data_reference import file_of
from embrace.bundles import Bundle, Progress, quiet
from embrace.trackers import OnRound, Tracker, tracked
from federation.job import Plan, plan_from, plan_to

if TYPE_CHECKING:
    from edge_runtime.data.load import Data
    from simulation.datasets import Dataset
    from simulation.runs import Run

Table = Mapping[str, Any]  # a table of a job file, by key


class Job:
    """What devices and server do in a training job. Every argument but the bundle has a default.

    A table is what a job file has under the same name, as a mapping; on an axis it may be a rule itself: one of ours,
    or your own frozen dataclass, which simulations run. What you give counts more than what the algorithm fills in.

    >>> job = embrace.Job(bundle, algorithm="embracing", num_rounds=20, local={"steps": 5})
    >>> job
    Job('Sequential', algorithm='embracing', num_rounds=20)
    >>> job.plan.local.steps
    5
    """

    def __init__(
        self,
        bundle: Bundle | str | Path,
        *,
        algorithm: str = "",
        name: str = "",
        num_rounds: int = 10,
        seed: int = 0,
        participate: Table | Any = None,
        cover: Table | Any = None,
        sync: Table | Any = None,
        local: Table | Any = None,
        weigh: Table | Any = None,
        serve: Table | Any = None,
        evaluate: Table | Any = None,
        bounds: Table | Any = None,
    ) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
        if isinstance(local, Mapping) and isinstance(local.get("rate"), (int, float)):
            local = {**local, "rate": str(local["rate"])}  # a constant rate is the simplest schedule
        tables = {
            "participate": participate,
            "cover": cover,
            "sync": sync,
            "local": local,
            "weigh": weigh,
            "serve": serve,
            "evaluate": evaluate,
            "bounds": bounds,
        }
        given = {table: value for table, value in tables.items() if value is not None}
        facts = {"algorithm": algorithm, "name": name, "num_rounds": num_rounds, "seed": seed}
        self.plan: Plan = plan_from({"bundle": str(self.bundle.path.resolve()), **facts, **given})

    @classmethod
    def from_file(cls, path: str | Path, *, own_rules: bool = True) -> Job:
        """Read a job file; the bundle and data are looked for beside it.

        own_rules: load rules of your own from the files that it names, as simulations do; else refuse them.

        >>> file = folder / "job.toml"
        >>> _ = file.write_text(f"bundle = '{bundle.path}'\\nalgorithm = 'fedavg'\\n")
        >>> embrace.Job.from_file(file).plan.algorithm
        'fedavg'
        """
        from simulation.fleet import read_job

        file = Path(path)
        plan, bundle = read_job(file, own_rules=own_rules)
        data = plan.evaluate.data
        if data is not None and (file.parent / file_of(data)).exists():
            plan = replace(plan, evaluate=replace(plan.evaluate, data=str((file.parent / data).resolve())))
        own: Table = {
            key: str(Path(plan.simulate[key]).resolve())
            for key in ("data", "test_data", "tokenizer")
            if key in plan.simulate
        }
        return cls.from_plan(replace(plan, simulate={**plan.simulate, **own}), Bundle(bundle.resolve()))

    @classmethod
    def from_plan(cls, plan: Plan, bundle: Bundle) -> Job:
        """Make a job of a plan that was decoded elsewhere."""
        job = cls.__new__(cls)
        job.bundle = bundle
        job.plan = plan
        return job

    def to_json(self) -> dict[str, Any]:
        """Return every key of the job file, with all defaults written out."""
        return plan_to(self.plan)

    def __repr__(self) -> str:
        plan = self.plan
        return f"Job({plan.name or self.bundle.name!r}, algorithm={plan.algorithm!r}, num_rounds={plan.num_rounds})"


def simulate(
    job: Job,
    data: Data | Dataset | None = None,
    *,
    test_data: Data | None = None,
    test_share: float | None = None,
    label: str | None = None,
    tokenizer: str | Path | None = None,
    devices: int | None = None,
    tiers: Mapping[str, int] | None = None,
    partition: str | None = None,
    partition_constants: Mapping[str, Any] | None = None,
    engine: str = "auto",
    workers: int | None = None,
    folder: str | Path | None = None,
    evaluate_every: int = 1,
    stop_at: float | None = None,
    on_round: OnRound = lambda record: None,
    track: str | Tracker | None = None,
    progress: Progress = quiet,
    **options: Any,
) -> Run:
    """Run a job on simulated devices, with the code that coordinator and devices run.

    `data` is what a device takes: a pair of arrays, FILE.npz, a folder of images by class, FILE.csv, FILE.jsonl (with
    `tokenizer`, if the bundle has none) or FILE.py:NAME; or the name of a data set; or what the job file says.
    `test_data` has the same forms; without it `test_share` of your data is held out, a fifth. `tiers` says how many
    devices train what, `partition` how the samples are dealt: "iid", "dirichlet" with {"alpha": 0.1}, and others. The
    same seed gives the same result for any number of `workers`.
    `on_round` is called with the record of each round; `track` keeps it in "tensorboard", "mlflow" or "wandb", or in a
    tracker of your own (`embrace.trackers.Tracker`).

    >>> job = embrace.Job(bundle, algorithm="embracing", num_rounds=2, local={"steps": 3})
    >>> run = embrace.simulate(job, data=(x, y), devices=8, tiers={"strong": 2, "weak": 6}, workers=1)
    >>> [record["devices"] for record in run.rounds]
    [8, 8]
    """
    from simulation.simulate import simulate as run_simulation

    def each(record: dict[str, Any]) -> None:
        log(record)
        on_round(record)

    with tracked(track, job.plan.name or job.bundle.name, plan_to(job.plan, own_rules=True), folder) as log:
        return run_simulation(
            job.plan,
            job.bundle.path,
            data,
            test_data=test_data,
            test_share=test_share,
            label=label,
            tokenizer=tokenizer,
            devices=devices,
            tiers=tiers,
            partition=partition,
            partition_constants=partition_constants,
            engine=engine,
            workers=workers,
            folder=folder,
            evaluate_every=evaluate_every,
            stop_at=stop_at,
            on_progress=progress,
            on_round=each,
            **options,
        )
