"""Score a version of the weights in a process of its own: whatever happens to it, the coordinator goes on.

python -m coordinator.scoring < request.json > score.json
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from federation.errors import EmbraceError

LONGEST = 3600.0  # seconds


@dataclass(frozen=True)
class Evaluation:
    """What to score."""

    job: str
    version: int
    bundle: Path
    weights: Path
    data: str
    statistics: str = "global"  # of batch norm


def score(request: Evaluation) -> dict[str, Any]:
    """Start the process and return what it found, or an error in words."""
    # Seen from the coordinator's folder, which is not that of the process: data may be FILE.py:NAME as well.
    places = {"bundle": request.bundle, "weights": request.weights, "data": Path(request.data)}
    given = {**{name: str(place.absolute()) for name, place in places.items()}, "statistics": request.statistics}
    answer = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
        cwd=Path(__file__).resolve().parents[1],
    )
    if answer.returncode:
        return {"error": (answer.stderr.strip().splitlines() or ["no message"])[-1]}
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def main() -> None:
    """Read a request from standard input and write its score to standard output."""
    from edge_runtime.evaluate_version import score_version  # here: the coordinator itself never loads a runtime

    request = json.load(sys.stdin)
    try:
        found = score_version(Path(request["bundle"]), Path(request["weights"]), request["data"], request["statistics"])
    except EmbraceError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
