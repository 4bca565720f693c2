"""The sums of a round in a file: those that a version was made of, or a part of them that one worker has folded.

    jobs/JOB/versions/N.sums            the sums that made version N of version N - 1; they go with version N - 1
    spool/JOB-ROUND-sum.SECRET.sums     a partial sum until its round is closed, where processes share the database

Such a file is safetensors: for every track an int64 vector as long as the model (federation/accumulate.py says what its
integers are), and in the header's notes, under `sums`, JSON with the number of the round, the `draws` that bound its
weights, how many `devices` had taken part in the job by then, and for every track what else its sums have. Version N is
what `RoundEngine.changes` makes of version N - 1 and these:

    stored = read_sums(versions.sums(job, N), engine.space)
    sums = stored.as_round(engine, facts)
    changes = engine.changes(sums, versions.read(job, N - 1, engine.space, engine.vector_names), stored.devices)

Median and trimmed mean sum nothing, so their versions have no such file; nor has one that an earlier program made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from federation.accumulate import Accumulator
from federation.algorithm import Facts
from federation.engine import RoundEngine
from federation.errors import InputError
from federation.round_sums import RoundSums
from federation.safetensors_codec import PREFIX, decode_header, encode_header, header_length
from federation.space import ParameterSpace

ALIGNMENT = 64
MOST_HEADER = 1 << 28  # bytes: every part of every layer that devices covered
_NOTE = "sums"


@dataclass(frozen=True)
class StoredSums:
    """What a file of sums has."""

    round: int
    draws: int
    devices: int
    totals: dict[str, Accumulator]  # by track

    def as_round(self, engine: RoundEngine, facts: Facts) -> RoundSums:
        """Return them as the sums of their round; `facts` are those at its beginning."""
        sums = engine.sums(self.round, facts, self.draws)
        for name, total in self.totals.items():
            sums.merge(name, total)
        return sums


def write_sums(path: Path, sums: RoundSums, devices: int = 0) -> None:
    """Write the sums of a round; `devices` have taken part in the job so far, which a part of them need not know."""
    dumped = {name: total.dump() for name, total in sums.totals.items()}
    facts = {"round": sums.number, "draws": sums.draws, "devices": devices}
    notes = {_NOTE: json.dumps({**facts, "tracks": {name: header for name, (header, _) in dumped.items()}})}
    shapes = [(name, vector.shape) for name, (_, vector) in dumped.items()]
    with path.open("wb") as file:
        file.write(encode_header(shapes, ALIGNMENT, notes, dict.fromkeys(dumped, "I64")))
        for _, vector in dumped.values():
            file.write(vector.astype("<i8", copy=False).data)


def read_sums(path: Path, space: ParameterSpace) -> StoredSums:
    """Read sums of a model; InputError if they are none."""
    with path.open("rb") as file:
        length = header_length(file.read(PREFIX), MOST_HEADER)
        header = decode_header(file.read(length), any_dtype=True)
    try:
        facts = json.loads(header.notes[_NOTE])
        if PREFIX + length + header.size != path.stat().st_size or facts["tracks"].keys() != header.offsets.keys():
            raise ValueError
        totals = {}
        for name, begin in header.offsets.items():
            if header.dtypes[name] != "I64":
                raise ValueError
            vector = np.memmap(path, "<i8", "r", PREFIX + length + begin, tuple(header.shapes[name]))
            totals[name] = Accumulator.load(space, facts["tracks"][name], vector)
        return StoredSums(int(facts["round"]), int(facts["draws"]), int(facts["devices"]), totals)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"{path.name} holds no sums of a round, or not all of them") from None
