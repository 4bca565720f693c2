"""Make an aarch64 userland that runs here under emulation: a virtual environment whose interpreter is a script.

    python -m tests.arm64.userland build/arm64

Debian's packages of Python for arm64 and aarch64 wheels are unpacked into the folder; nothing is installed, and root is
not needed. `bin/python` starts qemu with that Python. To Python its own name is that of the script, so `sys.executable`
is right and child processes are emulated, too, without binfmt.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("apt-get", "dpkg", "dpkg-deb", "tar")
PACKAGES = ("python3:arm64", "libstdc++6:arm64")  # the second for the wheel of onnxruntime
EMULATOR = "qemu-aarch64-static"
PROCESSOR = "cortex-a72"  # of a Raspberry Pi 4; qemu's default, `max`, is many times slower
TOOLS = ("pytest", "pytest-xdist", "hypothesis")
GLIBC = range(17, 37)  # minor versions that wheels may be built for: Debian 12 has 2.36
APT = """
Dir::State "{0}/state";
Dir::State::status "{0}/status";
Dir::Cache "{0}/cache";
APT::Architecture "{1}";
APT::Architectures {{ "{1}"; "arm64"; }};
APT::Install-Recommends "0";
APT::Sandbox::User "root";
Acquire::Languages "none";
Debug::NoLocking "1";
"""
# What onnxruntime looks at when it is loaded; that of the host would crash it.
CPUINFO = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd08
CPU revision\t: 3
"""
INTERPRETER = """#!/bin/sh
exec '{emulator}' -cpu {processor} -L '{root}' -0 '{here}/bin/python' '{root}/usr/bin/{python}' "$@"
"""


def make(folder: Path) -> None:
    """Replace the folder by a new userland."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    root = folder / "root"
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        emulator = _unpack_packages(Path(downloads), root, folder / "bin")
    (root / "proc").mkdir()
    (root / "proc" / "cpuinfo").write_text(CPUINFO)
    python = (root / "usr" / "bin" / "python3").readlink().name
    (folder / "pyvenv.cfg").write_text(f"home = {root}/usr/bin\ninclude-system-site-packages = false\n")
    script = folder / "bin" / "python"
    script.write_text(INTERPRETER.format(emulator=emulator, processor=PROCESSOR, root=root, here=folder, python=python))
    script.chmod(0o755)
    packages = folder / "lib" / python / "site-packages"
    _install_wheels(packages, python.removeprefix("python"))
    (packages / "embrace.pth").write_text(f"{ROOT}\n")


def _unpack_packages(downloads: Path, root: Path, programs: Path) -> str:
    """Unpack Python into `root`, and the emulator into `programs` unless the system has it; return its path."""
    own = _run("dpkg", "--print-architecture").strip()
    (downloads / "state/lists/partial").mkdir(parents=True)
    (downloads / "cache/archives/partial").mkdir(parents=True)
    (downloads / "status").touch()
    (downloads / "apt.conf").write_text(APT.format(downloads, own))
    os.environ["APT_CONFIG"] = str(downloads / "apt.conf")
    _run("apt-get", "update")
    _run("apt-get", "install", "--download-only", "--yes", *PACKAGES)
    for package in (downloads / "cache/archives").glob("*_arm64.deb"):
        _run("dpkg-deb", "--extract", str(package), str(root))
    installed = shutil.which(EMULATOR)
    if installed is None:
        _run("apt-get", "download", f"qemu-user-static:{own}", cwd=downloads)
        (package,) = downloads.glob("qemu-user-static_*.deb")
        _run("sh", "-c", f"dpkg-deb --fsys-tarfile '{package}' | tar -xC '{downloads}' ./usr/bin/{EMULATOR}")
        installed = str(shutil.move(downloads / "usr/bin" / EMULATOR, programs / EMULATOR))
    return installed


def _install_wheels(packages: Path, version: str) -> None:
    """Install what a device has, and the test tools, as wheels for aarch64."""
    wanted = [Requirement(text) for text in requires("embrace-fl") or ()]
    roles = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": "edge-base"})]
    names = [f"{one.name}{one.specifier}" for one in roles]
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in GLIBC] + ["--platform=manylinux2014_aarch64"]
    only = ("--only-binary=:all:", "--implementation=cp", f"--python-version={version}", *platforms)
    _run(sys.executable, "-m", "pip", "install", f"--target={packages}", *only, *names, "onnxruntime", *TOOLS)


def _run(*command: str, cwd: Path | None = None) -> str:
    answer = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if answer.returncode:
        last = (answer.stderr or answer.stdout).strip().splitlines()[-1:] or ["no message"]
        raise SystemExit(f"cannot make an aarch64 userland: {' '.join(command[:2])} failed: {last[0]}")
    return answer.stdout


def main() -> None:
    """Make the userland of the command line, or say in one line what this machine lacks."""
    if platform.machine() in ("aarch64", "arm64"):
        raise SystemExit("this machine is an aarch64 one: `make test` runs every test on it, without emulation")
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        raise SystemExit(
            f"needs {', '.join(missing)}: the aarch64 userland is made of Debian's packages; run it on a Debian"
        )
    make(Path(sys.argv[1]).resolve())


if __name__ == "__main__":
    main()
