"""What of the model goes to and fro in a task, and what the device keeps.

replaced   units that changed since the device last took part: the server's value is taken
kept       all others: the device goes on with its own, if it still has it
sent       the difference from the server's value, over the units that are asked for
tracks     beside the model, as the local rules declare: SCAFFOLD's control variates, momenta that are averaged
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from federation.axes.sync import SYNC, Sync, WholeModel
from federation.coverage import Coverage
from federation.errors import FieldError, InputError
from federation.identity import is_plain
from federation.layout import MODEL
from federation.manifest import Manifest
from federation.region import Piece, Region, box, of_layers, of_parameters, whole
from federation.space import ParameterSpace


@dataclass(frozen=True)
class Inherit:
    """Take over the local model of an earlier task, which trained this boundary."""

    task: str
    boundary: str


@dataclass(frozen=True)
class Exchange:
    """The server's half of the agreement; the default is FedAvg: everything is replaced, everything is sent."""

    sync: Annotated[Sync, SYNC] = field(default_factory=WholeModel)
    sent: tuple[int, ...] = (0,)  # units
    changed: tuple[int, ...] = (0,)  # version in which each unit got its present value
    window_from: int = 0  # round since which the cohort is the same
    last_round: int | None = None  # in which this device last took part with success
    last_task: str | None = None  # ... and its task: what was kept then is valid
    inherit: Inherit | None = None  # from the device that had this place before the window
    tracks: tuple[str, ...] = ()  # beside the model
    fuse: float | None = None  # DOMO: 1/(αηP) of the round before, whose move is the server's momentum

    def __post_init__(self) -> None:
        units = range(len(self.changed))
        if not self.changed or not set(self.sent) <= set(units) or len(set(self.sent)) != len(self.sent):
            raise FieldError("sent", f"expected units among {len(self.changed)}, each once, got {self.sent}")
        if len(set(self.tracks)) != len(self.tracks) or MODEL in self.tracks or not all(map(is_plain, self.tracks)):
            raise FieldError("tracks", f"expected plain names beside the model, each once, got {self.tracks}")

    @property
    def replaced(self) -> tuple[int, ...]:
        """Units that the device does not have: all, if it was not in this window before."""
        since = self.last_round if self.last_round is not None and self.last_round >= self.window_from else None
        return tuple(unit for unit, version in enumerate(self.changed) if since is None or version > since)

    @property
    def keeps_model(self) -> bool:
        """Whether the device has to keep weights of its own."""
        return len(self.changed) > 1 or self.sync.skips_rounds


def graph_region(manifest: Manifest, covered: Coverage) -> Region:
    """What the training graph of a coverage works on."""
    narrow, space = covered.boundary.narrow, manifest.space
    if narrow is not None:
        return box(space, narrow)
    return of_layers(space, range(covered.boundary.layer, len(space.layers)))


def trained_region(manifest: Manifest, covered: Coverage) -> Region:
    """What a device with this coverage changes."""
    return graph_region(manifest, covered) & of_layers(manifest.space, covered.layers)


def measured_region(manifest: Manifest, covered: Coverage) -> Region:
    """What a device with this coverage measures: statistics of batch norms in front of what it trains."""
    front = manifest.layers[: covered.boundary.layer] if covered.measures else ()
    return of_parameters(manifest.space, {name for layer in front for name in layer.measured})


def update_regions(manifest: Manifest, covered: Coverage, tracks: Iterable[str]) -> dict[str, Region]:
    """What an update of a coverage has if everything is due: what was trained, and of the model what was measured."""
    trained = trained_region(manifest, covered)
    return {MODEL: measured_region(manifest, covered) | trained, **dict.fromkeys(tracks, trained)}


def units_region(sync: Sync, space: ParameterSpace, units: Sequence[int]) -> Region:
    """Some units together: all of them, one, or several that have no parameter in common."""
    regions = sync.units(space)
    if len(units) == len(regions):
        return regions[0] if len(regions) == 1 else whole(space)
    found: dict[str, Piece] = {}
    for piece in (piece for unit in units for layer in regions[unit].layers for piece in layer):
        if found.setdefault(piece.parameter.name, piece) is not piece:
            raise InputError(f"units {units} have {piece.parameter.name!r} in common and cannot be sent together")
    return Region(tuple(tuple(found[p.name] for p in layer if p.name in found) for layer in space.layers))
