"""`embrace job watch`: a job as it goes. A live view on a terminal, a line per round elsewhere."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from embrace.cli import show
from embrace.following import OVER, follow
from federation.best_version import deciding_metric
from federation.errors import EmbraceError, InputError
from federation.printable import printable

if TYPE_CHECKING:
    from embrace.client import Client

REFRESH = 0.25  # seconds: what happened long ago is not shown step by step
STILL = 2.0  # seconds between two looks at what a job waits for; what is the same at both is told
MOST_ROUNDS, MOST_NOTES = 10, 4
PARTS = ("download", "forward", "training")  # of the time of an update; all others are the rest
Rows = Sequence[Mapping[str, Any]]
OnEvent = Callable[[Mapping[str, Any]], None]  # sees every event before it is shown


@dataclass(frozen=True)
class Note:
    """Something that an administrator who watches should know."""

    text: str
    round: int
    about: tuple[str, ...] = ()  # the newest note of what it is about takes the place of older ones
    passing: bool = False  # true only while its round is open


def note_of(event: Mapping[str, Any], names: Mapping[str, str]) -> Note | None:
    """Put an event into words; None for what the tables show anyway."""
    body, kind = event["body"], event["kind"]
    number = int(body["version"] - 1 if kind == "Evaluated" else body.get("round", _round_of(body.get("task", ""))))
    device = names.get(body.get("device", ""), body.get("device", ""))
    if kind == "WarnLayerUncovered":
        text = f"no device trains {', '.join(body['layers'])}"
    elif kind == "TaskFailed":
        text = f"{device} gave up, {body['reason']}" + (f": {body['message']}" if body["message"] else "")
    elif kind == "DeviceUnfit":
        text = f"{device} cannot take part: {body['message']}"
    elif kind == "DeviceBenched":
        text = f"{device} is {body['message']}"
    elif kind == "CloseFailed":
        text = f"it could not be closed (try {body['tries']}), {body['message']}"
    elif kind == "SumLost":
        text = f"{body['updates']} updates are folded again, {body['message']}"
    elif kind == "UpdateLost":
        text = f"the update of {device} is lost, {body['message']}"
    elif kind == "RejectUpdate":
        text = f"an update of {device} does not count, {body['reason']}"
    elif kind == "WaitForDevices":
        text = f"waiting for {body['count']} more device{'s' if body['count'] != 1 else ''}"
    elif kind == "WaitForUpdates":
        text = f"the deadline is over; waiting for {body['count']} more update{'s' if body['count'] != 1 else ''}"
    elif kind == "RoundAbandoned":
        text = f"given up: {body['reason']}"
    elif kind == "Evaluated" and "error" in body:
        text = f"version {body['version']} could not be scored, {body['error']}"
    else:
        return None
    return Note(printable(f"round {number}: {text}"), number, (kind, device), passing=kind.startswith("WaitFor"))


def _round_of(task: str) -> str:
    """Read the round from a task's name, JOB-ROUND-SEAT-ATTEMPT."""
    return task.split("-")[1] if task else "0"


