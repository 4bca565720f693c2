"""What came of a table: JSON for programs, markdown for readers; measured beside published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.papers.editions import EDITION, changed_models, missed
from bench.papers.measures import best_accuracy
from bench.papers.runner import Reproduction, RowResult
from bench.papers.table import Column, Measured, PaperRow, Table
from edge_runtime.machine import describe_device
from federation.errors import InputError
from simulation.runs import deviation

VERDICTS = {True: "held", False: "did not hold", None: "not tested at this scale"}


def report(found: Reproduction, stored: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Collect all figures; of a row that is still the same, a stored report's with more runs stay."""
    measured = means(found)
    rows = [_row(found, result, measured) for result in found.rows]
    before = _still_valid(stored, found.table.name) if stored else {}
    rows = [_completed(max(row, before.get(_identity(row), row), key=runs_of), row) for row in rows]
    data = {
        "table": found.table.name,
        "paper": found.table.paper,
        "tests": found.table.tests,
        "scale": found.scale,
        "edition": EDITION,
        "setting": found.setting.note,
        "rates": list(found.setting.rates),
        "seeds": list(range(max([len(found.seeds), *map(runs_of, rows)]))),
        "seconds": {"runs": round(sum(row["seconds"] for row in rows), 1), "tuning": round(found.tuning_seconds, 1)},
        "machine": describe_device(),
        "rows": rows,
        "claims": [],
    }
    return data if found.scale == "smoke" else judged(data, found.table)  # smoke shows that it runs, nothing else


def read_report(path: Path) -> dict[str, Any]:
    """Read what an earlier command stored."""
    try:
        data = json.loads(path.read_bytes())
        if all({"label", "model", "job", "figures"} <= row.keys() for row in data["rows"]):
            return dict(data)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    raise InputError(f"{path} is not a whole report of earlier rows; restore it, or remove it to begin without them")


