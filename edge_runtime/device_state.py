"""What a device keeps between tasks, as files: one for each task that was answered, under the task's name.

A file is written before the update is sent, and those of earlier tasks go when the coordinator has acknowledged it. So
whenever the device dies, the file of the last task that counts is there; the coordinator names that task.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from edge_runtime.client import Declined, DeviceClient, NotUnderstood
from edge_runtime.files import remove
from edge_runtime.logs import get_logger
from edge_runtime.participant import Contribution
from edge_runtime.state_file import load_state, save_state
from federation.device_task import Kept
from federation.errors import InputError
from federation.identity import is_plain

log = get_logger("embrace.agent")
OVER = ("stopped", "done", "failed")  # states of a job that does not go on
_SUFFIX = ".kept"


class KeptFiles:
    """The folder of one job. `server` is the address of its coordinator, if there is one."""

    def __init__(self, folder: Path, *, server: str = "", durable: bool = True) -> None:
        self.folder = folder
        self._server = server
        self._durable = durable

    def load(self, task: str) -> Kept | None:
        path = self._path(task)
        if not is_plain(task) or not path.is_file():
            return None
        try:
            vectors, about = load_state(path)
            walked = tuple(map(float, about["walked"].split()))
            return Kept(task, about["boundary"], vectors, walked, int(about.get("steps", 0)))
        except (InputError, KeyError, ValueError) as error:
            log.warning("what was kept of task %s is lost: %s", task, error)
            return None

    def save(self, task: str, boundary: str, contribution: Contribution) -> None:
        if contribution.kept:
            walked, steps = " ".join(map(repr, contribution.walked)), str(contribution.steps)
            about = {"boundary": boundary, "walked": walked, "steps": steps, "server": self._server}
            save_state(self._path(task), contribution.kept, about, durable=self._durable)

    def tasks(self) -> list[str]:
        """List the tasks of which something is kept."""
        return [path.name.removesuffix(_SUFFIX) for path in self.folder.glob(f"*{_SUFFIX}")]

    def acknowledged(self, task: str, *, but: str | None = None) -> None:
        """Remove the state of all tasks but this one and `but`, which the coordinator may still go back to."""
        for old in self.tasks():
            if old not in (task, but):
                remove(self._path(old))

    def belongs_to(self, server: str) -> bool:
        """Whether all that is kept comes from tasks of a coordinator."""
        return all(load_state(self._path(task))[1].get("server") == server for task in self.tasks())

    def _path(self, task: str) -> Path:
        return self.folder / f"{task}{_SUFFIX}"


def forget_finished(folder: Path, client: DeviceClient, besides: str = "") -> None:
    """Remove the folders of jobs that are over, or that this coordinator has deleted. Another's stay."""
    for other in folder.glob("*"):
        with suppress(Declined, NotUnderstood, InputError):
            if other.name != besides and is_plain(other.name) and _is_over(other, client):
                shutil.rmtree(other, ignore_errors=True)


def _is_over(folder: Path, client: DeviceClient) -> bool:
    try:
        return client.job_state(folder.name) in OVER
    except Declined as error:
        return error.answer == 404 and KeptFiles(folder).belongs_to(client.server)
