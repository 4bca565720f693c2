"""The local learning rate of every round: constant, warm-up, step decay or cosine.

0.1                          constant
0.4/10@800,900               divided by 10 after 800 rounds, and again after 900
0.1 warmup 5                 a fifth of it in the first round, all of it from the fifth on
0.1 warmup 5 cosine 50       after the warm-up half a cosine wave, zero from round 50 on
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from federation.errors import InputError

GRAMMAR = "RATE[/DIVISOR@ROUND,ROUND,...] [warmup ROUNDS] [cosine ROUNDS]"

_RATE = re.compile(r"(?P<rate>[^/@]+)(?:/(?P<divisor>[^/@]+)@(?P<rounds>[^/@]+))?")
_ROUND = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Schedule:
    """A rate for every round, counted from 0.

    >>> [Schedule(0.4, warm_up=2, decay_rounds=(3,), decay_factor=0.5).at(r) for r in range(5)]
    [0.2, 0.4, 0.4, 0.2, 0.2]
    """

    rate: float
    warm_up: int = 0  # rounds that climb linearly, from rate / warm_up to rate
    decay_rounds: tuple[int, ...] = ()  # after so many rounds the rate is multiplied by decay_factor
    decay_factor: float = 0.1
    cosine_rounds: int | None = None  # after the warm-up the rate falls like a cosine, to zero in this round

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise InputError(f"rate: expected a finite number above 0, got {self.rate}")
        if self.warm_up < 0:
            raise InputError(f"warm_up: expected 0 or more rounds, got {self.warm_up}")
        if any(later <= earlier for earlier, later in zip((0, *self.decay_rounds), self.decay_rounds)):
            raise InputError(f"decay_rounds: expected ascending numbers above 0, got {self.decay_rounds}")
        if not 0 < self.decay_factor <= 1:
            raise InputError(f"decay_factor: expected a number above 0 and at most 1, got {self.decay_factor}")
        if self.cosine_rounds is not None and self.cosine_rounds <= self.warm_up:
            raise InputError(
                f"cosine_rounds: expected more than the {self.warm_up} rounds of warm-up, got {self.cosine_rounds}"
            )
        if self.cosine_rounds is not None and self.decay_rounds:
            raise InputError("expected either decay_rounds or cosine_rounds, got both")

    def at(self, round_number: int) -> float:
        """The rate of a round; the first round is 0."""
        if round_number < 0:
            raise InputError(f"round_number: expected 0 or more, got {round_number}")
        decays = sum(after <= round_number for after in self.decay_rounds)
        rate = self.rate * self.decay_factor**decays
        if round_number < self.warm_up:
            return rate * ((round_number + 1) / self.warm_up)  # in this order it is the rate itself at the end
        if self.cosine_rounds is None:
            return rate
        share = (round_number - self.warm_up) / (self.cosine_rounds - self.warm_up)
        return rate * (1 + math.cos(math.pi * share)) / 2 if share < 1 else 0.0


def two_sided_rates(rounds: int, steps: int, cohort: int, smoothness: float) -> tuple[float, float]:
    """The rates that the theory of generalised FedAvg recommends: local 1/(√T·K·L), server √(K·n)."""
    if min(rounds, steps, cohort) < 1 or not 0 < smoothness < math.inf:
        raise InputError(
            "expected rounds, steps and cohort of at least 1 and a finite smoothness above 0, "
            f"got {rounds}, {steps}, {cohort} and {smoothness}"
        )
    return 1 / (math.sqrt(rounds) * steps * smoothness), math.sqrt(steps * cohort)


def parse_schedule(text: str) -> Schedule:
    """A schedule from one line; see the top of this file."""
    rate, *options = text.split() or [""]
    match = _RATE.fullmatch(rate)
    if match is None:
        raise _unreadable(text, f"{rate!r} is not RATE or RATE/DIVISOR@ROUND,ROUND,...")
    divisor = _number(text, match["divisor"] or "10")
    if not 1 <= divisor < math.inf:
        raise _unreadable(text, f"the divisor must be at least 1, not {divisor:g}")
    given: dict[str, int] = {}
    for word, rounds in zip(options[::2], [*options[1::2], ""]):
        if word not in ("warmup", "cosine") or word in given:
            raise _unreadable(text, f"{word!r} appears twice" if word in given else f"{word!r} is no option")
        given[word] = _rounds(text, rounds)
    return Schedule(
        rate=_number(text, match["rate"]),
        warm_up=given.get("warmup", 0),
        decay_rounds=tuple(_rounds(text, part) for part in (match["rounds"] or "").split(",") if match["rounds"]),
        decay_factor=1 / divisor,
        cosine_rounds=given.get("cosine"),
    )


def _number(text: str, part: str) -> float:
    try:
        return float(part)
    except ValueError:
        raise _unreadable(text, f"{part!r} is not a number") from None


def _rounds(text: str, part: str) -> int:
    if not _ROUND.fullmatch(part):
        raise _unreadable(text, f"{part!r} is not a number of rounds")
    return int(part)


def _unreadable(text: str, reason: str) -> InputError:
    return InputError(f"schedule {text!r}: {reason}; expected {GRAMMAR}")
