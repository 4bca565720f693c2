"""FedLAMA: layers whose local copies hardly differ are synchronised less often.

Lee, Zhang and Avestimehr, Layer-wise Adaptive Model Aggregation for Scalable Federated Learning, AAAI 2023.

    d_l = (1/m) Σ ‖u_l − x_l^i‖² / (τ_l · dim(u_l))           when layer l is synchronised
    δ_l = Σ_{≤l} d·dim / Σ d·dim,   λ_l = Σ_{≤l} dim / Σ dim   layers sorted by d, ascending

A layer is one with parameters of its own (federation/parameter_layers.py): the paper counts 9 of ResNet20's as 80 % of
what is sent, so a residual block is several.

Up to and including the first layer with 1 − λ_l < δ_l they get the interval φτ', the others τ'. (The listing of the
paper prints another comparison; its text and figure say this crossing.) `accelerate` is the mirrored rule, which trades
bytes for speed: sorted descending, from the first layer on until λ_l exceeds 1 − δ_l, layers keep τ'. φ = 1 is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from federation.axes.sync.rule import Sync, SyncFacts, When
from federation.errors import FieldError
from federation.parameter_layers import parameter_layers
from federation.region import Region, of_parameters
from federation.space import ParameterSpace


@dataclass(frozen=True)
class FedLama(Sync):
    """A unit is a parameter layer; τ' is the number of steps of a round, and `factor` is φ."""

    factor: int = 2
    accelerate: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= 1000:
            raise FieldError("factor", f"expected a number from 1 to 1000, got {self.factor}")

    @property
    def window(self) -> int:
        return self.factor

    @property
    def skips_rounds(self) -> bool:
        return self.factor > 1

    @property
    def measures(self) -> bool:
        return True

    def units(self, space: ParameterSpace) -> tuple[Region, ...]:
        return tuple(of_parameters(space, {p.name for p in layer.parameters}) for layer in parameter_layers(space))

    def due(self, when: When, facts: SyncFacts) -> tuple[int, ...]:
        done = when.round + 1
        everything = when.is_last or when.ends_window or done % self.factor == 0
        return tuple(unit for unit, rounds in enumerate(facts.intervals) if everything or done % rounds == 0)

    def learn(self, when: When, facts: SyncFacts, sizes: tuple[int, ...]) -> SyncFacts:
        if (when.round + 1) % self.factor:
            return facts
        choose = faster_intervals if self.accelerate else longer_intervals
        return replace(facts, intervals=choose(facts.discrepancies, sizes, self.factor))


def longer_intervals(discrepancies: tuple[float, ...], sizes: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """Rounds between synchronisations: φ for the layers that cost the least accuracy for the bytes they save."""
    found = [1] * len(sizes)
    costs = [d * size for d, size in zip(discrepancies, sizes)]
    cost, size = 0.0, 0
    for layer in sorted(range(len(sizes)), key=lambda layer: (discrepancies[layer], layer)):
        found[layer] = factor
        cost, size = cost + costs[layer], size + sizes[layer]
        if _share(cost, sum(costs)) > 1 - _share(size, sum(sizes)):
            break
    return tuple(found)


def faster_intervals(discrepancies: tuple[float, ...], sizes: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """The mirrored rule: 1 for the layers that gain the most accuracy for the bytes they cost."""
    found = [factor] * len(sizes)
    costs = [d * size for d, size in zip(discrepancies, sizes)]
    cost, size = 0.0, 0
    for layer in sorted(range(len(sizes)), key=lambda layer: (-discrepancies[layer], layer)):
        found[layer] = 1
        cost, size = cost + costs[layer], size + sizes[layer]
        if _share(size, sum(sizes)) > 1 - _share(cost, sum(costs)):
            break
    return tuple(found)


def _share(part: float, total: float) -> float:
    return part / total if total else 0.0
