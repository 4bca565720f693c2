"""A device's own credential: kept from last time, or given by the coordinator in exchange for an enrolment token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from edge_runtime.client import DeviceClient
from edge_runtime.files import make_folder, replacing
from federation.errors import InputError

FILE_NAME = "credentials.json"


def credential(
    server: str,
    token: str | None,
    name: str,
    profile: Mapping[str, object],
    work: Path,
    certificate: str | Path | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> str:
    """Return the device's own token for a coordinator; enrol if there is none yet, and notify of another name."""
    file = work / FILE_NAME
    try:
        known = json.loads(file.read_text()) if file.is_file() else {}
    except (ValueError, OSError):
        known = None
    if not isinstance(known, dict):
        raise InputError(f"{file} is damaged: expected tokens as JSON; delete it and enrol again")
    if server not in known:
        if token is None:
            raise InputError(f"this device is not enrolled at {server}: give --token with an enrolment token")
        with DeviceClient(server, token, certificate=certificate) as enrolling:
            _, known[server] = enrolling.enrol(name, dict(profile))
            if enrolling.name not in ("", name):
                notify(f"enrolled as {enrolling.name}: the name {name} is taken")
        with replacing(file, mode=0o600) as draft:
            draft.write(json.dumps(known).encode())
    return str(known[server])


def check_work_folder(work: Path) -> None:
    """Refuse a folder that cannot be written, before a use of the enrolment token is spent."""
    try:
        make_folder(work)
        (work / "writable").touch()
        (work / "writable").unlink()
    except OSError as error:
        raise InputError(f"cannot use {work}: {error.strerror}") from None
