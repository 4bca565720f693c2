"""The parser of updates under fire: atheris changes bodies, guided by which lines of the parser they reach.

    python -m tests.fuzz.fuzz_wire --seconds 20

The parser may refuse a body, with a WireError. What it accepts, the safetensors library has to read as the same finite
numbers, in whatever pieces the body came.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy

from federation.space import Parameter, ParameterSpace

try:
    import atheris
except ModuleNotFoundError:
    sys.exit("atheris is not installed here (it has wheels for Linux on x86-64 only); nothing was tried")

with atheris.instrument_imports(include=["federation"]):
    from federation import wire

SPACE = ParameterSpace(
    [[Parameter("a", "weight", (2, 3))], [Parameter("b.w", "weight", (4,)), Parameter("b.s", "statistic", ())]]
)
LIMITS = wire.Limits(max_header_bytes=4096, max_tensors=16, max_name_length=64, max_norm=1e6, max_value=1e4)


def one(data: bytes) -> None:
    """The first byte says from which layer on, the second in what pieces; the rest is a body."""
    first, piece, body = data[:1] != b"\0", 1 + sum(data[1:2]), data[2:]
    decoder = wire.UpdateDecoder(wire.layers_layout(SPACE, int(first)), LIMITS)
    try:
        for start in range(0, len(body), piece):
            decoder.feed(body[start : start + piece])
        checked = decoder.finish()
    except wire.WireError:
        return
    found = np.full(SPACE.size, np.nan, np.float32)
    for run, values in wire.read_blocks(io.BytesIO(body), checked.model):
        found[run.start : run.stop] = values
    expected = safetensors.numpy.load(body)
    for parameter in (p for layer in SPACE.layers[int(first) :] for p in layer):
        values = found[SPACE.slice_of(parameter.name)]
        assert np.isfinite(values).all(), parameter
        assert values.tobytes() == expected.pop(parameter.name).tobytes(), parameter
    assert not expected, expected


def _seeds(folder: Path) -> None:
    """Good bodies to start from: ours, and the library's."""
    rng = np.random.default_rng(0)
    for first in range(len(SPACE.layers)):
        where = SPACE.suffix(first)
        vector = rng.standard_normal(where.stop - where.start).astype(np.float32)
        ours = b"".join(map(bytes, wire.encode_layers(SPACE, first, vector)))
        (folder / f"ours-{first}").write_bytes(bytes([first, 200]) + ours)
        tensors = {p.name: np.ones(p.shape, np.float32) for layer in SPACE.layers[first:] for p in layer}
        (folder / f"library-{first}").write_bytes(bytes([first, 3]) + safetensors.numpy.save(tensors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--corpus", type=Path, help="directory of bodies to start from; others are added")
    given = parser.parse_args()
    if given.corpus is None:  # atheris ends the process that it runs in
        with tempfile.TemporaryDirectory() as folder:
            _seeds(Path(folder))
            again = [sys.executable, "-m", "tests.fuzz.fuzz_wire", "--seconds", str(given.seconds), "--corpus", folder]
            sys.exit(subprocess.run(again).returncode)
    for body in sorted(given.corpus.iterdir()):
        one(body.read_bytes())
    options = [f"-max_total_time={given.seconds}", "-max_len=4096", "-print_final_stats=1", "-verbosity=0"]
    options.append(f"-artifact_prefix={given.corpus}/")  # what it stumbles over it prints, too
    atheris.Setup([sys.argv[0], *options, str(given.corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
