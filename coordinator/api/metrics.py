"""Numbers for Prometheus, one registry per application. What the database knows is read when a client asks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect

from coordinator.errors import NotAllowed, NotFound, Refused
from federation.errors import EmbraceError, InputError
from federation.printable import printable
from federation.wire import WireError

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
# Why an update was not taken; a Refused has a word of its own.
_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (WireError, "invalid_body"),
    (NotAllowed, "not_allowed"),
    (NotFound, "unknown_task"),
    (InputError, "invalid_report"),
    (EmbraceError, "failed"),
    (ClientDisconnect, "cut_off"),
    (OSError, "storage"),
)

# Why tasks are given up, as agents say it; any other word counts as "other", so that no device makes new labels.
_GIVEN_UP = (
    "coordinator",
    "data",
    "disk_full",
    "empty_data",
    "failed",
    "non_finite_loss",
    "out_of_memory",
    "over_limit",
    "single_class",
    "stopped",
    "too_large",
    "unsafe_graph",
    "untrusted",
)
KEPT = 3.0  # seconds: any client may ask, and reading the database for it is work
_MOST_NAME = 60  # characters of a name that is a label

Census = Callable[[], dict[str, Any]]  # coordinator.reports.Reports.census
Figures = Callable[[], dict[str, Any]]  # coordinator.reports.Reports.figures


class Metrics:
    """What was counted since the process started, and what is there now."""

    def __init__(self, census: Census, figures: Figures | None = None) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "embrace_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "embrace_request_seconds",
            "From the headers of a request to the end of its answer, waiting included.",
            ("method", "route"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._found: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._received = Counter("embrace_received_bytes", "Bodies of requests.", registry=self.registry)
        self._accepted = Counter("embrace_updates_accepted", "Updates that were recorded.", registry=self.registry)
        self._refused = Counter(
            "embrace_updates_refused", "Updates that were not.", ("reason",), registry=self.registry
        )
        self._tasks = Counter("embrace_tasks", "Tasks that ended, by outcome.", ("outcome",), registry=self.registry)
        for outcome in ("done", "refused", *_GIVEN_UP, "other"):
            self._tasks.labels(outcome)  # so that each is there from the start
        ProcessCollector(registry=self.registry)
        self.registry.register(_Census(census))
        if figures is not None:
            self.registry.register(_Figures(figures))

    def observe(self, method: str, route: str, status: int, seconds: float, received: int) -> None:
        """A request was answered. Only known methods and routes become labels: a stranger cannot make new ones."""
        known = method if method in _METHODS else "other"
        found = self._found.get((known, route, status))
        if found is None:  # looking a label up takes longer than counting
            found = self._requests.labels(known, route, status), self._seconds.labels(known, route)
            self._found[known, route, status] = found
        found[0].inc()
        found[1].observe(seconds)
        self._received.inc(received)

    def accepted(self) -> None:
        self._accepted.inc()
        self._tasks.labels("done").inc()

    def given_up(self, reason: str) -> None:
        """A device gave a task up."""
        self._tasks.labels(reason if reason in _GIVEN_UP else "other").inc()

    def refused(self, error: BaseException) -> None:
        self._tasks.labels("refused").inc()
        own = error.reason if isinstance(error, Refused) else None
        self._refused.labels(own or next((word for kind, word in _REASONS if isinstance(error, kind)), "other")).inc()

    def text(self) -> bytes:
        """Write the exposition format of Prometheus."""
        return generate_latest(self.registry)


class CountedRoute(APIRoute):
    """Count updates, those too whose sender or report is refused before their body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        usual = super().get_route_handler()

        async def handle(request: Request) -> Response:
            metrics: Metrics = request.app.state.metrics
            try:
                answer = await usual(request)
            except BaseException as error:
                metrics.refused(error)
                raise
            if answer.status_code == 201:  # else it is not checked yet
                metrics.accepted()
            return answer

        return handle if self.name in ("send_update", "complete") else usual


class _Figures(Collector):
    """Read how jobs and devices do. Labels are bounded: the newest jobs, and the devices that fail most."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        found = self._figures()
        yield from _job_families(found["jobs"], found["missing"])
        states = GaugeMetricFamily("embrace_devices_by_state", "Devices, by what they do.", labels=["state"])
        for state in ("working", "waiting", "benched", "gone", "revoked"):
            states.add_metric([state], found["states"].get(state, 0))
        yield states
        about = "Failures of the devices that fail most, at most 20 of them, in all jobs."
        failures = GaugeMetricFamily("embrace_device_failures", about, labels=["device", "name"])
        for device, name, count in found["failing"]:
            failures.add_metric([device, printable(name, _MOST_NAME)], count)
        yield failures


def _job_families(jobs: list[dict[str, Any]], missing: dict[str, int]) -> Iterator[GaugeMetricFamily]:
    """Yield the numbers of the newest jobs, at most 50 of them."""
    labels = ["job", "name"]
    version = GaugeMetricFamily("embrace_job_version", "Newest version, for the 50 newest jobs.", labels=labels)
    loss = GaugeMetricFamily("embrace_job_training_loss", "Mean training loss of the last round.", labels=labels)
    seconds = GaugeMetricFamily("embrace_job_round_seconds", "From the opening to the end of it.", labels=labels)
    updates = GaugeMetricFamily("embrace_job_round_updates", "Updates that counted in it.", labels=labels)
    waits = GaugeMetricFamily("embrace_job_devices_missing", "Devices missing to begin a round.", labels=labels)
    score = GaugeMetricFamily("embrace_job_score", "Scores of the newest version with any.", labels=[*labels, "metric"])
    for row in jobs:
        job, round = row["job"], row["round"]
        own = [job.id, printable(job.name, _MOST_NAME)]
        version.add_metric(own, job.version)
        waits.add_metric(own, missing.get(job.id, 0))
        if round is not None:
            seconds.add_metric(own, (round.closed_at or round.opened_at) - round.opened_at)
            updates.add_metric(own, round.summary.get("updates", 0))
            if isinstance(value := round.summary.get("loss"), float):
                loss.add_metric(own, value)
        for name, value in row["scores"].items():
            score.add_metric([*own, name], value)
    yield from (version, loss, score, seconds, updates, waits)


class _Census(Collector):
    """Read what the database says at the moment."""

    def __init__(self, census: Census) -> None:
        self._census = census

    def describe(self) -> list[Any]:
        return []  # asking for the names must not ask the database

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        found = self._census()
        yield CounterMetricFamily(
            "embrace_rounds_committed",
            "Rounds that led to a new version, since the directory was made.",
            found["rounds_committed"],
        )
        jobs = GaugeMetricFamily("embrace_jobs", "Jobs, by state.", labels=["state"])
        for state, number in found["jobs"].items():
            jobs.add_metric([state], number)
        yield jobs
        yield GaugeMetricFamily("embrace_devices", "Devices that are enrolled and not revoked.", found["devices"])
        yield GaugeMetricFamily(
            "embrace_devices_present", "Devices that were heard of within the last minute.", found["devices_present"]
        )