def _still_valid(stored: Mapping[str, Any], table: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a stored report that were run, but for those whose model was changed since."""
    changed = changed_models(table, stored.get("edition", 0))
    rows = [row for row in stored["rows"] if was_run(row) and row["model"].partition("@")[0] not in changed]
    return {_identity(row): row for row in rows}


def _completed(row: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Give a stored row the columns that the table has gained since, without figures."""
    none = {name: {**figure, "mean": None, "deviation": None, "runs": 0} for name, figure in new["figures"].items()}
    return {**row, "figures": {**none, **row["figures"]}}


def _identity(row: Mapping[str, Any]) -> str:
    return json.dumps([row["label"], row["model"], row["job"]], sort_keys=True)


def judged(data: dict[str, Any], table: Table) -> dict[str, Any]:
    """Take the claims and published figures of a stored report from today's table: they may have been mended since.

    A run that was begun under another job than today's does not go on, and is left out.
    """
    today = {row.label: row for row in table.setting(data["scale"]).rows}
    rows = [_as_today(row, today[row["label"]]) if row["label"] in today else row for row in data["rows"]]
    measured = {row["label"]: {name: figure["mean"] for name, figure in row["figures"].items()} for row in rows}
    return {**data, "rows": rows, "claims": _verdicts(table, measured)}


def _as_today(row: dict[str, Any], today: PaperRow) -> dict[str, Any]:
    figures = {name: {**figure, "published": today.published.get(name)} for name, figure in row["figures"].items()}
    same = row["job"] == json.loads(json.dumps(today.job))
    return {**row, "figures": figures, "begun": row.get("begun", []) if same else []}


def _verdicts(table: Table, measured: Measured) -> list[dict[str, str]]:
    return [{"text": claim.text, "verdict": VERDICTS[claim.test(measured)]} for claim in table.claims]


def means(found: Reproduction) -> Measured:
    """Label -> column -> mean over the seeds."""
    result: dict[str, dict[str, float | None]] = {}
    for column in found.table.columns:
        for row in found.rows:
            mean, scale = row.mean(column.measure), _scale(found, column)
            value = None if mean is None or scale is None else scale * mean
            result.setdefault(row.row.label, {})[column.name] = value
    return result


def _scale(found: Reproduction, column: Column) -> float | None:
    """Return what to multiply by; None where the first row, of which this is a share, was not run."""
    if not column.relative:
        return 1.0
    first = found.rows[0].mean(column.measure)
    return 100 / first if first else None


def _row(found: Reproduction, result: RowResult, measured: Measured) -> dict[str, Any]:
    row = result.row
    figures = {}
    for column in found.table.columns:
        scale = _scale(found, column)
        values = [] if scale is None else [scale * value for value in result.values(column.measure)]
        figures[column.name] = {
            "mean": measured[row.label][column.name],
            "deviation": deviation(values) if values else None,
            "runs": len(values),
            "published": row.published.get(column.name),
        }
    return {
        "label": row.label,
        "model": row.model,
        "job": dict(row.job),
        "rate": result.rate,
        "tried": dict(result.tried),
        "in_table": row.measured,
        "figures": figures,
        "failures": list(result.failures),
        "begun": [{"rounds": len(run.rounds), "best": best_accuracy(run)} for run in result.begun],
        "seconds": round(result.seconds, 1),
    }


def markdown(data: dict[str, Any], columns: Sequence[Column]) -> str:
    """Write the report as a page; `columns` are the table's."""
    head = (f"# {data['table']}, {data['scale']}", data["tests"], f"*{data['paper']}*")
    return "".join(f"{text}\n\n" for text in head) + body(data, columns)


def body(data: dict[str, Any], columns: Sequence[Column]) -> str:
    """Setting, table and verdicts."""
    old = missed(data["table"], data.get("edition", 0))
    lines = [f"**Run before a change:** {'; '.join(old)}.", ""] if old else []
    lines += [data["setting"], ""]
    if data["rates"]:
        lines += [f"Rates tried for every row alike: {', '.join(data['rates'])}.", ""]
    lines += [*_unfinished(data), *_table(data, columns)]
    tested = [claim for claim in data["claims"] if claim["verdict"] != VERDICTS[None]]
    lines += ["", *(f"- {claim['text']}: **{claim['verdict']}**" for claim in tested)]
    lines += [""] if tested else []
    seconds, machine = data["seconds"], data["machine"]
    lines += [
        f"Seeds: {len(data['seeds'])}; mean ± standard deviation. Runs took {seconds['runs']:,.0f} s, trying rates "
        f"{seconds['tuning']:,.0f} s, one thread each, on {machine.get('cores', '?')} cores "
        f"({machine.get('processor', '')}) that other work may have shared.",
        "",
    ]
    return "\n".join(lines)


def _unfinished(data: dict[str, Any]) -> list[str]:
    """Say how much of the table was run, where it was not all of it."""
    rows = [row for row in data["rows"] if row["in_table"]]
    run = [row for row in rows if was_run(row)]
    if len(run) == len(rows):
        return []
    begun = [
        f"{row['label']} is at round {run['rounds']:,} of {row['job']['num_rounds']:,}"
        + (f", best accuracy so far {run['best']:.2f} %" if run["best"] is not None else "")
        for row in rows
        for run in row.get("begun", ())
    ]
    told = f"**{len(run)} of {len(rows)} rows were run**; claims are about these alone."
    return [" ".join([told, *(f"{text}." for text in begun)]), ""]


def runs_of(row: Mapping[str, Any]) -> int:
    """Count the runs of a row of a report that ended; those that diverged did."""
    return len(row["failures"]) + max((figure["runs"] for figure in row["figures"].values()), default=0)


def was_run(row: Mapping[str, Any]) -> bool:
    return runs_of(row) > 0


def _table(data: dict[str, Any], columns: Sequence[Column]) -> list[str]:
    rows = [row for row in data["rows"] if row["in_table"] and was_run(row)] or data["rows"][:1]
    columns = [c for c in columns if c.name in rows[0]["figures"]]  # a stored report may have fewer
    shown = [c for c in columns if any(row["failures"] or row["figures"][c.name]["mean"] is not None for row in rows)]
    with_paper = [c for c in columns if any(row["figures"][c.name]["published"] is not None for row in rows)]
    heads = ["", *(c.name for c in shown), *(f"paper: {c.name}" for c in with_paper)]
    heads += ["rate"] if data["rates"] else []
    lines = [_cells(heads), _cells(["---", *["---:"] * (len(heads) - 1)])]
    for row in rows:
        cells = [row["label"], *(_measured(row, c, len(data["seeds"])) for c in shown)]
        cells += [_published(row["figures"][c.name]["published"]) for c in with_paper]
        lines.append(_cells([*cells, *([row["rate"]] if data["rates"] else [])]))
    return lines


def _measured(row: dict[str, Any], column: Column, seeds: int) -> str:
    figure = row["figures"][column.name]
    if figure["mean"] is None:
        return "diverged" if row["failures"] else "–"
    some = f" ({figure['runs']} of {seeds})" if figure["runs"] < seeds else ""
    spread = f" ± {figure['deviation']:.{column.digits}f}" if figure["runs"] > 1 else ""
    return f"{figure['mean']:.{column.digits}f}{spread}{some}"


def _published(value: float | str | None) -> str:
    return "–" if value is None else str(value)


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
