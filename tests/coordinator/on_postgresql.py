"""Run tests with their coordinators on PostgreSQL: a server of its own, on a socket in a temporary folder.

    python -m tests.coordinator.on_postgresql tests/coordinator -q

The programs are Debian's (package postgresql-15) or those of the PATH. The server refuses to run as root: then it runs
as the user `postgres`, whom the package brings.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEBIAN = Path("/usr/lib/postgresql/15/bin")
# Many short tests, each with connections of its own. Nothing here has to survive a loss of power: not even the kill
# matrix, which kills coordinators and not this server.
OPTIONS = {"listen_addresses": "", "max_connections": "400", "fsync": "off", "max_locks_per_transaction": "256"}


class PostgresMissing(Exception):
    """The programs are not here."""


@contextmanager
def postgresql(options: Mapping[str, str] = OPTIONS) -> Iterator[str]:
    """Start a server; the value is its URL. It ends with the block."""
    found = shutil.which("initdb", path=f"{DEBIAN}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise PostgresMissing("PostgreSQL is missing: apt install postgresql-15")
    programs, run_as = Path(found).resolve().parent, _user()
    folder = Path(tempfile.mkdtemp(prefix="embrace-postgresql-"))
    try:
        if "user" in run_as:
            shutil.chown(folder, run_as["user"])
        data, log = folder / "data", folder / "log"
        command = [str(programs / "initdb"), "-D", str(data), "-U", "embrace", "-A", "trust", "-E", "UTF8"]
        subprocess.run([*command, "--locale=C", "--no-sync"], check=True, capture_output=True, cwd=folder, **run_as)
        given = [f"-c{name}={value}" for name, value in {**options, "unix_socket_directories": str(folder)}.items()]
        with log.open("wb") as out:
            server = subprocess.Popen(
                [str(programs / "postgres"), "-D", str(data), *given], stdout=out, stderr=out, cwd=folder, **run_as
            )
        try:
            ready = [str(programs / "pg_isready"), "-q", "-h", str(folder), "-U", "embrace", "-d", "postgres"]
            while subprocess.run(ready, check=False).returncode:
                if server.poll() is not None:
                    raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text()}")
                time.sleep(0.05)
            yield f"postgresql+psycopg://embrace@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGQUIT)  # at once: nothing of it is needed any more
            server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _user() -> dict[str, Any]:
    if os.geteuid():
        return {}
    try:
        known = pwd.getpwnam("postgres")
    except KeyError:
        raise PostgresMissing("PostgreSQL does not run as root, and there is no user postgres") from None
    return {"user": known.pw_name, "group": known.pw_gid, "extra_groups": []}


def main() -> int:
    try:
        with postgresql() as url:
            environment = {**os.environ, "EMBRACE_TEST_POSTGRESQL": url}
            return subprocess.run([sys.executable, "-m", "pytest", *sys.argv[1:]], env=environment).returncode
    except PostgresMissing as error:
        print(f"skipped: {error}")
        return 0


if __name__ == "__main__":
    sys.exit(main())