@dataclass
class Watched:
    """The state of a job as the coordinator tells it, fetched repeatedly; names are fetched once."""

    client: Client
    id: str
    names: dict[str, str] = field(default_factory=dict)  # of devices, by id
    notes: list[Note] = field(default_factory=list)
    job: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[int, dict[str, float]] = field(default_factory=dict)  # by version
    timings: dict[str, dict[str, float]] = field(default_factory=dict)  # of each device's last update
    silent: str = ""  # why the coordinator does not answer

    def hear(self, event: Mapping[str, Any]) -> Note | None:
        self._learn_names({event["body"].get("device")})
        note = note_of(event, self.names)
        if note is not None and event["kind"] != "DeviceUnfit":  # the job itself knows who is unfit now
            self.notes = [*(known for known in self.notes if known.about != note.about), note][-MOST_NOTES:]
        return note

    def look(self) -> None:
        """Fetch the job's state from the coordinator."""
        self.job = self.client.job(self.id)
        self.rounds = self.client.rounds(self.id)
        self.scores = scores_of(self.client.metrics(self.id))
        first = max(0, len(self.rounds) - 2)
        for row in self.client.timings(self.id, first):
            self.timings[row["device"]] = row["seconds"]
        self._learn_names({seat["member"]["device"] for seat in self.seats} | set(self.job["unfit"]))
        self.silent = ""

    def _learn_names(self, devices: set[str | None]) -> None:
        if devices - self.names.keys() - {None}:
            self.names = {row["id"]: row["name"] for row in self.client.devices()}

    @property
    def seats(self) -> list[dict[str, Any]]:
        return list((self.job.get("round") or {}).get("body", {}).get("slots", []))

    @property
    def over(self) -> bool:
        return self.job.get("state") in OVER

    def view(self, height: int) -> Group:
        """Render everything in at most so many lines."""
        now = len(self.rounds) - 1
        notes = [note.text for note in self.notes if note.round >= now - (not note.passing) and not self.over]
        notes += [*waiting_lines(self.job), *unfit_lines(self.job, self.names)[:MOST_NOTES]]
        scores = score_lines(self.job, self.rounds)
        notes = notes[: 2 * MOST_NOTES - len(scores)]
        room = max(4, height - len(notes) - len(scores) - 14)  # for rows of both tables
        seats = self.seats[: max(2, room - min(len(self.rounds), MOST_ROUNDS, room // 2))]
        rounds = self.rounds[-min(MOST_ROUNDS, max(2, room - len(seats))) :]
        bar = Table.grid()  # which ends its line, as the bar itself does not
        bar.add_row(ProgressBar(self.job["plan"]["num_rounds"], self.job["version"], width=60))
        told = [show.line(note, "yellow") for note in notes]
        told += [show.line(line) for line in scores]
        return Group(self._title(), bar, *told, rounds_table(rounds, self.scores), *self._devices(seats))

    def _title(self) -> Text:
        job, state = self.job, self.job["state"]
        style = {"failed": "bold red", "paused": "bold yellow", "done": "bold green"}.get(state, "bold")
        ended = max((row["closed_at"] or 0.0 for row in self.rounds), default=0.0) if self.over else time.time()
        passed = time.strftime("%H:%M:%S", time.gmtime(max(0.0, ended - job["created_at"])))
        title = Text.assemble(
            (printable(f"{job['name'] or 'job'} {job['id']}: "), "bold"),
            (printable(state), style),
            f", {job['version']} of {job['plan']['num_rounds']} rounds in {passed}",
        )
        if job["message"]:
            title.append(f"\n{printable(job['message'])}", "red")
        return title.append(f"\n{printable(self.silent)}", "yellow") if self.silent else title

    def _devices(self, seats: Rows) -> tuple[Any, ...]:
        if not seats:
            return (Text("no device has been invited yet"),)
        rows = [self._device(seat) for seat in seats]
        columns = ("device", "from", "state", "download", "frozen", "training", "rest")
        others = Counter(seat["state"] for seat in self.seats[len(seats) :])
        title = f"round {self.job['round']['number']}, and seconds of each device's last update"
        title += f"; not shown: {', '.join(f'{n} {state}' for state, n in others.items())}" if others else ""
        return show.line(title, "bold"), show.table("", columns, rows, left=3)

    def _device(self, seat: Mapping[str, Any]) -> tuple[str, ...]:
        member, attempts = seat["member"], len(seat["holders"])
        state = seat["state"] if attempts < 2 else f"{seat['state']} ({attempts})"
        spent = self.timings.get(member["device"], {})
        parts = [spent.get(part) for part in PARTS]
        rest = spent["wall"] - sum(part or 0.0 for part in parts) if "wall" in spent else None
        seconds = ("–" if value is None else f"{max(0.0, value):.2f}" for value in (*parts, rest))
        name = self.names.get(member["device"], member["device"])
        return (printable(name, 20), printable(member["boundary"], 14), state, *seconds)


def unfit_lines(job: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Say which devices can train nothing of a job, and why."""
    return [printable(f"{names.get(device, device)} cannot take part: {why}") for device, why in job["unfit"].items()]


def waiting_lines(job: Mapping[str, Any]) -> list[str]:
    """Say what a job waits for, if it does."""
    return [printable(f"waiting: {job['waiting']['text']}")] if job.get("waiting") else []


def score_lines(job: Mapping[str, Any], rounds: Rows) -> list[str]:
    """Say which version is the best so far, and what devices last found."""
    told = [row["summary"]["evaluation"] for row in rounds if "evaluation" in row["summary"]]
    return [*([best_line(job["best"])] if job.get("best") else []), *map(device_scores_line, told[-1:])]


def device_scores_line(found: Mapping[str, Any]) -> str:
    """Say how devices scored the version that they received: the mean, the spread over devices, and each tier."""
    name = "accuracy" if "accuracy" in found else "mean_loss"

    def show_value(value: float) -> str:
        return f"{value:.1%}" if name == "accuracy" else f"{value:.4f}"

    spread = found["spread"][name]
    tiers = "".join(f", {printable(tier)} {show_value(own[name])}" for tier, own in found["tiers"].items())
    devices = f"{found['devices']} device{'s' if found['devices'] != 1 else ''}"
    return (
        f"version {found['version']} on {devices}: {name.replace('_', ' ')} {show_value(found[name])} "
        f"({show_value(spread['min'])} to {show_value(spread['max'])}, median {show_value(spread['median'])}){tiers}"
    )


def best_line(best: Mapping[str, Any]) -> str:
    """Say which version is the best so far."""
    name, value = best["metric"].replace("_", " "), best["value"]
    shown = f"{value:.1%}" if "accuracy" in name else f"{value:.4f}"
    return printable(f"best: version {best['version']}, {name} {shown}")


def scores_of(metrics: Rows) -> dict[int, dict[str, float]]:
    """Sort scores by version."""
    found: dict[int, dict[str, float]] = {}
    for row in metrics:
        found.setdefault(row["version"], {})[row["name"]] = row["value"]
    return found


def rounds_table(rounds: Rows, scores: Mapping[int, Mapping[str, float]], *, samples: bool = False) -> Any:
    """Tabulate the rounds that are over and the open one. Round n makes version n + 1."""
    known = deciding_metric(None, {name for row in scores.values() for name in row})
    in_parts = any("parts" in row["summary"] for row in rounds)
    reuses = any(row["summary"].get("reused") for row in rounds)
    rows = []
    for row in rounds:
        told, took = row["summary"], (row["closed_at"] or time.time()) - row["opened_at"]
        cells = [row["number"], row["state"], told.get("updates", "–")]
        cells += [told.get("samples", "–")] if samples else []
        cells += [_parts(told)] if in_parts else []
        cells += [told.get("reused", "–")] if reuses else []
        cells.append(_loss(told.get("loss")))
        if known:
            value = scores.get(row["number"] + 1, {}).get(known) if row["state"] == "committed" else None
            cells.append("–" if value is None else f"{value:.1%}" if "accuracy" in known else f"{value:.4f}")
        received = show.size(told["bytes_up"]) if "bytes_up" in told else "–"
        rows.append((*cells, received, f"{max(0.0, took):.1f}"))
    columns = ["round", "state", "updates", *(["samples"] if samples else [])]
    columns += [*(["parts averaged"] if in_parts else []), *(["reused"] if reuses else []), "training loss"]
    columns += [known.replace("_", " ")] if known else []
    return show.table("rounds", (*columns, "received", "seconds"), rows, left=2)


def _parts(told: Mapping[str, Any]) -> str:
    """Say which part of the model a round synchronised: FedLAMA's layers, or parts that take turns."""
    return f"{len(told['parts'])} of {len(told['facts']['sync']['changed'])}" if "parts" in told else "–"


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def watch_live(client: Client, job: str, on_event: OnEvent) -> str:
    """Show a live view; return the state that the job ended in."""
    from rich.live import Live

    watched, screen, shown = Watched(client, job), show.console(), 0.0
    watched.look()
    with Live(console=screen, auto_refresh=False) as live:
        for event in follow(client, job):
            try:
                if isinstance(event, EmbraceError):
                    watched.silent = f"{event}; trying again"
                elif event is not None:
                    on_event(event)
                    watched.hear(event)
                if event is None or time.monotonic() - shown > REFRESH:
                    shown = time.monotonic()
                    if not isinstance(event, EmbraceError):
                        watched.look()
                    live.update(watched.view(screen.size.height), refresh=True)
            except InputError:
                raise
            except EmbraceError as error:  # between two events
                watched.silent = f"{error}; trying again"
        watched.look()
        live.update(watched.view(screen.size.height), refresh=True)
    return str(watched.job["state"])


class Patience:
    """Find out what a job waits for, once it has waited for the same thing a while."""

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._job = job
        self._asked = time.monotonic()
        self._found: dict[str, Any] | None = None  # what it waited for when it was last asked
        self._told: dict[str, Any] | None = None

    def look(self) -> dict[str, Any] | None:
        """Return what the job waits for if that is news; for when no event has come for a moment."""
        if time.monotonic() - self._asked < STILL:
            return None
        self._asked = time.monotonic()
        try:
            before, self._found = self._found, self._client.job(self._job)["waiting"]
        except EmbraceError:  # the coordinator is away, which `follow` notices, too
            return None
        if self._found is None or self._found != before or self._found == self._told:
            return None
        self._told = self._found
        return self._found


def watch_json(client: Client, job: str, on_event: OnEvent) -> str:
    """Print every event as a line of JSON, and what the job waits for; return the state that the job ended in."""
    patience = Patience(client, job)
    for event in follow(client, job):
        if isinstance(event, dict):
            on_event(event)
            print(json.dumps(event), flush=True)
        elif event is None and (news := patience.look()):
            print(json.dumps({"job": job, "at": time.time(), "kind": "Waiting", "body": news}), flush=True)
    return str(client.job(job)["state"])


def watch_lines(client: Client, job: str, on_event: OnEvent) -> str:
    """Print a line for every round, score and note; return the state that the job ended in."""
    watched, patience = Watched(client, job), Patience(client, job)
    for event in follow(client, job):
        if event is None and (news := patience.look()):
            show.console().print(printable(f"waiting: {news['text']}"), markup=False, soft_wrap=True)
        if event is None or isinstance(event, EmbraceError):
            continue
        on_event(event)
        note, body = watched.hear(event), event["body"]
        line = note.text if note else None
        if event["kind"] == "RoundCommitted":
            line = f"round {body['round']}: {body['updates']} updates, training loss {_loss(body['loss'])}, " + (
                f"{show.size(body['bytes_up'])} received"
            )
        elif event["kind"] == "Evaluated" and "error" not in body:
            scores = {"loss": body.get("mean_loss"), "accuracy": body.get("accuracy")}
            shown = (f"{name} {value:.4f}" for name, value in scores.items() if value is not None)
            line = f"version {body['version']}: " + ", ".join(shown)
        if line:
            show.console().print(line, markup=False)
        if "evaluation" in body:
            show.console().print(device_scores_line(body["evaluation"]), markup=False, soft_wrap=True)
    watched.look()
    told = f": {watched.job['message']}" if watched.job["message"] else ""
    show.console().print(printable(f"{watched.job['state']}, version {watched.job['version']}{told}"), markup=False)
    return str(watched.job["state"])
