"""Certificates for tests, made by openssl: good ones, and every kind that a client has to refuse."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

LONG_AGO, LAST_YEAR, FAR_AWAY = "20000101000000Z", "20010101000000Z", "20980101000000Z"
NEVER = "20990101000000Z"
_AUTHORITY = """
[ca]
default_ca = own
[own]
database = {folder}/index.txt
serial = {folder}/serial
new_certs_dir = {folder}
certificate = {folder}/authority.pem
private_key = {folder}/authority.key
default_md = sha256
policy = any
copy_extensions = copy
x509_extensions = leaf
[any]
commonName = supplied
[leaf]
basicConstraints = critical,CA:FALSE
"""


class Authority:
    """A certificate authority in a folder; `file` is what its clients trust."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl to make certificates")
        folder.mkdir(parents=True)
        self.folder = folder
        self.file = folder / "authority.pem"
        (folder / "index.txt").touch()
        (folder / "serial").write_text("01\n")
        (folder / "ca.cnf").write_text(_AUTHORITY.format(folder=folder))
        extensions = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"]
        self._new_key("authority.key", "/CN=test authority", ["-x509", "-days", "3650", *extensions, "-out", self.file])

    def issue(self, name: str, *, host: str = "DNS:localhost,IP:127.0.0.1", start: str = "", end: str = NEVER) -> Path:
        """Make a certificate, with its key beside it (NAME.key)."""
        request, made = self.folder / f"{name}.csr", self.folder / f"{name}.pem"
        self._new_key(f"{name}.key", f"/CN={name}", ["-addext", f"subjectAltName={host}", "-out", request])
        days = ["-enddate", end, *(["-startdate", start] if start else [])]
        config = self.folder / "ca.cnf"
        _openssl(["ca", "-batch", "-notext", "-config", config, *days, "-in", request, "-out", made])
        return made

    def _new_key(self, name: str, subject: str, more: list[object]) -> None:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        _openssl(["req", *curve, "-subj", subject, "-keyout", self.folder / name, *more])


def tls_options(certificate: Path) -> list[str]:
    """Options of `embrace serve`."""
    return ["--tls-certificate", str(certificate), "--tls-key", str(certificate.with_suffix(".key"))]


def _openssl(arguments: list[object]) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
