"""Results as tables, for spreadsheets and notebooks."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from coordinator.api.auth import Admin, Service
from coordinator.api.documents import TimingDocument
from coordinator.api.limits import LARGEST
from coordinator.api.openapi import problems
from coordinator.reports import METRIC_COLUMNS, ROUND_COLUMNS, TIMING_COLUMNS
from federation.printable import printable

router = APIRouter(prefix="/v1", tags=["admin"], dependencies=[Admin], responses=problems(404))
CSV = "text/csv; charset=utf-8"
_TEXT = {"text/csv": {"schema": {"type": "string"}}}
CSV_BODY: dict[int | str, dict[str, Any]] = {200: {"description": "Names, then a line per row.", "content": _TEXT}}
_FORMULAS = tuple("=+-@＝＋－＠")  # what a spreadsheet computes begins with one of these, wide ones too
FirstRound = Annotated[int, Query(ge=0, le=LARGEST, description="Leave out the rounds before this one.")]


@router.get(
    "/jobs/{job}/rounds.csv",
    summary="The rounds of a job, as CSV",
    response_class=StreamingResponse,
    responses=CSV_BODY,
)
def rounds_csv(job: str, service: Service) -> StreamingResponse:
    """One line per round: when, how many updates and samples, bytes received, mean training loss."""
    return _csv(ROUND_COLUMNS, service.round_rows(job))


@router.get(
    "/jobs/{job}/metrics.csv",
    summary="Scores of the versions, as CSV",
    response_class=StreamingResponse,
    responses=CSV_BODY,
)
def metrics_csv(job: str, service: Service) -> StreamingResponse:
    """One line per version and score."""
    return _csv(METRIC_COLUMNS, service.metrics(job))


@router.get("/jobs/{job}/timings", summary="Where the devices' time went")
def timings(job: str, service: Service, first_round: FirstRound = 0) -> list[TimingDocument]:
    """What every accepted update's report says: seconds by part (docs/guides/fine-tune.md), bytes received."""
    return [TimingDocument(**row) for row in service.timings(job, first_round)]


@router.get(
    "/jobs/{job}/timings.csv",
    summary="Where the devices' time went, as CSV",
    response_class=StreamingResponse,
    responses=CSV_BODY,
)
def timings_csv(job: str, service: Service, first_round: FirstRound = 0) -> StreamingResponse:
    """One line per update. Parts that a device did not report are empty."""
    rows = service.timings(job, first_round)
    return _csv(TIMING_COLUMNS, ({**row, **row["seconds"]} for row in rows))


def _csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> StreamingResponse:
    return StreamingResponse(_lines(columns, rows), media_type=CSV)


def _lines(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in columns])
        if text.tell() > 1 << 15:
            yield text.getvalue()
            text.seek(0)
            text.truncate()
    yield text.getvalue()


def _cell(value: Any) -> Any:
    """A device writes its own words into reports: none may become a formula in a spreadsheet, or an order."""
    if not isinstance(value, str):
        return value
    shown = printable(value)
    return f"'{shown}" if shown.lstrip().startswith(_FORMULAS) else shown
