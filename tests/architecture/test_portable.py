"""What Windows lacks is used only where a branch asks for it first: in edge_runtime/system.py and as listed here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.stock_python import ROOT

ROOMS = ("federation", "edge_runtime", "coordinator", "model_export", "simulation", "bench", "embrace")
MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}
# Python's documentation: "Availability: Unix".
NAMES = {
    "os": {
        *("fork", "forkpty", "getloadavg", "getpgid", "getpgrp", "getuid", "geteuid", "getgid", "killpg", "mkfifo"),
        *("nice", "posix_fallocate", "posix_spawn", "pread", "pwrite", "sched_getaffinity", "sched_setaffinity"),
        *("sendfile", "setpgid", "setsid", "statvfs", "sysconf", "uname", "wait", "waitid", "fchmod", "chown"),
        *("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "WNOHANG"),
    },
    "signal": {
        *("SIGKILL", "SIGSTOP", "SIGCONT", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE"),
        *("alarm", "setitimer", "pause", "pthread_kill", "pthread_sigmask", "sigwait"),
    },
    "socket": {"AF_UNIX", "SO_REUSEPORT", "TCP_USER_TIMEOUT", "socketpair"},
    "select": {"poll", "epoll", "kqueue"},
}
OPTIONS = {"start_new_session", "preexec_fn", "process_group"}  # of Popen: Windows ignores or refuses them
CALLS = {"add_signal_handler"}  # of an event loop
# The class of each system; the fork that only Linux does; names behind `hasattr` or `try`.
ALLOWED = {
    "edge_runtime/system.py": {"killpg", "SIGKILL"},
    "edge_runtime/trial.py": {"fork", "SIGKILL", "resource"},
    "edge_runtime/data/tokenise.py": {"resource"},
    "edge_runtime/activations.py": {"posix_fallocate"},
    "edge_runtime/machine.py": {"getloadavg", "sched_getaffinity", "sysconf"},
    "edge_runtime/memory.py": {"sysconf"},
    "coordinator/scoring.py": {"resource"},
    "coordinator/server.py": {"TCP_USER_TIMEOUT"},
    "simulation/simulate.py": {"sched_getaffinity"},
    "bench/device/browser.py": {"geteuid"},
    "bench/fleet.py": {"SIGSTOP", "SIGCONT"},
    "bench/processes.py": {"sysconf"},
    "bench/server/process.py": {"sysconf"},
    "bench/server/scaling.py": {"getloadavg", "sched_getaffinity", "sched_setaffinity", "sysconf"},
    "bench/server/services.py": {"geteuid"},
}


def found_in(path: Path) -> set[str]:
    """List what a file uses that Windows lacks."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} & NAMES.get(node.value.id, set())
        if isinstance(node, ast.Attribute):
            found |= {node.attr} & CALLS
        if isinstance(node, ast.keyword):
            found |= {node.arg or ""} & OPTIONS
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names} & NAMES.get(node.module or "", set())
            found |= {node.module or ""} & MODULES
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_posix_is_asked_for_before_it_is_used(room: str) -> None:
    for path in sorted((ROOT / room).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        assert found_in(path) == ALLOWED.get(name, set()), (
            f"{name}: ask edge_runtime/system.py, or guard it and list it"
        )


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text("import os, pwd\nfrom signal import SIGKILL\nos.killpg(1, 2)\nPopen([], start_new_session=True)\n")
    assert found_in(file) == {"pwd", "SIGKILL", "killpg", "start_new_session"}
