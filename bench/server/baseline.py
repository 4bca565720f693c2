"""The least a server can do, to compare with: `python -m bench.server.baseline DIRECTORY PARAMETERS`.

It sends the weights, reads each body from its socket, writes it to a file and adds it into a vector of doubles. It
knows no device, checks nothing and survives nothing. Prints its port. One thread per connection; HTTP as far as needed.

    GET   /weights    DIRECTORY/weights, PARAMETERS float32
    PUT   /update     as many float32
    POST  /close      weights ← weights + mean of the updates; the bodies are removed
"""

from __future__ import annotations

import socket
import sys
import threading
from io import BufferedReader
from itertools import count
from pathlib import Path

import numpy as np

CHUNK = 1 << 18  # bytes
BACKLOG = 1024


class Baseline:
    """The state of the baseline: files and a sum."""

    def __init__(self, directory: Path, parameters: int) -> None:
        self._directory = directory
        self._size = 4 * parameters
        self._sum = np.zeros(parameters)
        self._lock = threading.Lock()
        self._numbers = count()
        self._bodies: list[Path] = []

    def serve(self, connection: socket.socket) -> None:
        """Serve one client, request after request."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, connection.makefile("rb") as stream:
            while (line := stream.readline()).strip():
                while stream.readline().strip():
                    pass
                match line.split(b" ")[0]:
                    case b"GET":
                        self._send(connection)
                    case b"PUT":
                        self._take(stream)
                        connection.sendall(b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n")
                    case _:
                        self._close()
                        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    def _send(self, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % self._size)
        with (self._directory / "weights").open("rb") as file:
            connection.sendfile(file)

    def _take(self, stream: BufferedReader) -> None:
        path = self._directory / f"{next(self._numbers)}.body"
        buffer = memoryview(bytearray(CHUNK))
        with path.open("wb", buffering=0) as file:
            for start in range(0, self._size, CHUNK):
                part = buffer[: min(CHUNK, self._size - start)]
                if stream.readinto(part) != len(part):
                    raise ConnectionError("the body ended too early")
                file.write(part)
                with self._lock:
                    self._sum[start // 4 : (start + len(part)) // 4] += np.frombuffer(part, "<f4")
        with self._lock:
            self._bodies.append(path)

    def _close(self) -> None:
        with self._lock:
            weights = np.fromfile(self._directory / "weights", "<f4")
            self._sum /= len(self._bodies)
            self._sum += weights
            self._sum.astype("<f4").tofile(self._directory / "weights")
            self._sum[:] = 0
            for path in self._bodies:
                path.unlink()
            self._bodies = []


def main() -> None:
    baseline = Baseline(Path(sys.argv[1]), int(sys.argv[2]))
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=baseline.serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
