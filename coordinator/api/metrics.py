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

Census = Callable[[], dict[str, Any]]  # coordinator.reports.Reports.census


class Metrics:
    """What was counted since the process started, and what is there now."""

    def __init__(self, census: Census) -> None:
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
        ProcessCollector(registry=self.registry)
        self.registry.register(_Census(census))

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

    def refused(self, error: BaseException) -> None:
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
            metrics.accepted()
            return answer

        return handle if self.name == "send_update" else usual


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
