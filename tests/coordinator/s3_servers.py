"""S3 servers for tests: rclone, which checks signatures and keeps objects as files, and moto, which imitates AWS."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until

BUCKET = "embrace"
KEY, SECRET = "tester", "not-a-real-secret"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
RCLONE = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
MISSING = {
    "boto3": importlib.util.find_spec("boto3") is None,
    "rclone": RCLONE is None,
    "moto": importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None,
}


class S3Server:
    """A server on a port of its own, which can be ended and started again."""

    def __init__(self, kind: str, folder: Path) -> None:
        for name in ("boto3", kind):
            if MISSING[name]:
                pytest.skip(f"{name} is missing: make test-scale")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{self._address}"
        self.folder = folder
        self.kind = kind
        (folder / BUCKET).mkdir(parents=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        if self.kind == "rclone":
            key = f"--auth-key={KEY},{SECRET}"
            command = [str(RCLONE), "serve", "s3", str(self.folder), "--addr", self._address, key]
        else:
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", self._address.rpartition(":")[2]]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env={**os.environ, "RCLONE_CONFIG": ""})
        wait_until(self._answers)
        if self.kind == "moto":
            self.client().create_bucket(Bucket=BUCKET)

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None
        host, _, port = self._address.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return True
        return False

    def client(self):
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def s3_server(kind: str, folder: Path) -> Iterator[S3Server]:
    """Run a server while the block runs, and name it in the environment as users do."""
    server = S3Server(kind, folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": server.url}.items():
            patch.setenv(name, value)
        try:
            yield server
        finally:
            server.kill()
